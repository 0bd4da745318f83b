"""TRL's colocate mode: its engine's attestation, and its weight sync as a transaction.

TRL loads one tensor at a time into the running model, bare: on CPU that crashes at the first
fused layer, and anywhere a failure half-way leaves a mixture that the next step samples from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import gather_object
from trl.generation.vllm_generation import empty_cache

from trl_callbacks.generation import log_update, named_params
from trl_callbacks.policy_tensors import check_ties, policy_tensors
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.settings import load_settings
from vllm_parity_plugin.weights.colocated import ColocatedUpdates, attest
from vllm_parity_plugin.weights.errors import by_name
from vllm_parity_plugin.wire import Status, WorkerStatus


class TrainerRanks:
    """The processes of an accelerator, as ``weights.colocated.Ranks``."""

    def __init__(self, accelerator: Any) -> None:
        self.writer = bool(accelerator.is_local_main_process)
        self._rank = int(accelerator.process_index)
        self._writer_rank = self._rank - int(accelerator.local_process_index)

    def agree(self, problem: BaseException | None) -> None:
        """Raise this process's problem, or else the first one of another."""
        told = [] if problem is None else [(self._rank, type(problem).__name__, *_parts(problem))]
        others = gather_object(told)
        if problem is not None:
            raise problem
        if others:
            rank, kind, found, why, fix = others[0]
            raise (by_name(kind) or ParityError)(f"Rank {rank}: {found}", why, fix)

    def from_writer(self, value: dict[str, Any] | None) -> dict[str, Any]:
        """What this host's first process passed in."""
        found: dict[str, Any] = gather_object([value])[self._writer_rank]
        return found


def _parts(problem: BaseException) -> tuple[str, str, str]:
    if isinstance(problem, ParityError):
        return problem.found, problem.why, problem.fix
    return f"{problem!r}.", "The processes cannot go on alone.", "look at that rank's traceback."


def colocated_engine(trainer: Any) -> Any | None:
    """The ``LLM`` in a trainer's own process; None outside colocate mode."""
    return getattr(getattr(trainer, "vllm_generation", None), "llm", None)


def colocated_status(trainer: Any) -> Status:
    """Attestation of the engines of all processes; called by all of them.

    Raises:
        ParityError: an engine runs without the plugin.
    """
    llm, ranks = trainer.vllm_generation.llm, TrainerRanks(trainer.accelerator)
    reports: list[dict[str, Any]] = []
    problem = None
    try:
        reports = attest(llm)
    except ParityError as error:
        problem = error
    ranks.agree(problem)
    # The workers of one engine number themselves; over all processes they repeat.
    rank = int(trainer.accelerator.process_index)
    workers = gather_object([report | {"rank": rank} for report in reports])
    engine = llm.llm_engine
    return Status(
        server_id="colocated",
        plugin_version=workers[0]["plugin_version"],
        mode=load_settings(engine.vllm_config.additional_config).mode,
        model=str(engine.model_config.model),
        max_model_len=int(engine.model_config.max_model_len),
        head_size=int(engine.model_config.max_logprobs),
        state="serving" if all(w["weights"] == "committed" for w in workers) else "unhealthy",
        policy_version=workers[0]["policy_version"],
        workers=[WorkerStatus(**worker) for worker in workers],
    )


def install_colocated_sync(trainer: Any) -> ColocatedUpdates:
    """Make a trainer's colocated engines take weights by transaction, from the next sync on.

    Called by ``ParityCallback`` before step 1, on every process. While no complete policy is
    loaded, the engine refuses to generate.

    Raises:
        ParityError: the engine runs without the plugin, or trainer and engine disagree about
            which tensor is the head.
    """
    generation = trainer.vllm_generation
    llm = generation.llm
    installed: ColocatedUpdates | None = getattr(generation, "parity_updates", None)
    if installed is not None:
        return installed

    def wake() -> None:
        empty_cache()  # as TRL does: the trainer's cached blocks are in the way
        llm.wake_up(tags=["weights"])
        generation._llm_weights_sleeping = False

    settings = load_settings(llm.llm_engine.vllm_config.additional_config)
    updates = ColocatedUpdates(
        llm,
        settings.rollback,
        settings.weights_dir,
        ranks=TrainerRanks(trainer.accelerator),
        wake=wake if generation.enable_sleep_mode else None,
    )
    check_ties(generation.model, updates.expected)

    def sync_weights() -> None:
        generation.last_update = updates.push(_to_the_end(named_params(generation)))
        log_update(trainer, generation)

    generation.sync_weights = sync_weights
    generation.parity_updates = updates
    return updates


def _to_the_end(
    named: Iterator[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """:func:`policy_tensors` that walks all of ``named`` even when it refuses one: other
    processes are in the same gathers."""
    try:
        yield from policy_tensors(named)
    finally:
        for _ in named:
            pass
