"""How rollouts of a real server travel.

Properties:
- streamed, compressed and float16 answers hold what the plain one holds, and a stream gives each
  sequence when it has ended;
- a lost answer is had again without sampling again, whole or streamed; what cannot be had again
  is refused, never sampled anew in silence;
- a caller that is gone does not keep the engine busy, and one that does not read holds nobody up;
- stop strings, EOS, stop ids and parameters per prompt end sequences as the stock endpoint does;
- every value is the stock endpoint's, bit for bit;
- text and multimodal prompts are refused with the reason;
- a rollout makes no object per logprob (P1).
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.client import Client, sequences, top_logprobs
from tests.models import VOCAB, Kind, weights_of
from tests.server.proxies import Proxy
from tests.waiting import eventually
from vllm_parity_plugin import client as client_module
from vllm_parity_plugin.client import ConnectionLost, ParityClient
from vllm_parity_plugin.errors import NotRepeatable, ParityError
from vllm_parity_plugin.rollout_wire import (
    BODY_TYPE,
    KEY_HEADER,
    RETRY_HEADER,
    SERVER_HEADER,
    STREAM_TYPE,
    Rollout,
    RolloutRequest,
    Sampling,
    read_frames,
)
from vllm_parity_plugin.serving import Server
from vllm_parity_plugin.wire import PREFIX

ROOT = Path(__file__).parents[2]
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [100, 101, 102, 103, 104]]
K = 64


@pytest.fixture
def client(untied_server: Server) -> Client:
    return Client(untied_server)


@pytest.fixture
def parity(untied_server: Server) -> Iterator[ParityClient]:
    connected = ParityClient(untied_server.url)
    connected.status()
    yield connected
    connected.close()


def request(head_size: int = K, **sampling: Any) -> RolloutRequest:
    """Three prompts with seeds; each ends at another length unless one is given."""
    values = {"temperature": 0.7, "ignore_eos": True} | sampling
    each = [Sampling(**{"max_tokens": tokens} | values) for tokens in (40, 8, 24)]
    return RolloutRequest(prompts=PROMPTS, head_size=head_size, seeds=[3, 4, 5], sampling=each)


def same(one: Rollout, two: Rollout) -> None:
    for name in Rollout.DTYPES:
        assert np.array_equal(getattr(one, name), getattr(two, name)), name
    assert (one.finish_reasons, one.stop_reasons) == (two.finish_reasons, two.stop_reasons)


def sampled_tokens(client: Client) -> float:
    """Tokens that the engine has sampled so far."""
    return client.metric("vllm:generation_tokens_total")


def by_key(client: Client, key: str, body: Any, **headers: str) -> httpx.Response:
    """A request with an idempotency key: however often it is sent, it is sampled once.

    Two samplings of the same seeds may differ in the last bit: a CPU's matrix products depend on
    how many requests share a step.
    """
    headers = {"accept-encoding": "identity", KEY_HEADER: key} | headers
    return client.http.post(f"{PREFIX}/rollouts", json=body, headers=headers)


@pytest.mark.parametrize("encoding", ["identity", "zstd"])
def test_a_stream_holds_what_the_body_holds(
    client: Client, parity: ParityClient, encoding: str
) -> None:
    """Sequences come in the order in which they end: 8, 24 and 40 tokens."""
    body = request().model_dump(exclude_none=True)
    key = f"streamed-{encoding}"
    streamed = by_key(client, key, body | {"stream": True}, **{"accept-encoding": encoding})
    whole = Rollout.from_bytes(by_key(client, key, body).content)
    assert np.diff(whole.sequence_offsets).tolist() == [40, 8, 24]
    assert isinstance(whole.sampling, list) and whole.sampling[1].max_tokens == 8
    parts = dict(map(Rollout.from_frame, read_frames(iter([streamed.content]))))
    assert list(parts) == [1, 2, 0]
    same(whole, Rollout.join([parts[i] for i in range(3)], request().sampling))
    again = dict(parity.rollout_stream(request(), zstd=encoding == "zstd"))
    assert list(again) == [1, 2, 0]
    assert all(np.array_equal(again[i].token_ids, parts[i].token_ids) for i in range(3))


def test_forms_that_a_caller_can_ask_for(client: Client) -> None:
    """Content negotiation: types, float16 heads, zstd and its refusal; sampled logprobs stay."""
    body = request().model_dump(exclude_none=True)

    def ask(accept: str, encoding: str = "identity", **more: Any) -> httpx.Response:
        headers = {"accept": accept, "accept-encoding": encoding}
        return by_key(client, "forms", body | more, **headers)

    plain, packed = ask("*/*"), ask(BODY_TYPE, "gzip, zstd;q=0.5")
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "zstd"
    same(Rollout.from_bytes(packed.content), Rollout.from_bytes(plain.content))
    assert int(packed.headers["content-length"]) < len(plain.content)
    assert "content-encoding" not in ask(BODY_TYPE, "zstd;q=0").headers
    half = ask(f"text/html, {BODY_TYPE}; head=float16")
    assert half.headers["content-type"] == f"{BODY_TYPE}; head=float16"
    one, two = Rollout.from_bytes(plain.content), Rollout.from_bytes(half.content)
    assert (one.head_logprobs.dtype, two.head_logprobs.dtype) == ("float32", "float16")
    assert np.allclose(one.head_logprobs, two.head_logprobs, rtol=2**-11, atol=0)
    assert np.array_equal(one.logprobs, two.logprobs)
    assert len(half.content) < 0.8 * len(plain.content)
    streamed = ask("*/*", stream=True)
    assert streamed.headers["content-type"].startswith(STREAM_TYPE)
    for accept in ("text/html", f"{BODY_TYPE}; head=int8", STREAM_TYPE):
        refused = ask(accept)
        assert refused.status_code == 406 and BODY_TYPE in refused.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_lost_answer_is_had_again(
    parity: ParityClient, client: Client, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks in the middle of the answer, twice: one sampling, one rollout."""
    expected = parity.rollout(request())
    begun = sampled_tokens(client)
    port = httpx.URL(client.server.url).port
    monkeypatch.setattr(client_module, "PAUSES", (0.1, 0.1))
    # With seeds a second sampling would give the same tokens: the engine's count tells.
    with Proxy(port, answers=[3000, 9000]) as proxy:
        behind = ParityClient(proxy.url)
        behind._server_id = parity._server_id  # as after an earlier rollout
        if stream:
            parts = dict(behind.rollout_stream(request()))
            found = Rollout.join([parts[i] for i in range(3)], request().sampling)
        else:
            found = behind.rollout(request())
        assert proxy.broken == 2
    assert np.array_equal(found.token_ids, expected.token_ids)
    assert np.allclose(found.head_logprobs, expected.head_logprobs, atol=1e-3)
    assert sampled_tokens(client) - begun == len(expected.token_ids)


def test_what_cannot_be_had_again_is_refused(parity: ParityClient, client: Client) -> None:
    """Another server, another request under the key; nothing is sampled."""
    body = request().model_dump(exclude_none=True)
    server_id = parity.status().server_id

    def ask(key: str, retry: str | None = None, **more: Any) -> httpx.Response:
        return by_key(client, key, body | more, **({RETRY_HEADER: retry} if retry else {}))

    first = ask("a-key")
    assert first.headers[SERVER_HEADER] == server_id
    begun = sampled_tokens(client)
    for again in (ask("a-key"), ask("a-key", retry=server_id)):
        same(Rollout.from_bytes(again.content), Rollout.from_bytes(first.content))
    for refused in (ask("a-key", head_size=3), ask("another", retry="an-older-server")):
        assert refused.status_code == 409
        assert refused.json()["error"]["type"] == "NotRepeatable"
    assert sampled_tokens(client) == begun
    # A request that never arrived was not sampled, so it may be now.
    assert ask("a-third", retry=server_id).status_code == 200
    with (
        Proxy(httpx.URL(client.server.url).port, cuts=[10]) as proxy,
        pytest.raises(NotRepeatable, match="restarted"),
    ):
        behind = ParityClient(proxy.url)
        behind._server_id = "an-older-server"
        behind.rollout(request())


def test_a_first_request_that_breaks_is_not_repeated(client: Client) -> None:
    """Without an answer before, nobody can tell whether it is still the same server."""
    with (
        Proxy(httpx.URL(client.server.url).port, answers=[10]) as proxy,
        pytest.raises(ConnectionLost, match="broke"),
    ):
        ParityClient(proxy.url).rollout(request())
    assert proxy.broken == 1


def long_request(**more: Any) -> dict[str, Any]:
    sampling = {"max_tokens": 1900, "ignore_eos": True}
    return {"prompts": PROMPTS, "head_size": 4, "sampling": sampling} | more


@contextmanager
def leaving(client: Client, body: dict[str, Any], headers: dict[str, str]) -> Iterator[None]:
    """A caller that asks for a rollout, and hangs up at the end of the block."""
    connection = HTTPConnection(client.server.url.removeprefix("http://"))
    headers = {"content-type": "application/json"} | headers
    connection.request("POST", f"{PREFIX}/rollouts", json.dumps(body), headers)
    try:
        yield
    finally:
        connection.close()


@pytest.mark.parametrize("key", [None, "a-key-of-one-who-left"])
@pytest.mark.parametrize("stream", [False, True])
def test_one_who_left_does_not_keep_the_engine_busy(
    client: Client, fault: dict[str, str], key: str | None, stream: bool
) -> None:
    """Cancelled at once, or after a while when there is a key to come back with.

    Steps are slow: however busy the machine is, the answer is not there before the caller goes.
    """
    headers = {KEY_HEADER: f"{key}-{stream}"} if key else {}
    running = lambda: client.metric("vllm:num_requests_running")  # noqa: E731
    brake = Path(fault["PARITY_TEST_BRAKE"])
    brake.touch()
    try:
        with leaving(client, long_request(stream=stream), headers):
            eventually(lambda: running() == 3)
        eventually(lambda: running() == 0)  # to sample all of it would take three minutes
    finally:
        brake.unlink()
    if key:
        again = client.http.post(
            f"{PREFIX}/rollouts", json=long_request(stream=stream), headers=headers
        )
        assert again.status_code == 409 and "no longer kept" in again.text


def test_one_who_does_not_read_holds_nobody_up(parity: ParityClient, client: Client) -> None:
    """Backpressure: a stream of several MB that nobody reads, while others are served."""
    big = RolloutRequest(
        prompts=PROMPTS * 4,
        head_size=128,
        sampling=Sampling(max_tokens=400, ignore_eos=True),
        stream=True,
    )
    with client.http.stream(
        "POST", f"{PREFIX}/rollouts", json=big.model_dump(exclude_none=True)
    ) as response:
        running = lambda: client.metric("vllm:num_requests_running")  # noqa: E731
        eventually(lambda: running() == 0)  # all is sampled, and most of it is not sent
        assert len(parity.rollout(request()).token_ids) == 72
        size = sum(map(len, response.iter_bytes()))
    assert size > 12 * 400 * 128 * 8


def test_l11_stop_strings_end_as_in_the_stock_endpoint(client: Client) -> None:
    """L11, equality: a stop string, a stop id, EOS and a length; ids, reasons and logprobs."""
    values = {"temperature": 0.7, "max_tokens": 40}
    free = client.rollout([PROMPTS[0]], seeds=[3], ignore_eos=True, **values)
    ids = free.token_ids.tolist()
    text = client.http.post(
        "/detokenize", json={"model": model_of(client), "tokens": ids[10:12]}
    ).json()["prompt"]
    cases = [{"stop": [text]}, {"stop_token_ids": [ids[7]]}, {}, {"ignore_eos": True}]
    for case in cases:
        found = client.rollout([PROMPTS[0]], seeds=[3], head_size=5, **values, **case)
        (stock,) = client.completions(PROMPTS[0], seed=3, logprobs=5, **values, **case)
        assert found.token_ids.tolist() == stock["token_ids"], case
        assert found.finish_reasons == [stock["finish_reason"]]
        assert found.stop_reasons == [stock["stop_reason"]]
        sampled = np.array(stock["logprobs"]["token_logprobs"], dtype=np.float32)
        assert np.array_equal(sampled, found.logprobs)
        assert found.head_ids.shape == (len(found.token_ids), 5)
    stopped = client.rollout([PROMPTS[0]], seeds=[3], stop=text, **values)
    assert stopped.stop_reasons == [text] and 7 < len(stopped.token_ids) < 40


def model_of(client: Client) -> str:
    return str(client.http.get("/v1/models").json()["data"][0]["id"])


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
        {"temperature": 0.7, "repetition_penalty": 1.2, "logit_bias": {"7": 2.0}},
    ],
)
def test_every_value_is_the_stock_endpoints(client: Client, sampling: dict[str, Any]) -> None:
    """Bit for bit in float32, for a head of 64, whichever parameters shape it."""
    values = {"max_tokens": 24, "ignore_eos": True, **sampling}
    found = client.rollout([PROMPTS[0]], seeds=[3], head_size=K, **values)
    (stock,) = client.completions(PROMPTS[0], seed=3, logprobs=K, **values)
    assert found.token_ids.tolist() == stock["token_ids"]
    sampled = np.array(stock["logprobs"]["token_logprobs"], dtype=np.float32)
    assert np.array_equal(sampled, found.logprobs)
    for position, head in enumerate(top_logprobs(stock)):
        kept = found.head_ids[position] >= 0
        ids = found.head_ids[position][kept].tolist()
        values_of = np.array([head[token] for token in ids], dtype=np.float32)
        assert np.array_equal(values_of, found.head_logprobs[position][kept])


def ordered_ties(found: Rollout) -> np.ndarray:
    """Of the entries that are as likely as the one before, which have the higher id."""
    tied = found.head_logprobs[:, 1:] == found.head_logprobs[:, :-1]
    assert tied.mean() > 0.4
    return (found.head_ids[:, 1:] > found.head_ids[:, :-1])[tied]


TIES = {"seeds": [3], "temperature": 1.0, "max_tokens": 24, "ignore_eos": True}


def test_a_small_head_begins_a_large_one(
    client: Client, tiny_model: Callable[[Kind], Path]
) -> None:
    """Ties: every row of the lm_head is there twice, so that each logit is; K = 33 cuts a pair.
    Alone or in steps with a request of K = 64, the lowest ids come first."""
    weights = weights_of(tiny_model("gc"))
    weights["lm_head.weight"][VOCAB // 2 :] = weights["lm_head.weight"][: VOCAB // 2]
    assert client.update(weights).status_code == 200
    ask = partial(client.rollout, [PROMPTS[0]], **TIES)
    with ThreadPoolExecutor() as pool:
        beside = list(pool.map(lambda size: ask(head_size=size), [33, K, 33]))
    for found in (ask(head_size=33), *beside):
        assert ordered_ties(found).all()
        # Of the pair that a head of 33 cuts, the lower id is in it.
        assert (found.head_ids[:, 32] < VOCAB // 2).all()


def test_control_stock_ties_have_no_order(
    observe_server: Server, tiny_model: Callable[[Kind], Path]
) -> None:
    """The same without the patch: torch's top-k promises nothing about ties."""
    client, old = Client(observe_server), weights_of(tiny_model("tied-gc"))
    new = {name: tensor.clone() for name, tensor in old.items()}
    embedding = new["model.embed_tokens.weight"]
    embedding[VOCAB // 2 :] = embedding[: VOCAB // 2]
    try:
        assert client.update(new).status_code == 200
        ordered = ordered_ties(client.rollout([PROMPTS[0]], head_size=33, **TIES))
    finally:
        assert client.update(old).status_code == 200
    assert 0.1 < ordered.mean() < 0.9


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompts": ["a text"]}, "tokenize with the served model's tokenizer"),
        ({"prompts": [{"prompt_token_ids": [5], "multi_modal_data": {}}]}, "multi_modal_data"),
        ({"images": [["x"]]}, "carry token ids only"),
        ({"sampling": [{}]}, "1 sampling parameters came with 3 prompts"),
        ({"sampling": {"stop": [""]}}, "at least 1 character"),
    ],
)
def test_prompts_that_are_not_token_ids(client: Client, change: Any, reason: str) -> None:
    """Refused with the reason, before anything is sampled."""
    answer = client.http.post(f"{PREFIX}/rollouts", json={"prompts": PROMPTS} | change)
    assert 400 <= answer.status_code < 500
    assert reason in answer.text


def test_p1_no_object_per_logprob(parity: ParityClient, client: Client) -> None:
    """P1: 16 sequences of 64 tokens with K = 64; control: the stock answer is 65,536 numbers."""
    sampling = Sampling(max_tokens=64, ignore_eos=True)
    asked = RolloutRequest(prompts=[[5, 6]] * 16, head_size=K, sampling=sampling)
    parity.rollout(asked)
    gc.collect()
    before = len(gc.get_objects())
    held = parity.rollout(asked)
    gc.collect()
    assert len(gc.get_objects()) - before < 200
    assert held.head_ids.shape == (16 * 64, K)
    stock = client.completions([5, 6], n=16, logprobs=K, max_tokens=64, ignore_eos=True)
    entries = sum(len(head) for choice in stock for head in choice["logprobs"]["top_logprobs"])
    assert entries >= 16 * 64 * K


def test_requests_at_once_come_back_in_their_order(parity: ParityClient) -> None:
    """One request per prompt: the same completions as in one; the first failure is raised."""
    together = parity.rollout(request())
    each = [
        RolloutRequest(prompts=[prompt], head_size=K, seeds=[seed], sampling=sampling)
        for prompt, seed, sampling in zip(PROMPTS, [3, 4, 5], request().sampling, strict=True)
    ]
    parts = Rollout.join(parity.rollouts(each), request().sampling)
    assert np.array_equal(parts.token_ids, together.token_ids)
    assert np.array_equal(parts.sequence_offsets, together.sequence_offsets)
    wrong = RolloutRequest(prompts=[[10**6]])
    with pytest.raises(ParityError, match="Prompt 0 has 1 token ids"):
        parity.rollouts([*each, wrong])


def test_sequences_are_unlike_each_other(parity: ParityClient) -> None:
    """The prompts and seeds give different completions: equality above means something."""
    assert len({tuple(ids) for ids in sequences(parity.rollout(request()))}) == 3


def test_the_client_of_the_documentation(client: Client) -> None:
    """The 20 lines of docs/wire.md, as they stand there, need httpx and safetensors only."""
    page = (ROOT / "docs" / "wire.md").read_text()
    code = page.split("<!-- client: begin -->")[1].split("```python\n")[1].split("```")[0]
    assert 15 <= len([line for line in code.splitlines() if line.strip()]) <= 20
    found: dict[str, Any] = {}
    exec(code, found)
    arrays, reasons = found["rollout"](client.server.url, PROMPTS, 4, max_tokens=6, ignore_eos=True)
    assert set(arrays) == set(Rollout.DTYPES)
    assert arrays["head_logprobs"].shape == (18, 4)
    assert reasons == ["length"] * 3
    with pytest.raises(RuntimeError, match="Prompt 0 has 0 token ids"):
        found["rollout"](client.server.url, [[]], 4)
