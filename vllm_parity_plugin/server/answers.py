"""How errors become HTTP answers: one table, one shape (vLLM's own)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from vllm_parity_plugin.errors import NotRepeatable, ParityError
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
    (NotRepeatable, 409, "a repeated request whose first answer is gone; nothing was sampled"),
    (RangeError, 416, "the bytes do not continue the upload"),
    (ManifestError, 422, "the update does not fit the served model; nothing was touched"),
    (ApplyError, 500, "loading failed; the message tells what is served now"),
    (OutOfSpace, 507, "the update cannot be staged; nothing was touched"),
    (ParityError, 422, "the request cannot be served"),
)
"""First match wins."""


DEAD = (
    "The engine has died. This server answers nothing any more, and its policy is lost. Fix: look "
    "at its log, start it again, and push the policy."
)


class Problem(BaseModel):
    """What went wrong, as vLLM's own routes say it."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorAnswer(BaseModel):
    """Body of every error."""

    error: Problem


class Unauthorised(BaseModel):
    """Body of a 401: ours, or the one word of vLLM's check of ``--api-key``."""

    error: Problem | str


def answer_error(request: Request, error: Exception) -> JSONResponse:
    """Exception handler of every ``ParityError``."""
    status = next(status for kind, status, _ in STATUS if isinstance(error, kind))
    return answer(status, str(error), type(error).__name__)


def answer(
    status: int, message: str, kind: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """An error in the shape of vLLM's own, with ``Retry-After`` where trying again helps."""
    retry = {"retry-after": "5"} if status == 503 else {}
    body = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": body}, status, headers=retry | dict(headers or {}))


class Route(APIRoute):
    """A route whose every HTTP error has that shape, FastAPI's own too (a body that is no text),
    whatever handlers the application has."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        original = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                response: Response = await original(request)
            except HTTPException as error:
                kind = HTTPStatus(error.status_code).phrase
                return answer(error.status_code, str(error.detail), kind, error.headers)
            except Exception as error:
                # Whatever failed, it failed because of this: no message about it would help.
                state = getattr(request.app.state, "parity", None)
                if state is None or not state.engine.errored:
                    raise
                return answer(503, f"{DEAD} ({error!r})", "EngineDead")
            return response

        return handler


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI ``responses`` of a route that can answer these errors, and what every route can."""
    general = {
        401: "no valid credential",
        404: "no such upload, or vllm-parity is switched off",
        429: "too many refused callers from this address",
    }
    texts = {status: text for _, status, text in reversed(STATUS)} | general
    texts |= {
        400: "the request is not what the schema says",
        406: "the answer has no form that the caller takes",
        409: "the server's state does not allow it; nothing was touched",
        411: "a body of unknown length",
        413: "the body is larger than this route takes",
        503: "no complete policy is loaded, or the engine is gone",
    }
    return {
        status: {
            "description": texts[status],
            "model": Unauthorised if status == 401 else ErrorAnswer,
        }
        for status in sorted({400, 401, 404, 422, 429, 503, *statuses})
    }
