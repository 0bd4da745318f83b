"""What can go wrong with a weight update; the HTTP status of each is in ``server/answers.py``."""

from __future__ import annotations

from vllm_parity_plugin.errors import NotRepeatable, ParityError


class ManifestError(ParityError):
    """The update does not fit the served model. Nothing was touched."""


class ConflictError(ManifestError):
    """The update does not fit the server's state. Nothing was touched."""


class UpdateInProgress(ConflictError):
    """Another update holds the server."""


class UnknownUpload(ManifestError):
    """There is no such upload, or no longer."""


class RangeError(ManifestError):
    """Bytes that do not continue the upload."""


class OutOfSpace(ParityError):
    """The staging directory cannot hold the update. Nothing was touched."""


class ApplyError(ParityError):
    """Loading failed. The old weights are served again, or generation stays paused."""


def by_name(name: str) -> type[ParityError] | None:
    """The class that a server's answer names, to raise it again on the trainer's side."""
    kinds = (
        ManifestError,
        ConflictError,
        UpdateInProgress,
        UnknownUpload,
        RangeError,
        OutOfSpace,
        ApplyError,
        NotRepeatable,
    )
    return {kind.__name__: kind for kind in kinds}.get(name)
