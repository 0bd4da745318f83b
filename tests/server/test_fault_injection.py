"""Whatever goes wrong with a weight update, the server serves one complete known policy.

Properties:
- after each of the seeded scenarios (``faultlab/scenarios.py``) greedy logprobs equal those of the
  old or of the new weights to 1e-6, as they were recorded on the same server beforehand; status,
  health and the staging directory agree with that (W7, W8, W16, W18, X1, X2);
- the outcome is one that the scenario allows: what does not fit is refused, what fails while it is
  loaded is taken back, and where it cannot be, every route says so until a full update heals it;
- a generation request in flight gets all of its tokens, each from a policy that was served then;
- a killed engine answers errors, not other logprobs, and nothing hangs;
- the laboratory notices a mixture of two policies, a wrong version and a lost token.

A failure names its scenarios; ``benchmarks/fault_injection.py --only NAME`` repeats one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import get_args

import pytest

from tests.models import noisy
from tests.server.faultlab.lab import Flight, Lab, Violation, laboratory
from tests.server.faultlab.policies import Draft, Policy, Tensors, tensors_of
from tests.server.faultlab.runner import run, violations
from tests.server.faultlab.scenarios import (
    GROUPS,
    Host,
    Outcome,
    Row,
    Scenario,
    last,
    scenarios,
)
from vllm_parity_plugin.rollout_wire import Rollout

A, B = ("full:1",), ("full:2",)
LAST = "worker killed"
CASES = [(host, group) for host in GROUPS for group in (*GROUPS[host], LAST)]


class Labs:
    """One server at a time, in the order of the tests."""

    def __init__(self) -> None:
        self._stack, self._host, self._lab = ExitStack(), "", None

    def get(self, host: Host) -> Lab:
        if self._host != host or self._lab is None:
            self.close()
            self._lab, self._host = self._stack.enter_context(laboratory(host)), host
        return self._lab

    def close(self) -> None:
        self._lab = None
        self._stack.close()


@pytest.fixture(scope="module")
def labs() -> Iterator[Labs]:
    """Where the servers are."""
    found = Labs()
    yield found
    found.close()


@pytest.fixture
def lab(request: pytest.FixtureRequest, labs: Labs) -> Lab:
    """The server of a test."""
    return labs.get(request.param)


def test_there_are_enough_scenarios() -> None:
    """More than 200, each with its own name, and each outcome is what some scenario allows."""
    known = [s for host in GROUPS for s in scenarios(host) + last(host)]
    assert len({scenario.name for scenario in known}) == len(known) >= 200
    allowed = {outcome for scenario in known for outcome in scenario.row.allowed}
    assert allowed == set(get_args(Outcome))


def half_and_half(original: Tensors) -> Tensors:
    """Layer 0 of one policy, everything else of another."""
    a, b = tensors_of(A, original), tensors_of(B, original)
    return b | {name: tensor for name, tensor in a.items() if "layers.0" in name}


def one_tensor(original: Tensors) -> Tensors:
    """One projection of another policy."""
    name = "model.layers.1.self_attn.k_proj.weight"
    return tensors_of(B, original) | {name: tensors_of(A, original)[name]}


MIXTURES: dict[str, Callable[[Tensors], Tensors]] = {
    "half and half": half_and_half,
    "one tensor": one_tensor,
    "unknown": lambda original: noisy(original, seed=999),
}


@pytest.mark.parametrize("lab", ["keep"], indirect=True)
@pytest.mark.parametrize("what", MIXTURES)
def test_a_mixture_is_noticed(lab: Lab, what: str) -> None:
    """The laboratory can fail: weights that are neither policy's are no known weight set."""
    commit(lab, MIXTURES[what](lab.original), claimed=B)
    with pytest.raises(Violation, match="no known weight set"):
        lab.examine()
    lab.recover()


@pytest.mark.parametrize("lab", ["keep"], indirect=True)
def test_a_wrong_version_is_noticed(lab: Lab) -> None:
    """A complete policy under another's version is a violation, and so is a lost token."""
    commit(lab, tensors_of(A, lab.original), claimed=B)
    with pytest.raises(Violation, match=r"the logprobs are those of \[\('full:1',\)\]"):
        lab.examine()
    lab.recover()
    with pytest.raises(Violation, match="a request lost tokens"):
        landed(lab, lab.fly(), tokens=-1).check(kept_kv=True, served=lab.served_version())
    landed(lab, lab.fly()).check(kept_kv=True, served=lab.served_version())


@pytest.mark.parametrize("lab", ["keep"], indirect=True)
def test_a_wrong_outcome_is_noticed(lab: Lab) -> None:
    """A good update where a refusal was due is a violation that names the scenario."""
    row = Row("good update", "send", "nothing", ("refused",))
    (result,) = run(lab, [Scenario("keep", row, "file", "full", seed=0)])
    assert result.problem is not None
    assert "keep/send-nothing/file/full/seed0: ended new" in result.problem


def commit(lab: Lab, tensors: Tensors, claimed: Policy) -> None:
    """Serve tensors under a version that the laboratory takes for another policy's."""
    draft = Draft.of(tensors, version=lab.next_version(), model=lab.model)
    assert lab.send_file(draft, claimed).status_code == 200


def landed(lab: Lab, rollout: Rollout, tokens: int | None = None) -> Flight:
    """A flight that ended with the first ``tokens`` tokens of a rollout."""
    flight = Flight.__new__(Flight)
    result: Future[Rollout] = Future()
    arrays = {name: getattr(rollout, name)[:tokens] for name in Rollout.TOKENS}
    result.set_result(replace(rollout, **arrays))
    flight.__dict__ |= {
        "_lab": lab,
        "old": lab.served_version(),
        "_pool": ThreadPoolExecutor(1),
        "_result": result,
    }
    return flight


def few(chosen: list[Scenario]) -> list[Scenario]:
    """One of each row, in another way each; ``benchmarks/fault_injection.py`` runs them all."""
    rows: dict[Row, list[Scenario]] = {}
    for scenario in chosen:
        rows.setdefault(scenario.row, []).append(scenario)
    return [found[index % len(found)] for index, found in enumerate(rows.values())]


@pytest.mark.parametrize(("lab", "group"), CASES, indirect=["lab"])
def test_scenarios(lab: Lab, labs: Labs, group: str) -> None:
    """W7, W8, W16, W18, X1, X2: after each, one known policy is served, and the server says so."""
    chosen = last(lab.host) if group == LAST else few(scenarios(lab.host, group))
    found = violations(run(lab, chosen))
    if group == LAST:
        labs.close()
    assert not found, "\n".join(found)
