"""The rules on a real engine's configuration, whatever the command line asked for.

Properties:
- defaults and explicit contradictions end in the enforced values (L17, L20, L21); the table at
  start shows what was asked; observe changes nothing and says so;
- strict refuses every explicit contradiction in one paragraph, and what enforce only reports;
- speculative decoding and a quantised KV cache are reported (L18);
- a quantised lm_head is refused before anything is loaded;
- settings that are not understood stop the start;
- a vLLM that cannot be patched stops the start (H6).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.client import Client
from tests.models import COUNTDOWN
from tests.offline import run_jobs
from tests.servers import CONFLICTS, STANDARD
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.serving import Server, serve

ENFORCED = {
    "logprobs_mode": "processed_logprobs",
    "head_dtype": "float32",
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "generation_config": "vllm",
    "max_logprobs": 128,
    "disable_cascade_attn": True,
}
OPPOSITE: dict[str, Any] = {
    "logprobs_mode": "raw_logits",
    "hf_overrides": {"head_dtype": "model"},
    "enable_prefix_caching": True,
    "async_scheduling": True,
    "generation_config": str(COUNTDOWN),
    "max_logprobs": 5,
    "disable_cascade_attn": False,
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": False,
    "sym": True,
    "lm_head": True,
}


def with_quantised_head(directory: Path) -> Path:
    """The countdown model with a config that says its lm_head is quantised."""
    shutil.copytree(COUNTDOWN, directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": GPTQ}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All configurations of this file, resolved in one child process."""
    directory = tmp_path_factory.mktemp("config")
    quantised = str(with_quantised_head(directory / "quantised"))

    def parity(**settings: Any) -> dict[str, Any]:
        return {"additional_config": {"parity": settings}}

    strict, observe = parity(mode="strict"), parity(mode="observe")
    cases: dict[str, dict[str, Any]] = {
        "default": {},
        "opposite": OPPOSITE,
        "observe": OPPOSITE | observe,
        "off": OPPOSITE | parity(mode="off"),
        "strict": strict,
        "strict opposite": OPPOSITE | strict,
        "K": parity(head_size=300),
        "no cap": {"max_logprobs": -1},
        "ngram": {"speculative_config": NGRAM},
        "strict ngram": {"speculative_config": NGRAM} | strict,
        "fp8": {"kv_cache_dtype": "fp8_e5m2"},
        "strict fp8": {"kv_cache_dtype": "fp8_e5m2"} | strict,
        "override": {"override_generation_config": {"top_k": 5}},
        "quantised": {"model": quantised},
        "quantised observed": {"model": quantised} | observe,
        "misspelt": parity(modus="strict"),
        "bad mode": parity(mode="enforced"),
        "no object": {"additional_config": {"parity": "strict"}},
    }
    jobs: list[dict[str, Any]] = [
        {"kind": "config", "args": {"model": str(COUNTDOWN), "max_model_len": 256} | args}
        for args in cases.values()
    ]
    cases["environment"] = {}
    jobs.append(
        {
            "kind": "config",
            "args": {"model": str(COUNTDOWN), "max_model_len": 256},
            "env": {"VLLM_PARITY_MODUS": "strict"},
        }
    )
    return dict(zip(cases, run_jobs(jobs, directory), strict=True))


def resolved(result: dict[str, Any]) -> dict[str, Any]:
    assert result["error"] is None, result["error"]
    return {name: result["steps"][0][name] for name in ENFORCED}


def refusal(result: dict[str, Any]) -> str:
    assert result["error"] is not None
    kind, _, message = result["error"].partition(": ")
    assert kind == "ParityError"
    assert "\n" not in message and "Fix: " in message
    return message


@pytest.mark.parametrize("case", ["default", "opposite", "strict"])
def test_l17_l20_l21_the_rules_are_enforced(results: dict[str, Any], case: str) -> None:
    """L17, L20, L21: with defaults, and with the opposite asked for, the same configuration."""
    assert resolved(results[case]) == ENFORCED


@pytest.mark.parametrize("case", ["observe", "off"])
def test_control_observe_and_off_change_nothing(results: dict[str, Any], case: str) -> None:
    """Control: in mode observe and off, vLLM runs what was asked."""
    found = resolved(results[case])
    assert found["logprobs_mode"] == "raw_logits"
    assert found["head_dtype"] == "bfloat16"
    assert found["enable_prefix_caching"]
    assert found["max_logprobs"] == 5
    # Async scheduling and cascade attention: vLLM's CPU platform switches them off by itself.


def test_l16_the_cap_follows_the_head_size(results: dict[str, Any]) -> None:
    """L16: the cap is at least K; a user's own "no cap" stands."""
    assert resolved(results["K"])["max_logprobs"] == 300
    assert resolved(results["no cap"])["max_logprobs"] == -1


def test_the_table_shows_what_was_asked(results: dict[str, Any]) -> None:
    """One table: setting, asked, enforced, why; observe says that nothing was changed."""
    table = results["opposite"]["log"]
    assert "mode enforce" in table
    for name, value in (OPPOSITE | {"head_dtype": "model"}).items():
        if name not in ENFORCED or name == "generation_config":
            continue
        row = next(line for line in table.splitlines() if line.strip().startswith(name))
        assert repr(value) in row and repr(ENFORCED[name]) in row
    assert "nothing was changed" in results["observe"]["log"]
    assert results["off"]["log"] == ""


def test_strict_names_every_contradiction(results: dict[str, Any]) -> None:
    """Mode strict: one paragraph with every contradiction and the flags that resolve it."""
    message = refusal(results["strict opposite"])
    for name in set(ENFORCED) - {"disable_cascade_attn"}:
        assert f"{name}=" in message, name
    for flag in ("--no-enable-prefix-caching", "--no-async-scheduling", "--logprobs-mode"):
        assert flag in message


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("ngram", "speculative_config"),
        ("fp8", "kv_cache_dtype"),
        ("override", "override_generation_config"),
    ],
)
def test_l18_enforce_reports_what_it_does_not_change(
    results: dict[str, Any], case: str, name: str
) -> None:
    """L18: the table says NOT CHANGED; without the setting (control) it does not."""
    assert results[case]["error"] is None
    row = next(line for line in results[case]["log"].splitlines() if "NOT CHANGED" in line)
    assert name[:14] in row
    assert "NOT CHANGED" not in results["default"]["log"]


@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("strict ngram", "speculative_config='ngram'"),
        ("strict fp8", "kv_cache_dtype='fp8_e5m2'"),
        ("misspelt", "modus"),
        ("bad mode", "mode"),
        ("no object", "which is not an object"),
        ("environment", "VLLM_PARITY_MODUS"),
        ("quantised", "lm_head=true"),
    ],
)
def test_refusals_name_the_setting(results: dict[str, Any], case: str, part: str) -> None:
    """L18, H3: what cannot be protected, or is not understood, stops the start with a paragraph."""
    message = refusal(results[case])
    assert part in message
    if case in {"misspelt", "bad mode", "environment"}:
        assert "head_size" in message.lower() and "weights_dir" in message.lower()


def test_a_model_path_that_does_not_exist(tmp_path: Path) -> None:
    """Bad input: refused as a path before it is taken for a hub name."""
    code = (
        "from vllm import EngineArgs\n"
        f"EngineArgs(model={str(tmp_path / 'nowhere')!r}).create_engine_config()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        # Offline, vLLM looks into its cache first and refuses with a message of its own.
        env=os.environ | {"HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "ParityError: There is no model at" in done.stderr


def test_observe_does_not_refuse_a_quantised_head(results: dict[str, Any]) -> None:
    """Control: in mode observe the configuration of a quantised head is made."""
    error = results["quantised observed"]["error"]
    assert error is None or "ParityError" not in error


def test_a_server_with_contradicting_flags(untied_server: Server) -> None:
    """L17: a real server's table has what was asked, its workers run what is enforced."""
    log = untied_server.log_text()
    for asked in ("'raw_logits'", "'model'", "True"):
        assert asked in log
    (worker,) = Client(untied_server).status().workers
    assert worker.logprobs_mode == "processed_logprobs"
    assert worker.head is not None and worker.head.dtype == "float32"
    assert worker.prefix_caching == "off" and not worker.async_scheduling


def test_a_strict_server_does_not_start(tmp_path: Path) -> None:
    """Mode strict, from the shell: the server ends by itself and the log has the paragraph."""
    log = tmp_path / "server.log"
    with (
        pytest.raises(ParityError, match=r"ended with status [^0]"),
        serve(COUNTDOWN, *STANDARD, *CONFLICTS, env={"VLLM_PARITY_MODE": "strict"}, log=log),
    ):
        pass
    text = log.read_text()
    assert "Parity mode is strict, but the engine was asked for logprobs_mode='raw_logits'" in text
    for name in ("head_dtype='model'", "enable_prefix_caching=True", "async_scheduling=True"):
        assert name in text


def test_a_server_with_a_quantised_head_does_not_start(tmp_path: Path) -> None:
    """H3: refused from the configuration: no engine process was started, nothing loaded."""
    log = tmp_path / "server.log"
    model = with_quantised_head(tmp_path / "model")
    with (
        pytest.raises(ParityError, match=r"ended with status [^0]"),
        serve(model, *STANDARD, log=log),
    ):
        pass
    text = log.read_text()
    assert "is quantised (gptq config has lm_head=true)" in text
    assert "(EngineCore" not in text


START = """
import sys
{damage}
from vllm.entrypoints.cli.main import main
sys.argv = ["vllm", "serve", {model!r}]
main()
"""
DAMAGE = {
    "EngineArgs.create_engine_config": "from vllm.engine.arg_utils import EngineArgs\n"
    "EngineArgs.make_engine_config = EngineArgs.create_engine_config\n"
    "del EngineArgs.create_engine_config",
    "WorkerBase.parity_attest": "from vllm.v1.worker.worker_base import WorkerBase\n"
    "WorkerBase.parity_attest = print",
}


@pytest.mark.parametrize("symbol", DAMAGE)
def test_h6_a_vllm_that_cannot_be_patched_does_not_start(symbol: str) -> None:
    """H6: a renamed method, or a taken name, stops ``vllm serve`` with the symbol's name."""
    done = subprocess.run(
        [sys.executable, "-c", START.format(damage=DAMAGE[symbol], model=str(COUNTDOWN))],
        env=dict(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert f"{symbol} (" in done.stderr
    assert "Without this patch" in done.stderr
