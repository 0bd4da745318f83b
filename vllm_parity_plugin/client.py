"""HTTP client of the plugin's routes, whose every failure is a paragraph."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx

from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.weights.manifest import ManifestError
from vllm_parity_plugin.wire import (
    MARKER_FILE,
    PREFIX,
    TOKEN_HEADER,
    Rollout,
    RolloutRequest,
    Status,
    WeightsInfo,
    WeightUpdate,
    WeightUpdateResult,
)

TOKEN_VARIABLE = "VLLM_PARITY_TOKEN"


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
        headers = {}
        if token := token or os.environ.get(TOKEN_VARIABLE):
            headers[TOKEN_HEADER] = token
        if api_key := api_key or os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {api_key}"
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=5.0),
            # A proxy between trainer and sampler would turn loopback into a remote caller.
            trust_env=False,
        )

    def status(self) -> Status:
        """What the server really runs (``GET /v1/parity/status``)."""
        return Status.model_validate_json(self._call("GET", "/status").content)

    def weights_info(self) -> WeightsInfo:
        """Where a weight update goes and what it must carry (``GET /v1/parity/weights``)."""
        return WeightsInfo.model_validate_json(self._call("GET", "/weights").content)

    def staging_directory(self) -> Path:
        """The server's weights directory, checked to be visible from this process.

        Raises:
            ParityError: this process does not see the server's directory.
        """
        info = self.weights_info()
        directory = Path(info.directory)
        marker = directory / MARKER_FILE
        try:
            seen = marker.read_text()
        except OSError:
            seen = None
        if seen != info.server_id:
            raise ParityError(
                f"The weights directory of {self.url}, {directory}, is not visible here.",
                "Weights travel through a file that both sides see.",
                "run the trainer on the server's host, or start the server with "
                "VLLM_PARITY_WEIGHTS_DIR set to a directory that both mount.",
            )
        return directory

    def update_weights(self, update: WeightUpdate) -> WeightUpdateResult:
        """Replace the served policy (``POST /v1/parity/weights``)."""
        answer = self._call("POST", "/weights", json=update.model_dump())
        return WeightUpdateResult.model_validate_json(answer.content)

    def rollout(self, request: RolloutRequest) -> Rollout:
        """Sample completions with heads (``POST /v1/parity/rollouts``)."""
        answer = self._call(
            "POST",
            "/rollouts",
            content=request.model_dump_json(),
            headers={"content-type": "application/json"},
        )
        return Rollout.from_bytes(answer.content)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _call(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, PREFIX + path, **kwargs)
        except httpx.ConnectError as error:
            raise ParityError(
                f"No server answers at {self.url} ({error}).",
                "There is nothing to sample from.",
                "start one with `vllm serve MODEL` in an environment that has vllm-parity "
                "installed, wait until it is up, and check host and port.",
            ) from None
        except httpx.TimeoutException:
            raise ParityError(
                f"{self.url} did not answer {method} {PREFIX + path} in time.",
                "It may be overloaded, or paused by an update that failed.",
                "look at the server's log and at GET /v1/parity/status; raise the timeout if it "
                "is only slow.",
            ) from None
        except httpx.HTTPError as error:
            raise ParityError(
                f"The connection to {self.url} broke during {method} {PREFIX + path} ({error}).",
                "The answer is lost, and whether the request took effect is unknown.",
                "look at the server's log; GET /v1/parity/status tells which policy is served.",
            ) from None
        if answer.is_success:
            return answer
        raise self._refusal(answer)

    def _refusal(self, answer: httpx.Response) -> ParityError:
        message = _message(answer)
        if answer.status_code == 404:
            return ParityError(
                f"The server at {self.url} has no {PREFIX} routes ({message}).",
                "It runs without the vllm-parity plugin (or with it switched off), so its "
                "logprobs do not mean what the trainer expects.",
                "pip install vllm-parity in the server's environment and restart `vllm serve`; "
                "if VLLM_PLUGINS is set there, include 'parity' in it.",
            )
        if answer.status_code == 401:
            return ParityError(
                f"{self.url} refuses this caller ({message}).",
                "Its routes can replace the served policy.",
                f"set {TOKEN_VARIABLE} (and VLLM_API_KEY) to the server's values.",
            )
        kind = ManifestError if answer.status_code in {409, 422} else ParityError
        return kind(
            f"{self.url} answered {answer.status_code}: {message}",
            "The request had no effect." if kind is ManifestError else "The server is in trouble.",
            "act on the server's message above.",
        )


def _message(answer: httpx.Response) -> str:
    try:
        body = answer.json()
    except ValueError:
        return answer.text[:500]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)
