"""The centred loss inside ParityGRPOTrainer, on batches from a real server.

Properties: the gradient of every parameter is that of the paper's definition on full float64
logits, on the rollout's policy and after the policy has moved, for every loss; with a sampler
equal to the trainer TRL's gradient remains; what TRL adds (KL, entropy bonus) and the factors of
whole sequences are its own; off means TRL's own loss bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from tests.trainer.runs import Start, gradients, one_batch, relative, scored
from trl_callbacks.heads import HEAD_IDS, HEAD_LOGPROBS, OLD_HEAD_LOGPROBS
from trl_callbacks.loss_types import SUPPORTED


@pytest.mark.parametrize("weight", ["none", "tis", "mis"])
def test_the_loss_is_the_papers(start: Start, weight: str) -> None:
    """Gradient of every parameter against the definition on full float64 logits.

    The sampler's logprobs are moved away from the trainer's first, so that the correction is
    large: on agreeing policies a loss without it would pass.
    """
    trainer = start(
        score_centering_weight=weight,
        score_centering_top_k=16,
        temperature=1.5,
    )
    batch = one_batch(trainer)
    move_sampler(batch)
    ours = gradients(trainer, trainer.compute_loss(trainer.model, batch))
    expected = gradients(trainer, definition(trainer, batch, weight))
    uncentred = gradients(trainer, definition(trainer, batch, weight, centred=False))
    assert relative(ours, expected) < 5e-3
    assert relative(uncentred, expected) > 0.05


@pytest.mark.parametrize(
    ("loss_type", "weight", "settings"),
    [
        ("dapo", "none", {"epsilon_high": 0.28}),
        ("dapo", "tis", {"delta": 1.5}),
        ("grpo", "mis", {}),
        ("cispo", "none", {"epsilon_high": 1.2}),
        ("sapo", "tis", {}),
        ("dapo", "is", {}),
    ],
)
def test_later_steps_on_a_rollout(
    start: Start, loss_type: str, weight: str, settings: dict[str, float]
) -> None:
    """S9: after the policy has moved, the clip is part of what is centred, on y and on the head."""
    trainer = start(
        loss_type=loss_type,
        score_centering_weight=weight,
        score_centering_top_k=16,
        num_iterations=2,
        **settings,
    )
    batch = one_batch(trainer)
    _, unmoved = scored(trainer, batch)
    own = batch[HEAD_IDS] >= 0
    assert torch.equal(batch[OLD_HEAD_LOGPROBS][own], unmoved[own])
    move_sampler(batch)
    move_policy(trainer)
    ours = gradients(trainer, trainer.compute_loss(trainer.model, batch))
    clipped = trainer._metrics["train"]["parity/score_centering/policy_clipped_share"][-1]
    assert (clipped > 0.05) == (loss_type != "sapo")
    expected = gradients(trainer, definition(trainer, batch, weight))
    uncentred = gradients(trainer, definition(trainer, batch, weight, centred=False))
    assert relative(ours, expected) < 5e-3
    assert relative(uncentred, expected) > 0.05
    if weight == "none":
        theirs = gradients(trainer, GRPOTrainer.compute_loss(trainer, trainer.model, batch))
        assert relative(theirs, uncentred) < 5e-3
        assert_clip_metrics_are_trls(trainer)


def assert_clip_metrics_are_trls(trainer: Any) -> None:
    """G8: our loss logged the clip metrics that TRL's loss logs for the same batch."""
    names = [name for name in trainer._metrics["train"] if "clip_ratio" in name]
    assert len(names) == (1 if trainer.loss_type == "cispo" else 5)
    for name in names:
        ours, theirs = trainer._metrics["train"][name]
        assert ours == pytest.approx(theirs, abs=1e-6)


def move_sampler(batch: dict[str, Any]) -> None:
    """Noise inside the head; its mass stays, so that the tail ratio is well conditioned."""
    noise = torch.Generator().manual_seed(1)
    q = batch[HEAD_LOGPROBS]
    shifted = q + 1.5 * torch.randn(q.shape, generator=noise)
    batch[HEAD_LOGPROBS] = shifted.log_softmax(-1) + q.logsumexp(-1, keepdim=True)


@torch.no_grad()
def move_policy(trainer: Any) -> None:
    """A step that leaves some ratios inside the clip and puts others on both sides of it."""
    noise = torch.Generator().manual_seed(2)
    for parameter in trainer.model.parameters():
        parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise))


def definition(
    trainer: Any, batch: dict[str, Any], weight: str, *, centred: bool = True
) -> torch.Tensor:
    """-A (f g log p_y - sum_H c_v log p_v), averaged, written out (SC: Eq. 7-12)."""
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
    old_y, old_h = p_y, p_h
    if OLD_HEAD_LOGPROBS in batch:
        old_y = batch["old_per_token_logps"].double().exp()
        old_h = batch[OLD_HEAD_LOGPROBS].double().exp()
    advantages = batch["advantages"].unsqueeze(1)

    def f(ratio: torch.Tensor) -> torch.Tensor:
        if weight == "none":
            return torch.ones_like(ratio)
        if weight == "tis":
            return ratio.clamp(max=2.0)
        inside = (ratio >= 0.5) & (ratio <= 5.0)
        return torch.where(inside | torch.tensor(weight == "is"), ratio, 0.0)

    def g(ratio: torch.Tensor) -> torch.Tensor:
        sign = advantages.view(-1, *[1] * (ratio.dim() - 1)) > 0
        return factor(trainer, ratio, sign)

    p_tail, q_tail, old_tail = ((1 - x.sum(-1)).clamp(min=1e-6) for x in (p_h, q_h, old_h))
    rho, rho_old = q_tail / p_tail, old_tail / p_tail
    alpha = rho * f(rho_old / rho) * g(1 / rho_old)
    c = q_h * f(old_h / q_h) * g(p_h / old_h) - alpha.unsqueeze(-1) * p_h
    c = torch.where(head >= 0, c, 0.0) * float(centred)
    logp_h = torch.where(head >= 0, logp_h, 0.0)
    per_token = f(old_y / q_y) * g(p_y / old_y) * logp_y - (c * logp_h).sum(-1)
    mask = batch["completion_mask"]
    loss = -per_token * advantages * mask
    if trainer.loss_type in ("grpo", "sapo"):
        return (loss.sum(-1) / mask.sum(-1)).mean()
    return loss.sum() / mask.sum()


def factor(trainer: Any, ratio: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    """g by autograd of TRL's formulas, for the sign of the advantage."""
    leaf = ratio.clone().requires_grad_()
    sign = torch.where(positive, 1.0, -1.0).double()
    if trainer.loss_type == "cispo":
        return leaf.detach().clamp(max=trainer.epsilon_high)
    if trainer.loss_type == "sapo":
        tau = torch.where(positive, trainer.args.sapo_temperature_pos, 1.05)
        value = torch.sigmoid(tau * (leaf - 1)) * 4 / tau
    else:
        clipped = leaf.clamp(1 - trainer.epsilon_low, 1 + trainer.epsilon_high)
        bounded = leaf if trainer.args.delta is None else leaf.clamp(max=trainer.args.delta)
        value = torch.min(bounded * sign, clipped * sign) * sign
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    return ratio * slope


@pytest.mark.parametrize("loss_type", SUPPORTED)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_averaging_is_trls(start: Start, loss_type: str, beta: float) -> None:
    """S12: with a sampler equal to the trainer nothing is centred, and TRL's gradient remains."""
    trainer = start(loss_type=loss_type, beta=beta)
    batch = one_batch(trainer)
    if beta:
        batch["ref_per_token_logps"] = batch["ref_per_token_logps"] - 0.3
    log_probs, head = scored(trainer, batch)
    batch["sampling_per_token_logps"] = log_probs
    batch[HEAD_LOGPROBS] = torch.where(batch[HEAD_IDS] >= 0, head, -torch.inf)
    ours = gradients(trainer, trainer.compute_loss(trainer.model, batch))
    theirs = gradients(trainer, GRPOTrainer.compute_loss(trainer, trainer.model, batch))
    assert relative(ours, theirs) < 2e-3


def test_batch_layout_does_not_matter(start: Start) -> None:
    """S12: 16 rows at once or in four accumulated parts give one gradient."""
    trainer = start(loss_type="dapo")
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


@pytest.mark.parametrize("loss_type", SUPPORTED)
def test_padding_does_not_matter(start: Start, loss_type: str) -> None:
    """G11: wider prompts and completions with anything in the padding give the same gradient."""
    trainer = start(loss_type=loss_type)
    batch = one_batch(trainer)
    move_sampler(batch)
    narrow = gradients(trainer, trainer.compute_loss(trainer.model, batch))
    wide = gradients(trainer, trainer.compute_loss(trainer.model, padded(batch, 5, 7)))
    assert relative(wide, narrow) < 1e-4


def padded(batch: dict[str, Any], left: int, right: int) -> dict[str, Any]:
    """A batch with wider prompts and completions; what no mask covers is garbage."""
    garbage = {
        "prompt_ids": 7,
        "prompt_mask": 0,
        "completion_ids": 9,
        "completion_mask": 0,
        "sampling_per_token_logps": torch.nan,
        HEAD_IDS: 3,
        HEAD_LOGPROBS: -0.5,
    }
    wide = dict(batch)
    for name, value in garbage.items():
        tensor = batch[name]
        columns = (left, 0) if name.startswith("prompt") else (0, right)
        pad = (0, 0, *columns) if tensor.dim() == 3 else columns
        wide[name] = torch.nn.functional.pad(tensor, pad, value=value)
    return wide


def test_off_is_trls_loss_bit_for_bit(start: Start) -> None:
    """G6: score_centering=False leaves GRPOTrainer's loss and its importance correction."""
    trainer = start(score_centering=False)
    batch = one_batch(trainer)
    assert HEAD_IDS not in batch
    assert "importance_sampling_ratio" in batch
    ours = trainer.compute_loss(trainer.model, batch)
    theirs = GRPOTrainer.compute_loss(trainer, trainer.model, batch)
    assert torch.equal(ours, theirs)


def difference(
    trainer: Any, batch: dict[str, Any], loss: Any, name: str, values: tuple[Any, Any]
) -> dict[str, torch.Tensor]:
    """What a setting adds to the gradient of a loss."""
    found = []
    for value in values:
        setattr(trainer, name, value)
        found.append(gradients(trainer, loss(trainer.model, batch)))
    return {key: found[1][key] - found[0][key] for key in found[0]}


@pytest.mark.parametrize(
    ("settings", "name", "values"),
    [
        ({"beta": 0.1}, "beta", (0.0, 0.1)),
        ({"entropy_coef": 0.05}, "entropy_coef", (0.0, 0.05)),
    ],
)
def test_centering_leaves_kl_and_entropy_alone(
    start: Start, settings: dict[str, float], name: str, values: tuple[float, float]
) -> None:
    """S9: the term adds to the centred loss what it adds to TRL's, and is logged alike."""
    trainer = start(**settings)
    batch = one_batch(trainer)
    if "ref_per_token_logps" in batch:
        batch["ref_per_token_logps"] = batch["ref_per_token_logps"] - 0.3
    move_sampler(batch)
    ours = difference(trainer, batch, trainer.compute_loss, name, values)
    metric = "kl" if name == "beta" else "entropy"
    logged = trainer._metrics["train"][metric][-1]

    def theirs(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return GRPOTrainer.compute_loss(trainer, model, inputs)

    expected = difference(trainer, batch, theirs, name, values)
    assert relative(ours, expected) < 1e-3
    assert logged == pytest.approx(trainer._metrics["train"][metric][-1], rel=1e-4)
    assert max(float(grad.abs().max()) for grad in expected.values()) > 1e-5


@pytest.mark.parametrize(
    "settings",
    [
        {"off_policy_mask_threshold": 0.05},
        {
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": "sequence_truncate",
        },
        {"top_entropy_quantile": 0.5},
    ],
)
def test_factors_of_a_sequence_multiply_both_parts(start: Start, settings: dict[str, Any]) -> None:
    """G6: TRL's masks and sequence-level weights act as if they scaled the advantage."""
    trainer = start(**settings)
    batch = one_batch(trainer)
    move_sampler(batch)
    batch["sampling_per_token_logps"] = batch["sampling_per_token_logps"] + 0.3
    if "importance_sampling_ratio" in batch:
        rows = len(batch["advantages"])
        batch["importance_sampling_ratio"] = torch.linspace(0.5, 1.5, rows).unsqueeze(1)
    ours = gradients(trainer, trainer.compute_loss(trainer.model, batch))
    scaled = {**batch, "advantages": batch["advantages"].unsqueeze(1) * outer(trainer, batch)}
    trainer.off_policy_mask_threshold, trainer.top_entropy_quantile = None, 1.0
    trainer.vllm_importance_sampling_correction = False
    plain = gradients(trainer, trainer.compute_loss(trainer.model, batch))
    expected = gradients(trainer, trainer.compute_loss(trainer.model, scaled))
    assert relative(ours, expected) < 1e-4
    assert relative(plain, expected) > 0.05


def outer(trainer: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The factor that a trainer's settings ask for, from TRL's own functions."""
    mask = batch["completion_mask"]
    if trainer.vllm_importance_sampling_correction:
        ratio: torch.Tensor = batch["importance_sampling_ratio"]
        return ratio
    log_probs, _ = scored(trainer, batch)
    if trainer.off_policy_mask_threshold is not None:
        kept: torch.Tensor = trainer.get_off_policy_mask(
            batch["advantages"].unsqueeze(1),
            log_probs,
            batch["sampling_per_token_logps"],
            mask,
            trainer.off_policy_mask_threshold,
        )
        assert 0 < kept.float().mean() < 1
        return kept
    entropy = scored(trainer, batch, "entropy")[0]
    high: torch.Tensor = trainer.get_high_entropy_mask(entropy, mask, 0.5)
    return high
