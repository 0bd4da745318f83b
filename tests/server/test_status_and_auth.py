"""What a server tells about itself, and to whom.

Properties:
- the attestation has the enforced values, per worker;
- with the plugin off there are no routes;
- without a token, loopback callers are let in, forwarded requests are not (X2);
- with a token or an API key, callers without one are not, on every route (X2);
- wrong credentials always get the same answer.
"""

from __future__ import annotations

import httpx
import pytest

from tests.client import Client
from tests.servers import API_KEY, TOKEN
from vllm_parity_plugin.compat import vllm_version
from vllm_parity_plugin.serving import Server
from vllm_parity_plugin.wire import TOKEN_HEADER

ROUTES = [
    ("GET", "status"),
    ("GET", "weights"),
    ("POST", "weights"),
    ("POST", "rollouts"),
    ("POST", "pause"),
    ("POST", "resume"),
]


def test_status_attests_the_enforced_values(server: Server) -> None:
    """H3, L6, L17: the workers, not the command line, say what runs."""
    status = Client(server).status()
    assert (status.mode, status.state, status.head_size) == ("enforce", "serving", 128)
    assert status.max_model_len == 256
    (worker,) = status.workers
    assert worker.head is not None
    assert worker.head.dtype == "float32" and worker.head.bf16_share < 0.05
    assert worker.head.weight_dtype == worker.dtype == "bfloat16"
    assert worker.logprobs_mode == "processed_logprobs"
    assert worker.generation_config == "vllm"
    assert worker.prefix_caching == "off"
    assert not worker.async_scheduling
    assert not worker.speculative
    assert not worker.tied_embeddings
    assert (worker.max_logprobs, worker.vocab_size) == (128, 1041)
    assert worker.vllm_version == str(vllm_version())
    assert "parity confirmed by 1 worker(s): lm_head float32" in server.log_text()


def test_status_of_an_observed_server(observe_server: Server) -> None:
    """Control: in mode observe the attestation has vLLM's own values."""
    status = Client(observe_server).status()
    (worker,) = status.workers
    assert status.mode == "observe"
    assert worker.head is not None and worker.head.dtype == "bfloat16"
    assert worker.prefix_caching == "on" and worker.tied_embeddings
    assert worker.generation_config == "auto"


@pytest.mark.parametrize(("method", "route"), ROUTES)
def test_mode_off_has_no_routes(stock_server: Server, method: str, route: str) -> None:
    """Mode off: stock vLLM, without the plugin's routes, table and confirmation."""
    answer = httpx.request(method, f"{stock_server.url}/v1/parity/{route}")
    assert answer.status_code == 404
    assert "parity confirmed" not in stock_server.log_text()


@pytest.mark.parametrize(
    "header", ["x-forwarded-for", "forwarded", "x-real-ip", "via", "X-Forwarded-Host"]
)
def test_x2_a_forwarded_request_is_not_local(server: Server, header: str) -> None:
    """X2: loopback is let in without a token, a proxy on loopback is not."""
    assert httpx.get(f"{server.url}/v1/parity/status").status_code == 200
    answer = httpx.get(f"{server.url}/v1/parity/status", headers={header: "127.0.0.1"})
    assert answer.status_code == 401
    assert "VLLM_PARITY_TOKEN" in answer.text


@pytest.mark.parametrize(("method", "route"), ROUTES)
def test_x2_every_route_needs_a_credential(tied_server: Server, method: str, route: str) -> None:
    """X2: vLLM's API key covers the routes: none, a wrong one and the bare token get nothing."""
    for headers in ({}, {"authorization": "Bearer wrong"}, {TOKEN_HEADER: TOKEN}):
        answer = httpx.request(
            method, f"{tied_server.url}/v1/parity/{route}", headers=headers, json={}
        )
        assert answer.status_code == 401
        assert "rollout" not in answer.text and "directory" not in answer.text


def test_x2_credentials_that_are_let_in(tied_server: Server) -> None:
    """X2: the API key alone, or with the token, is let in."""
    for client in (Client(tied_server, api_key=API_KEY), Client(tied_server, TOKEN, API_KEY)):
        assert client.status().state == "serving"


def test_x2_wrong_credentials_get_one_answer(server: Server, tied_server: Server) -> None:
    """X2: the answer does not tell how a credential is wrong."""
    wrong = ["", "a", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "é".encode()]
    url = f"{tied_server.url}/v1/parity/status"
    answers = {
        (answer.status_code, answer.text)
        for token in wrong
        for answer in [httpx.get(url, headers={TOKEN_HEADER: token})]
    }
    assert len(answers) == 1
    forwarded = {"x-forwarded-for": "127.0.0.1"}
    url = f"{server.url}/v1/parity/status"
    answers = [httpx.get(url, headers=forwarded | {TOKEN_HEADER: token}) for token in wrong]
    assert len({answer.text for answer in answers if answer.status_code == 401}) == 1
    # The server counts: other tests may have been refused within the same minute.
    assert {answer.status_code for answer in answers} <= {401, 429}


def test_x2_guessing_is_slowed_and_nobody_else_is(server: Server) -> None:
    """X2: after ten refusals the answer is 429 and says how long; a good caller is let in."""
    url = f"{server.url}/v1/parity/status"
    answers = [httpx.get(url, headers={"via": "proxy"}) for _ in range(12)]
    assert answers[-1].status_code == 429
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 60
    assert httpx.get(url).status_code == 200
