"""HTTP client of the plugin's routes, whose every failure is a paragraph."""

from __future__ import annotations

import base64
import itertools
import logging
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.rollout_wire import (
    BODY_TYPE,
    KEY_HEADER,
    RETRY_HEADER,
    SERVER_HEADER,
    STREAM_TYPE,
    HeadDtype,
    Rollout,
    RolloutRequest,
    read_frames,
)
from vllm_parity_plugin.weights.errors import ApplyError, by_name
from vllm_parity_plugin.weights.messages import (
    NcclStart,
    UploadRequest,
    UploadStatus,
    WeightsInfo,
    WeightUpdate,
    WeightUpdateResult,
)
from vllm_parity_plugin.wire import MARKER_FILE, PREFIX, TOKEN_HEADER, Status

TOKEN_VARIABLE = "VLLM_PARITY_TOKEN"
JSON = {"content-type": "application/json"}
PIECE = 2**20
"""Bytes given to the connection at a time."""
PAUSES = (0.1, 1.0, 5.0)
"""Seconds before each further attempt at a rollout; the server waits longer for it."""
CONNECTIONS = 32
logger = logging.getLogger(__name__)


class ConnectionLost(ParityError):
    """The answer is lost, and whether the request took effect is unknown."""


class TimedOut(ConnectionLost):
    """There was no answer in time; it may still come into being."""


class ParityClient:
    """Talks to a ``vllm serve`` that runs the plugin.

    Args:
        url: base URL of the server, such as ``http://127.0.0.1:8000``.
        token: value of the server's VLLM_PARITY_TOKEN; by default this process's variable.
        api_key: the server's ``--api-key``; by default the variable VLLM_API_KEY.
        timeout: seconds that one answer may take; a rollout answers when all of it is sampled.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        self.url = url.rstrip("/")
        headers: dict[bytes, bytes] = {}
        if token := token or os.environ.get(TOKEN_VARIABLE):
            headers[TOKEN_HEADER.encode()] = token.encode()
        if api_key := api_key or os.environ.get("VLLM_API_KEY"):
            headers[b"authorization"] = f"Bearer {api_key}".encode()
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=5.0),
            # A proxy between trainer and sampler would turn loopback into a remote caller.
            trust_env=False,
        )
        self._server_id = ""
        """Of the last answer: a retry must reach the same server."""

    def status(self) -> Status:
        """What the server really runs (``GET /v1/parity/status``)."""
        return Status.model_validate_json(self._call("GET", "/status").content)

    def weights_info(self) -> WeightsInfo:
        """Where a weight update goes and what it must carry (``GET /v1/parity/weights``)."""
        return WeightsInfo.model_validate_json(self._call("GET", "/weights").content)

    def visible_directory(self, info: WeightsInfo) -> Path | None:
        """The server's weights directory if this process sees the same one, else None."""
        directory = Path(info.directory)
        try:
            seen = (directory / MARKER_FILE).read_text()
        except OSError:
            return None
        return directory if seen == info.server_id else None

    def update_weights(self, update: WeightUpdate) -> WeightUpdateResult:
        """Replace the served policy (``POST /v1/parity/weights``)."""
        return self._update("/weights", update.model_dump_json())

    def open_upload(self, request: UploadRequest) -> UploadStatus:
        """Announce an update that is sent over HTTP (``POST /v1/parity/weights/uploads``)."""
        answer = self._call(
            "POST", "/weights/uploads", content=request.model_dump_json(), headers=JSON
        )
        return UploadStatus.model_validate_json(answer.content)

    def upload_status(self, upload_id: str) -> UploadStatus:
        """How far an upload is (``GET /v1/parity/weights/uploads/ID``)."""
        answer = self._call("GET", f"/weights/uploads/{upload_id}")
        return UploadStatus.model_validate_json(answer.content)

    def send(self, upload_id: str, begin: int, total: int, data: memoryview) -> UploadStatus:
        """Send bytes of an upload from ``begin`` on (``PUT /v1/parity/weights/uploads/ID``)."""
        answer = self._call(
            "PUT",
            f"/weights/uploads/{upload_id}",
            content=_pieces(data),
            headers={
                "content-range": f"bytes {begin}-{begin + len(data) - 1}/{total}",
                "content-length": str(len(data)),
            },
        )
        return UploadStatus.model_validate_json(answer.content)

    def start_nccl(self, upload_id: str, unique_id: bytes) -> UploadStatus:
        """Have a worker join NCCL (``POST /v1/parity/weights/uploads/ID/nccl``)."""
        body = NcclStart(unique_id=base64.b64encode(unique_id).decode()).model_dump_json()
        answer = self._call(
            "POST", f"/weights/uploads/{upload_id}/nccl", content=body, headers=JSON
        )
        return UploadStatus.model_validate_json(answer.content)

    def commit_upload(self, upload_id: str) -> WeightUpdateResult:
        """Apply an upload (``POST /v1/parity/weights/uploads/ID/commit``)."""
        return self._update(f"/weights/uploads/{upload_id}/commit", "")

    def drop_upload(self, upload_id: str) -> None:
        """Give an upload up (``DELETE /v1/parity/weights/uploads/ID``)."""
        self._call("DELETE", f"/weights/uploads/{upload_id}")

    def _update(self, path: str, body: str) -> WeightUpdateResult:
        answer = self._call("POST", path, content=body, headers=JSON)
        return WeightUpdateResult.model_validate_json(answer.content)

    def rollout(
        self, request: RolloutRequest, *, head_dtype: HeadDtype = "float32", zstd: bool = False
    ) -> Rollout:
        """Sample completions with heads (``POST /v1/parity/rollouts``), in one answer.

        A connection that breaks is tried again. The server samples only once: the second attempt
        gets the same completions, or an error.

        Args:
            request: sent as it is, but for ``stream``.
            head_dtype: of ``head_logprobs``; float16 saves a quarter of the bytes.
            zstd: compress the answer: for a network that is slower than about 1 Gbit/s.

        Raises:
            NotRepeatable: the connection broke, and the completions cannot be had again.
            ParityError: the server refused, or is gone.
        """
        whole = request.model_copy(update={"stream": False})
        [body] = self._bodies(whole, head_dtype, zstd)
        return Rollout.from_bytes(body)

    def rollout_stream(
        self, request: RolloutRequest, *, head_dtype: HeadDtype = "float32", zstd: bool = False
    ) -> Iterator[tuple[int, Rollout]]:
        """The same, sequence by sequence as they end: index in the request and its rollout.

        Nothing more is read than is asked for, and closing the iterator hangs up. After a broken
        connection the stream is opened again; sequences that were seen are not repeated.

        Raises:
            NotRepeatable, ParityError: as :meth:`rollout`.
        """
        streamed = request.model_copy(update={"stream": True})
        seen: set[int] = set()
        for body in self._bodies(streamed, head_dtype, zstd):
            index, rollout = Rollout.from_frame(body)
            if index not in seen:
                seen.add(index)
                yield index, rollout

    def rollouts(
        self,
        requests: Sequence[RolloutRequest],
        *,
        head_dtype: HeadDtype = "float32",
        zstd: bool = False,
    ) -> list[Rollout]:
        """Several requests at once, one connection each: for a balancer in front of servers.

        Raises:
            NotRepeatable, ParityError: as :meth:`rollout`; of the first request that fails.
        """
        with ThreadPoolExecutor(min(len(requests), CONNECTIONS)) as pool:
            send = partial(self.rollout, head_dtype=head_dtype, zstd=zstd)
            return list(pool.map(send, requests))

    def _bodies(
        self, request: RolloutRequest, head_dtype: HeadDtype, zstd: bool
    ) -> Iterator[bytes]:
        """Bodies of the answer; a stream that is opened again begins with the first one again."""
        content = request.model_dump_json(exclude_none=True)
        media_type = STREAM_TYPE if request.stream else BODY_TYPE
        headers = JSON | {
            "accept": f"{media_type}; head={head_dtype}",
            "accept-encoding": "zstd" if zstd else "identity",
            KEY_HEADER: uuid.uuid4().hex,
        }
        for attempt in itertools.count():
            try:
                with (
                    self._translated("POST", "/rollouts"),
                    self._http.stream(
                        "POST", f"{PREFIX}/rollouts", content=content, headers=headers
                    ) as response,
                ):
                    self._server_id = response.headers.get(SERVER_HEADER, self._server_id)
                    if not response.is_success:
                        response.read()
                        raise self._refusal(response)
                    if request.stream:
                        yield from read_frames(response.iter_bytes())
                    else:
                        yield response.read()
                return
            except ConnectionLost as error:
                if isinstance(error, TimedOut) or not self._server_id or attempt == len(PAUSES):
                    raise
                logger.warning("%s Trying again.", error.found)
            headers[RETRY_HEADER] = self._server_id
            time.sleep(PAUSES[attempt])

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _call(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        with self._translated(method, path):
            answer = self._http.request(method, PREFIX + path, **kwargs)
        if answer.is_success:
            return answer
        raise self._refusal(answer)

    @contextmanager
    def _translated(self, method: str, path: str) -> Iterator[None]:
        """httpx's errors as ours."""
        try:
            yield
        except httpx.ConnectError as error:
            raise ParityError(
                f"No server answers at {self.url} ({error}).",
                "There is nothing to sample from.",
                "start one with `vllm serve MODEL` in an environment that has vllm-parity "
                "installed, wait until it is up, and check host and port.",
            ) from None
        except httpx.TimeoutException:
            raise TimedOut(
                f"{self.url} did not answer {method} {PREFIX + path} in time.",
                "It may be overloaded, or paused by an update that failed.",
                "look at the server's log and at GET /v1/parity/status; raise the timeout if it "
                "is only slow.",
            ) from None
        except httpx.HTTPError as error:
            raise ConnectionLost(
                f"The connection to {self.url} broke during {method} {PREFIX + path} ({error}).",
                "The answer is lost, and whether the request took effect is unknown.",
                "look at the server's log; GET /v1/parity/status tells which policy is served.",
            ) from None

    def _refusal(self, answer: httpx.Response) -> ParityError:
        message, kind = _error(answer)
        if (known := by_name(kind)) is not None:
            found, _, fix = message.rpartition(" Fix: ")
            touched = (
                "Its outcome is in the message." if known is ApplyError else "Nothing changed."
            )
            return known(f"{self.url} answered {answer.status_code}: {found}", touched, fix)
        if answer.status_code == 404:
            return ParityError(
                f"The server at {self.url} has no {PREFIX} routes ({message}).",
                "It runs without the vllm-parity plugin (or with it switched off), so its "
                "logprobs do not mean what the trainer expects.",
                "pip install vllm-parity in the server's environment and restart `vllm serve`; "
                "if VLLM_PLUGINS is set there, include 'parity' in it.",
            )
        if answer.status_code in {401, 429}:
            return ParityError(
                f"{self.url} refuses this caller ({message}).",
                "Its routes can replace the served policy.",
                f"set {TOKEN_VARIABLE} (and VLLM_API_KEY) to the server's values.",
            )
        return ParityError(
            f"{self.url} answered {answer.status_code}: {message}",
            "The request was not served.",
            "act on the server's message above.",
        )


def _pieces(data: memoryview) -> Iterator[bytes]:
    for begin in range(0, len(data), PIECE):
        yield bytes(data[begin : begin + PIECE])


def _error(answer: httpx.Response) -> tuple[str, str]:
    """Message and kind of an error answer, in vLLM's shape or any other."""
    try:
        body = answer.json()
    except ValueError:
        return answer.text[:500], ""
    error = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        return str(error), ""
    return str(error.get("message", error)), str(error.get("type", ""))
