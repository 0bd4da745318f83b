"""The order of a head where tokens are equally likely.

Properties:
- the result is the K largest, largest first and of equal ones the lowest id, whatever torch gave;
- a smaller head is the beginning of a larger one; control: torch's top-k breaks that;
- without ties nothing is touched, and filler behind a filter is no tie;
- vLLM's own sampler returns the same values as before, in both model runners' form.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_parity_plugin.head_order import (
    V2_PATCH,
    settled,
    wrap_compute_topk_scores,
    wrap_gather_logprobs,
)

VOCAB = 40


def brute_force(values: Tensor, size: int) -> list[list[int]]:
    """By Python's sort on (value, id)."""
    return [
        sorted(range(len(row)), key=lambda token: (-row[token], token))[:size]
        for row in values.tolist()
    ]


def tied_values(seed: int, levels: int, rows: int = 5) -> Tensor:
    """Logprobs of which only ``levels`` different ones exist; 0.0 and -0.0 among them."""
    generator = torch.Generator().manual_seed(seed)
    values = -torch.randint(levels, (rows, VOCAB), generator=generator).float() / 3
    values[0, :2] = torch.tensor([0.0, -0.0])
    return values


@given(st.integers(0, 2**31), st.integers(1, 50), st.integers(1, VOCAB))
@settings(max_examples=60, deadline=None)
def test_lowest_ids_win(seed: int, levels: int, size: int) -> None:
    """S7: any number of ties, up to the whole vocabulary, from any order that top-k gives."""
    values = tied_values(seed, levels)
    found = values.topk(min(size + 1, VOCAB), dim=-1).indices.int()
    result = settled(values, found, size)
    head = found[:, :size] if result is None else result
    assert head.tolist() == brute_force(values, size)
    assert head.dtype == torch.int32
    assert torch.equal(values.gather(1, head.long()), values.topk(size, dim=-1).values)


def test_nothing_is_touched_without_ties() -> None:
    """Different values, and rows that a filter cut to two tokens."""
    values = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    cut = torch.full((2, VOCAB), -torch.inf)
    cut[:, [7, 3]] = torch.tensor([-0.1, -2.4])
    for rows in (values, cut):
        assert settled(rows, rows.topk(9, dim=-1).indices, 8) is None


def test_control_the_head_of_torch_depends_on_its_size() -> None:
    """Somewhere a head of 32 is not the beginning of a head of 128: the reason for all this."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(300, (64, 2048), generator=generator).float()
    small, large = (values.topk(size, dim=-1).indices for size in (32, 128))
    assert not torch.equal(small, large[:, :32])
    ordered = [settled(values, values.topk(k + 1, dim=-1).indices, k) for k in (32, 128)]
    assert ordered[0] is not None and ordered[1] is not None
    assert torch.equal(ordered[0], ordered[1][:, :32])


@pytest.mark.parametrize("size", [0, 1, 8, VOCAB])
def test_vllms_sampler_returns_the_same_values(size: int) -> None:
    """Model runner V1, on vLLM's own function: logprobs, sampled ids and ranks are as they were."""
    sampler = pytest.importorskip("vllm.v1.sample.sampler").Sampler
    values = tied_values(1, 9).log_softmax(-1)
    sampled = torch.arange(5)
    original = getattr(sampler.gather_logprobs, "__wrapped__", sampler.gather_logprobs)
    before = original(values, size, sampled)
    after = wrap_gather_logprobs(original)(values, size, sampled)
    assert torch.equal(after.logprobs, before.logprobs)
    assert torch.equal(after.logprob_token_ids[:, 0], before.logprob_token_ids[:, 0])
    assert torch.equal(after.selected_token_ranks, before.selected_token_ranks)
    assert after.logprob_token_ids[:, 1:].tolist() == brute_force(values, size)
    assert after.logprob_token_ids.dtype == torch.int32


@pytest.mark.parametrize("own_ids", [0, 3])
def test_the_form_of_model_runner_v2(own_ids: int) -> None:
    """A stand-in for the GPU kernel with V2's arguments; ids that a request named are no head."""
    outputs = pytest.importorskip("vllm.v1.outputs")
    values = tied_values(2, 9)

    def kernel(
        logits: Tensor,
        num_logprobs: int,
        sampled_token_ids: Tensor,
        cu_num_logits: Any = None,
        max_per_req_token_ids: int = 0,
        logits_mode: bool = False,
    ) -> Any:
        ids = logits.topk(num_logprobs, dim=-1).indices
        ids = torch.cat((sampled_token_ids.unsqueeze(-1), ids), dim=1)
        return outputs.LogprobsTensors(ids, logits.gather(1, ids), sampled_token_ids, cu_num_logits)

    before = kernel(values, 8, torch.arange(5), [1])
    after = wrap_compute_topk_scores(kernel)(
        values, 8, torch.arange(5), [1], max_per_req_token_ids=own_ids, logits_mode=True
    )
    assert torch.equal(after.logprobs, before.logprobs)
    assert after.cu_num_generated_tokens == [1]
    expected = before.logprob_token_ids[:, 1:].tolist() if own_ids else brute_force(values, 8)
    assert after.logprob_token_ids[:, 1:].tolist() == expected


def test_model_runner_v2_calls_what_is_patched() -> None:
    """The contract of the row that no CPU runs: the name is there, and takes these arguments."""
    module = pytest.importorskip(V2_PATCH.module)
    code = getattr(module, V2_PATCH.attribute).__code__
    names = code.co_varnames[: code.co_argcount]
    assert names[:3] == ("logits", "num_logprobs", "sampled_token_ids")
    assert "max_per_req_token_ids" in names[3:]
