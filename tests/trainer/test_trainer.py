"""ParityGRPOTrainer with a real server.

Properties: heads arrive beside the tokens they belong to, through TRL's shuffle, split and
buffering; evaluation asks for no heads; the server follows the trainer's weights; a completion that
must not be trained on leaves loss and denominator. The loss itself: test_loss.py.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.runs import (
    GENERATIONS,
    Start,
    countdown,
    gradients,
    logged,
    one_batch,
    parity_trainer,
    relative,
)
from trl_callbacks import ParityGRPOTrainer
from trl_callbacks.heads import HEAD_IDS, HEAD_LOGPROBS
from trl_callbacks.metrics import METRICS
from trl_callbacks.rollout import ParityRollout
from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.rollout_wire import Rollout, RolloutRequest, Sampling
from vllm_parity_plugin.serving import Server


class Recording(ParityGRPOTrainer):
    """Keeps the inputs of every loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.batches: list[dict[str, Any]] = []
        super().__init__(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.batches.append(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)


AUDITED = {"score_centering_top_k": 32, "score_centering_audit": 8}


def test_training_runs_and_reports(start: Start) -> None:
    """The three lines of the README give a run with all of its metrics."""
    trainer = start(max_steps=3, **AUDITED)
    trainer.train()
    for entry in logged(trainer):
        assert entry["parity/logprob_diff/mean"] <= 0.02
        assert entry["parity/score_centering/sampler_head_mass"] > 0.99
        assert entry["parity/score_centering/drift_removed"] > 0
        assert entry["parity/dropped_completions"] == 0
        assert entry["grad_norm"] > 0
        # Each metric is documented, and each documented one is there.
        assert {name for name in entry if name.startswith("parity/")} == {m.name for m in METRICS}
    versions = [entry["parity/policy_version"] for entry in logged(trainer)]
    assert versions[2] == versions[0] + 2


@pytest.mark.parametrize(
    "layout",
    [
        {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
        {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 4,
            "steps_per_generation": 2,
            "pad_to_multiple_of": 16,
        },
    ],
)
def test_heads_stay_with_their_tokens(start: Start, layout: dict[str, int]) -> None:
    """S7, L15: where the sampled id is in the head, its value is the sampled token's, exactly."""
    trainer = start(kind=Recording, max_steps=2, **layout)
    trainer.train()
    assert len(trainer.batches) == 2 * layout["gradient_accumulation_steps"]
    for batch in trainer.batches:
        mask = batch["completion_mask"].bool()
        ids, logprobs = batch[HEAD_IDS][mask], batch[HEAD_LOGPROBS][mask]
        sampled = batch["completion_ids"][mask].unsqueeze(1)
        found = ids == sampled
        assert found.any(1).float().mean() > 0.9
        rows = found.any(1)
        at_sampled = logprobs[found]
        assert torch.equal(at_sampled, batch["sampling_per_token_logps"][mask][rows])
        assert (batch[HEAD_IDS][~mask] == -1).all()
        sorted_ids = ids.sort(1).values
        assert ((sorted_ids[:, 1:] != sorted_ids[:, :-1]) | (sorted_ids[:, 1:] == -1)).all()
        assert (rows & (ids[:, 0] != sampled[:, 0])).any()  # top-1 is not always the sampled one


SMALL = {"rollout_head_dtype": "float16", "rollout_compression": "zstd"}


def test_heads_can_travel_smaller_and_by_prompt(
    start: Start,
    policy: Any,
    tokenizer: Any,
    restored: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """float16, compressed, one request for each of the 4 problems: the same batch, up to rounding,
    and heads that still pass the check against the sampled logprobs."""
    asked: list[int] = []
    send = ParityClient.rollouts
    monkeypatch.setattr(
        ParityClient,
        "rollouts",
        lambda self, requests, **form: (
            asked.extend(len(request.prompts) for request in requests),
            send(self, requests, **form),
        )[1],
    )
    other = copy.deepcopy(policy)
    plain = one_batch(parity_trainer(other, tokenizer, restored.url, tmp_path))
    assert not asked
    small = start(rollout_requests="prompt", **SMALL)
    batch = one_batch(small)
    assert asked == [GENERATIONS] * 4
    assert torch.equal(batch["completion_ids"], plain["completion_ids"])
    mask = batch["completion_mask"].bool()
    head = batch[HEAD_LOGPROBS][mask]
    # Two samplings of the same seeds differ by the rounding of the batch; float16 by 2**-11.
    assert torch.allclose(head, plain[HEAD_LOGPROBS][mask], rtol=2e-3, atol=2e-3)
    assert torch.equal(head, head.half().float())
    small.train()


@pytest.mark.parametrize(("top_k", "fits"), [(16, True), (64, False)])
def test_l4_the_whole_support_or_a_refusal(start: Start, top_k: int, fits: bool) -> None:
    """L4: truncated sampling whose support is in the head trains; one that is not says where."""
    options = {"score_centering_support": True, "score_centering_top_k": 16, "max_steps": 1}
    trainer = start(top_k=16, **options)
    trainer.vllm_generation.top_k = top_k  # behind the back of the check before step 1
    if fits:
        batch = one_batch(trainer)
        mass = batch[HEAD_LOGPROBS].exp().sum(-1)[batch["completion_mask"].bool()]
        assert (mass - 1).abs().max() < 1e-3
    else:
        with pytest.raises(ParityError, match="of the sampler's mass"):
            one_batch(trainer)


FOREIGN = [7, 8, 9]
"""What an environment says between two turns."""


def two_turns(prompts: Any, trainer: Any) -> dict[str, Any]:
    """A user's own rollout: sample, add what the environment says, sample again, keep the end."""
    prompt_ids, _, _ = trainer._tokenize_prompts(list(prompts))
    first, said = trainer.sample(prompt_ids)
    first, said = [ids[:5] for ids in first], [row[:5] for row in said]
    so_far = [p + ids + FOREIGN for p, ids in zip(prompt_ids, first, strict=True)]
    second, more = trainer.sample(so_far)
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [a + FOREIGN + b for a, b in zip(first, second, strict=True)],
        "logprobs": [a + [0.0] * 3 + b for a, b in zip(said, more, strict=True)],
        "env_mask": [
            [1] * len(a) + [0] * 3 + [1] * len(b) for a, b in zip(first, second, strict=True)
        ],
    }


def test_a_rollout_func_has_heads(start: Start) -> None:
    """S7: a user's own two turns: each sampled token has its head, the environment's have none."""
    trainer = start(
        kind=Recording,
        max_steps=2,
        trainer={"rollout_func": two_turns},
    )
    trainer.train()
    for batch in trainer.batches:
        mask = batch["completion_mask"].bool() & batch["tool_mask"].bool()
        ids, logprobs = batch[HEAD_IDS], batch[HEAD_LOGPROBS]
        at = ids[mask] == batch["completion_ids"][mask].unsqueeze(1)
        assert at.any(1).float().mean() > 0.9
        sampled = batch["sampling_per_token_logps"][mask]
        assert torch.equal(logprobs[mask][at], sampled[at.any(1)])
        others = batch["completion_mask"].bool() & ~mask
        assert others.sum() >= 3 * len(ids) and (ids[others] == -1).all()
    for entry, batch in zip(logged(trainer), trainer.batches, strict=True):
        trained = batch["completion_mask"] * batch["tool_mask"]
        assert entry["parity/score_centering/tokens"] == trained.sum()
        assert entry["parity/score_centering/drift_removed"] > 0


def test_a_rollout_func_that_loses_the_heads_is_refused(start: Start) -> None:
    """Plain numbers do not say which token they belong to; an evaluation may return them."""

    def plain(prompts: Any, trainer: Any) -> dict[str, Any]:
        output = two_turns(prompts, trainer)
        return output | {"logprobs": [[float(v) for v in row] for row in output["logprobs"]]}

    trainer = start(trainer={"rollout_func": plain})
    with pytest.raises(ParityError, match="completion 0 at position 0 is a plain number") as raised:
        one_batch(trainer)
    assert "trainer.sample(prompt_ids)" in raised.value.fix
    trainer.model.eval()
    rows = [trainer.train_dataset[i // GENERATIONS] for i in range(4 * GENERATIONS)]
    assert HEAD_IDS not in trainer._generate_and_score_completions(rows)


class CountingClient:
    """Passes requests on and remembers the head size of each; may edit the answers."""

    def __init__(self, client: ParityClient, edit: Any = None) -> None:
        self._client, self._edit = client, edit
        self.head_sizes: list[int] = []

    def rollout(self, request: RolloutRequest, **form: Any) -> Rollout:
        self.head_sizes.append(request.head_size)
        rollout = self._client.rollout(request, **form)
        return self._edit(rollout) if self._edit else rollout


def test_evaluation_asks_for_no_heads(start: Start, tokenizer: Any) -> None:
    """S11: K, 0, K over a training step, an evaluation and a training step."""
    trainer = start(
        score_centering_top_k=64,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=16,
        trainer={"eval_dataset": countdown.problems(4, 1, tokenizer)},
    )
    counting = CountingClient(trainer.vllm_generation.client)
    trainer.vllm_generation.client = counting
    trainer.train()
    assert counting.head_sizes == [64, 0, 64, 0]
    evaluations = [e for e in trainer.state.log_history if "eval_reward" in e]
    assert len(evaluations) == 2
    assert all(np.isfinite(entry["eval_loss"]) for entry in evaluations)


@pytest.mark.parametrize("fault", ["nan", "abort", "empty"])
@pytest.mark.parametrize("centring", [True, False])
def test_unusable_completions_leave_the_loss(start: Start, fault: str, centring: bool) -> None:
    """L8, W4: a NaN logprob or an aborted completion is masked whole, and counted."""

    def edit(rollout: Rollout) -> Rollout:
        aborted = {"finish_reasons": ["abort", *rollout.finish_reasons[1:]]}
        if fault == "abort":
            return dataclasses.replace(rollout, **aborted)
        if fault == "empty":
            first = rollout.span(0).stop
            offsets = np.maximum(rollout.sequence_offsets - first, 0)
            later = {name: getattr(rollout, name)[first:] for name in Rollout.TOKENS}
            return dataclasses.replace(rollout, sequence_offsets=offsets, **later, **aborted)
        logprobs = rollout.logprobs.copy()
        logprobs[2] = np.nan
        return dataclasses.replace(rollout, logprobs=logprobs)

    trainer = start(score_centering=centring)
    trainer.vllm_generation.client = CountingClient(trainer.vllm_generation.client, edit)
    batch = one_batch(trainer)
    assert batch["completion_mask"][0].sum() == 0
    assert batch["completion_mask"][1].sum() > 0
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
    assert trainer._metrics["train"]["parity/dropped_completions"] == [1.0]
    with_row = gradients(trainer, trainer.compute_loss(trainer.model, batch))
    without = {
        name: value if value.dim() == 0 else value[1:]
        for name, value in batch.items()
        if isinstance(value, torch.Tensor)
    }
    expected = gradients(trainer, trainer.compute_loss(trainer.model, without))
    assert all(grad.isfinite().all() for grad in with_row.values())
    assert relative(with_row, expected) < 1e-4


def test_the_server_follows_the_trainer(
    policy: Any, tokenizer: Any, restored: Server, start: Start, model_path: Path
) -> None:
    """After steps large enough to tell the policies apart: new weights <= 0.02, old > 5 times."""
    from transformers import AutoModelForCausalLM

    trainer = start(max_steps=4, learning_rate=1e-3)
    trainer.train()
    trainer.vllm_generation.sync_weights()
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in trainer.train_dataset]
    rollout = ParityClient(restored.url).rollout(
        RolloutRequest(prompts=prompts, sampling=Sampling(max_tokens=24))
    )
    old = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    gaps = []
    for model in (policy, old):
        differences = []
        for row, prompt in enumerate(prompts):
            ids = rollout.token_ids[rollout.span(row)].tolist()
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + ids])).logits[0]
            logp = torch.log_softmax(logits[len(prompt) - 1 : -1].float(), -1)
            logp = logp.gather(-1, torch.tensor(ids)[:, None])[:, 0]
            differences.append(logp - torch.tensor(rollout.logprobs[rollout.span(row)]))
        gaps.append(float(torch.cat(differences).abs().mean()))
    assert gaps[0] <= 0.02
    assert gaps[1] > 5 * gaps[0]


def test_seeded_rollouts_repeat(start: Start) -> None:
    """rollout_seed: the same completions in a second run, and different ones within a group."""
    batches = []
    for _ in range(2):
        trainer = start()
        batches.append(one_batch(trainer)["completion_ids"])
    assert torch.equal(*batches)
    first_group = batches[0][:GENERATIONS]
    assert (first_group != first_group[0]).any()


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"vllm_server_base_url": "http://127.0.0.1:9"}, "No server answers"),
        ({"score_centering_top_k": 600}, "VLLM_PARITY_HEAD_SIZE=600"),
        ({"score_centering_top_k": 2000}, "1041"),
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"generation_kwargs": {"temperature": 0.5}}, "temperature 0.5"),
        ({"trainer": {"rollout_func": ParityRollout("http://127.0.0.1:9")}}, "trainer.sample"),
    ],
)
def test_unsafe_runs_do_not_get_a_trainer(start: Start, values: dict[str, Any], word: str) -> None:
    """L4, L16, S10: refused in the constructor, by name, with a fix."""
    with pytest.raises(ParityError) as caught:
        start(**values)
    assert word in str(caught.value)
    assert "Fix:" in str(caught.value)


def test_another_model_is_refused(
    tokenizer: Any, restored: Server, tmp_path: Path, model_path: Path
) -> None:
    """A trainer whose tensors are not the served model's stops before its first rollout."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_path, num_hidden_layers=3)
    other = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    trainer = parity_trainer(other, tokenizer, restored.url, tmp_path)
    with pytest.raises(ParityError, match=r"missing tensor.*model\.layers\.3"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_plain_configurations_are_refused(policy: Any, tokenizer: Any, tmp_path: Path) -> None:
    """A GRPOConfig carries no score-centering settings."""
    from trl import GRPOConfig

    with pytest.raises(ParityError, match="GRPOConfig"):
        ParityGRPOTrainer(
            model=policy,
            processing_class=tokenizer,
            reward_funcs=countdown.solved,
            args=GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False),
            train_dataset=countdown.problems(4, 0, tokenizer),
        )
