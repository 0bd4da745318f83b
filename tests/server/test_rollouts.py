"""Rollouts of a real server as arrays.

Properties:
- the sampled token's logprob is its own, found by id, whatever the head size (L15);
- the head is the most likely tokens, unique, whatever was sampled (L13);
- ids, logprobs and heads have one length, also when a sequence stops early (L11, L14);
- a filter leaves filler, and what remains sums to one; K = V gives the whole distribution (L16);
- seeds reproduce, and ``/v1/completions`` returns the same bits;
- what the server cannot do is refused with the limit (L16, X5).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.client import Client, sequences, top_logprobs
from tests.models import VOCAB, Kind
from tests.reference import reference
from tests.servers import API_KEY, TOKEN
from vllm_parity_plugin.serving import Server

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [100, 101, 102, 103, 104]]
SEEDS = [3, 4, 5]
K = 64


@pytest.fixture
def client(untied_server: Server) -> Client:
    return Client(untied_server)


def ask(client: Client, head_size: int = K, **more: Any) -> Any:
    request = {"seeds": SEEDS, "max_tokens": 24, "ignore_eos": True, "temperature": 1.0} | more
    return client.rollout(PROMPTS, head_size=head_size, **request)


def test_l15_the_head_does_not_change_the_sampled_logprob(client: Client) -> None:
    """L15: head sizes 0, 4 and 64 give the same ids and bits, and sampled is mostly not top-1."""
    alone = [client.rollout([PROMPTS[0]], seeds=[3], max_tokens=24, head_size=k) for k in (0, 4, K)]
    for found in alone[1:]:
        assert np.array_equal(found.token_ids, alone[0].token_ids)
        assert np.array_equal(found.logprobs, alone[0].logprobs)
    assert alone[0].head_ids.shape == (24, 0)
    assert (alone[1].head_ids[:, 0] != alone[1].token_ids).mean() >= 0.5


def test_l13_the_head_is_the_most_likely_tokens(client: Client) -> None:
    """L13, L15: unique ids, falling logprobs; a sampled token outside the head is not put in."""
    found = ask(client)
    assert all(len(set(row)) == K for row in found.head_ids.tolist())
    assert (np.diff(found.head_logprobs, axis=1) <= 0).all()
    inside = found.head_ids == found.token_ids[:, None]
    assert inside.any() and not inside.any(axis=1).all()
    assert np.array_equal(
        found.head_logprobs[inside], np.broadcast_to(found.logprobs[:, None], inside.shape)[inside]
    )
    outside = ~inside.any(axis=1)
    assert (found.logprobs[outside] <= found.head_logprobs[outside, -1]).all()


def test_l11_lengths_agree_when_a_sequence_stops(client: Client) -> None:
    """L11, L14: stop tokens end sequences at different places; every array follows."""
    free = ask(client, n=2)
    stop = [int(free.token_ids[free.span(0)][5]), int(free.token_ids[free.span(3)][9])]
    found = ask(client, n=2, stop_token_ids=stop)
    assert len(found) == 6
    lengths = np.diff(found.sequence_offsets)
    assert len(set(lengths.tolist())) > 1
    assert "stop" in found.finish_reasons and "length" in found.finish_reasons
    total = int(lengths.sum())
    assert found.head_ids.shape == found.head_logprobs.shape == (total, K)
    assert len(found.token_ids) == len(found.logprobs) == len(found.policy_versions) == total
    for ids, reason in zip(sequences(found), found.finish_reasons, strict=True):
        assert (ids[-1] in stop) == (reason == "stop")
        assert not set(ids[:-1]) & set(stop)


def test_l16_the_whole_vocabulary(observe_server: Server) -> None:
    """L16: K = V: every token once, probabilities that sum to one, the sampled one among them."""
    request = {"max_tokens": 4, "temperature": 1.0, "top_p": 1.0}
    found = Client(observe_server).rollout(PROMPTS, head_size=VOCAB, **request)
    assert (np.sort(found.head_ids, axis=1) == np.arange(VOCAB)).all()
    mass = np.exp(found.head_logprobs.astype(np.float64)).sum(axis=1)
    assert np.abs(mass - 1.0).max() < 1e-3
    sampled = found.head_logprobs[found.head_ids == found.token_ids[:, None]]
    assert np.array_equal(sampled, found.logprobs)


def test_l4_a_filter_leaves_filler(client: Client, tiny_model: Callable[[Kind], Path]) -> None:
    """L4: top_p 0.8: what is left sums to one, the rest is id -1 with -inf; renormalised."""
    found = ask(client, head_size=128, top_p=0.8, temperature=0.3)
    filler = found.head_ids == -1
    assert filler.any()
    assert np.array_equal(filler, np.isneginf(found.head_logprobs))
    complete = filler.any(axis=1)
    mass = np.exp(found.head_logprobs.astype(np.float64)).sum(axis=1)
    assert np.abs(mass[complete] - 1.0).max() < 1e-3
    full = reference(tiny_model("gc"), PROMPTS, sequences(found), temperature=0.3)
    assert np.mean(full - found.logprobs) < np.log(0.9)


def test_seeds_reproduce_and_differ(client: Client) -> None:
    """Same seeds, same arrays; completion j of a prompt is that of seed + j; no seed is random."""
    one = client.rollout([PROMPTS[0]], seeds=[7], n=3, max_tokens=16, ignore_eos=True)
    again = client.rollout([PROMPTS[0]], seeds=[7], n=3, max_tokens=16, ignore_eos=True)
    assert sequences(one) == sequences(again)
    third = client.rollout([PROMPTS[0]], seeds=[9], max_tokens=16, ignore_eos=True)
    assert sequences(third)[0] == sequences(one)[2]
    free = client.rollout([PROMPTS[0]], n=3, max_tokens=16, ignore_eos=True)
    assert len({tuple(ids) for ids in sequences(free)}) == 3


def test_completions_return_the_same_bits(client: Client) -> None:
    """L2, L14: the stock endpoint's values for a seed are the arrays' values, in float32."""
    found = client.rollout(
        [PROMPTS[0]], seeds=[3], head_size=20, max_tokens=24, temperature=0.7, ignore_eos=True
    )
    (choice,) = client.completions(
        PROMPTS[0], seed=3, logprobs=20, max_tokens=24, temperature=0.7, ignore_eos=True
    )
    assert choice["token_ids"] == found.token_ids.tolist()
    sampled = np.array(choice["logprobs"]["token_logprobs"], dtype=np.float32)
    assert np.array_equal(sampled, found.logprobs)
    for position, head in enumerate(top_logprobs(choice)):
        for token, logprob in zip(
            found.head_ids[position].tolist(), found.head_logprobs[position], strict=True
        ):
            assert np.float32(head[token]) == logprob


def test_l13_control_text_keys_lose_tokens(client: Client) -> None:
    """L13 control: by id every position has 20 or 21 entries, by text some have fewer."""
    request = {"seed": 3, "logprobs": 20, "max_tokens": 24, "ignore_eos": True}
    (by_id,) = client.completions(PROMPTS[0], **request)
    (by_text,) = client.completions(PROMPTS[0], return_tokens_as_token_ids=False, **request)
    assert all(len(head) in {20, 21} for head in by_id["logprobs"]["top_logprobs"])
    assert min(len(head) for head in by_text["logprobs"]["top_logprobs"]) < 20


@pytest.mark.parametrize("head_size", [65, 600])
def test_x5_the_cap_holds(tied_server: Server, head_size: int) -> None:
    """X5, L16: K = 64: more is refused by both routes, naming the limit and the vocabulary."""
    client = Client(tied_server, token=TOKEN, api_key=API_KEY)
    assert client.ask_completions(PROMPTS[0], logprobs=64, max_tokens=1).status_code == 200
    assert client.ask_completions(PROMPTS[0], logprobs=head_size, max_tokens=1).status_code == 400
    assert client.rollout(PROMPTS, head_size=64, max_tokens=1).head_ids.shape == (3, 64)
    answer = client.ask_rollout(PROMPTS, head_size=head_size, max_tokens=1)
    assert answer.status_code == 422
    assert f"head_size={head_size} is more than this server returns (64; " in answer.text
    assert f"vocabulary has {VOCAB} tokens" in answer.text


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"prompts": [[]]}, "Prompt 0 has 0 token ids"),
        ({"prompts": [[5], [VOCAB]]}, f"Prompt 1 has 1 token ids in [{VOCAB}, {VOCAB}]"),
        ({"prompts": [[-1]]}, "Prompt 0 has 1 token ids in [-1, -1]"),
        ({"prompts": [[5] * 4096]}, "Prompt 0 has 4096 token ids"),
        ({"seeds": [1]}, "1 seeds came with 3 prompts"),
        ({"temperature": 5.0}, "temperature"),
    ],
)
def test_requests_the_model_cannot_take(client: Client, change: Any, part: str) -> None:
    """L16: refused with a 4xx that names the matter; the server goes on."""
    request = {"prompts": PROMPTS, "max_tokens": 2} | change
    answer = client.ask_rollout(request.pop("prompts"), **request)
    assert 400 <= answer.status_code < 500, answer.text
    assert part in answer.text
    assert client.rollout(PROMPTS, max_tokens=1).finish_reasons == ["length"] * 3
