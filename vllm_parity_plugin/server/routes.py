"""The routes: status, weights, rollouts, pause and resume."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, HTTPException, Request, Response
from starlette.requests import ClientDisconnect

from vllm_parity_plugin.engine_requests import check
from vllm_parity_plugin.rollout_wire import SERVER_HEADER, RolloutRequest
from vllm_parity_plugin.server.answers import Route, documented
from vllm_parity_plugin.server.auth import TooManyFailures, authorised
from vllm_parity_plugin.server.gate import unhealthy
from vllm_parity_plugin.server.rollout_answers import Form, answer_streamed, answer_whole
from vllm_parity_plugin.server.rollouts import sequences
from vllm_parity_plugin.weights.messages import (
    NcclStart,
    UploadRequest,
    UploadStatus,
    WeightsInfo,
    WeightUpdate,
    WeightUpdateResult,
)
from vllm_parity_plugin.wire import PREFIX, TOKEN_HEADER, Status

CONTENT_RANGE = r"^bytes [0-9]{1,18}-[0-9]{1,18}/([0-9]{1,18}|\*)$"


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
        wait = state.limiter.retry_after(client)
        if wait is not None:
            raise TooManyFailures(client, wait)
        state.limiter.failed(client)
        raise HTTPException(
            401,
            f"Found no valid credential from {client}. These routes can replace the served "
            "policy. Fix: call from the server's own host as http://127.0.0.1:PORT, without a "
            "proxy or a browser, or send the value of VLLM_PARITY_TOKEN in the header "
            f"{TOKEN_HEADER} (or as a bearer token).",
        )
    return state


State = Annotated[Any, Depends(_state)]
router = APIRouter(prefix=PREFIX, tags=["vllm-parity"], route_class=Route)


@router.get("/status", responses=documented())
async def status(state: State) -> Status:
    """What every worker really runs, and which policy is served."""
    result: Status = await state.status()
    return result


@router.get("/weights", responses=documented(409, 500))
async def weights_info(state: State) -> WeightsInfo:
    """Where a weight update goes, and the tensors it must carry."""
    result: WeightsInfo = await state.updates.info(state.server_id)
    return result


@router.post("/weights", responses=documented(409, 411, 413, 500))
async def update_weights(state: State, update: WeightUpdate) -> WeightUpdateResult:
    """Replace the served policy from a file in the weights directory: all of it or nothing."""
    result: WeightUpdateResult = await state.updates.apply(update)
    return result


@router.post("/weights/uploads", status_code=201, responses=documented(409, 411, 413, 500, 507))
async def open_upload(state: State, request: UploadRequest) -> UploadStatus:
    """Announce an update that will be sent in the bodies of later requests."""
    result: UploadStatus = await state.updates.open_upload(request)
    return result


@router.get("/weights/uploads/{upload_id}", responses=documented())
async def upload_status(state: State, upload_id: str) -> UploadStatus:
    """How far an upload is: where to go on after a broken connection."""
    result: UploadStatus = state.updates.uploads.status(upload_id)
    return result


@router.put("/weights/uploads/{upload_id}", responses=documented(409, 416, 507))
async def write_upload(
    state: State,
    request: Request,
    upload_id: str,
    content_range: Annotated[
        str, Header(pattern=CONTENT_RANGE, description="`bytes BEGIN-LAST/TOTAL`, LAST included")
    ],
) -> UploadStatus:
    """Bytes of the data section: all of it, what is missing, or one tensor's range again."""
    begin, last, *total = map(int, re.findall(r"\d+", content_range))
    try:
        result: UploadStatus = await state.updates.uploads.write(
            upload_id, begin, last + 1, request.stream(), *total
        )
    except ClientDisconnect:  # what arrived is kept
        raise HTTPException(400, "The caller hung up.") from None
    return result


@router.post("/weights/uploads/{upload_id}/commit", responses=documented(409, 416, 500))
async def commit_upload(state: State, upload_id: str) -> WeightUpdateResult:
    """Apply what was uploaded: all of it or nothing."""
    result: WeightUpdateResult = await state.updates.commit_upload(upload_id)
    return result


@router.post(
    "/weights/uploads/{upload_id}/nccl", status_code=202, responses=documented(409, 411, 413, 507)
)
async def receive_upload(state: State, upload_id: str, nccl: NcclStart) -> UploadStatus:
    """Have a worker receive the bytes by NCCL broadcast, in the manifest's order. Not yet run on
    a GPU."""
    result: UploadStatus = await state.updates.receive(upload_id, nccl.unique_id, state.server_id)
    return result


@router.delete("/weights/uploads/{upload_id}", status_code=204, responses=documented())
async def drop_upload(state: State, upload_id: str) -> None:
    """Give an upload up."""
    state.updates.uploads.drop(upload_id)


@router.post("/rollouts", response_class=Response, responses=documented(406, 409, 411, 413))
async def rollouts(
    state: State,
    request: RolloutRequest,
    connection: Request,
    accept: Annotated[
        str, Header(description="`application/vnd.safetensors`, optionally `; head=float16`")
    ] = "*/*",
    accept_encoding: Annotated[str, Header(description="`zstd` compresses the answer")] = "",
    idempotency_key: Annotated[
        str | None,
        Header(max_length=200, description="Sampled once; a repeated request gets the same"),
    ] = None,
    x_parity_retry: Annotated[
        str | None,
        Header(max_length=200, description="On a repeated request: the server id last seen"),
    ] = None,
) -> Response:
    """Completions with sampler heads, as safetensors: one body, or one per sequence."""
    if (failure := state.updates.staging.failure) is not None:
        raise HTTPException(503, unhealthy(failure))
    form = Form.negotiate(accept, accept_encoding, request.stream)
    check(request, state.engine.model_config, state.head_limit)
    job = state.jobs.open(
        request, lambda: sequences(state.engine, request), idempotency_key, x_parity_retry
    )
    try:
        if request.stream:
            answer = await answer_streamed(state.jobs, job, form, connection)
        else:
            answer = await answer_whole(state.jobs, job, request, form, connection)
    except ValueError as error:  # vLLM's word on parameters
        raise HTTPException(422, str(error)) from None
    answer.headers[SERVER_HEADER] = state.server_id
    return answer


@router.post("/pause", status_code=204, responses=documented(409))
async def pause(state: State) -> None:
    """Freeze generation by hand; running requests keep their KV cache."""
    state.updates.refuse_while_applying()
    await state.engine.pause_generation(mode="keep", clear_cache=False)


@router.post("/resume", status_code=204, responses=documented(409))
async def resume(state: State) -> None:
    """Go on after a pause. Refused while no complete policy is loaded."""
    state.updates.refuse_while_applying()
    if (failure := state.updates.staging.failure) is not None:
        raise HTTPException(409, unhealthy(failure))
    await state.engine.resume_generation()
