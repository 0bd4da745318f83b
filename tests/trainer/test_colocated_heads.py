"""Heads in TRL's colocate mode: real ``ParityGRPOTrainer``, engine in its process, on CPU.

Properties: K past TRL's cap of 20; each head belongs to its token; the engine follows the trainer;
evaluation asks for no heads; the arrays hold what ``LLM.generate`` gives, bit for bit, without an
object per logprob; a failure leaves nothing in the engine; settings that need a server are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.models import VOCAB, Kind
from tests.trainer import colocated_heads
from tests.trainer.colocated import launch
from tests.trainer.colocated_heads import K
from tests.trainer.runs import arguments
from trl_callbacks import ParityGRPOConfig
from vllm_parity_plugin.errors import ParityError


@pytest.fixture(scope="module")
def result(
    tiny_model: Callable[[Kind], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("colocated")
    source = directory / "run.json"
    source.write_text(json.dumps({"model": str(tiny_model("untied"))}))
    written = directory / "result.json"
    launch(colocated_heads.__file__, source, [written], {})
    found: dict[str, Any] = json.loads(written.read_text())
    return found


def test_training_has_heads_and_the_engine_follows(result: dict[str, Any]) -> None:
    """S7, L16: two steps with K = 64; each head has its sampled token's own logprob."""
    steps = [entry for entry in result["log"] if "reward" in entry]
    # The evaluation after each step is the first to need its weights.
    assert steps[0]["parity/policy_version"] == 1
    after = [e["eval_parity/policy_version"] for e in result["log"] if "eval_reward" in e]
    assert after == [2, 3]
    assert all(0 < entry["parity/logprob_diff/mean"] <= 0.02 for entry in steps)
    assert all(entry["parity/score_centering/drift_removed"] > 0 for entry in steps)
    assert all(0 < entry["parity/score_centering/top_k_gap"] < 1 for entry in steps)
    assert [size for size, _, _ in result["shares"]] == [K, K]
    assert all(share > 0.2 and same for _, share, same in result["shares"])


def test_s11_evaluation_asks_for_no_heads(result: dict[str, Any]) -> None:
    """S11: K, the audit's 128, 0, twice: two steps with an evaluation after each."""
    assert result["asked"] == [K, 128, 0] * 2


def test_the_arrays_are_what_generate_gives(result: dict[str, Any]) -> None:
    """L14, L15: ids, logprobs and heads, bit for bit; n, seeds and stop ids."""
    assert result["same"] == [True, True]
    assert result["lengths"] == [24] * 4
    assert result["seed_plus_sample"]
    length, reasons, stops = result["stopped"]
    assert (length, reasons, len(stops)) == (result["expected_stop"], ["stop"], 1)


def test_a_failure_leaves_nothing_behind(result: dict[str, Any]) -> None:
    """No request and no record; the engine goes on. A head that is too large names the limit."""
    assert result["failed"] == "a step that fails"
    assert result["left"] == [False, 0]
    assert result["goes_on"] == 4
    assert "has unfinished requests" in result["busy"]
    assert "is more than this server returns (128; " in result["too_large"]
    assert str(VOCAB) in result["too_large"]


def test_p1_no_object_per_logprob(result: dict[str, Any]) -> None:
    """P1: 16 x 64 tokens, K = 64: arrays make hundreds of objects, dictionaries tens of thousands
    (the control)."""
    assert result["objects"]["arrays"] < 5000
    assert result["objects"]["dictionaries"] > 50_000


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"weight_transport": "http"}, "weight_transport"),
        ({"rollout_compression": "zstd"}, "rollout_compression"),
        ({"vllm_mode": "elsewhere"}, "vllm_mode"),
        ({"vllm_structured_outputs_regex": "[0-9]+"}, "under the grammar"),
    ],
)
def test_settings_that_would_be_ignored(tmp_path: Path, values: dict[str, Any], word: str) -> None:
    """They need a server, or a trainer that knows them: refused."""
    with pytest.raises((ParityError, ValueError), match=word):
        ParityGRPOConfig(**arguments(tmp_path, **{"vllm_mode": "colocate"} | values))
