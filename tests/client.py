"""A small client of a running server, for tests of both packages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

from vllm_parity_plugin.rollout_wire import Rollout
from vllm_parity_plugin.serving import Server
from vllm_parity_plugin.weights.messages import WeightsInfo
from vllm_parity_plugin.wire import PREFIX, TOKEN_HEADER, Status


class Client:
    """Calls one server, with its token and API key if it has them."""

    def __init__(
        self, server: Server, token: str | None = None, api_key: str | None = None
    ) -> None:
        headers = {} if token is None else {TOKEN_HEADER: token}
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        self.server = server
        self.http = httpx.Client(base_url=server.url, headers=headers, timeout=120.0)

    def status(self) -> Status:
        answer = self.http.get(f"{PREFIX}/status")
        assert answer.status_code == 200, answer.text
        return Status.model_validate(answer.json())

    def weights_info(self) -> WeightsInfo:
        answer = self.http.get(f"{PREFIX}/weights")
        assert answer.status_code == 200, answer.text
        return WeightsInfo.model_validate(answer.json())

    def ask_rollout(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int = 1,
        head_size: int = 0,
        seeds: list[int] | None = None,
        **sampling: Any,
    ) -> httpx.Response:
        body = {"prompts": prompts, "n": n, "head_size": head_size, "sampling": sampling}
        if seeds is not None:
            body["seeds"] = seeds
        return self.http.post(f"{PREFIX}/rollouts", json=body)

    def rollout(self, prompts: Sequence[Sequence[int]], **request: Any) -> Rollout:
        answer = self.ask_rollout(prompts, **request)
        assert answer.status_code == 200, answer.text
        return Rollout.from_bytes(answer.content)

    def ask_completions(self, prompt: Any, **body: Any) -> httpx.Response:
        model = self.http.get("/v1/models").json()["data"][0]["id"]
        body = {"return_token_ids": True, "return_tokens_as_token_ids": True, **body}
        return self.http.post("/v1/completions", json={"model": model, "prompt": prompt, **body})

    def completions(self, prompt: Any, **body: Any) -> list[dict[str, Any]]:
        answer = self.ask_completions(prompt, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    def metric(self, name: str) -> float:
        """Sum of one Prometheus counter or gauge over its labels."""
        text = self.http.get("/metrics").text
        return sum(map(float, re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.M)))

    def stage(self, tensors: dict[str, torch.Tensor], name: str = "update.safetensors") -> Path:
        """Write an update file into the server's weights directory."""
        path = Path(self.weights_info().directory) / name
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
        return path

    def post_weights(self, **body: Any) -> httpx.Response:
        return self.http.post(f"{PREFIX}/weights", json=body)

    def update(
        self, tensors: dict[str, torch.Tensor], version: int | None = None, **body: Any
    ) -> httpx.Response:
        """Stage and apply an update; the next version unless one is given."""
        path = self.stage(tensors)
        version = version or self.weights_info().policy_version + 1
        try:
            return self.post_weights(version=version, file=path.name, **body)
        finally:
            path.unlink(missing_ok=True)


def top_logprobs(choice: dict[str, Any]) -> list[dict[int, float]]:
    """{token id: logprob} of every position of a completions choice."""
    return [
        {int(key.removeprefix("token_id:")): value for key, value in position.items()}
        for position in choice["logprobs"]["top_logprobs"]
    ]


def sequences(rollout: Rollout) -> list[list[int]]:
    """Token ids of every completion of a rollout."""
    return [rollout.token_ids[rollout.span(i)].tolist() for i in range(len(rollout))]
