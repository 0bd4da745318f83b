"""Weight updates of an ``LLM`` without a server: ``ColocatedUpdates``.

Each property holds with the engine in this process, and with two tensor-parallel workers in
processes of their own; the model is tied and, in mode observe, its head bf16 and its prefix cache
on, which is where vLLM's own reload goes stale. Properties: an update with the same weights changes
no bit (W8); after one to other weights the engine is, bit for bit, a fresh one (W8); partial ones
give the trainer's logprobs; a refused update leaves it untouched; a failed load goes back, on all
ranks, or (rollback none) every request is refused until a full update; no prompt is served from KV
of old weights (W1); an engine with unfinished requests, or asleep, takes no update (W7, W10).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.faults import install_faults
from tests.models import Kind, noisy, weights_of
from tests.offline import run_jobs
from tests.reference import reference

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [100, 101, 102, 103, 104]]
LONG_PROMPT = [(7 * i) % 500 + 3 for i in range(200)]
EMBEDDING = "model.embed_tokens.weight"
TARGET = "model.layers.1.self_attn.q_proj"
MISSING = "model.layers.1.mlp.up_proj.weight"
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
SCALING = 0.5
SAME, FACTOR = 0.02, 5.0

ENGINES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "in-process": ({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, {}),
    "two workers": ({"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, {"tensor_parallel_size": 2}),
}
"""Environment and engine arguments of each kind of engine."""

Step = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def generate(prompts: list[list[int]] = PROMPTS, op: str = "generate") -> Step:
    return {"op": op, "prompts": prompts, "sampling": GREEDY}


class Files:
    """The policies of these tests, and the directories of fresh engines."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.model, self.directory = model, directory
        self.old = weights_of(model)
        self.new = noisy(self.old, seed=31)
        embedding = noisy(self.new, seed=32, only="embed_tokens")[EMBEDDING]
        generator = torch.Generator().manual_seed(33)
        self.pair = {
            "a": torch.randn(2, 64, generator=generator),
            "b": torch.randn(128, 2, generator=generator),
        }
        self.changed = self.new | {EMBEDDING: embedding}
        merged = self.changed[f"{TARGET}.weight"].float()
        merged += SCALING * (self.pair["b"] @ self.pair["a"])
        self.adapted = self.changed | {f"{TARGET}.weight": merged.to(torch.bfloat16)}

    def file(self, name: str, tensors: Tensors) -> str:
        path = self.directory / f"{name}.safetensors"
        save_file(tensors, path)
        return str(path)

    def push(self, name: str, tensors: Tensors, **fields: Any) -> Step:
        return {"op": "push", "path": self.file(name, tensors), **fields}

    def fresh(self, name: str, tensors: Tensors) -> str:
        """A model directory with other weights."""
        path = shutil.copytree(self.model, self.directory / name)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return str(path)


def bad(files: Files) -> dict[str, Step]:
    """Updates that must be refused."""
    new = files.new
    nan = new[MISSING].clone()
    nan[3, 3] = float("nan")
    return {
        "missing": files.push("missing", {n: t for n, t in new.items() if n != MISSING}),
        "unknown": files.push("unknown", new | {"lm_head.weight": new[EMBEDDING].clone()}),
        "shape": files.push("shape", new | {MISSING: new[MISSING][:-1].clone()}),
        "nan": files.push("nan", new | {MISSING: nan}),
        "twice": files.push("twice", new, repeat=1),
    }


def scenario(files: Files, fault: str) -> dict[str, Step]:
    """The steps on one engine, by name."""
    state: Step = {"op": "state"}
    third = files.push("third", noisy(files.old, seed=34))
    return {
        "start": generate(),
        "fill cache": generate([LONG_PROMPT]),
        "cached": generate([LONG_PROMPT]),
        "identity": files.push("identity", files.old),
        "same": generate(),
        "push": files.push("new", files.new),
        "pushed": generate(),
        "pushed long": generate([LONG_PROMPT]),
        **bad(files),
        "enqueue": {"op": "enqueue", "prompts": PROMPTS, "sampling": GREEDY},
        "unfinished": third,
        "drain": {"op": "drain"},
        "sleep": {"op": "sleep"},
        "asleep": third,
        "wake": {"op": "wake", "tags": ["weights", "kv_cache"]},
        "refused state": state,
        "refused": generate(),
        "break": {"op": "touch", "path": fault},
        "failed": third,
        "failed state": state,
        "restored": generate(),
        "push embedding": files.push(
            "embedding", {EMBEDDING: files.changed[EMBEDDING]}, kind="changed"
        ),
        "changed": generate(),
        "push adapter": {
            "op": "adapter",
            "target": TARGET,
            "path": files.file("pair", files.pair),
            "scaling": SCALING,
        },
        "adapted": generate(),
        "deep sleep": {"op": "sleep"},
        "wake weights": {"op": "wake", "tags": ["weights"]},
        "push awake": files.push("again", files.new),
        "wake rest": {"op": "wake", "tags": ["kv_cache"]},
        "awake": generate(),
        "end state": state,
    }


def without_copies(files: Files, fault: str) -> dict[str, Step]:
    """The steps on a fresh engine of the new weights, which keeps no copy."""
    full = files.push("full", files.new, rollback="none")
    return {
        "fresh": generate(),
        "push": full,
        "pushed": generate(),
        "break": {"op": "touch", "path": fault},
        "failed": full,
        "state": {"op": "state"},
        "unhealthy": generate(op="generate-or-error"),
        "partial": files.push("part", {EMBEDDING: files.changed[EMBEDDING]}, kind="changed"),
        "heal": full,
        "healed": generate(),
        "end state": {"op": "state"},
    }


@pytest.fixture(scope="module", params=ENGINES)
def results(
    request: pytest.FixtureRequest,
    tiny_model: Callable[[Kind], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """Results of all steps on one kind of engine, and of fresh engines beside it."""
    environment, extra = ENGINES[request.param]
    directory = tmp_path_factory.mktemp("colocated")
    env = install_faults(directory) | environment
    fault = env["PARITY_TEST_FAULT"] + (".1" if extra else "")
    files = Files(tiny_model("tied"), directory)
    args = {"additional_config": {"parity": {"mode": "observe"}}, "max_model_len": 512, **extra}
    args["logprobs_mode"] = "processed_logprobs"
    kept, none = scenario(files, fault), without_copies(files, fault)
    fresh = files.fresh("W2", files.new)
    jobs = {"kept": (str(files.model), kept), "none": (fresh, none)}
    if request.param == "in-process":
        reload: Step = {"op": "reload", "path": fresh}
        jobs["stock"] = (str(files.model), {"reload": reload, "reloaded": generate()})
    found = run_jobs(
        [
            {"kind": "llm", "args": {"model": model, **args}, "steps": list(steps.values())}
            for model, steps in jobs.values()
        ],
        directory,
        env,
        timeout=900,
    )
    named: dict[str, Any] = {"files": files}
    for (name, (_, steps)), result in zip(jobs.items(), found, strict=True):
        assert result["error"] is None, (name, result["error"])
        named[name] = dict(zip(steps, result["steps"], strict=True))
    return named


def test_the_same_weights_change_no_bit(results: dict[str, Any]) -> None:
    """W8a: and the update counts as one."""
    kept = results["kept"]
    assert kept["identity"]["policy_version"] == 1 and kept["identity"]["applied"]
    assert kept["same"] == kept["start"]


def test_new_weights_are_a_fresh_engines(results: dict[str, Any]) -> None:
    """W8b: with a bf16 head that is tied."""
    kept = results["kept"]
    assert kept["push"]["policy_version"] == 2
    assert kept["pushed"] == results["none"]["fresh"] != kept["start"]


def difference(files: Files, found: list[dict[str, Any]], weights: Tensors) -> float:
    """Mean absolute difference between the engine's logprobs and the trainer's."""
    ids = [choice["token_ids"] for choice in found]
    logprobs = np.concatenate([choice["logprobs"] for choice in found])
    expected = reference(files.model, PROMPTS, ids, weights=weights, head="bfloat16")
    return float(np.abs(logprobs - expected).mean())


def test_partial_updates_give_the_trainers_logprobs(results: dict[str, Any]) -> None:
    """A changed embedding (and with it the head), then an adapter on top of it."""
    kept, files = results["kept"], results["files"]
    assert kept["push embedding"]["tensors"] == 1
    for step, right, wrong in (
        ("changed", files.changed, files.new),
        ("adapted", files.adapted, files.changed),
    ):
        assert difference(files, kept[step], right) <= SAME
        assert difference(files, kept[step], wrong) > FACTOR * SAME


@pytest.mark.parametrize("results", ["in-process"], indirect=True, scope="module")
def test_control_vllms_reload_serves_the_old_head(results: dict[str, Any]) -> None:
    """Without the transaction a tied bf16 head keeps serving the old policy."""
    assert results["stock"]["reload"] == [None]
    found, files = results["stock"]["reloaded"], results["files"]
    assert difference(files, found, files.new) > FACTOR * SAME


def test_w1_no_prompt_is_served_from_old_kv(results: dict[str, Any]) -> None:
    """W1: the prefix cache is on, and it is empty after an update."""
    kept = results["kept"]
    assert kept["cached"][0]["cached"] > 0
    assert kept["pushed long"][0]["cached"] == 0


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("missing", ["ManifestError", MISSING, "missing"]),
        ("unknown", ["ManifestError", "lm_head.weight", "unknown"]),
        ("shape", ["ManifestError", MISSING, "[127, 64]"]),
        ("nan", ["ManifestError", MISSING, "1 value(s)"]),
        ("twice", ["ManifestError", "twice"]),
        ("unfinished", ["ConflictError", "unfinished requests"]),
        ("asleep", ["ConflictError", "sleeps", "wake_up"]),
    ],
)
def test_what_is_refused_is_named(results: dict[str, Any], step: str, words: list[str]) -> None:
    """W7, W10, W13: by kind and by name."""
    for word in words:
        assert word in results["kept"][step]["error"]


def test_a_refused_update_touches_nothing(results: dict[str, Any]) -> None:
    """Weights, version and staged files are those of before."""
    kept = results["kept"]
    assert kept["drain"] == len(PROMPTS)
    assert kept["refused"] == kept["pushed"]
    state = kept["refused state"]
    assert (state["version"], state["failure"], len(state["files"])) == (2, None, 1)
    assert [worker["version"] for worker in state["workers"]] == [2] * len(state["workers"])


def test_a_failed_load_goes_back(results: dict[str, Any]) -> None:
    """On all ranks, although one of two failed; the version and its label go back as well."""
    kept = results["kept"]
    for word in ("ApplyError", "injected fault", "are served"):
        assert word in kept["failed"]["error"]
    assert kept["restored"] == kept["pushed"]
    state = kept["failed state"]
    assert (state["version"], state["failure"], state["label"]) == (2, None, "2")
    assert {(w["version"], w["phase"]) for w in state["workers"]} == {(2, "committed")}


def test_without_a_copy_requests_are_refused_until_it_heals(
    results: dict[str, Any],
) -> None:
    """Rollback none: half a policy is never sampled from, and nothing stays staged."""
    none = results["none"]
    for word in ("ApplyError", "injected fault", "rollback none", "refuses requests"):
        assert word in none["failed"]["error"]
    assert "injected fault" in none["state"]["failure"]
    assert "No complete policy is loaded" in none["unhealthy"]["error"]
    assert "ConflictError" in none["partial"]["error"]
    assert none["healed"] == none["pushed"] == results["none"]["fresh"]
    assert (none["end state"]["failure"], none["end state"]["files"]) == (None, [])


def test_w10_an_engine_whose_weights_are_awake_takes_the_update(
    results: dict[str, Any],
) -> None:
    """As TRL's sleep mode does it: the weights wake up first, the KV cache after the update."""
    kept = results["kept"]
    assert kept["push awake"]["applied"]
    assert kept["awake"] == results["none"]["fresh"]
    assert len(kept["end state"]["files"]) == 1


def test_staged_files_are_bounded(results: dict[str, Any]) -> None:
    """The label that vLLM keeps is the version; one set stays per full update."""
    state = results["kept"]["end state"]
    assert (state["version"], state["label"]) == (5, "5")
    assert state["files"][0].startswith(".set-5-")
