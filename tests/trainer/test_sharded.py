"""Score centering on two processes (DDP, FSDP2 with an untied and a tied head) and with LoRA.

Properties: both ranks of a DDP run hold the same weights, bit for bit, and those of a run on one
process; a completion that one rank drops stops neither; loss, gradient norm and every gradient of
a sharded run are those of one process on the same batch, an adapter's included; the server follows
a sharded policy and a merged adapter; an adapter's gradient is that of the paper's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.models import Kind
from tests.servers import STANDARD
from tests.trainer.runs import one_batch, relative
from tests.trainer.sharded import Job, on_two_processes, outcome, trainer_for
from tests.trainer.test_loss import definition, move_sampler
from vllm_parity_plugin.serving import Server, serve

CASES = ("untied", "tied", "lora")
READ_BY_DEFINITION = ("temperature", "loss_type", "epsilon_low", "epsilon_high", "args")
Runs = dict[str, Any]


@pytest.fixture(scope="module")
def tied_server(tiny_model: Callable[[Kind], Path]) -> Iterator[Server]:
    with serve(tiny_model("tied"), *STANDARD) as running:
        yield running


@pytest.fixture(scope="module")
def runs(
    trained_server: Server,
    tied_server: Server,
    tiny_model: Callable[[Kind], Path],
    model_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Runs:
    """Every case on one process and on two: the same first batch, then rollouts of their own."""
    out = tmp_path_factory.mktemp("sharded")
    found: Runs = {}
    jobs = []
    for case in CASES:
        tied = case == "tied"
        job = Job(
            model=tiny_model("tied") if tied else model_path,
            url=(tied_server if tied else trained_server).url,
            batch=out / f"{case}.pt",
            replays=2 if case == "untied" else 1,
            steps=2 if case == "untied" else 1,
            lora=case == "lora",
        )
        torch.save(one_batch(trainer_for(replace(job, replays=0), out)), job.batch)
        found[case] = {"one": outcome(trainer_for(job, out))}
        jobs.append(job)
    untied = jobs[0]
    two = [replace(untied, steps=3, faulty=True)]
    two += [replace(job, replays=1, steps=2, shard=True) for job in jobs]
    ddp, *fsdp = on_two_processes(two, out)
    found["ddp"] = ddp
    for case, ranks in zip(CASES, fsdp, strict=True):
        found[case]["two"] = ranks
    return found


def test_ddp_ranks_stay_equal_and_equal_one_process(runs: Runs) -> None:
    """S12, L8: two steps on the same rows; in a third, rank 1 drops a completion and a token."""
    first, second = runs["ddp"]
    assert first["wrapped"] == "DistributedDataParallel"
    for step in range(3):
        for name, value in first["weights"][step].items():
            assert torch.equal(value, second["weights"][step][name])
    alone = runs["untied"]["one"]
    for name, value in first["weights"][1].items():
        torch.testing.assert_close(value, alone["weights"][1][name], rtol=0, atol=1e-5)
    start, end = alone["weights"][0], alone["weights"][1]
    assert max(float((end[name] - start[name]).abs().max()) for name in end) > 1e-3
    for step in range(2):
        assert relative(first["gradients"][step], alone["gradients"][step]) < 1e-4
    last = first["log"][2]
    assert last["parity/dropped_completions"] == 1  # counted on every rank, logged by rank 0
    assert last["parity/score_centering/nan_tokens"] == 1
    assert last["parity/logprob_diff/mean"] < 0.02


@pytest.mark.parametrize("case", CASES)
def test_sharded_gradients_are_those_of_one_process(runs: Runs, case: str) -> None:
    """W20, S12: loss, gradient norm and each whole gradient on the same batch, under FSDP2."""
    alone, ranks = runs[case]["one"], runs[case]["two"]
    for rank in ranks:
        assert rank["fsdp"] and rank["wrapped"].startswith("FSDP")
        ours, theirs = rank["gradients"][0], alone["gradients"][0]
        assert ours.keys() == theirs.keys()
        assert all(grad.norm() > 0 for grad in theirs.values())
        assert relative(ours, theirs) < 1e-4
    assert ("lm_head.weight" in alone["gradients"][0]) == (case == "untied")
    for name in ("loss", "grad_norm"):
        assert ranks[0]["log"][0][name] == pytest.approx(alone["log"][0][name], rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_the_server_follows_a_sharded_policy(runs: Runs, case: str) -> None:
    """W20: a rollout after the first sharded step agrees with the policy that the shards hold."""
    first, second = runs[case]["two"]
    changed = [name for name, value in first["weights"][0].items() if name in first["gradients"][0]]
    assert changed
    for step in range(2):
        for name, value in first["weights"][step].items():
            assert torch.equal(value, second["weights"][step][name])
    assert any((first["weights"][1][n] != first["weights"][0][n]).any() for n in changed)
    assert first["log"][1]["parity/logprob_diff/mean"] < 0.03
    # Logged with a push only: a server that happens to hold a near policy would pass the above.
    assert first["log"][1]["parity/policy_version"] > 0


def test_lora_trains_its_adapter_alone(runs: Runs) -> None:
    """W20: gradients for the adapter's tensors, and weights that move nowhere else."""
    alone = runs["lora"]["one"]
    assert all("lora_" in name for name in alone["gradients"][0])
    assert len(alone["gradients"][0]) == 2 * 2 * 4  # A and B of two layers' projections, 4 layers


def test_the_loss_of_an_adapter_is_the_papers(
    trained_server: Server, model_path: Path, tmp_path: Path
) -> None:
    """S1, S10: gradient of every adapter tensor against the definition, on a server that has it."""
    job = Job(model_path, trained_server.url, tmp_path / "batch.pt", 0, 2, lora=True)
    trainer = trainer_for(job, tmp_path)
    batch = one_batch(trainer)
    move_sampler(batch)
    plain = SimpleNamespace(
        model=trainer.model.get_base_model(),
        **{name: getattr(trainer, name) for name in READ_BY_DEFINITION},
    )
    found = [
        adapter_gradients(trainer, loss)
        for loss in (
            trainer.compute_loss(trainer.model, batch),
            definition(plain, batch, "none"),
            definition(plain, batch, "none", centred=False),
        )
    ]
    assert relative(found[0], found[1]) < 5e-3
    assert relative(found[2], found[1]) > 0.05
    trainer.train()
    assert all(e["parity/logprob_diff/mean"] < 0.02 for e in trainer.state.log_history[:2])


def adapter_gradients(trainer: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    trainer.model.zero_grad()
    loss.backward()
    named = trainer.model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}
