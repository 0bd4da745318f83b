"""Tells the truth on vLLM's own routes while no complete policy is loaded."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_parity_plugin.server.answers import answer
from vllm_parity_plugin.wire import PREFIX

HEALTH = ("/health", "/ping")
HARMLESS = (PREFIX, "/tokenize", "/detokenize")
"""What a caller may still POST to: our own routes decide for themselves; these touch no weights."""
LIFECYCLE = (
    "/pause",
    "/resume",
    "/sleep",
    "/wake_up",
    "/release_kv_cache_memory",
    "/reset_prefix_cache",
    "/abort_requests",
    "/update_weight_version",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/start_draft_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/collective_rpc",
)
"""vLLM's routes (dev mode) that would change the engine's state under a running transaction."""


UPLOADS = f"{PREFIX}/weights/uploads/"
MAX_JSON = 64 * 2**20
"""Bytes of a JSON body on our routes; the manifest of 100,000 tensors has a third of it."""


class ParityGate:
    """ASGI middleware.

    While no complete policy is loaded: ``/health`` and ``/ping`` answer 503, and so does every
    request that could generate, or resume generation. While an update is applied, vLLM's own
    lifecycle routes answer 409. A body that our routes would read into memory is limited before
    it is read, because FastAPI reads it before it knows who is calling.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state: Any = getattr(scope["app"].state, "parity", None) if "app" in scope else None
        if state is not None and scope["type"] == "websocket":
            if state.updates.staging.failure is not None:
                await send({"type": "websocket.close", "code": 1013, "reason": "unhealthy"})
                return
        elif state is not None and scope["type"] == "http":
            refusal = _too_large(scope) or _unsafe(scope, state.updates.staging)
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _path(scope: Scope) -> str:
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def _unsafe(scope: Scope, staging: Any) -> JSONResponse | None:
    path, posts = _path(scope), scope["method"] == "POST"
    matters = path in HEALTH or (posts and not path.startswith(HARMLESS))
    if matters and staging.failure is not None:  # why is told to authorised callers only
        return answer(503, unhealthy("see GET /v1/parity/status"), "ServiceUnavailable")
    if posts and path in LIFECYCLE and (version := staging.updating()) is not None:
        return answer(
            409,
            f"The weight update to policy version {version} is being applied. This route would "
            "run the engine on half-loaded weights. Fix: call it when the update is over.",
            "ConflictError",
        )
    return None


def _too_large(scope: Scope) -> JSONResponse | None:
    path = _path(scope)
    if scope["method"] != "POST" or not path.startswith(PREFIX):
        return None
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) <= MAX_JSON:
        return None
    if not length and b"transfer-encoding" not in headers:
        return None  # no body at all
    return answer(
        413 if length else 411,
        f"{path} takes a JSON body of at most {MAX_JSON} bytes and a Content-Length; it came with "
        f"{length.decode('latin-1') or 'none'}. It would be held in memory. Fix: send weights as "
        f"a file or through {UPLOADS}, not in the JSON.",
        "PayloadTooLarge",
    )


def unhealthy(failure: str) -> str:
    """The paragraph that callers get while no complete policy is loaded."""
    return (
        f"No complete policy is loaded ({failure}). Tokens would be sampled from a mixture. "
        "Fix: send a full weight update; generation resumes when it succeeds."
    )
