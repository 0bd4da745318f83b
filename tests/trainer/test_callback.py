"""ParityCallback with a stock GRPOTrainer and a real server.

Properties: two lines of user code give a run whose sampler and trainer agree, with metrics in
TRL's own logs; a run that drifts is stopped with a reason; what is unsafe never starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.runs import logged, stock_trainer
from trl_callbacks import ParityCallback, ParityRollout
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.serving import Server


def rollout_and_callback(url: str, **callback: Any) -> dict[str, Any]:
    return {
        "rollout_func": ParityRollout(url, seed=0),
        "callbacks": [ParityCallback(url, **callback)],
    }


def test_a_stock_trainer_agrees_with_its_sampler(
    policy: Any, tokenizer: Any, restored: Server, tmp_path: Path
) -> None:
    """Metrics appear in log_history from step 1, and the mismatch is that of bf16 arithmetic."""
    trainer = stock_trainer(
        policy, tokenizer, tmp_path, max_steps=3, trainer=rollout_and_callback(restored.url)
    )
    trainer.train()
    entries = logged(trainer)
    assert [entry["step"] for entry in entries] == [1, 2, 3]
    for entry in entries:
        assert 0 < entry["parity/logprob_diff/mean"] <= 0.02
        assert entry["parity/logprob_diff/p99"] <= entry["parity/logprob_diff/max"]
        assert 0.9 < entry["parity/ess"] <= 1.0
        assert entry["parity/nan_tokens"] == 0
        assert entry["parity/weight_update/pause_seconds"] > 0
    versions = [entry["parity/policy_version"] for entry in entries]
    assert versions == [versions[0], versions[0] + 1, versions[0] + 2]


def test_the_trainers_head_is_the_servers(
    policy: Any, tokenizer: Any, restored: Server, tmp_path: Path
) -> None:
    """The head runs in fp32 on weights of the served dtype; the master weights stay as they are."""
    parts = rollout_and_callback(restored.url)
    trainer = stock_trainer(policy, tokenizer, tmp_path, max_steps=1, trainer=parts)
    trainer.train()
    callback = parts["callbacks"][0]
    assert callback.head.served_dtype == torch.bfloat16
    assert policy.get_output_embeddings().weight.dtype == torch.float32
    assert callback.status.head.dtype == "float32"


def test_a_run_that_drifts_is_stopped_with_a_reason(
    policy: Any, tokenizer: Any, restored: Server, tmp_path: Path
) -> None:
    """max_mismatch: with a limit that bf16 arithmetic exceeds, the first step is the last."""
    parts = rollout_and_callback(restored.url, max_mismatch=1e-6)
    trainer = stock_trainer(policy, tokenizer, tmp_path, max_steps=3, trainer=parts)
    with pytest.warns(UserWarning, match="max_mismatch"):
        trainer.train()
    assert trainer.state.global_step == 1
    assert "parity/policy_version" in parts["callbacks"][0].stop_reason


def test_a_sampler_that_misses_its_updates_is_stopped(
    policy: Any, tokenizer: Any, restored: Server, tmp_path: Path
) -> None:
    """W10: a sync that is dropped shows in the mismatch of the next step, and stops the run."""
    parts = rollout_and_callback(restored.url, max_mismatch=0.05)
    trainer = stock_trainer(
        policy, tokenizer, tmp_path, max_steps=6, learning_rate=1e-3, trainer=parts
    )
    rollout = parts["rollout_func"]
    rollout._synced_step = float("nan")  # differs from every step, so it would always sync ...
    original = rollout.__class__.__call__

    def without_sync(self: Any, prompts: Any, caller: Any) -> Any:
        if self._generation is not None:
            self._synced_step = caller.state.global_step  # ... and after the first it never does
        return original(self, prompts, caller)

    rollout.__class__ = type("Stale", (ParityRollout,), {"__call__": without_sync})
    with pytest.warns(UserWarning, match="max_mismatch"):
        trainer.train()
    assert trainer.state.global_step < 6


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", None])
def test_no_server_is_said_in_one_paragraph(
    policy: Any, tokenizer: Any, tmp_path: Path, url: str | None, stock_server: Server
) -> None:
    """A dead URL, and a live server without the plugin: refused before step 1, with the fix."""
    url = url or stock_server.url
    trainer = stock_trainer(policy, tokenizer, tmp_path, trainer=rollout_and_callback(url))
    with pytest.raises(ParityError) as caught:
        trainer.train()
    assert trainer.state.global_step == 0
    words = "vllm-parity plugin" if url == stock_server.url else "vllm serve"
    assert words in str(caught.value)
    assert "Fix:" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
        ({"generation_kwargs": {"temperature": 0.5}}, "temperature 0.5"),
    ],
)
def test_sampling_that_cannot_agree_is_refused(
    policy: Any, tokenizer: Any, restored: Server, tmp_path: Path, values: dict[str, Any], word: str
) -> None:
    """L4, S10: before step 1, by name."""
    trainer = stock_trainer(
        policy, tokenizer, tmp_path, trainer=rollout_and_callback(restored.url), **values
    )
    with pytest.raises(ParityError, match=word):
        trainer.train()
    assert trainer.state.global_step == 0


def test_observe_reports_and_changes_nothing(
    policy: Any, tokenizer: Any, restored: Server, tmp_path: Path
) -> None:
    """Mode observe: warnings instead of refusals, TRL's own head, and the same metrics."""
    parts = rollout_and_callback(restored.url, mode="observe")
    trainer = stock_trainer(policy, tokenizer, tmp_path, max_steps=1, top_p=0.5, trainer=parts)
    with pytest.warns(UserWarning, match=r"top_p=0\.5"):
        trainer.train()
    assert parts["callbacks"][0].head is None
    # Truncation shifts every ratio by the kept mass: the metric shows it (L4).
    assert logged(trainer)[0]["parity/kl/k1"] > 0.02


@pytest.mark.parametrize(
    ("values", "word"), [({"mode": "strict"}, "strict"), ({"max_mismatch": 0.0}, "max_mismatch")]
)
def test_bad_arguments_are_refused(values: dict[str, Any], word: str) -> None:
    """A callback that could not do what was asked is not built."""
    with pytest.raises(ParityError, match=word):
        ParityCallback(**values)
