"""Who is let in, as a table, and over a real socket.

Properties:
- without a token: a program on this host, unless a header shows a proxy or a web page; nobody else;
- with a token: only its holders, or holders of an API key, from anywhere;
- empty secrets and empty offers never match; a secret of any characters does, and nothing raises;
- many failures of one client answer 429 with the seconds to wait, and never a valid credential;
- a secret that was offered or configured is in no answer and no log.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_parity_plugin.server.auth import (
    BROWSER_HEADERS,
    FORWARDING_HEADERS,
    FailureLimiter,
    TooManyFailures,
    authorised,
    client_key,
    is_local_name,
    is_loopback,
)
from vllm_parity_plugin.settings import ParitySettings, load_settings

LOCAL, REMOTE = "127.0.0.1", "10.0.0.7"
FORWARDED = ["for", "host", "proto", "port", "prefix", "server", "by", "ssl", "client-cert"]


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        (LOCAL, True),
        ("127.8.9.10", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.7", False),
        (REMOTE, False),
        ("0.0.0.0", False),
        ("localhost", False),
        ("", False),
        (None, False),
    ],
)
def test_x2_loopback(host: str | None, loopback: bool) -> None:
    """X2: an address decides, never a name; IPv4 in IPv6 counts as what it holds."""
    assert is_loopback(host) == loopback
    assert authorised(host, {}, None, []) == loopback


@pytest.mark.parametrize("header", [*FORWARDING_HEADERS, *(f"x-forwarded-{n}" for n in FORWARDED)])
def test_x2_forwarded(header: str) -> None:
    """X2: behind a proxy the peer address says nothing; a token still does."""
    assert not authorised(LOCAL, {header: ""}, None, [])
    assert authorised(LOCAL, {header: "", "x-parity-token": "t"}, "t", [])


@pytest.mark.parametrize(
    ("header", "value"),
    [(name, value) for name in BROWSER_HEADERS for value in ("", "null", "http://127.0.0.1:8000")],
)
def test_x2_a_web_page_is_not_local(header: str, value: str) -> None:
    """X2: a page in a browser on this host reaches loopback, whatever it says it is."""
    assert not authorised(LOCAL, {"host": "127.0.0.1:8000", header: value}, None, [])
    assert authorised(LOCAL, {header: value, "x-parity-token": "t"}, "t", [])
    assert authorised(LOCAL, {header: value, "authorization": "Bearer k"}, None, ["k"])


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True),
        ("localhost:8000", True),
        ("LocalHost.:8000", True),
        ("127.0.0.1", True),
        ("127.0.0.1:8000", True),
        ("127.9.8.7:1", True),
        ("[::1]", True),
        ("[::1]:8000", True),
        ("[::ffff:127.0.0.1]:8000", True),
        ("0.0.0.0:8000", True),  # TRL's default vllm_server_host
        ("[::]:8000", True),
        ("", False),
        (":8000", False),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("127.0.0.1:8000.evil.example", False),
        ("[::1].evil.example", False),
        ("[::1", False),
        ("10.0.0.7:8000", False),
        ("::1", False),
        ("127.0.0.1, evil.example", False),
    ],
)
def test_x2_dns_rebinding(host: str, local: bool) -> None:
    """X2: a page's own name, rebound to 127.0.0.1, is same-origin; only Host shows it."""
    assert is_local_name(host) == local
    assert authorised(LOCAL, {"host": host}, None, []) == local
    assert authorised(LOCAL, {"host": host, "x-parity-token": "t"}, "t", [])


@pytest.mark.parametrize(
    ("headers", "token", "keys", "allowed"),
    [
        ({}, "t", [], False),
        ({"x-parity-token": "t"}, "t", [], True),
        ({"authorization": "Bearer t"}, "t", [], True),
        ({"authorization": "bearer  t "}, "t", [], True),
        ({"authorization": "Basic t"}, "t", [], False),
        ({"authorization": "t"}, "t", [], False),
        ({"x-parity-token": "T"}, "t", [], False),
        ({"x-parity-token": "tt"}, "t", [], False),
        ({"x-parity-token": ""}, "", [""], False),
        ({"authorization": "Bearer "}, None, [""], False),
        ({"authorization": "Bearer k2"}, None, ["k1", "k2"], True),
        ({"authorization": "Bearer k2"}, "t", ["k1", "k2"], True),
        ({"authorization": "Bearer k3"}, "t", ["k1", "k2"], False),
        ({"x-parity-token": "wröng", "authorization": "Bearer t"}, "t", [], True),
    ],
)
def test_x2_credentials(
    headers: dict[str, str], token: str | None, keys: list[str], allowed: bool
) -> None:
    """X2: a remote caller needs a credential that matches exactly."""
    assert authorised(REMOTE, headers, token, keys) == allowed


def test_x2_a_token_is_needed_on_loopback_too() -> None:
    """X2: once a token is set, being local is not enough; an API key alone does not change that."""
    assert not authorised(LOCAL, {}, "t", [])
    assert authorised(LOCAL, {}, None, ["k"])


TEXT = st.text(max_size=12) | st.text(st.characters(max_codepoint=255), max_size=12)
ANY_TEXT = TEXT | st.text(st.characters(categories=["Cs", "L"]), max_size=4)  # lone surrogates too
NAMES = st.sampled_from(["x-parity-token", "authorization", "host", "origin", "via"]) | TEXT


@given(
    client=st.none() | TEXT,
    headers=st.dictionaries(NAMES, ANY_TEXT | ANY_TEXT.map("Bearer {}".format), max_size=4),
    token=st.none() | ANY_TEXT,
    keys=st.lists(ANY_TEXT, max_size=2),
)
@example(REMOTE, {"x-parity-token": "\ud800"}, "\udfff", ["\ud801"])
@example(REMOTE, {"authorization": "Bearer €"}, "?", [])
def test_x2_nothing_raises(
    client: str | None, headers: dict[str, str], token: str | None, keys: list[str]
) -> None:
    """X2: whatever arrives is let in or refused; a stranger is let in by a secret's bytes only."""
    allowed = authorised(client, headers, token, keys)
    assert isinstance(allowed, bool)
    limiter = FailureLimiter()
    limiter.failed(client)
    assert limiter.retry_after(client) is None
    if not any([token, *keys]):
        assert not authorised(REMOTE, headers, token, keys)


@given(token=TEXT.filter(bool), other=TEXT)
@example(token="voilà", other="voil")  # its last UTF-8 byte is a no-break space in latin-1
@example(token="ÿ", other="ÿ")
@example(token="é", other="Ã©")
def test_x2_any_characters(token: str, other: str) -> None:
    """X2: a secret is matched by its UTF-8 and latin-1 bytes, as servers decode them, no other."""

    def arrives(data: bytes) -> dict[str, str]:
        return {"x-parity-token": data.decode("latin-1")}

    forms = {token.encode()}
    if max(token) <= "\xff":
        forms.add(token.encode("latin-1"))
    assert all(authorised(REMOTE, arrives(form), token, []) for form in forms)
    assert authorised(REMOTE, arrives(other.encode()), token, []) == (other.encode() in forms)
    if token.strip(" \t") == token:
        bearer = f"Bearer {token}".encode().decode("latin-1")
        assert authorised(REMOTE, {"authorization": bearer}, None, [token])


# --- the limiter --------------------------------------------------------------------------------


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_worked_numbers() -> None:
    """Ten failures at 0 s: 60 s to wait at 0 s, 1 s at 59 s, none at 60 s; nine: none at all."""
    clock = Clock()
    limiter = FailureLimiter(clock=clock)
    for _ in range(9):
        limiter.failed(REMOTE)
        assert limiter.retry_after(REMOTE) is None
    limiter.failed(REMOTE)
    for now, wait in ((0.0, 60.0), (59.0, 1.0), (60.0, None)):
        clock.now = now
        assert limiter.retry_after(REMOTE) == wait
    assert limiter.retry_after(LOCAL) is None


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0.0, 30.0)), max_size=60))
def test_the_limiter_is_a_sliding_window(events: list[tuple[str, float]]) -> None:
    """It waits exactly while the last 10 counted failures of that client are within 60 s."""
    clock = Clock()
    limiter = FailureLimiter(clock=clock)
    counted: dict[str, list[float]] = {"a": [], "b": []}
    clients = {"a": REMOTE, "b": LOCAL}
    for name, pause in events:
        clock.now += pause
        recent = [at for at in counted[name] if at + 60.0 > clock.now]
        wait = limiter.retry_after(clients[name])
        assert (wait is not None) == (len(recent) >= 10)
        if wait is None:
            limiter.failed(clients[name])
            counted[name].append(clock.now)
        else:
            assert 0 < wait <= 60


def test_the_limiter_remembers_a_bounded_number_of_addresses() -> None:
    """The address that failed longest ago is dropped; the memory never grows past the bound."""
    limiter = FailureLimiter(limit=1, clients=3)
    for number in range(100):
        limiter.failed(f"10.0.0.{number}")
        limiter.failed("10.1.1.1")
        assert len(limiter._failures) <= 3
    assert limiter.retry_after("10.0.0.0") is None
    assert limiter.retry_after("10.0.0.99") and limiter.retry_after("10.1.1.1")


def test_the_limiter_in_threads() -> None:
    """FastAPI calls it from several threads: no failure is lost and nothing raises."""
    limiter = FailureLimiter(limit=4000, clients=64)

    def work(thread: int) -> None:
        for number in range(1000):
            limiter.failed(REMOTE)
            limiter.failed(f"10.{thread + 1}.{number // 256}.{number % 256}")
            limiter.retry_after(REMOTE)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(limiter._failures) == 64
    assert limiter.retry_after(REMOTE) is not None


@pytest.mark.parametrize(
    ("client", "key"),
    [
        (REMOTE, REMOTE),
        ("::ffff:10.0.0.7", REMOTE),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("x" * 100_000, ""),
        ("unknown", ""),
        (None, ""),
    ],
)
def test_what_a_client_is(client: str | None, key: str) -> None:
    """A host owns a whole IPv6 /64; texts that are no address share one short key."""
    assert client_key(client) == key


def test_the_seconds_are_rounded_up() -> None:
    """A caller that waits the announced time is not early."""
    for wait, header in ((0.01, "1"), (1.0, "1"), (1.01, "2"), (60.0, "60")):
        assert (TooManyFailures(LOCAL, wait).headers or {})["Retry-After"] == header


# --- over a socket: uvicorn, with the settings that vLLM leaves at their defaults ---------------

SECRET = "very-secret-tökén"


class Api:
    """An API server with the plugin's routes and one route that tells who was let in."""

    def __init__(self, url: str, state: SimpleNamespace) -> None:
        self.url, self.state = url, state

    def get(self, **headers: str | bytes) -> httpx.Response:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        with httpx.Client(trust_env=False) as http:
            return http.get(f"{self.url}/probe", headers=names)


def parity_app(state: SimpleNamespace) -> FastAPI:
    from vllm_parity_plugin.server import routes
    from vllm_parity_plugin.server.endpoint import ParityEndpoint

    app = FastAPI()
    app.state.parity = state
    ParityEndpoint().attach_router(app)

    async def as_vllm_does(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": {"message": error.detail}}, error.status_code)

    def probe(request: Request) -> str:
        return request.client.host if request.client else "nobody"

    app.exception_handler(HTTPException)(as_vllm_does)
    app.router.route_class = type(routes.router.routes[0])
    app.get("/probe", dependencies=[Depends(routes._state)])(probe)
    return app


@pytest.fixture(scope="module")
def server() -> Iterator[Api]:
    healthy = SimpleNamespace(staging=SimpleNamespace(failure=None, updating=lambda: None))
    state = SimpleNamespace(updates=healthy)
    with closing(socket.create_server((LOCAL, 0))) as listener:
        config = uvicorn.Config(parity_app(state), log_config=None, lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield Api(f"http://{LOCAL}:{listener.getsockname()[1]}", state)
        server.should_exit = True
        thread.join(timeout=10)


@pytest.fixture
def api(server: Api, monkeypatch: pytest.MonkeyPatch) -> Api:
    """The server without a token and with a fresh limiter."""
    monkeypatch.delenv("VLLM_PARITY_TOKEN", raising=False)
    server.state.settings, server.state.api_keys = ParitySettings(), []
    server.state.limiter = FailureLimiter(clock=Clock())
    return server


def test_x2_a_rewritten_address_is_not_local(api: Api) -> None:
    """X2: uvicorn takes the client's address from a trusted peer's header; it stays forwarded."""
    assert api.get().json() == LOCAL
    for address in (LOCAL, "::1", "127.0.0.1, 127.0.0.1", "", "unknown"):
        assert api.get(x_forwarded_for=address).status_code == 401
    api.state.settings = ParitySettings(token="t")
    assert api.get(x_forwarded_for="127.8.8.8", x_parity_token="t").json() == "127.8.8.8"


def test_x2_a_web_page_over_the_socket(api: Api) -> None:
    """X2: pages, rebound names and the browser's address bar are refused; localhost is not."""
    assert api.get(host="localhost:1").status_code == 200
    assert api.get(host="rebound.evil.example").status_code == 401
    assert api.get(origin="http://evil.example").status_code == 401
    assert api.get(sec_fetch_site="none").status_code == 401


def test_x2_characters_over_the_socket(api: Api) -> None:
    """X2: a secret with any characters passes as UTF-8 and as latin-1."""
    api.state.settings = ParitySettings(token=SECRET)
    for encoding in ("utf-8", "latin-1"):
        assert api.get(x_parity_token=SECRET.encode(encoding)).status_code == 200
        assert api.get(authorization=f"Bearer {SECRET}".encode(encoding)).status_code == 200
    assert api.get(x_parity_token=SECRET[:-1].encode()).status_code == 401


def test_x2_many_failures(api: Api) -> None:
    """X2: the eleventh failure is told when to come back; a valid credential never waits."""
    api.state.settings = ParitySettings(token="t")
    assert [api.get(x_parity_token="wrong").status_code for _ in range(10)] == [401] * 10
    for _ in range(3):
        answer = api.get(x_parity_token="wrong")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "60")
        assert "60 s" in answer.json()["error"]["message"]
        assert api.get(x_parity_token="t").status_code == 200
    # Elsewhere the count is zero, and a success did not clear it here.
    assert api.get(x_forwarded_for=REMOTE).status_code == 401
    assert api.get().status_code == 429
    api.state.limiter._clock.now = 60.0
    assert api.get().status_code == 401


def test_no_secret_in_answers_and_logs(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the offered nor the configured secret is shown, refused or limited or let in."""
    caplog.set_level(logging.DEBUG)
    offered = "offered-by-mistake"
    api.state.settings = ParitySettings(token=SECRET)
    api.state.api_keys = ["configured-key"]
    answers = [
        api.get(x_parity_token=offered, authorization=f"Bearer {offered}") for _ in range(12)
    ]
    answers.append(api.get(x_parity_token=SECRET.encode()))
    assert {answer.status_code for answer in answers} == {401, 429, 200}
    shown = caplog.text + "".join(f"{answer.headers}{answer.text}" for answer in answers)
    assert "/probe" in caplog.text  # the access log was captured
    for secret in (offered, SECRET, repr(SECRET.encode())[2:-1], "configured-key"):
        assert secret not in shown


def test_no_secret_in_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings print stars, also when another setting is wrong."""
    monkeypatch.setenv("VLLM_PARITY_TOKEN", SECRET)
    assert SECRET not in repr(load_settings()) + str(load_settings())
    for config in ({"head_size": 0}, {"unknown": 1}, {"token": {"is": SECRET}}):
        with pytest.raises(Exception) as refused:
            load_settings({"parity": config})
        assert SECRET not in str(refused.value)
