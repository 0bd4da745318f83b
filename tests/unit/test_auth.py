"""Who is let in, as a table.

Properties:
- without a token: loopback, unless a header shows a proxy; nobody else;
- with a token: only its holders, or holders of an API key, from anywhere;
- empty secrets and empty offers never match.
"""

from __future__ import annotations

import pytest

from vllm_parity_plugin.server.auth import FORWARDING_HEADERS, authorised, is_loopback

LOCAL, REMOTE = "127.0.0.1", "10.0.0.7"


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


@pytest.mark.parametrize("header", FORWARDING_HEADERS)
def test_x2_forwarded(header: str) -> None:
    """X2: behind a proxy the peer address says nothing; a token still does."""
    assert not authorised(LOCAL, {header: ""}, None, [])
    assert authorised(LOCAL, {header: "", "x-parity-token": "t"}, "t", [])


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
