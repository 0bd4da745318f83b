"""ParityGRPOTrainer through what real runs do: resume, reuse rollouts, evaluate, truncate.

Properties: a resumed run goes on with the seeds, versions and weights of the run that was not
interrupted; heads and the old policy's values stay with their rows for as long as a rollout is
used, with evaluations in between; truncated completions and unusable heads leave loss and
denominator; every loss type trains on with finite weights and TRL's clip metrics.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from tests.trainer.runs import (
    Start,
    countdown,
    gradients,
    logged,
    one_batch,
    parity_trainer,
    relative,
    scored,
)
from tests.trainer.test_trainer import CountingClient, Recording
from trl_callbacks import ParityGRPOTrainer
from trl_callbacks.heads import HEAD_IDS, HEAD_LOGPROBS, OLD_HEAD_LOGPROBS
from trl_callbacks.loss_types import SUPPORTED
from vllm_parity_plugin.rollout_wire import Rollout, RolloutRequest
from vllm_parity_plugin.serving import Server

TWO_STEPS = {"num_iterations": 2, "learning_rate": 1e-3}
WEIGHTS = dict(zip(SUPPORTED, ("none", "tis", "mis", "is", "tis", "none"), strict=True))
"""One importance weight for each loss type."""


class Seeds(CountingClient):
    """Also keeps the seeds of each request."""

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self.seeds: list[tuple[int, ...]] = []

    def rollout(self, request: RolloutRequest, **form: Any) -> Rollout:
        self.seeds.append(tuple(request.seeds or ()))
        return super().rollout(request, **form)


def watched(trainer: Any) -> Seeds:
    """A trainer's client, remembering what is asked of it."""
    trainer.vllm_generation.client = Seeds(trainer.vllm_generation.client)
    return trainer.vllm_generation.client


def fresh(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def graded(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs within every group: any function of the text does."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    ("stop", "layout"),
    [
        (2, {}),
        (2, {"num_iterations": 2, "gradient_accumulation_steps": 2}),
        (1, {"num_iterations": 2, "gradient_accumulation_steps": 2}),
    ],
)
def test_a_resumed_run_goes_on(
    model_path: Path,
    tokenizer: Any,
    restored: Server,
    tmp_path: Path,
    stop: int,
    layout: dict[str, int],
) -> None:
    """No case: 4 steps, and a new trainer that goes on from a checkpoint of the first 1 or 2."""
    values = {"max_steps": 4, "learning_rate": 1e-3, **layout}
    values["per_device_train_batch_size"] = 16 // layout.get("gradient_accumulation_steps", 1)
    saving = {"save_strategy": "steps", "save_steps": stop}
    whole = parity_trainer(fresh(model_path), tokenizer, restored.url, tmp_path, **values, **saving)
    asked = watched(whole)
    whole.train()
    resumed = parity_trainer(
        fresh(model_path), tokenizer, restored.url, tmp_path, kind=Recording, **values
    )
    asked_again = watched(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop}"))
    assert resumed.state.global_step == 4
    first, second = (
        [entry["parity/policy_version"] for entry in logged(trainer)]
        for trainer in (whole, resumed)
    )
    pushed = range(len(asked_again.seeds))
    assert second[-len(pushed) :] == [first[-1] + 1 + i for i in pushed]
    begun = asked.seeds[: math.ceil(stop / layout.get("num_iterations", 1))]
    assert not set(begun) & set(asked_again.seeds)
    assert all(HEAD_IDS in batch for batch in resumed.batches)
    if stop == 1:  # in the middle of a rollout, which TRL does not save
        return
    assert asked.seeds[len(begun) :] == asked_again.seeds
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(resumed)[name], value, rtol=0, atol=1e-5)


class Frozen(Recording):
    """Keeps the policy of each rollout, and which one each loss belongs to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.policies: list[dict[str, torch.Tensor]] = []
        self.rollout_of: list[int] = []
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.model.training:
            self.policies.append(copy.deepcopy(self.model.state_dict()))
        return super()._generate_and_score_completions(inputs)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.rollout_of.append(len(self.policies) - 1)
        return super().compute_loss(model, inputs, *args, **kwargs)


def off_by(trainer: Any, batch: dict[str, Any]) -> float:
    """Largest difference of a batch's old values to the trainer's present policy."""
    log_probs, head = scored(trainer, batch)
    mask = batch["completion_mask"].bool()
    present = batch[HEAD_IDS] >= 0
    return max(
        float((batch["old_per_token_logps"] - log_probs)[mask].abs().max()),
        float((batch[OLD_HEAD_LOGPROBS] - head)[present].abs().max()),
    )


def test_rows_keep_their_heads_and_their_old_policy(start: Start) -> None:
    """S7, S9, L15: one rollout for 4 optimizer steps, shuffled and split, then a second rollout."""
    trainer = start(
        kind=Frozen,
        max_steps=5,
        temperature=2.0,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        pad_to_multiple_of=16,
        **TWO_STEPS,
    )
    trainer.reward_funcs = [graded]
    trainer.train()
    assert trainer.rollout_of == [0] * 8 + [1] * 2
    assert {batch["completion_ids"].size(1) % 16 for batch in trainer.batches} == {0}
    assert len({int(batch["completion_mask"].sum()) for batch in trainer.batches[:4]}) > 1
    assert off_by(trainer, trainer.batches[4]) > 0.05  # the policy has moved since
    for batch, rollout in zip(trainer.batches, trainer.rollout_of, strict=True):
        trainer.model.load_state_dict(trainer.policies[rollout])
        assert off_by(trainer, batch) < 1e-4
        sampled = batch["completion_ids"].unsqueeze(-1)
        found = (batch[HEAD_IDS] == sampled) & batch["completion_mask"].bool().unsqueeze(-1)
        assert found.any(-1).sum() > 0.5 * batch["completion_mask"].sum()
        own = batch["sampling_per_token_logps"].unsqueeze(-1).expand_as(found)
        assert torch.equal(batch[HEAD_LOGPROBS][found], own[found])


def test_evaluation_between_two_steps_on_a_rollout(
    model_path: Path, tokenizer: Any, restored: Server, tmp_path: Path
) -> None:
    """S11: training's heads, seeds and completions are those of a run without evaluations."""
    runs = []
    for evaluating in (True, False):
        trainer = parity_trainer(
            fresh(model_path),
            tokenizer,
            restored.url,
            tmp_path,
            kind=Recording,
            max_steps=3,
            score_centering_top_k=32,
            eval_strategy="steps" if evaluating else "no",
            eval_steps=1,
            per_device_eval_batch_size=8,
            trainer={"eval_dataset": countdown.problems(2, 1, tokenizer)},
            **TWO_STEPS,
        )
        asked = watched(trainer)
        trainer.train()
        training = [batch for batch in trainer.batches if HEAD_IDS in batch]
        assert [batch is training[0] for batch in training] == [True, True, False]
        assert len(trainer.batches) - len(training) == 3 * evaluating
        runs.append((asked, training))
    (asked, training), (plain, alone) = runs
    assert asked.head_sizes == [32, 0, 0, 32, 0]
    assert plain.head_sizes == [32, 32]
    assert len(set(asked.seeds)) == 5
    assert [asked.seeds[0], asked.seeds[3]] == plain.seeds
    for ours, theirs in zip(training, alone, strict=True):
        order = [batch["completion_ids"].tolist() for batch in (ours, theirs)]
        assert sorted(order[0]) == sorted(order[1])
        assert ours[OLD_HEAD_LOGPROBS].shape == ours[HEAD_IDS].shape


def test_truncated_completions_leave_the_loss(start: Start, tokenizer: Any) -> None:
    """G1, G3: rows without an end count neither above nor below."""
    trainer = start(
        mask_truncated_completions=True,
        max_completion_length=10,
        temperature=2.0,
    )
    trainer.reward_funcs = [graded]
    batch = one_batch(trainer)
    ended = (batch["completion_ids"] == tokenizer.eos_token_id).any(1)
    assert 0 < ended.sum() < len(ended)
    assert torch.equal(batch["completion_mask"].any(1), ended)
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
    ours = gradients(trainer, trainer.compute_loss(trainer.model, batch))
    kept = {
        name: value if value.dim() == 0 else value[ended]
        for name, value in batch.items()
        if isinstance(value, torch.Tensor)
    }
    expected = gradients(trainer, trainer.compute_loss(trainer.model, kept))
    assert all(grad.isfinite().all() for grad in ours.values())
    assert relative(ours, expected) < 1e-4


@pytest.mark.parametrize("loss_type", SUPPORTED)
def test_a_batch_of_truncated_completions(start: Start, loss_type: str) -> None:
    """G1: nothing in the loss is loss 0 and gradient 0: weights stay, bit for bit."""
    trainer = start(
        loss_type=loss_type,
        mask_truncated_completions=True,
        max_completion_length=4,
        logging_nan_inf_filter=False,  # it would log a NaN loss as 0
        **TWO_STEPS,
    )
    trainer.reward_funcs = [graded]
    before = weights(trainer)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == 2
    for entry in entries:
        assert entry["loss"] == entry["grad_norm"] == 0
        assert all(np.isfinite(entry[name]) for name in entry if name.startswith("parity/"))
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


def test_a_nan_inside_a_head(start: Start) -> None:
    """L8, G1: that one token leaves numerator and denominator, and is counted."""
    broken: list[int] = []

    def edit(rollout: Rollout) -> Rollout:
        logprobs = rollout.head_logprobs.copy()
        others = np.flatnonzero(rollout.head_ids[3] != rollout.token_ids[3])
        logprobs[3, others[0]] = np.nan
        broken.append(int(rollout.token_ids[3]))
        return dataclasses.replace(rollout, head_logprobs=logprobs)

    trainer = start()
    trainer.reward_funcs = [graded]
    trainer.vllm_generation.client = CountingClient(trainer.vllm_generation.client, edit)
    batch = one_batch(trainer)
    assert batch["completion_ids"][0, 3] == broken[0]
    assert batch["sampling_per_token_logps"].isfinite().all()
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum() - 1
    ours = gradients(trainer, trainer.compute_loss(trainer.model, batch))
    metrics = trainer._metrics["train"]
    assert metrics["parity/score_centering/nan_tokens"] == [1.0]
    without = {**batch, HEAD_LOGPROBS: batch[HEAD_LOGPROBS].nan_to_num(nan=-5.0)}
    without["tool_mask"] = torch.ones_like(batch["completion_mask"])
    without["tool_mask"][0, 3] = 0
    expected = gradients(trainer, trainer.compute_loss(trainer.model, without))
    assert relative(ours, expected) == 0
    metrics.clear()
    trainer.train()
    assert all(value.isfinite().all() for value in weights(trainer).values())
    assert all(e["parity/score_centering/nan_tokens"] == 1 for e in logged(trainer))


class BesideTRL(ParityGRPOTrainer):
    """Has TRL compute its own loss of each batch, and keeps both sets of clip metrics."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.clipping: list[tuple[dict[str, float], dict[str, float]]] = []
        super().__init__(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        kept = copy.deepcopy(self._metrics)
        with torch.no_grad():
            GRPOTrainer.compute_loss(self, model, inputs)
        self.clipping.append((clip_metrics(kept), clip_metrics(self._metrics)))
        self._metrics = kept
        return loss


def clip_metrics(metrics: Any) -> dict[str, float]:
    return {name: v[-1] for name, v in metrics["train"].items() if "clip_ratio" in name}


@pytest.mark.parametrize("loss_type", SUPPORTED)
def test_two_steps_of_each_loss_type(start: Start, loss_type: str) -> None:
    """G8, S9: finite weights, another loss on the second step, and TRL's own clip metrics."""
    trainer = start(
        kind=BesideTRL,
        loss_type=loss_type,
        score_centering_weight=WEIGHTS[loss_type],
        temperature=2.0,
        **TWO_STEPS,
    )
    trainer.reward_funcs = [graded]
    before = weights(trainer)
    trainer.train()
    assert trainer.state.global_step == len(trainer.clipping) == 2
    after = weights(trainer)
    assert all(value.isfinite().all() for value in after.values())
    assert any((after[name] != before[name]).any() for name in after)
    names = {name for ours, _ in trainer.clipping for name in ours} - {"completions/clipped_ratio"}
    assert len(names) == {"cispo": 1, "sapo": 0}.get(loss_type, 5)
    for ours, theirs in trainer.clipping:
        assert ours == pytest.approx(theirs, nan_ok=True)
    last = trainer.clipping[-1][1]
    assert not names or max(last[name] for name in names) > 0
