"""The trainer's lm_head in fp32, with the weights that are served.

Problem: a bf16 product rounds every logit. TRL's ``cast_lm_head_to_fp32`` casts the *weights*
too: the head then learns bits that a bf16 server rounds away, and a tied embedding is cast along
with it. Here the weights keep their dtype; only the product runs in fp32, on weights rounded to
the served dtype, and the gradient passes straight through that rounding.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head, maybe_gather_lm_head_ctx

from trl_callbacks.token_logprobs import token_logprobs
from vllm_parity_plugin.errors import ParityError

PROBE_TOKENS = 8
PROBE_TOLERANCE = 1e-3
"""Largest |difference| between our head and TRL's in fp32, on the same hidden states."""


@dataclass
class ParityLMOutput(FusedCausalLMOutput):
    """TRL's fused output plus log-probabilities of the sampler's head.

    ``head_log_probs`` is ``(batch, seq_len - 1, K)``, aligned with ``log_probs``.
    """

    head_log_probs: torch.Tensor | None = None


class _RoundTo(torch.autograd.Function):
    """x rounded to the values of another dtype; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # Back in x's dtype: autograd would round the gradient of a bf16 tensor to bf16.
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _ServedHead:
    """Stands in for the lm_head module where TRL reads ``.weight`` and ``.bias``."""

    def __init__(self, head: nn.Module, dtype: torch.dtype) -> None:
        self._head, self._dtype = head, dtype

    @property
    def weight(self) -> torch.Tensor:
        # Read on access: sharded parameters are whole only while the model's forward runs.
        weight = cast(torch.Tensor, self._head.weight)
        return weight if weight.dtype == self._dtype else _RoundTo.apply(weight, self._dtype)

    @property
    def bias(self) -> torch.Tensor | None:
        return getattr(self._head, "bias", None)


@dataclass(frozen=True)
class ParityHead:
    """The installed head of one model.

    Attributes:
        served_dtype: dtype of the weights that the product uses.
    """

    served_dtype: torch.dtype


def install_parity_head(model: Any, *, temperature: float, served_dtype: torch.dtype) -> ParityHead:
    """Make ``model(..., labels=..., fused_lm_head=True)`` run its head in fp32.

    The model's own forward (generation, evaluation by others) is unchanged. With ``head_ids``
    ([B, S - 1, K] int64, -1 for padding) the output also has ``head_log_probs``, from the same
    logits as ``log_probs``.

    Args:
        model: the bare model a GRPOTrainer trains (a PEFT model is looked into).
        temperature: the trainer's, by which logits are divided.
        served_dtype: dtype of the served lm_head weights.

    Raises:
        ParityError: the model has no plain lm_head, or processes its logits in a way that this
            head does not reproduce.
    """
    target = model.get_base_model() if hasattr(model, "get_base_model") else model
    installed: ParityHead | None = target.__dict__.get("_parity_head")
    if installed is not None:
        return installed
    lm_head = target.get_output_embeddings()
    if not isinstance(lm_head, nn.Linear):
        raise ParityError(
            f"The lm_head of {type(target).__name__} is {type(lm_head).__name__}, not a linear "
            "layer.",
            "Its product cannot be run in fp32 with the served weights.",
            "train without a quantised head and without a PEFT adapter on lm_head.",
        )
    # Keeps whatever forward is installed (TRL's, an autocast wrapper) for unfused calls.
    add_fused_lm_head(
        target,
        temperature=temperature,
        cast_lm_head_to_fp32=True,
        outputs=("log_probs", "entropy"),
    )
    fused = target.forward
    text_config = target.config.get_text_config()
    scale, softcap = logit_processing(text_config)
    served_logits = {
        "temperature": temperature,
        "logit_scale": scale,
        "softcap": softcap,
        "weight_dtype": served_dtype,
    }

    @functools.wraps(type(target).forward)
    def forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        head_ids: Any = None,
        entropy_grad: bool = False,
        **kwargs: Any,
    ) -> Any:
        if not fused_lm_head:
            return fused(*args, **kwargs)
        if head_ids is None:
            with _served(self, served_dtype):
                return fused(*args, fused_lm_head=True, **kwargs)
        return _forward_with_head(self, args, kwargs, head_ids, entropy_grad, served_logits)

    target.forward = types.MethodType(forward, target)
    _check_effect(target, temperature)
    head = target.__dict__["_parity_head"] = ParityHead(served_dtype)
    return head


@contextmanager
def _served(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """TRL's fused forward asks ``get_output_embeddings``; give it the served weights."""
    lm_head = model.get_output_embeddings()
    model.get_output_embeddings = lambda: _ServedHead(lm_head, dtype)
    try:
        yield
    finally:
        del model.get_output_embeddings


def _forward_with_head(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    head_ids: torch.Tensor,
    entropy_grad: bool,
    served_logits: dict[str, Any],
) -> ParityLMOutput:
    """One backbone pass and one pass over the head for label and head tokens together."""
    labels = kwargs.pop("labels")
    kwargs["use_cache"] = False
    hidden = model.base_model(*args, **kwargs).last_hidden_state[:, :-1]
    labels = labels[:, 1:]
    scored = labels != -100
    lm_head = model.get_output_embeddings()
    ids = torch.cat([labels[scored].unsqueeze(1), head_ids[scored].long()], dim=1)
    logprobs, entropy = token_logprobs(
        hidden[scored],
        lm_head.weight,
        ids,
        bias=lm_head.bias,
        entropy_grad=entropy_grad,
        gather=maybe_gather_lm_head_ctx,
        **served_logits,
    )

    def spread(values: torch.Tensor) -> torch.Tensor:
        # Scatter instead of indexed assignment: a batch without any scored token stays attached.
        mask = scored.view(*scored.shape, *[1] * (values.dim() - 1))
        empty = values.new_zeros(*scored.shape, *values.shape[1:])
        return empty.masked_scatter(mask, values)

    return ParityLMOutput(
        log_probs=spread(logprobs[:, 0]),
        entropy=spread(entropy),
        head_log_probs=spread(logprobs[:, 1:]),
        label_mask=scored,
    )


def logit_processing(text_config: Any) -> tuple[float, float | None]:
    """(factor, soft cap) that a model's own forward applies to its logits.

    The same configuration names as TRL's fused head reads; :func:`install_parity_head` compares
    the two on real hidden states, so that a name added there cannot be missed here.
    """
    softcap = getattr(text_config, "final_logit_softcapping", None)
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(text_config, name, None) is not None:
            return float(getattr(text_config, name)), softcap
    scaling = getattr(text_config, "logits_scaling", None)
    if scaling is not None:
        multiplies = text_config.model_type == "hyperclovax"
        return float(scaling if multiplies else 1 / scaling), softcap
    return 1.0, softcap


@torch.no_grad()
def _check_effect(model: Any, temperature: float) -> None:
    """Compare three ways to the same log-probabilities, where the parameters are at hand.

    Ours with head tokens against TRL's fused head, tightly; both against the model's own forward,
    as closely as its dtype allows: a forgotten scale or cap is far outside that.

    Raises:
        ParityError: an architecture whose logits need something that this head does not apply.
    """
    weight = model.get_output_embeddings().weight
    if weight.is_meta or weight.numel() == 0 or type(weight) is not nn.Parameter:
        return  # sharded or not materialised yet: a probe would be a collective of its own
    ids = torch.arange(PROBE_TOKENS, device=weight.device).unsqueeze(0) % weight.shape[0]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    training = model.training
    model.eval()
    try:
        theirs = model(**inputs, labels=ids, fused_lm_head=True).log_probs
        ours = model(**inputs, labels=ids, fused_lm_head=True, head_ids=ids[:, 1:, None])
        logits = model(**inputs).logits[:, :-1].float()
    finally:
        model.train(training)
    own = torch.log_softmax(logits / temperature, -1).gather(-1, ids[:, 1:, None])[..., 0]
    gaps = {
        "TRL's fused head": (
            float((ours.head_log_probs[..., 0] - theirs).abs().max()),
            PROBE_TOLERANCE,
        ),
        "the model's own forward": (
            float((ours.log_probs - own).abs().max()),
            0.05 + 0.02 * float(logits.abs().max()) / temperature,
        ),
    }
    for other, (gap, tolerance) in gaps.items():
        if not gap <= tolerance:
            raise ParityError(
                f"The fp32 head of {type(model).__name__} differs from {other} by {gap:.3g} nats.",
                "This architecture processes its logits in a way that the head does not reproduce.",
                "train it without ParityCallback's head (mode='observe'), and report the "
                "architecture.",
            )
