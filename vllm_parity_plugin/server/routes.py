"""The routes: status, weights, rollouts, pause and resume."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Request, Response

from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.server.auth import authorised
from vllm_parity_plugin.server.rollouts import rollout
from vllm_parity_plugin.weights.manifest import ManifestError
from vllm_parity_plugin.weights.staging import UpdateInProgress
from vllm_parity_plugin.weights.transaction import ApplyError
from vllm_parity_plugin.wire import (
    PREFIX,
    TOKEN_HEADER,
    RolloutRequest,
    Status,
    WeightsInfo,
    WeightUpdate,
    WeightUpdateResult,
)


def _state(request: Request) -> Any:
    """The server's state, for authorised callers only."""
    state = getattr(request.app.state, "parity", None)
    if state is None:
        raise HTTPException(404, "vllm-parity is switched off on this server (mode off).")
    token = state.settings.token
    client = request.client.host if request.client else None
    if not authorised(
        client, request.headers, token.get_secret_value() if token else None, state.api_keys
    ):
        raise HTTPException(
            401,
            f"Found no valid credential from {client}. These routes can replace the served "
            "policy. Fix: call from the server's own host without a proxy, or send the value of "
            f"VLLM_PARITY_TOKEN in the header {TOKEN_HEADER} (or as a bearer token).",
        )
    return state


State = Annotated[Any, Depends(_state)]
router = APIRouter(prefix=PREFIX, tags=["vllm-parity"])


@router.get("/status")
async def status(state: State) -> Status:
    """What every worker really runs, and which policy is served."""
    result: Status = await state.status()
    return result


@router.get("/weights")
async def weights_info(state: State) -> WeightsInfo:
    """Where a weight update goes, and the tensors it must carry."""
    try:
        tensors = await state.updates.expected()
    except ManifestError as error:
        raise HTTPException(409, str(error)) from None
    return WeightsInfo(
        server_id=state.server_id,
        directory=str(state.updates.staging.path),
        policy_version=await state.updates.policy_version(),
        tensors=tensors,
    )


@router.post("/weights")
async def update_weights(state: State, update: WeightUpdate) -> WeightUpdateResult:
    """Replace the served policy: all of it or nothing."""
    try:
        result: WeightUpdateResult = await state.updates.apply(update)
        return result
    except UpdateInProgress:
        raise HTTPException(
            409,
            "Another weight update is in progress. Two at once would mix policies. Fix: wait for "
            "it, then send this one again.",
        ) from None
    except ManifestError as error:
        raise HTTPException(422, str(error)) from None
    except ApplyError as error:
        raise HTTPException(500, str(error)) from None


@router.post("/rollouts", response_class=Response)
async def rollouts(state: State, request: RolloutRequest) -> Response:
    """Completions with sampler heads, as one safetensors body."""
    if state.updates.failure is not None:
        raise HTTPException(
            503,
            f"The last weight update failed ({state.updates.failure}). No complete policy is "
            "loaded. Fix: send a complete weight update.",
        )
    try:
        result = await rollout(state, request)
    except (ParityError, ValueError) as error:
        raise HTTPException(422, str(error)) from None
    return Response(result.to_bytes(), media_type="application/vnd.safetensors")


@router.post("/pause", status_code=204)
async def pause(state: State) -> None:
    """Freeze generation by hand; running requests keep their KV cache."""
    await state.engine.pause_generation(mode="keep", clear_cache=False)


@router.post("/resume", status_code=204)
async def resume(state: State) -> None:
    """Go on after a pause. Refused while no complete policy is loaded."""
    if state.updates.failure is not None:
        raise HTTPException(
            409,
            "The last weight update failed, so the model may hold a mixture of two policies. "
            "Fix: send a complete weight update; it resumes generation.",
        )
    await state.engine.resume_generation()
