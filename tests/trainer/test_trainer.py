"""ParityGRPOTrainer with a real server.

Properties: heads arrive beside the tokens they belong to, through TRL's shuffle, split and
buffering; the loss is the paper's, with TRL's averaging; off means TRL's own loss bit for bit;
evaluation asks for no heads; the server follows the trainer's weights; a completion that must not
be trained on leaves loss and denominator.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trl import GRPOTrainer

from tests.trainer.runs import GENERATIONS, countdown, logged, parity_trainer
from trl_callbacks import ParityGRPOTrainer
from trl_callbacks.heads import HEAD_IDS, HEAD_LOGPROBS, HeadScorer
from trl_callbacks.loss_types import SUPPORTED
from trl_callbacks.metrics import METRICS
from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.serving import Server
from vllm_parity_plugin.wire import Rollout, RolloutRequest, Sampling


class Recording(ParityGRPOTrainer):
    """Keeps the inputs of every loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.batches: list[dict[str, Any]] = []
        super().__init__(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.batches.append(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)


AUDITED = {"score_centering_top_k": 32, "score_centering_audit": 8}


def one_batch(trainer: Any) -> dict[str, Any]:
    """One generation batch, as the loss sees it."""
    trainer.model.train()
    rows = [trainer.train_dataset[i // GENERATIONS] for i in range(4 * GENERATIONS)]
    trainer.current_gradient_accumulation_steps = 1
    return trainer._generate_and_score_completions(rows)


@torch.no_grad()
def scored(trainer: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The trainer's log-probabilities of sampled tokens [B, T] and heads [B, T, K]."""
    scorer = HeadScorer(trainer.model, batch[HEAD_IDS])
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    trainer._get_per_token_logps_and_entropies(
        scorer, ids, attention, batch["completion_ids"].size(1)
    )
    return scorer.scored("log_probs"), scorer.scored("head_log_probs")


def gradients(trainer: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    trainer.model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def relative(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Largest relative error of a parameter's gradient."""
    return max(
        float((ours[name] - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-12))
        for name in theirs
    )


def test_training_runs_and_reports(
    policy: Any, tokenizer: Any, restored: Server, tmp_path: Path
) -> None:
    """The three lines of the README give a run with all of its metrics."""
    trainer = parity_trainer(policy, tokenizer, restored.url, tmp_path, max_steps=3, **AUDITED)
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
def test_heads_stay_with_their_tokens(
    policy: Any, tokenizer: Any, restored: Server, tmp_path: Path, layout: dict[str, int]
) -> None:
    """S7, L15: where the sampled id is in the head, its value is the sampled token's, exactly."""
    trainer = parity_trainer(
        policy, tokenizer, restored.url, tmp_path, kind=Recording, max_steps=2, **layout
    )
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


@pytest.mark.parametrize("weight", ["none", "tis", "mis"])
def test_the_loss_is_the_papers(
    policy: Any, tokenizer: Any, restored: Server, tmp_path: Path, weight: str
) -> None:
    """Gradient of every parameter against the definition on full float64 logits.

    The sampler's logprobs are moved away from the trainer's first, so that the correction is
    large: on agreeing policies a loss without it would pass.
    """
    trainer = parity_trainer(
        policy,
        tokenizer,
        restored.url,
        tmp_path,
        score_centering_weight=weight,
        score_centering_top_k=16,
        temperature=1.5,
    )
    batch = one_batch(trainer)
    # Noise inside the head; its mass stays, so that the tail ratio is well conditioned.
    noise = torch.Generator().manual_seed(1)
    q = batch[HEAD_LOGPROBS]
    shifted = q + 1.5 * torch.randn(q.shape, generator=noise)
    batch[HEAD_LOGPROBS] = shifted.log_softmax(-1) + q.logsumexp(-1, keepdim=True)
    ours = gradients(trainer, trainer.compute_loss(trainer.model, batch))
    expected = gradients(trainer, definition(trainer, batch, weight))
    uncentred = gradients(trainer, definition(trainer, batch, weight, centred=False))
    assert relative(ours, expected) < 5e-3
    assert relative(uncentred, expected) > 0.05


def definition(
    trainer: Any, batch: dict[str, Any], weight: str, *, centred: bool = True
) -> torch.Tensor:
    """-A (f log p_y - sum_H c_v log p_v), averaged over tokens, written out (SC: Eq. 7-12)."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    tokens = batch["completion_ids"].size(1)
    hidden = trainer.model.model(input_ids=ids, attention_mask=attention).last_hidden_state
    master = trainer.model.lm_head.weight
    served = master + (master.to(torch.bfloat16).float() - master).detach()
    logits = hidden[:, -tokens - 1 : -1].double() @ served.double().T
    logp = torch.log_softmax(logits / trainer.temperature, -1)
    logp_y = logp.gather(-1, batch["completion_ids"].unsqueeze(-1))[..., 0]
    head = batch[HEAD_IDS].long()
    logp_h = logp.gather(-1, head.clamp(min=0))
    q_y, q_h = batch["sampling_per_token_logps"].double().exp(), batch[HEAD_LOGPROBS].exp()
    p_y, p_h = logp_y.detach().exp(), logp_h.detach().exp()

    def f(ratio: torch.Tensor) -> torch.Tensor:
        if weight == "none":
            return torch.ones_like(ratio)
        if weight == "tis":
            return ratio.clamp(max=2.0)
        return torch.where((ratio >= 0.5) & (ratio <= 5.0), ratio, 0.0)

    rho = (1 - q_h.sum(-1)).clamp(min=1e-6) / (1 - p_h.sum(-1)).clamp(min=1e-6)
    alpha = rho * f(1 / rho)
    c = q_h * f(p_h / q_h) - alpha.unsqueeze(-1) * p_h
    c = torch.where(head >= 0, c, 0.0) * float(centred)
    per_token = f(p_y / q_y) * logp_y - (c * logp_h).sum(-1)
    mask = batch["completion_mask"]
    return -(per_token * batch["advantages"].unsqueeze(1) * mask).sum() / mask.sum()


@pytest.mark.parametrize("loss_type", SUPPORTED)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_averaging_is_trls(
    policy: Any, tokenizer: Any, restored: Server, tmp_path: Path, loss_type: str, beta: float
) -> None:
    """S12: with a sampler equal to the trainer nothing is centred, and TRL's gradient remains."""
    trainer = parity_trainer(
        policy, tokenizer, restored.url, tmp_path, loss_type=loss_type, beta=beta
    )
    batch = one_batch(trainer)
    if beta:
        batch["ref_per_token_logps"] = batch["ref_per_token_logps"] - 0.3
    log_probs, head = scored(trainer, batch)
    batch["sampling_per_token_logps"] = log_probs
    batch[HEAD_LOGPROBS] = torch.where(batch[HEAD_IDS] >= 0, head, -torch.inf)
    ours = gradients(trainer, trainer.compute_loss(trainer.model, batch))
    theirs = gradients(trainer, GRPOTrainer.compute_loss(trainer, trainer.model, batch))
    assert relative(ours, theirs) < 2e-3


def test_batch_layout_does_not_matter(
    policy: Any, tokenizer: Any, restored: Server, tmp_path: Path
) -> None:
    """S12: 16 rows at once or in four accumulated parts give one gradient."""
    trainer = parity_trainer(policy, tokenizer, restored.url, tmp_path, loss_type="dapo")
    batch = one_batch(trainer)
    whole = gradients(trainer, trainer.compute_loss(trainer.model, batch))
    trainer.current_gradient_accumulation_steps, trainer.args.steps_per_generation = 4, 4
    trainer.model.zero_grad()
    for part in range(4):
        rows = slice(4 * part, 4 * part + 4)
        inputs = {
            name: value if name == "num_items_in_batch" else value[rows]
            for name, value in batch.items()
        }
        trainer.compute_loss(trainer.model, inputs).backward()
    parts = {name: p.grad for name, p in trainer.model.named_parameters()}
    assert relative(parts, whole) < 1e-4


def test_off_is_trls_loss_bit_for_bit(
    policy: Any, tokenizer: Any, restored: Server, tmp_path: Path
) -> None:
    """G6: score_centering=False leaves GRPOTrainer's loss and its importance correction."""
    trainer = parity_trainer(policy, tokenizer, restored.url, tmp_path, score_centering=False)
    batch = one_batch(trainer)
    assert HEAD_IDS not in batch
    assert "importance_sampling_ratio" in batch
    ours = trainer.compute_loss(trainer.model, batch)
    theirs = GRPOTrainer.compute_loss(trainer, trainer.model, batch)
    assert torch.equal(ours, theirs)


class CountingClient:
    """Passes requests on and remembers the head size of each; may edit the answers."""

    def __init__(self, client: ParityClient, edit: Any = None) -> None:
        self._client, self._edit = client, edit
        self.head_sizes: list[int] = []

    def rollout(self, request: RolloutRequest) -> Rollout:
        self.head_sizes.append(request.head_size)
        rollout = self._client.rollout(request)
        return self._edit(rollout) if self._edit else rollout


def test_evaluation_asks_for_no_heads(
    policy: Any, tokenizer: Any, restored: Server, tmp_path: Path
) -> None:
    """S11: K, 0, K over a training step, an evaluation and a training step."""
    trainer = parity_trainer(
        policy,
        tokenizer,
        restored.url,
        tmp_path,
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


@pytest.mark.parametrize("fault", ["nan", "abort"])
@pytest.mark.parametrize("centring", [True, False])
def test_unusable_completions_leave_the_loss(
    policy: Any, tokenizer: Any, restored: Server, tmp_path: Path, fault: str, centring: bool
) -> None:
    """L8, W4: a NaN logprob or an aborted completion is masked whole, and counted."""

    def edit(rollout: Rollout) -> Rollout:
        if fault == "abort":
            return dataclasses.replace(
                rollout, finish_reasons=["abort", *rollout.finish_reasons[1:]]
            )
        logprobs = rollout.logprobs.copy()
        logprobs[2] = np.nan
        return dataclasses.replace(rollout, logprobs=logprobs)

    trainer = parity_trainer(policy, tokenizer, restored.url, tmp_path, score_centering=centring)
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
    policy: Any, tokenizer: Any, restored: Server, tmp_path: Path, model_path: Path
) -> None:
    """After steps large enough to tell the policies apart: new weights <= 0.02, old > 5 times."""
    from transformers import AutoModelForCausalLM

    trainer = parity_trainer(
        policy, tokenizer, restored.url, tmp_path, max_steps=4, learning_rate=1e-3
    )
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


def test_seeded_rollouts_repeat(
    policy: Any, tokenizer: Any, restored: Server, tmp_path: Path
) -> None:
    """rollout_seed: the same completions in a second run, and different ones within a group."""
    batches = []
    for _ in range(2):
        trainer = parity_trainer(policy, tokenizer, restored.url, tmp_path)
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
        ({"trainer": {"rollout_func": print}}, "rollout_func"),
    ],
)
def test_unsafe_runs_do_not_get_a_trainer(
    policy: Any, tokenizer: Any, restored: Server, tmp_path: Path, values: dict[str, Any], word: str
) -> None:
    """L4, L16, S10: refused in the constructor, by name, with a fix."""
    with pytest.raises(ParityError) as caught:
        parity_trainer(policy, tokenizer, restored.url, tmp_path, **values)
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
