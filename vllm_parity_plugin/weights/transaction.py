"""One weight update: validate, stage, verify, pause, apply, commit, resume.

The order is the point. Everything that can be wrong with what arrived is found before generation
is paused. Generation resumes only when every worker of every engine holds one complete policy: the
new one, or after a failure the old one again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from vllm_parity_plugin.core_state import asleep
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.log import logger
from vllm_parity_plugin.weights.errors import (
    ConflictError,
    ManifestError,
    OutOfSpace,
    UnknownUpload,
    UpdateInProgress,
)
from vllm_parity_plugin.weights.manifest import (
    TensorSpec,
    changed_names,
    check_against,
    read_header,
)
from vllm_parity_plugin.weights.messages import (
    Manifest,
    Progress,
    UploadRequest,
    UploadStatus,
    WeightsInfo,
    WeightUpdate,
    WeightUpdateResult,
)
from vllm_parity_plugin.weights.nccl import Reception
from vllm_parity_plugin.weights.served import Served, first_error, plain
from vllm_parity_plugin.weights.stack import (
    Layer,
    Stack,
    adapter_base,
    check_base,
    extend,
    losing_adapter,
    together,
)
from vllm_parity_plugin.weights.staging import Staging
from vllm_parity_plugin.weights.swap import Record, Swap, Update
from vllm_parity_plugin.weights.uploads import Uploads
from vllm_parity_plugin.weights.verify import verified_layer

ABANDONED = 600.0
"""Seconds after which a file that no request named belongs to a trainer that died."""
T = TypeVar("T")


class WeightUpdates:
    """Applies updates to an engine, one at a time.

    Args:
        engine: vLLM's ``EngineClient`` (``AsyncLLM``).
        staging: where update files are read from.
        rollback: keep the served set, so that a failure can go back to it.
        upload_timeout: seconds without bytes after which an HTTP upload is dropped.
        observe: told of every update that this process ended, whatever its outcome.
    """

    def __init__(
        self,
        engine: Any,
        staging: Staging,
        rollback: Literal["keep", "none"] = "keep",
        upload_timeout: float = 60.0,
        observe: Callable[[Record], None] = lambda record: None,
    ) -> None:
        self._engine = engine
        self._tasks: set[asyncio.Task[Any]] = set()
        self.staging = staging
        self.served = Served(engine, staging)
        self._swap = Swap(engine, self.served, staging, rollback)
        self.rollback = rollback
        self.uploads = Uploads(staging, upload_timeout)
        self._observe = observe

    async def info(self, server_id: str) -> WeightsInfo:
        """Where an update goes and what it must carry."""
        tensors, identity_ = await self.served.expected(), await self.served.model_identity()
        # While another process applies an update they may differ: the least is served everywhere.
        reports = await self.served.on_workers("report")
        stacks = [tuple(Layer(**layer) for layer in report["stack"]) for report in reports]
        return WeightsInfo(
            server_id=server_id,
            directory=str(self.staging.path),
            model=identity_,
            policy_version=min(stack[-1].version for stack in stacks),
            adapter_base=min(map(adapter_base, stacks)),
            rollback=self.rollback,
            upload_timeout=self.uploads.timeout,
            tensors=tensors,
            in_progress=self.in_progress(),
        )

    def in_progress(self) -> Progress | None:
        """The update that holds the server, in whichever process."""
        version = self.staging.updating()
        if version is not None:
            return Progress(version=version, phase="apply", idle_seconds=0.0)
        return self.uploads.current()

    # The ways in.

    async def apply(self, update: WeightUpdate) -> WeightUpdateResult:
        """Apply a file that the trainer wrote to the staging directory, and take it over.

        Raises:
            UpdateInProgress: another update holds the server.
            ManifestError: the update does not fit; the served model was not touched.
            ApplyError: loading failed; the message tells what is served now.
        """

        async def run(going: Update) -> WeightUpdateResult:
            self._refuse_during_upload()
            if (repeated := await self._check_request(going)) is not None:
                return repeated
            with self.staging.taken(self.staging.resolve(update.file), update.version) as path:
                return await self._apply(going, path)

        return await self._transaction(update, run)

    async def open_upload(self, request: UploadRequest) -> UploadStatus:
        """Check a manifest and make room for its bytes; from here on the upload holds the server.

        Raises:
            UpdateInProgress: another update holds the server.
            ManifestError: the update does not fit.
            OutOfSpace: the staging directory cannot hold it.
        """
        try:
            with self.staging.transaction(request.version):
                stack = await self.served.stack_or_none()
                if stack is not None and request.version == stack[-1].version:
                    raise _older(request.version, stack)
                await self._check_tensors(request, stack)
                return self.uploads.open(request)
        except ParityError as error:
            self._observe(Record("refused", request.version, reason=str(error)))
            raise

    async def commit_upload(self, upload_id: str) -> WeightUpdateResult:
        """Apply an upload that has all of its bytes. A refused one stays, to be sent again.

        Raises:
            as :meth:`apply`.
        """
        request = self.uploads.request(upload_id)

        async def run(going: Update) -> WeightUpdateResult:
            with self.uploads.complete(upload_id) as path:
                if (repeated := await self._check_request(going)) is not None:
                    return repeated
                with self.staging.taken(path, request.version) as taken:
                    result = await self._apply(going, taken)
                # Its trainer gave it up meanwhile, or the directory was closed: it is served.
                with contextlib.suppress(UnknownUpload, OutOfSpace):
                    self.uploads.drop(upload_id)
                return result

        return await self._transaction(request, run)

    async def receive(self, upload_id: str, unique_id: str, server_id: str) -> UploadStatus:
        """Have one worker fill an upload by NCCL. Ends with the upload, at its timeout at last.

        Raises:
            UnknownUpload: there is no such upload.
            ConflictError: the worker cannot take part; the upload can still be sent over HTTP.
        """
        reception = Reception(self.served, self.uploads, upload_id, server_id)

        async def start() -> UploadStatus:
            await reception.start(unique_id)
            self._spawn(reception.follow())
            return self.uploads.status(upload_id)

        return await self._to_the_end(start())

    def reap(self) -> None:
        """Drop what trainers that died left behind."""
        self.uploads.sweep()
        while self.uploads.expired:
            version = self.uploads.expired.pop()
            logger.warning(
                "the upload of policy version %d was dropped: its trainer sent nothing for %.0f s",
                version,
                self.uploads.timeout,
            )
            self._observe(Record("aborted", version))
        for name in self.staging.reclaim(max(ABANDONED, self.uploads.timeout)):
            logger.warning("removed %s, which no request named for %.0f s", name, ABANDONED)

    # One transaction.

    async def _transaction(
        self, manifest: Manifest, run: Callable[[Update], Awaitable[WeightUpdateResult]]
    ) -> WeightUpdateResult:
        going = Update(manifest, Record("refused", manifest.version))

        async def locked() -> WeightUpdateResult:
            with self.staging.transaction(manifest.version):
                return await run(going)

        try:
            # A client that hangs up must not stop an update half-way.
            return await self._to_the_end(locked())
        except ParityError as error:
            going.record.reason = str(error)
            raise
        finally:
            going.record.total_seconds = time.perf_counter() - going.started
            self._observe(going.record)

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def refuse_while_applying(self) -> None:
        """Raise UpdateInProgress while an update is applied: pausing or resuming by hand would
        run the engine on half-loaded weights."""
        if (version := self.staging.updating()) is not None:
            raise UpdateInProgress(
                f"The update to policy version {version} is being applied.",
                "It pauses and resumes generation itself.",
                "wait until it is over.",
            )

    def _refuse_during_upload(self) -> None:
        if (upload := self.uploads.current()) is not None:
            raise UpdateInProgress(
                f"The update to policy version {upload.version} is in progress: it is being "
                "uploaded.",
                "Two at once would mix policies.",
                f"wait for it; it ends by itself {self.uploads.timeout:.0f} s after its trainer "
                "stops sending.",
            )

    async def _check_request(self, going: Update) -> WeightUpdateResult | None:
        """The answer to a repeated update, or None if there is something to do."""
        manifest, stack = going.manifest, await self.served.stack_or_none()
        if stack is not None and manifest.version == stack[-1].version:
            going.record.outcome = "repeated"
            return self._result(going, applied=False, tensors=0)
        await self._check_tensors(manifest, stack)
        if await asleep(self._engine):
            raise ConflictError(
                "The engine sleeps: its weights are not in memory.",
                "An update would be lost, or load into memory that is gone.",
                "wake it up (POST /wake_up), then send the update again.",
            )
        return None

    async def _check_tensors(self, manifest: Manifest, stack: Stack | None) -> None:
        """Everything about a manifest that can be known before its bytes."""
        if stack is not None and manifest.version < stack[-1].version:
            raise _older(manifest.version, stack)
        if manifest.model is not None and manifest.model != await self.served.model_identity():
            raise ManifestError(
                f"The manifest was made for model {manifest.model}, and this server serves "
                f"{await self.served.model_identity()}.",
                "The tensors belong to another model.",
                "train the model that is served; GET /v1/parity/weights gives its identity.",
            )
        if stack is not None:
            check_base(stack, manifest)
        elif manifest.kind != "full":
            raise ConflictError(
                f"No complete policy is loaded ({self.staging.failure}), and a {manifest.kind} "
                "update builds on one.",
                "It would leave a mixture.",
                "send a full update.",
            )
        if manifest.tensors is not None:
            await self._changes(manifest, manifest.tensors)

    async def _changes(
        self, manifest: Manifest, tensors: Mapping[str, TensorSpec]
    ) -> list[str] | None:
        """Names of the served tensors that change, checked; None for all of them."""
        return changed_names(manifest.kind, tensors, await self.served.expected())

    async def _apply(self, going: Update, path: Path) -> WeightUpdateResult:
        manifest = going.manifest
        header = await asyncio.to_thread(read_header, path)
        if manifest.tensors is not None:
            check_against(manifest.tensors, header)
        changed = await self._changes(manifest, header.tensors)
        served = await self.served.expected()
        layer = await asyncio.to_thread(verified_layer, path, header, manifest, served)
        old = await self.served.stack_or_none()
        new = extend(old or (), layer)
        first_error(await self.served.on_workers("check", plain(new)), ManifestError)

        going.record.bytes = layer.size
        only = None
        if changed is not None:
            changed = changed + losing_adapter(old or new, manifest.kind)
            only = sorted(together(changed, served))
        await self._swap.run(going, old, new, only)
        with contextlib.suppress(OSError):  # tidying must not fail an update that is served
            self.staging.keep_only(
                layer.file for layer in new if layer.file and self.rollback == "keep"
            )
        return self._result(going, applied=True, tensors=len(header.tensors))

    def _result(self, going: Update, *, applied: bool, tensors: int) -> WeightUpdateResult:
        return WeightUpdateResult(
            policy_version=going.manifest.version,
            applied=applied,
            tensors=tensors,
            bytes=going.record.bytes,
            pause_seconds=going.record.pause_seconds,
            total_seconds=time.perf_counter() - going.started,
        )


def _older(version: int, stack: Stack) -> ConflictError:
    return ConflictError(
        f"Policy version {version} is older than the served version {stack[-1].version}, or "
        "the same.",
        "A late or repeated update would move the sampler backwards.",
        "read policy_version from GET /v1/parity/weights and count up from there.",
    )
