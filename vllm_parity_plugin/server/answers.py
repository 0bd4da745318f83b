"""How errors become HTTP answers: one table, one shape (vLLM's own)."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import JSONResponse

from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.weights.errors import (
    ApplyError,
    ConflictError,
    ManifestError,
    OutOfSpace,
    RangeError,
    UnknownUpload,
)

STATUS: tuple[tuple[type[ParityError], int, str], ...] = (
    (UnknownUpload, 404, "the upload does not exist, or no longer"),
    (ConflictError, 409, "the update does not fit the server's state; nothing was touched"),
    (RangeError, 416, "the bytes do not continue the upload"),
    (ManifestError, 422, "the update does not fit the served model; nothing was touched"),
    (ApplyError, 500, "loading failed; the message tells what is served now"),
    (OutOfSpace, 507, "the update cannot be staged; nothing was touched"),
    (ParityError, 422, "the request cannot be served"),
)
"""First match wins."""


def answer_error(request: Request, error: Exception) -> JSONResponse:
    """Exception handler of every ``ParityError``."""
    status = next(status for kind, status, _ in STATUS if isinstance(error, kind))
    return answer(status, str(error), type(error).__name__)


def answer(status: int, message: str, kind: str) -> JSONResponse:
    """An error in the shape of vLLM's own, with ``Retry-After`` where trying again helps."""
    headers = {"retry-after": "5"} if status == 503 else None
    body = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": body}, status, headers=headers)


def documented(*statuses: int) -> dict[int | str, dict[str, str]]:
    """OpenAPI ``responses`` of a route that can answer these errors, and what every route can."""
    general = {
        401: "no valid credential",
        404: "no such upload, or vllm-parity is switched off",
        429: "too many refused callers from this address",
    }
    texts = {status: text for _, status, text in reversed(STATUS)} | general
    texts |= {
        400: "the request is not what the schema says",
        409: "the server's state does not allow it; nothing was touched",
        411: "a body of unknown length",
        413: "the body is larger than this route takes",
        503: "no complete policy is loaded, or the engine is gone",
    }
    return {
        status: {"description": texts[status]}
        for status in sorted({400, 401, 404, 422, 429, 503, *statuses})
    }
