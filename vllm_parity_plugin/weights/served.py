"""What an engine serves, asked from the processes that know: its workers."""

from __future__ import annotations

from typing import Any

from vllm_parity_plugin import compat
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.weights.errors import ApplyError, ConflictError
from vllm_parity_plugin.weights.manifest import TensorSpec, identity
from vllm_parity_plugin.weights.stack import Layer, Stack
from vllm_parity_plugin.weights.staging import Staging


class Served:
    """The weights of an engine.

    Args:
        engine: vLLM's ``EngineClient`` (``AsyncLLM``).
        staging: where the failure of an update is noted, for all API-server processes.
    """

    def __init__(self, engine: Any, staging: Staging) -> None:
        self._engine = engine
        self._staging = staging
        self._expected: dict[str, TensorSpec] | None = None

    async def expected(self) -> dict[str, TensorSpec]:
        """The tensors a full update must carry, asked from the workers once.

        Raises:
            ConflictError: the model was not loaded from a checkpoint, so nobody knows.
        """
        if self._expected is None:
            reports = await self._engine.collective_rpc("parity_attest", kwargs={"manifest": True})
            self._expected = expected_tensors(reports)
        return self._expected

    async def model_identity(self) -> str:
        """What a manifest must name to show that it was made for the served model."""
        architectures = getattr(self._engine.model_config.hf_config, "architectures", None)
        return identity(",".join(architectures or ["?"]), await self.expected())

    async def stack(self) -> Stack:
        """What the workers hold, when all hold the same.

        Raises:
            ApplyError: they disagree, or one holds a mixture.
        """
        return common_stack(await self.on_workers("report"))

    async def policy_version(self) -> int:
        """Version that the workers hold.

        Raises:
            ApplyError: they disagree.
        """
        return (await self.stack())[-1].version

    async def stack_or_none(self) -> Stack | None:
        """The stack that is served; None while no complete policy is loaded."""
        if self._staging.failure is None:
            try:
                return await self.stack()
            except ApplyError as error:
                self._staging.failure = str(error)
        return None

    async def on_workers(self, action: str, *args: Any) -> list[dict[str, Any]]:
        """One step of a transaction on every worker of every engine (see ``WeightHolder``)."""
        return await compat.rpc_every_worker(self._engine, "parity_weights", action, *args)

    async def on_first_engine(self, action: str, *args: Any) -> list[dict[str, Any]]:
        """One step on the workers of the first engine, one of which is ``server_id``."""
        reports: list[dict[str, Any]] = await self._engine.collective_rpc(
            "parity_weights", args=(action, *args)
        )
        return reports


def expected_tensors(attested: list[dict[str, Any]]) -> dict[str, TensorSpec]:
    """The tensors a full update must carry, by the workers' attestations.

    Raises:
        ConflictError: the model was not loaded from a checkpoint, so nobody knows.
    """
    record = next((report["expected"] for report in attested if report["expected"]), None)
    if record is None:
        raise ConflictError(
            "This engine did not load its model from a checkpoint.",
            "The plugin cannot tell whether a weight update is complete.",
            "start it with a model directory and the default --load-format.",
        )
    return {
        name: TensorSpec(dtype=dtype, shape=tuple(shape)) for name, (dtype, shape) in record.items()
    }


def common_stack(reports: list[dict[str, Any]]) -> Stack:
    """What the workers hold, when all hold the same.

    Raises:
        ApplyError: they disagree, or one holds a mixture.
    """
    stacks = {str(report["stack"]): report for report in reports}
    mixed = [report["rank"] for report in reports if report["phase"] == "mixed"]
    if len(stacks) > 1 or mixed:
        versions = sorted({report["version"] for report in reports})
        raise ApplyError(
            f"The workers hold policy versions {versions}"
            + (f", those of rank {mixed} half-loaded." if mixed else "."),
            "They would sample from a mixture.",
            "send a full update with a new version.",
        )
    return tuple(Layer(**layer) for layer in reports[0]["stack"])


def plain(stack: Stack) -> list[dict[str, Any]]:
    """A stack as plain msgpack types."""
    return [layer.model_dump() for layer in stack]


def first_error(reports: list[dict[str, Any]], kind: type[ParityError]) -> None:
    """Raise ``kind`` if a step failed on any rank."""
    failed = [report for report in reports if report["error"]]
    if failed:
        ranks = ", ".join(str(report["rank"]) for report in failed)
        raise kind(
            f"Rank {ranks} of {len(reports)}: {failed[0]['error']}",
            "All ranks must hold the same policy.",
            "act on the message.",
        )
