"""Makes the head a function of the logits alone, where several tokens are equally likely.

``torch.topk`` promises nothing about ties. Which of the tokens at the K-th logit are returned
depends on K, and vLLM runs it with the largest K of the batch: the head of a request could change
with what other requests ask for. Here the lowest ids win, so a head of 32 is always the
beginning of a head of 128. Ties are real: unused rows of a vocabulary are often equal, and a bf16
head makes ties among likely tokens common.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_parity_plugin.ledger import Patch

LOW_BITS = 0x7FFFFFFF


def settled(values: Tensor, found: Tensor, size: int) -> Tensor | None:
    """The ids of the ``size`` largest values of each row, of equal ones the lowest id first.

    Args:
        values: [B, V] float32.
        found: [B, size + 1] ids of the largest values, largest first (``size`` where that is V).
        size: K.

    Returns:
        [B, size] in the dtype of ``found``, or None where ``found`` is right as it is. Values
        do not change: equal ones only change places.
    """
    sorted_values = values.gather(-1, found.long())
    # -inf is not a tie: it fills up the list behind a filter, and its ids mean nothing.
    tied = (sorted_values[:, 1:] == sorted_values[:, :-1]) & sorted_values[:, 1:].isfinite()
    rows = tied.any(-1)
    if not rows.any():
        return None
    result = found[:, :size].clone()
    result[rows] = _ordered(values[rows], size).to(found.dtype)
    return result


def _ordered(values: Tensor, size: int) -> Tensor:
    """Top-k of integers that are all different: the value in the high bits, the id in the low."""
    bits = (values.float() + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: equal, with equal bits
    # Negative floats count down as integers; flipping their low bits makes both rise together.
    rising = (bits ^ ((bits >> 31) & LOW_BITS)).long()
    ids = torch.arange(values.shape[-1] - 1, -1, -1, device=values.device)
    return ((rising << 32) | ids).topk(size, dim=-1).indices


def wrap_gather_logprobs(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Sampler.gather_logprobs`` of model runner V1."""

    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        if num_logprobs <= 0:
            return original(logprobs, num_logprobs, token_ids)
        found = original(logprobs, _one_more(logprobs, num_logprobs), token_ids)
        return _cut(found, logprobs, num_logprobs)

    return gather_logprobs


def wrap_compute_topk_scores(original: Callable[..., Any]) -> Callable[..., Any]:
    """``compute_topk_scores`` of model runner V2, as its sampler calls it. Not run on a GPU yet."""

    def compute_topk_scores(
        logits: Tensor, num_logprobs: int, *args: Any, max_per_req_token_ids: int = 0, **kwargs: Any
    ) -> Any:
        own = {"max_per_req_token_ids": max_per_req_token_ids}
        # Ids that a request names itself take the place of the head, and are no top-k.
        if num_logprobs <= 0 or max_per_req_token_ids:
            return original(logits, num_logprobs, *args, **own, **kwargs)
        found = original(logits, _one_more(logits, num_logprobs), *args, **own, **kwargs)
        return _cut(found, logits, num_logprobs)

    return compute_topk_scores


def _one_more(values: Tensor, size: int) -> int:
    """The entry behind the head tells whether its last one is tied with what is left out."""
    return min(size + 1, values.shape[-1])


def _cut(found: Any, values: Tensor, size: int) -> Any:
    ids = found.logprob_token_ids
    head = settled(values, ids[:, 1:], size)
    head = ids[:, 1 : 1 + size] if head is None else head
    ids = torch.cat((ids[:, :1], head), dim=1)
    logprobs = found.logprobs[:, : 1 + size].contiguous()
    return found._replace(logprob_token_ids=ids, logprobs=logprobs)


def _row(
    name: str, module: str, attribute: str, wrap: Callable[[Any], Any], versions: str
) -> Patch:
    return Patch(
        name=name,
        module=module,
        attribute=attribute,
        wrap=wrap,
        why="equally likely tokens make a request's head depend on what others ask for",
        versions=versions,
        upstream="none",
        delete_when="vLLM's top-k orders ties by token id",
    )


V1_PATCH = _row(
    "head-order",
    "vllm.v1.sample.sampler",
    "Sampler.gather_logprobs",
    wrap_gather_logprobs,
    "0.28-0.31",
)
V2_PATCH = _row(
    "head-order-v2",
    "vllm.v1.worker.gpu.sample.sampler",
    "compute_topk_scores",
    wrap_compute_topk_scores,
    "0.31, read only",
)


def order_heads() -> None:
    """Install the patch of the model runners that this platform can use; in the worker."""
    from vllm.platforms import current_platform

    V1_PATCH.apply()
    if not current_platform.is_cpu():
        V2_PATCH.apply()
