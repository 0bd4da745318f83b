"""Weight updates of an ``LLM`` in the trainer's process, as the same transaction that a server
runs: stage, verify, load on every worker, commit, or go back.

Several trainer processes may each hold an ``LLM`` (TRL's colocate mode). They stage one copy per
host, and load and commit together or not at all.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from vllm_parity_plugin import compat
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.log import logger
from vllm_parity_plugin.recorded import inactive
from vllm_parity_plugin.weights.errors import ApplyError, ConflictError, ManifestError
from vllm_parity_plugin.weights.manifest import (
    TensorSpec,
    changed_names,
    check_against,
    read_header,
)
from vllm_parity_plugin.weights.messages import Kind, Manifest, WeightUpdateResult
from vllm_parity_plugin.weights.pusher import Pusher, Tensors
from vllm_parity_plugin.weights.served import common_stack, expected_tensors, first_error, plain
from vllm_parity_plugin.weights.stack import (
    Layer,
    Stack,
    adapter_base,
    check_base,
    extend,
    losing_adapter,
    together,
)
from vllm_parity_plugin.weights.staging import SET, Staging
from vllm_parity_plugin.weights.verify import verified_layer
from vllm_parity_plugin.weights.writer import write_policy

ATTRIBUTE = "_parity_updates"
"""Attribute of an ``LLM``: its one ``ColocatedUpdates``."""
T = TypeVar("T")


class Ranks(Protocol):
    """The trainer processes that update their engines together. Both calls are collective."""

    writer: bool
    """This process stages the tensors for its host."""

    def agree(self, problem: BaseException | None) -> None:
        """Return when no process had a problem; otherwise raise, in each of them."""

    def from_writer(self, value: dict[str, Any] | None) -> dict[str, Any]:
        """What this host's writer passed in."""


class Alone:
    """:class:`Ranks` of one process."""

    writer = True

    def agree(self, problem: BaseException | None) -> None:
        """Raise the problem, if there is one."""
        if problem is not None:
            raise problem

    def from_writer(self, value: dict[str, Any] | None) -> dict[str, Any]:
        """The value itself."""
        assert value is not None
        return value


class ColocatedUpdates(Pusher):
    """Applies updates to one ``LLM``, in process or not, on all of its workers or on none.

    ``push``, ``push_changed`` and ``push_adapter`` return when the new policy is served. No
    request may be unfinished, so ``kv`` makes no difference; the prefix cache is always cleared.

    Args:
        llm: a ``vllm.LLM`` whose processes run the plugin. It is watched from here on: while no
            complete policy is loaded, its ``generate`` and ``chat`` raise.
        rollback: ``keep`` keeps the served set, so that a failed load goes back to it; ``none``
            saves that memory, and after a failed load only a full update helps.
        weights_dir: where sets are staged; by default a private directory in shared memory.
        ranks: the processes that take part; by default this one alone.
        wake: brings the weights of a sleeping engine back into memory; called when an update has
            been verified. Without it a sleeping engine's update is refused.

    Attributes:
        failure: why no complete policy is loaded; None when one is.

    Raises:
        ParityError: the plugin is not active in the engine, or it already has updates.
    """

    def __init__(
        self,
        llm: Any,
        rollback: Literal["keep", "none"] = "keep",
        weights_dir: Path | None = None,
        *,
        ranks: Ranks | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        if hasattr(llm, ATTRIBUTE):
            raise ParityError(
                "This LLM already has a ColocatedUpdates.",
                "Each would take the other's files, and not know of its failures.",
                "use that one.",
            )
        self._llm, self._rollback, self._wake = llm, rollback, wake
        self._ranks: Ranks = ranks or Alone()
        reports = attest(llm, manifest=True)
        stack = common_stack(self._workers("report"))
        super().__init__(expected_tensors(reports), stack[-1].version, adapter_base(stack))
        self._staging = Staging(weights_dir, secrets.token_hex(8)) if self._ranks.writer else None
        self._kept: Stack = ()
        self.failure: str | None = None
        setattr(llm, ATTRIBUTE, self)
        self._guard_requests()

    def check(self) -> None:
        """Refuse to sample while no complete policy is loaded.

        Raises:
            ApplyError: the last update failed and there was no way back.
        """
        if self.failure is not None:
            raise ApplyError(
                f"No complete policy is loaded: {self.failure}.",
                "The model may hold a mixture of two policies.",
                "push a complete update.",
            )

    def _guard_requests(self) -> None:
        """Every request of an ``LLM`` goes through its engine's ``add_request`` (read in 0.31)."""
        engine = self._llm.llm_engine
        original = engine.add_request

        def add_request(*args: Any, **kwargs: Any) -> Any:
            self.check()
            return original(*args, **kwargs)

        engine.add_request = add_request

    # One update.

    def _send(
        self, tensors: Tensors, specs: Mapping[str, TensorSpec], kind: Kind, **fields: Any
    ) -> WeightUpdateResult:
        started = time.perf_counter()
        draft = Manifest(version=self.policy_version + 1, kind=kind, **fields)
        with contextlib.ExitStack() as held:
            old, only, written = self._everywhere(lambda: self._stage(draft, tensors, specs, held))
            layer = Layer(**self._ranks.from_writer(written))
            new = extend(old or (), layer)
            self._everywhere(lambda: first_error(self._workers("check", plain(new)), ManifestError))
            paused = time.perf_counter()
            self._replace(old, new, only)
            self._kept = new if self._rollback == "keep" else ()
        self.policy_version = layer.version
        return WeightUpdateResult(
            policy_version=layer.version,
            applied=True,
            tensors=len(specs),
            bytes=layer.size,
            pause_seconds=time.perf_counter() - paused,
            total_seconds=time.perf_counter() - started,
        )

    def _stage(
        self,
        draft: Manifest,
        tensors: Tensors,
        specs: Mapping[str, TensorSpec],
        held: contextlib.ExitStack,
    ) -> tuple[Stack | None, list[str] | None, dict[str, Any] | None]:
        """Everything that can be known before the engine is touched: (what is served, the names
        to load, the staged layer where it was written)."""
        try:
            if self._staging is not None:
                held.enter_context(self._staging.transaction(draft.version))
                held.callback(self._tidy)
            self._check_idle()
            old = self._served()
            self._check_base(draft, old)
            changed = changed_names(draft.kind, specs, self._expected)
            layer = self._write(draft, tensors, specs)
        finally:
            for _ in tensors:  # other processes are in the same gathers
                pass
        # What level 2 of sleep threw away has to come back whole.
        whole = changed is None or bool(self._llm.llm_engine.model_config.enable_sleep_mode)
        if whole:
            return old, None, layer
        losing = losing_adapter(old, draft.kind) if old else []
        return old, sorted(together((changed or []) + losing, self._expected)), layer

    def _check_idle(self) -> None:
        if self._llm.llm_engine.has_unfinished_requests():
            raise ConflictError(
                "The engine has unfinished requests.",
                "Each of their completions would be sampled from two policies.",
                "let generate return (or abort them), then push.",
            )
        if self._weights_sleep() and self._wake is None:
            raise ConflictError(
                "The engine sleeps: its weights are not in memory.",
                "An update would load into memory that is gone.",
                "call llm.wake_up(tags=['weights']), then push.",
            )

    def _check_base(self, draft: Manifest, old: Stack | None) -> None:
        if old is not None:
            check_base(old, draft)
        elif draft.kind != "full":
            raise ConflictError(
                f"No complete policy is loaded ({self.failure}), and a {draft.kind} update builds "
                "on one.",
                "It would leave a mixture.",
                "push a complete update.",
            )

    def _write(
        self, draft: Manifest, tensors: Tensors, specs: Mapping[str, TensorSpec]
    ) -> dict[str, Any] | None:
        """Stage the tensors and verify what was written."""
        if self._staging is None:
            return None
        name = f"{SET}{draft.version}-{secrets.token_hex(4)}.safetensors"
        path = self._staging.path / name
        entries = write_policy(path, tensors, specs)
        header = read_header(path)
        check_against(entries, header)
        layer = verified_layer(path, header, draft.model_copy(update={"tensors": entries}))
        return layer.model_dump()

    def _replace(self, old: Stack | None, new: Stack, only: list[str] | None) -> None:
        """Load and commit, everywhere; on any failure go back, everywhere."""

        def load() -> None:
            if self._weights_sleep() and self._wake is not None:
                self._wake()
            first_error(self._workers("apply", plain(new), only), ParityError)

        def commit() -> None:
            # It is not keyed by policy: new prompts would be served from KV of the old weights.
            if not self._llm.reset_prefix_cache():
                raise ParityError(
                    "vLLM did not clear its prefix cache.",
                    "New prompts would be served from KV of the old weights.",
                    "look at vLLM's log for the blocks that are still in use.",
                )
            self._label(new[-1].version)
            first_error(self._workers("commit", self._rollback == "keep"), ParityError)

        version = new[-1].version
        try:
            self._everywhere(load)
            self._everywhere(commit)
        except BaseException as error:
            logger.exception("weight update %d failed", version)
            self._go_back(old, version, error)
            raise ApplyError(
                f"Policy version {version} failed while it was loaded ({error}).",
                "The old weights were loaded again and are served.",
                "act on the message, then push again.",
            ) from error
        self.failure = None

    def _go_back(self, old: Stack | None, version: int, error: BaseException) -> None:
        """Load the weights that were served before.

        Raises:
            ApplyError: there is no way back; the engine refuses requests.
        """
        try:
            self._everywhere(lambda: self._restore(old))
        except Exception as second:
            self.failure = f"policy version {version} failed while it was loaded: {error} {second}"
            raise ApplyError(
                f"No complete policy is loaded: {self.failure}",
                "The model may hold a mixture of two policies, so the engine refuses requests.",
                "push a complete update.",
            ) from error

    def _restore(self, old: Stack | None) -> None:
        if old is None or self._rollback == "none":
            raise ApplyError(
                "No copy of the old weights was kept (rollback none)."
                if old is not None
                else "No complete policy was loaded before.",
                "They cannot be loaded again.",
                "push a complete update.",
            )
        # Not the workers' `restore`: it trusts a worker that was not reached to hold the old
        # weights, and after level 2 of sleep it holds nothing.
        first_error(self._workers("apply", plain(old), None), ApplyError)
        first_error(self._workers("commit", True), ApplyError)
        self._label(old[-1].version)

    # The engine.

    def _served(self) -> Stack | None:
        """What the workers hold; None while it is no complete policy."""
        if self.failure is None:
            try:
                return common_stack(self._workers("report"))
            except ApplyError as error:
                self.failure = str(error)
        return None

    def _workers(self, action: str, *args: Any) -> list[dict[str, Any]]:
        """One step of a transaction on every worker (see ``WeightHolder``)."""
        reports: list[dict[str, Any]] = self._llm.collective_rpc(
            "parity_weights", args=(action, *args)
        )
        return reports

    def _weights_sleep(self) -> bool:
        return "weights" in sleeping(self._llm)

    def _label(self, version: int) -> None:
        compat.call_core(self._llm.llm_engine, "parity_mark_version", version)
        if compat.has_weight_version():
            self._llm.update_weight_version(str(version))

    # All processes.

    def _everywhere(self, step: Callable[[], T]) -> T:
        """Do ``step`` here, and raise unless every process could.

        Raises:
            BaseException: this process's problem, or else the first one of another.
        """
        done: list[T] = []
        problem: BaseException | None = None
        try:
            done.append(step())
        except BaseException as error:
            problem = error
        self._ranks.agree(problem)
        return done[0]

    def _tidy(self) -> None:
        if self._staging is not None:
            with contextlib.suppress(OSError):  # must not fail an update that is served
                self._staging.keep_only(layer.file for layer in self._kept if layer.file)


def sleeping(llm: Any) -> list[str]:
    """What of an ``LLM`` is not in memory: ``weights``, ``kv_cache``.

    Raises:
        ParityError: the plugin is not active in the engine core.
    """
    try:
        tags: list[str] = compat.call_core(llm.llm_engine, "parity_asleep")
    except Exception as error:
        # vLLM's text for a failed call names it; a dead engine's error is not ours to translate.
        if "parity_asleep" not in str(error):
            raise
        raise inactive(str(error)) from error
    return tags


def attest(llm: Any, manifest: bool = False) -> list[dict[str, Any]]:
    """What every worker of an ``LLM`` runs (see ``attestation.attest``).

    Args:
        manifest: also list the tensors that an update must carry.

    Raises:
        ParityError: the engine runs without the plugin.
    """
    try:
        probe = "weights" not in sleeping(llm)
        reports: list[dict[str, Any]] = llm.collective_rpc(
            "parity_attest", kwargs={"manifest": manifest, "probe": probe}
        )
    except Exception as error:
        raise ParityError(
            f"The colocated vLLM engine could not attest to what it runs ({error}).",
            "It runs without the vllm-parity plugin.",
            "install vllm-parity in this environment; if VLLM_PLUGINS is set, include 'parity'; "
            "VLLM_PARITY_MODE must not be off.",
        ) from error
    return reports
