"""Messages and the framing of rollouts.

Properties:
- a rollout survives the way through bytes, bit for bit, also when it is empty (L14);
- truncated bytes, foreign bytes and arrays of different length are errors (L11);
- a stream survives any cut, says what went wrong, and is an error without its end;
- a head that is not the whole support is refused where the support form needs it (L4);
- messages refuse names that they do not know, and values out of range.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from safetensors.numpy import save

from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.rollout_wire import (
    MAX_SEQUENCES,
    Rollout,
    RolloutRequest,
    Sampling,
    error_frame,
    frame,
    read_frames,
)
from vllm_parity_plugin.weights.messages import MAX_VERSION, UploadRequest, WeightUpdate


def rollout(lengths: list[int], head_size: int = 3) -> Rollout:
    """Sequences of these lengths, with values that tell positions apart."""
    tokens = sum(lengths)
    generator = np.random.default_rng(0)
    return Rollout(
        token_ids=np.arange(tokens, dtype=np.int32),
        logprobs=generator.normal(size=tokens).astype(np.float32),
        head_ids=np.arange(tokens * head_size, dtype=np.int32).reshape(tokens, head_size),
        head_logprobs=np.full((tokens, head_size), -np.inf, dtype=np.float32),
        sequence_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        policy_versions=np.full(tokens, 3, dtype=np.int32),
        cached_tokens=np.arange(len(lengths), dtype=np.int32),
        finish_reasons=["stop"] * len(lengths),
        stop_reasons=[None] * len(lengths),
        sampling=Sampling(temperature=0.7, logit_bias={5: 1.5}),
    )


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(0, 4))
@settings(max_examples=40, deadline=None)
def test_l14_a_rollout_survives_the_wire(lengths: list[int], head_size: int) -> None:
    """L14: arrays, dtypes, -inf, reasons and sampling come back; zero tokens give zero logprobs."""
    sent = rollout(lengths, head_size)
    found = Rollout.from_bytes(sent.to_bytes())
    for name in Rollout.DTYPES:
        assert np.array_equal(getattr(found, name), getattr(sent, name))
        assert getattr(found, name).dtype == getattr(sent, name).dtype
    assert (found.finish_reasons, found.sampling) == (sent.finish_reasons, sent.sampling)
    assert len(found) == len(lengths)
    assert [len(found.token_ids[found.span(i)]) for i in range(len(found))] == lengths


@pytest.mark.parametrize("field", ["logprobs", "head_ids", "head_logprobs", "policy_versions"])
def test_l11_lengths_that_disagree(field: str) -> None:
    """L11: five ids and four of anything else is an error, on both ways."""
    sent = rollout([2, 3])
    broken = Rollout(**{**sent.__dict__, field: getattr(sent, field)[:-1]})
    with pytest.raises(ParityError, match="5 token ids"):
        broken.check()
    with pytest.raises(ParityError, match="5 token ids"):
        Rollout.from_bytes(broken.to_bytes())


def test_l11_sequences_that_disagree() -> None:
    """L11: offsets that end early, and a missing finish reason, are errors."""
    sent = rollout([2, 3])
    for field, value in (("sequence_offsets", np.array([0, 2, 4])), ("finish_reasons", ["stop"])):
        with pytest.raises(ParityError):
            Rollout(**{**sent.__dict__, field: value}).check()


def test_bytes_that_are_no_rollout() -> None:
    """Truncated, foreign and empty bytes are errors, not arrays."""
    body = rollout([2, 3]).to_bytes()
    foreign = save({"token_ids": np.zeros(2)})
    for wrong in (body[:-1], body[:20], b"", b"x" * 64, foreign):
        with pytest.raises(ParityError, match="cannot be read"):
            Rollout.from_bytes(wrong)


@pytest.mark.parametrize(
    ("message", "body"),
    [
        (Sampling, {"temprature": 0.7}),
        (Sampling, {"temperature": -0.1}),
        (Sampling, {"top_p": 0.0}),
        (Sampling, {"top_p": 1.1}),
        (Sampling, {"max_tokens": 0}),
        (RolloutRequest, {"prompts": []}),
        (RolloutRequest, {"prompts": [["text"]]}),
        (RolloutRequest, {"prompts": [[1]], "n": 0}),
        (RolloutRequest, {"prompts": [[1]], "head_size": -1}),
        (WeightUpdate, {"version": 0, "file": "x"}),
        (WeightUpdate, {"version": 1, "file": "x", "kv": "drop"}),
        (WeightUpdate, {"version": 1}),
        (WeightUpdate, {"version": MAX_VERSION + 1, "file": "x"}),
        (WeightUpdate, {"version": 2, "file": "x", "kind": "changed"}),
        (WeightUpdate, {"version": 2, "file": "x", "kind": "lora"}),
        (WeightUpdate, {"version": 2, "file": "x", "base_version": 1}),
        (UploadRequest, {"version": 1, "tensors": {}}),
        (UploadRequest, {"version": 1}),
    ],
)
def test_messages_refuse_what_they_do_not_know(message: type[BaseModel], body: dict) -> None:
    """A misspelt name is not ignored, and a value out of range is not clipped."""
    with pytest.raises(ValidationError):
        message.model_validate(body)


def test_l6_unset_sampling_is_neutral() -> None:
    """L6: what a request leaves out does not change the distribution."""
    neutral = Sampling()
    assert (neutral.temperature, neutral.top_p, neutral.top_k, neutral.min_p) == (1.0, 1.0, 0, 0.0)
    assert neutral.repetition_penalty == 1.0
    assert neutral.presence_penalty == neutral.frequency_penalty == 0.0


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "presence_penalty", "repetition_penalty"])
def test_numbers_are_finite(field: str, value: str) -> None:
    """NaN passes every comparison, and would reach the sampler of all requests."""
    with pytest.raises(ValidationError, match="finite"):
        Sampling.model_validate_json(f'{{"{field}": {value}}}')


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 2**31},
        {"max_tokens": 2**31},
        {"min_tokens": 10**30},
        {"stop_token_ids": [2**31]},
        {"stop_token_ids": [-1]},
        {"logit_bias": {2**31: 1.0}},
    ],
    ids=str,
)
def test_numbers_fit_the_engine(fields: dict[str, object]) -> None:
    """Its arrays hold int32; what does not fit would fail in a worker, for everybody."""
    with pytest.raises(ValidationError):
        Sampling(**fields)


def test_work_of_one_request_is_bounded() -> None:
    """65,536 completions, as prompts, as n, or as both; seeds leave room for ``seed + j``."""
    most = RolloutRequest(prompts=[[1]], n=MAX_SEQUENCES)
    assert most.n == len(RolloutRequest(prompts=[[1]] * MAX_SEQUENCES).prompts) == 65_536
    with pytest.raises(ValidationError, match="less than or equal to 65536"):
        RolloutRequest(prompts=[[1]], n=MAX_SEQUENCES + 1)
    with pytest.raises(ValidationError, match="at most 65536 items"):
        RolloutRequest(prompts=[[1]] * (MAX_SEQUENCES + 1))
    with pytest.raises(ValidationError, match="3 prompts times n=21846"):
        RolloutRequest(prompts=[[1]] * 3, n=21_846)
    assert RolloutRequest(prompts=[[1]] * 3, n=21_845)
    with pytest.raises(ValidationError):
        RolloutRequest(prompts=[[1]], seeds=[2**63])


def chunks(data: bytes, size: int) -> Iterator[bytes]:
    """As a network cuts it."""
    return (data[at : at + size] for at in range(0, len(data), size))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(1, 700))
@settings(max_examples=40, deadline=None)
def test_a_stream_survives_any_cut(lengths: list[int], size: int) -> None:
    """Each sequence comes with its index, in the order sent, however the bytes are cut."""
    sent = [rollout([length]) for length in lengths]
    order = list(reversed(range(len(sent))))
    data = b"".join(frame(sent[i].to_bytes(sequence=i)) for i in order) + frame(b"")
    found = [Rollout.from_frame(body) for body in read_frames(chunks(data, size))]
    assert [index for index, _ in found] == order
    joined = Rollout.join([part for _, part in reversed(found)], sent[0].sampling)
    assert np.diff(joined.sequence_offsets).tolist() == lengths
    assert np.array_equal(joined.logprobs, np.concatenate([part.logprobs for part in sent]))
    joined.check()


@pytest.mark.parametrize("missing", [1, 8, 20])
def test_a_stream_that_breaks_off(missing: int) -> None:
    """Without its end it is an error, also between two sequences."""
    data = frame(rollout([2]).to_bytes()) + frame(b"")
    with pytest.raises(ParityError, match="broke off"):
        list(read_frames(chunks(data[:-missing], 64)))


def test_a_stream_can_say_what_went_wrong() -> None:
    """The server's paragraph comes out as it went in."""
    told = ParityError("A is 1.", "B needs 2.", "set --a 2.")
    bodies = read_frames(iter([error_frame(told) + frame(b"")]))
    with pytest.raises(ParityError) as raised:
        Rollout.from_frame(next(bodies))
    assert str(raised.value) == str(told)


def test_float16_heads_keep_their_dtype() -> None:
    """Half the bytes of the head's logprobs; -inf stays; sampled logprobs are float32."""
    sent = rollout([2, 3])
    found = Rollout.from_bytes(sent.to_bytes("float16"))
    assert found.head_logprobs.dtype == np.float16
    assert np.isneginf(found.head_logprobs).all()
    assert np.array_equal(found.logprobs, sent.logprobs)


def test_bodies_of_another_kind() -> None:
    """Another format, another dtype, offsets that fall, heads of two widths."""
    sent = rollout([2, 3])
    arrays = {name: getattr(sent, name) for name in Rollout.DTYPES}
    older = save(arrays, metadata={"format": "vllm-parity-rollout-1"})
    with pytest.raises(ParityError, match="rollout-1, not vllm-parity-rollout-2"):
        Rollout.from_bytes(older)
    for name, value in (
        ("logprobs", sent.logprobs.astype(np.float64)),
        ("sequence_offsets", np.array([0, 6, 5], dtype=np.int64)),
        ("head_ids", sent.head_ids[:, :2]),
    ):
        with pytest.raises(ParityError):
            Rollout.from_bytes(Rollout(**{**sent.__dict__, name: value}).to_bytes())


@pytest.mark.parametrize(("kept", "whole"), [(3, True), (4, False)])
def test_l4_a_head_that_is_the_whole_support(kept: int, whole: bool) -> None:
    """L4: a filter kept 3 tokens of a head of 3: fine. It kept 4: refused, naming the place."""
    sent = rollout([2, 3])
    heads = np.full((5, 3), np.log(1 / 3), dtype=np.float32)
    heads[4] = np.log(1 / kept)
    found = Rollout(**{**sent.__dict__, "head_logprobs": heads})
    if whole:
        found.check_support()
        broken = found.logprobs.copy()
        heads[2], broken[2] = np.nan, np.nan  # such a row is dropped for what it is
        Rollout(**{**found.__dict__, "logprobs": broken}).check_support()
        return
    with pytest.raises(ParityError, match=r"completion 1 at position 2 holds 0\.7500") as raised:
        found.check_support()
    assert "top_k no larger than the head" in raised.value.fix


def test_one_stop_string_is_a_list_of_one() -> None:
    assert Sampling(stop="END").stop == ["END"]
    assert Sampling(stop=["a", "b"]).truncated is False
    assert Sampling(top_k=5).truncated and Sampling(min_p=0.1).truncated


def test_part_of_a_rollout() -> None:
    """Sequences 1 and 2 of three, with their own parameters; joined again it is the whole."""
    several = [Sampling(max_tokens=n) for n in (2, 1, 3)]
    whole = Rollout(**{**rollout([2, 1, 3]).__dict__, "sampling": several})
    first, rest = whole.part(0, 1), whole.part(1, 3)
    rest.check()
    assert np.diff(rest.sequence_offsets).tolist() == [1, 3]
    assert rest.token_ids.tolist() == whole.token_ids[2:].tolist()
    assert rest.sampling == several[1:]
    joined = Rollout.join([first, rest], several)
    for name in Rollout.DTYPES:
        assert np.array_equal(getattr(joined, name), getattr(whole, name))
