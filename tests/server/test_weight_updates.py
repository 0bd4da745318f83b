"""Weight updates on real servers: all of a policy or nothing of it.

Properties:
- an update gives exactly that policy's logprobs (a fresh Transformers model is the reference), for
  untied and tied heads, fp32 and bf16, repeatedly, and when only the head changes (H1, W8, W11);
- requests in flight go on: no abort, no preemption, earlier tokens untouched (W3, W4);
- whatever does not fit is refused before anything is touched (W13, X1);
- a load that fails half-way goes back to the old policy, or where no copy of it is kept leaves
  generation paused until a good update (W7, W8);
- one update at a time, in order, idempotent (W18);
- no prompt uses KV from before an update, also where vLLM's prefix cache is on (W1).
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.client import Client, sequences
from tests.models import Kind, noisy, weights_of
from tests.offline import IN_PROCESS, run_jobs
from tests.reference import reference
from tests.servers import API_KEY, TOKEN
from vllm_parity_plugin.rollout_wire import Rollout
from vllm_parity_plugin.serving import Server

Tensors = dict[str, torch.Tensor]
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [100, 101, 102, 103, 104]]
SAME, FACTOR = 0.02, 5.0
LONG_PROMPT = [(7 * i) % 500 + 3 for i in range(200)]
FLIGHT_TOKENS, FIRST_TOKENS = 300, 10
BEYOND = 10**9
"""A version that no test reaches: servers are shared, and count up."""
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


class Subject:
    """A server, its model and the weights it was started with."""

    def __init__(self, server: Server, path: Path, **credentials: str) -> None:
        self.server, self.path = server, path
        self.client = Client(server, **credentials)
        self.original = weights_of(path)
        if "lm_head.weight" not in self.client.weights_info().tensors:
            self.original.pop("lm_head.weight", None)

    def mismatch(self, weights: Tensors, head: Any = "float32") -> float:
        """Mean |server - reference holding ``weights``| of freshly sampled tokens."""
        found = self.client.rollout(PROMPTS, seeds=[0, 1, 2], max_tokens=16, ignore_eos=True)
        expected = reference(self.path, PROMPTS, sequences(found), weights=weights, head=head)
        return float(np.abs(found.logprobs - expected).mean())

    def serves(self, new: Tensors, old: Tensors, head: Any = "float32") -> None:
        """Assert that the server holds ``new`` and is far from ``old``."""
        right, wrong = self.mismatch(new, head), self.mismatch(old, head)
        assert right <= SAME
        assert wrong > FACTOR * right

    def fingerprint(self) -> tuple[list[int], bytes]:
        """Greedy ids and the bits of their logprobs, one request at a time: batches round."""
        found = [self.client.rollout([prompt], head_size=8, **GREEDY) for prompt in PROMPTS]
        bits = b"".join(r.logprobs.tobytes() + r.head_logprobs.tobytes() for r in found)
        return [token for r in found for token in r.token_ids.tolist()], bits

    def restore(self) -> None:
        answer = self.client.update(self.original, version=None)
        assert answer.status_code == 200, answer.text
        assert self.client.status().state == "serving"


@pytest.fixture
def untied(untied_server: Server, tiny_model: Callable[[Kind], Path]) -> Iterator[Subject]:
    subject = Subject(untied_server, tiny_model("gc"))
    yield subject
    subject.restore()


@pytest.fixture(params=["tied_server", "observe_server"])
def tied(
    request: pytest.FixtureRequest, tiny_model: Callable[[Kind], Path]
) -> Iterator[tuple[Subject, str]]:
    """A tied model with an fp32 head, and with vLLM's own bf16 head."""
    server = request.getfixturevalue(request.param)
    fp32 = request.param == "tied_server"
    credentials = {"token": TOKEN, "api_key": API_KEY} if fp32 else {}
    subject = Subject(server, tiny_model("tied" if fp32 else "tied-gc"), **credentials)
    yield subject, "float32" if fp32 else "bfloat16"
    subject.restore()


def accepted(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    assert answer.json()["applied"] is True
    return answer.json()


def test_w8_identity_update_changes_no_bit(untied: Subject) -> None:
    """W8a: the same weights again give bitwise equal ids and logprobs."""
    before = untied.fingerprint()
    result = accepted(untied.client.update(untied.original))
    assert result["tensors"] == len(untied.original)
    assert untied.fingerprint() == before


def test_w8_update_equals_the_new_model(untied: Subject) -> None:
    """W8b: every matrix changed by 0.5 sd: the new model's logprobs, not the old one's."""
    new = noisy(untied.original, seed=1)
    accepted(untied.client.update(new))
    untied.serves(new, untied.original)


def test_h1_alternating_head_updates(untied: Subject) -> None:
    """H1: only the head changes, three times: no cached copy of it survives."""
    old = untied.original
    for seed in (2, 3, 4):
        new = noisy(untied.original, seed=seed, sd=1.0, only="lm_head")
        accepted(untied.client.update(new))
        untied.serves(new, old)
        old = new


def test_w11_tied_head_follows_the_embedding(tied: tuple[Subject, str]) -> None:
    """W11, H4: a tied head is sent as the embedding, and its kernel copy is rebuilt each time."""
    subject, head = tied
    old = subject.original
    for seed in (5, 6, 7):
        new = noisy(subject.original, seed=seed, only="embed_tokens")
        accepted(subject.client.update(new))
        subject.serves(new, old, head)
        old = new


def test_w13_fp32_tensors_are_rounded_once(untied: Subject) -> None:
    """W13: float32 tensors give the bits of the same tensors rounded to bf16 by the trainer."""
    new = noisy(untied.original, seed=8)
    fp32 = {name: tensor.float() + 1e-4 * tensor.float().abs() for name, tensor in new.items()}
    accepted(untied.client.update(fp32))
    found = untied.fingerprint()
    accepted(untied.client.update({name: t.bfloat16() for name, t in fp32.items()}))
    assert untied.fingerprint() == found


class Flight:
    """A long request in its own thread; made when it has produced its first tokens.

    Args:
        brake: file that keeps every step long until the flight may land.
    """

    def __init__(self, subject: Subject, brake: Path | None = None) -> None:
        produced = subject.client.metric("vllm:generation_tokens_total")
        self._brake = brake
        if brake is not None:
            brake.touch()
        self._pool = ThreadPoolExecutor(1)
        self._result = self._pool.submit(
            Client(subject.server).rollout,
            [LONG_PROMPT[:140]],
            seeds=[0],
            max_tokens=FLIGHT_TOKENS,
            ignore_eos=True,
        )
        while (
            brake is not None
            and subject.client.metric("vllm:generation_tokens_total") < produced + FIRST_TOKENS
        ):
            assert self.flying
            time.sleep(0.05)

    @property
    def flying(self) -> bool:
        return not self._result.done()

    def land(self) -> Rollout:
        if self._brake is not None:
            self._brake.unlink()
        with self._pool:
            return self._result.result(timeout=100)


@pytest.fixture
def brake(fault: dict[str, str]) -> Iterator[Path]:
    path = Path(fault["PARITY_TEST_BRAKE"])
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def undisturbed(untied_server: Server, tiny_model: Callable[[Kind], Path]) -> Rollout:
    """The flight that nothing happens to."""
    return Flight(Subject(untied_server, tiny_model("gc"))).land()


def test_w3_pause_and_resume_change_no_bit(
    untied: Subject, undisturbed: Rollout, brake: Path
) -> None:
    """W3, W18: a request frozen (twice) and thawed by hand has the bits of an undisturbed one."""
    preempted = untied.client.metric("vllm:num_preemptions_total")
    flight = Flight(untied, brake)
    for _ in range(2):
        assert untied.client.http.post("/v1/parity/pause").status_code == 204
    assert untied.client.status().state == "paused"
    assert flight.flying
    for _ in range(2):
        assert untied.client.http.post("/v1/parity/resume").status_code == 204
    found = flight.land()
    assert untied.client.metric("vllm:num_preemptions_total") == preempted
    assert np.array_equal(found.token_ids, undisturbed.token_ids)
    assert np.array_equal(found.logprobs, undisturbed.logprobs)


@pytest.mark.parametrize(("kv", "preemptions"), [("keep", 0), ("recompute", 1)])
def test_w4_request_in_flight_over_an_update(
    untied: Subject, undisturbed: Rollout, brake: Path, kv: str, preemptions: int
) -> None:
    """W3, W4: it finishes with all its tokens; those it had stay, the rest are the new policy's."""
    preempted = untied.client.metric("vllm:num_preemptions_total")
    old = untied.client.status().policy_version
    new = noisy(untied.original, seed=9)
    flight = Flight(untied, brake)
    version = accepted(untied.client.update(new, kv=kv))["policy_version"]
    assert flight.flying
    found = flight.land()
    assert (len(found.token_ids), found.finish_reasons) == (FLIGHT_TOKENS, ["length"])
    assert untied.client.metric("vllm:num_preemptions_total") == preempted + preemptions
    kept = int((found.policy_versions == old).sum())
    assert found.policy_versions.tolist() == [old] * kept + [version] * (FLIGHT_TOKENS - kept)
    same = found.logprobs == undisturbed.logprobs
    assert kept >= FIRST_TOKENS and same[:kept].all()
    assert not same[kept] and not same[-FIRST_TOKENS:].any()
    untied.serves(new, untied.original)


def truncated(path: Path, tensors: Tensors) -> None:
    save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:-100])


class TouchOnLoad:
    """A pickle that leaves a trace when it is read."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def without(tensors: Tensors, name: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if key != name}


Q = "model.layers.1.self_attn.q_proj.weight"
# What is wrong with the file -> (how to write it, a part of the answer)
BAD_FILES: dict[str, tuple[Callable[[Path, Tensors], Any], str]] = {
    "missing tensor": (lambda path, t: save_file(without(t, Q), path), Q),
    "unknown tensor": (lambda path, t: save_file(t | {"module.x": t[Q].clone()}, path), "module.x"),
    "wrong shape": (lambda path, t: save_file(t | {Q: t[Q].T.contiguous()}, path), "[64, 128]"),
    "empty tensor": (lambda path, t: save_file(t | {Q: t[Q][:0]}, path), Q),
    "wrong dtype": (lambda path, t: save_file(t | {Q: t[Q].half()}, path), "F16"),
    "non-finite": (lambda path, t: save_file(t | {Q: t[Q] * torch.nan}, path), Q),
    "truncated file": (truncated, "not a complete safetensors file"),
    "garbage": (lambda path, t: path.write_bytes(b"\xff" * 4096), "not a complete safetensors"),
    "empty file": (lambda path, t: path.write_bytes(b""), "not a complete safetensors"),
    "pickle": (
        lambda path, t: path.write_bytes(pickle.dumps(TouchOnLoad(path.with_suffix(".trace")))),
        "not a complete safetensors",
    ),
    "a directory": (lambda path, t: path.mkdir(), "not a regular file"),
    "a link": (lambda path, t: path.symlink_to(save_elsewhere(path, t)), "a link"),
}


def save_elsewhere(path: Path, tensors: Tensors) -> Path:
    target = path.parent.parent / f"{path.name}.elsewhere"
    save_file(tensors, target)
    return target


@pytest.fixture(scope="module")
def untouched(
    untied_server: Server, tiny_model: Callable[[Kind], Path]
) -> Iterator[tuple[Subject, tuple[list[int], bytes]]]:
    """A server that refusals must leave as it is; compared once, after all of them."""
    subject = Subject(untied_server, tiny_model("gc"))
    accepted(subject.client.update(subject.original))
    yield subject, subject.fingerprint()


def refused(subject: Subject, before: Any, answer: Any, part: str, code: int = 422) -> None:
    """A 4xx that names the matter; the served policy and the state are what they were."""
    assert answer.status_code == code, answer.text
    assert part in answer.text.replace('\\"', '"')
    assert subject.client.status().state == "serving"
    assert subject.fingerprint() == before


@pytest.mark.parametrize("what", BAD_FILES)
def test_refusals_leave_the_policy_untouched(
    untouched: tuple[Subject, Any], tmp_path: Path, what: str
) -> None:
    """W13, X1: a file that does not fit is refused with the reason, before anything is touched."""
    subject, before = untouched
    write, part = BAD_FILES[what]
    version = subject.client.status().policy_version
    path = Path(subject.client.weights_info().directory) / f"{what.replace(' ', '-')}.bin"
    write(path, noisy(subject.original, seed=10))
    refused(subject, before, subject.client.post_weights(version=version + 1, file=path.name), part)
    assert subject.client.status().policy_version == version
    assert not path.with_suffix(".trace").exists()


@pytest.mark.parametrize(
    "name", ["../update.safetensors", "sub/update.safetensors", "..", ".", "", ".vllm-parity"]
)
def test_x1_names_that_leave_the_directory(untouched: tuple[Subject, Any], name: str) -> None:
    """X1: only a bare file name is accepted."""
    subject, before = untouched
    save_elsewhere(
        Path(subject.client.weights_info().directory) / "update.safetensors", subject.original
    )
    answer = subject.client.post_weights(version=BEYOND, file=name)
    refused(subject, before, answer, "is not a file name in the weights directory")


def test_absolute_and_missing_files(untouched: tuple[Subject, Any]) -> None:
    """X1: an absolute path is refused although the file fits; a missing file is named."""
    subject, before = untouched
    path = subject.client.stage(subject.original)
    refused(
        subject,
        before,
        subject.client.post_weights(version=BEYOND, file=str(path)),
        "is not a file name",
    )
    path.unlink()
    refused(
        subject,
        before,
        subject.client.post_weights(version=BEYOND, file=path.name),
        f"There is no file '{path.name}'",
    )


def test_versions_only_count_up(untouched: tuple[Subject, Any]) -> None:
    """W18: an older version and version 0 are refused; the served one is not applied again."""
    subject, before = untouched
    served = subject.client.status().policy_version
    assert served >= 1
    new = noisy(subject.original, seed=11)
    accepted(subject.client.update(subject.original, version=served + 2))
    older = subject.client.update(new, version=served + 1)
    refused(subject, before, older, "is older than", code=409)
    path = subject.client.stage(new)
    zero = subject.client.post_weights(version=0, file=path.name)
    refused(subject, before, zero, "body.version", code=400)
    repeated = subject.client.post_weights(version=served + 2, file=path.name)
    assert repeated.status_code == 200, repeated.text
    assert repeated.json()["applied"] is False
    assert subject.fingerprint() == before


def test_w11_a_tied_head_must_not_be_sent(tied: tuple[Subject, str]) -> None:
    """W11: a second tensor for a tied head is refused, with the reason."""
    subject, _ = tied
    before = subject.fingerprint()
    extra = {"lm_head.weight": subject.original["model.embed_tokens.weight"].clone()}
    refused(
        subject,
        before,
        subject.client.update(subject.original | extra),
        "a tied lm_head is not sent",
    )


def test_w11_a_checkpoint_with_a_copy_of_its_tied_head(
    tiny_model: Callable[[Kind], Path], tmp_path: Path
) -> None:
    """W11: Qwen3-0.6B's checkpoint: config tied, head stored all the same. vLLM calls it untied,
    loads both, finds them equal and ties them. A trainer has the embedding only: that is what is
    expected, and the head follows it, also when an update lies on top of the checkpoint."""
    path = tiny_model("tied-copy")
    old = weights_of(path)
    embedding = "model.embed_tokens.weight"
    new = {n: t for n, t in noisy(old, seed=15, only="embed_tokens").items() if "lm_head" not in n}
    save_file(new, tmp_path / "full.safetensors")
    save_file({embedding: new[embedding]}, tmp_path / "changed.safetensors")
    sampling = {"max_tokens": 16, "seed": 0, "ignore_eos": True}
    generate = {"op": "generate", "prompts": PROMPTS, "sampling": sampling}

    def job(kind: str) -> dict[str, Any]:
        file = str(tmp_path / f"{kind}.safetensors")
        apply = {"op": "apply", "path": file, "version": 1, "kind": kind}
        steps = [{"op": "manifest"}, {"op": "attest"}, apply, generate]
        return {"kind": "llm", "args": {"model": str(path)}, "steps": steps, "env": IN_PROCESS}

    for result in run_jobs([job("full"), job("changed")], tmp_path, at_once=2):
        assert result["error"] is None, result["error"]
        expected, attested, _, found = result["steps"]
        assert expected.keys() == new.keys()
        assert attested[0]["tied_embeddings"] is True
        ids = [choice["token_ids"] for choice in found]
        logprobs = np.concatenate([choice["logprobs"] for choice in found])
        tied = new | {"lm_head.weight": new[embedding]}
        right = np.abs(logprobs - reference(path, PROMPTS, ids, weights=tied)).mean()
        wrong = np.abs(logprobs - reference(path, PROMPTS, ids, weights=old)).mean()
        assert right <= SAME < wrong / FACTOR


def test_w18_two_updates_at_once(untied: Subject) -> None:
    """W18: of two updates at the same time, each is applied or refused, and one policy results."""
    served = untied.client.status().policy_version
    policies = {served + i: noisy(untied.original, seed=20 + i) for i in (1, 2)}
    paths = {v: untied.client.stage(t, f"{v}.safetensors") for v, t in policies.items()}

    def send(version: int) -> int:
        client = Client(untied.server)
        return client.post_weights(version=version, file=paths[version].name).status_code

    with ThreadPoolExecutor() as pool:
        codes = dict(zip(policies, pool.map(send, policies), strict=True))
    assert set(codes.values()) <= {200, 409, 422}
    assert 200 in codes.values()
    status = untied.client.status()
    assert status.state == "serving"
    assert codes[status.policy_version] == 200
    assert status.policy_version == max(v for v, code in codes.items() if code == 200)
    assert untied.mismatch(policies[status.policy_version]) <= SAME


def test_w7_a_load_that_fails_half_way_goes_back(untied: Subject, fault: dict[str, str]) -> None:
    """W7, W8: the old policy is loaded again, bit for bit, a request in flight is not lost, and the
    same update succeeds afterwards."""
    old = noisy(untied.original, seed=30)
    accepted(untied.client.update(old))
    before, bits = untied.client.status(), untied.fingerprint()
    new = noisy(untied.original, seed=12)
    Path(fault["PARITY_TEST_FAULT"]).touch()
    flight = Flight(untied)
    answer = untied.client.update(new)
    assert answer.status_code == 500
    assert "injected fault" in answer.text and "are served" in answer.text
    status = untied.client.status()
    assert (status.state, status.policy_version) == ("serving", before.policy_version)
    assert untied.client.http.get("/health").status_code == 200
    assert len(flight.land().token_ids) == FLIGHT_TOKENS
    assert untied.fingerprint() == bits
    accepted(untied.client.update(new))
    untied.serves(new, old)


def test_w7_without_a_copy_it_stays_paused(
    tied_server: Server, tiny_model: Callable[[Kind], Path], tied_fault: dict[str, str]
) -> None:
    """W7, W8, rollback none: half a policy is never served, every route tells the truth, and the
    next full update heals; a request that waited is answered by the new policy."""
    subject = Subject(tied_server, tiny_model("tied"), token=TOKEN, api_key=API_KEY)
    client = subject.client
    before = client.status()
    new = noisy(subject.original, seed=12)
    Path(tied_fault["PARITY_TEST_FAULT"]).touch()
    answer = client.update(new)
    assert answer.status_code == 500
    assert "injected fault" in answer.text and "generation stays paused" in answer.text
    status = client.status()
    assert (status.state, status.policy_version) == ("unhealthy", before.policy_version)
    assert status.failure is not None and "injected fault" in status.failure
    for path in ("/health", "/ping"):
        health = client.http.get(path)
        assert health.status_code == 503
        assert "No complete policy" in health.text and "injected" not in health.text
    assert client.ask_rollout(PROMPTS).status_code == 503
    assert client.ask_completions(PROMPTS[0]).status_code == 503
    assert client.http.post("/v1/chat/completions", json={}).status_code == 503
    assert client.http.post("/tokenize", json={"prompt": "a"}).status_code == 200
    assert client.http.post("/v1/parity/resume").status_code == 409
    name = "model.layers.1.self_attn.q_proj.weight"
    assert client.update(without(new, name)).status_code == 422
    partial = {"kind": "changed", "base_version": before.policy_version}
    assert client.update({name: new[name]}, **partial).status_code == 409
    assert client.status().state == "unhealthy"
    accepted(client.update(new))
    assert client.http.get("/health").status_code == 200
    subject.serves(new, subject.original)
    subject.restore()


def test_w7_an_update_of_a_sleeping_engine(
    observe_server: Server, tiny_model: Callable[[Kind], Path]
) -> None:
    """W7: refused, because its weights are not in memory; the engine lives, and takes the update
    when it is awake. Being paused is not being asleep."""
    subject = Subject(observe_server, tiny_model("tied-gc"))
    client, new = subject.client, noisy(subject.original, seed=14)
    assert client.http.post("/sleep", params={"level": 1}).status_code == 200
    answer = client.update(new)
    assert answer.status_code == 409
    assert "The engine sleeps" in answer.text
    assert client.http.get("/health").status_code == 200
    assert client.http.post("/wake_up").status_code == 200
    assert client.http.post("/v1/parity/pause").status_code == 204
    accepted(client.update(new))
    assert client.status().state == "paused"  # by hand, so it stays so
    assert client.http.post("/v1/parity/resume").status_code == 204
    subject.serves(new, subject.original, "bfloat16")
    subject.restore()


def long_prompt_logprobs(subject: Subject) -> tuple[np.ndarray, list[list[int]], int]:
    """Logprobs and ids after the long prompt, and the prompt tokens that came from a cache."""
    hits = subject.client.metric("vllm:prefix_cache_hits_total")
    found = subject.client.rollout([LONG_PROMPT], seeds=[0], max_tokens=24, ignore_eos=True)
    cached = subject.client.metric("vllm:prefix_cache_hits_total") - hits
    return found.logprobs, sequences(found), int(cached)


@pytest.mark.parametrize("name", ["untied_server", "observe_server"])
def test_w1_no_prompt_uses_old_kv(
    request: pytest.FixtureRequest, tiny_model: Callable[[Kind], Path], name: str
) -> None:
    """W1: with prefix caching off, and where observe leaves it on, an update ends all old KV."""
    observing = name == "observe_server"
    server = request.getfixturevalue(name)
    subject = Subject(server, tiny_model("tied-gc" if observing else "gc"))
    head = "bfloat16" if observing else "float32"
    long_prompt_logprobs(subject)
    assert long_prompt_logprobs(subject)[2] == (128 if observing else 0)
    new = noisy(subject.original, seed=13)
    accepted(subject.client.update(new))
    found, ids, cached = long_prompt_logprobs(subject)
    expected = reference(subject.path, [LONG_PROMPT], ids, weights=new, head=head)
    subject.restore()
    assert cached == 0
    assert np.abs(found - expected).max() < 0.05


def test_w1_control_stock_prefix_cache_is_stale(
    tiny_model: Callable[[Kind], Path], tmp_path: Path
) -> None:
    """W1 control: new weights under vLLM's own prefix cache and no reset: old KV is served."""
    path = tiny_model("untied")
    new = noisy(weights_of(path), seed=13)
    save_file(new, tmp_path / "new.safetensors")
    sampling = {"max_tokens": 24, "seed": 0, "ignore_eos": True}
    generate = {"op": "generate", "prompts": [LONG_PROMPT], "sampling": sampling}
    apply = {"op": "apply", "path": str(tmp_path / "new.safetensors"), "version": 1}
    args = {"model": str(path), "additional_config": {"parity": {"mode": "observe"}}}
    steps = [generate, generate, apply, generate]
    job = {"kind": "llm", "args": args, "steps": steps, "env": IN_PROCESS}
    (result,) = run_jobs([job], tmp_path)
    assert result["error"] is None, result["error"]
    warm, stale = result["steps"][1][0], result["steps"][3][0]
    assert (warm["cached"], stale["cached"]) == (128, 128)
    expected = reference(path, [LONG_PROMPT], [stale["token_ids"]], weights=new)
    assert np.abs(np.array(stale["logprobs"]) - expected).max() > 0.3
