"""Who may call the plugin's routes, and how often a caller may be wrong."""

from __future__ import annotations

import ipaddress
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from fastapi import HTTPException

from vllm_parity_plugin.wire import TOKEN_HEADER

FORWARDING_HEADERS = (
    "cf-connecting-ip",
    "cf-ray",
    "client-ip",
    "fastly-client-ip",
    "fly-client-ip",
    "forwarded",
    "forwarded-for",
    "forwarded-for-ip",
    "front-end-https",
    "true-client-ip",
    "via",
    "x-appengine-user-ip",
    "x-azure-clientip",
    "x-azure-socketip",
    "x-client-ip",
    "x-cluster-client-ip",
    "x-envoy-external-address",
    "x-envoy-original-path",
    "x-forwarded",
    "x-original-forwarded-for",
    "x-original-host",
    "x-originating-ip",
    "x-proxyuser-ip",
    "x-real-ip",
    "x-remote-addr",
    "x-remote-ip",
)
"""What proxies add. One of them, even empty, makes the peer a proxy."""
FORWARDING_PREFIX = "x-forwarded-"
"""So does any header of this family: -for, -host, -proto, -port, -prefix, -server, ..."""
BROWSER_HEADERS = ("origin", "sec-fetch-site")
"""What browsers add and no script of a page can remove; trainers send neither."""

HOST_HEADER = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::[0-9]*)?")
LOCAL_NAMES = ("localhost", "localhost.", "0.0.0.0", "::")
"""The last two connect to loopback and are what TRL dials by default; no DNS name spells them."""


def authorised(
    client_host: str | None, headers: Mapping[str, str], token: str | None, api_keys: list[str]
) -> bool:
    """Whether a caller may use ``/v1/parity``.

    A configured token is always required (or one of the server's API keys). Without a token, a
    local trainer is let in: see ``is_local``.

    Args:
        client_host: address of the peer, None when unknown.
        headers: request headers, lower-case names; values as servers give them, in latin-1.
        token: ``VLLM_PARITY_TOKEN``.
        api_keys: the server's ``--api-key`` values.
    """
    presented = [_wire_bytes(headers.get(TOKEN_HEADER, ""))]
    scheme, _, credential = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        # Not strip(): in latin-1 it would cut the last byte off a token that ends in "à".
        presented.append(_wire_bytes(credential.strip(" \t")))
    accepted = [form for secret in [token, *api_keys] if secret for form in _wire_forms(secret)]
    # All pairs are compared, in constant time each, so that timing tells nothing.
    matches = [secrets.compare_digest(offer, secret) for offer in presented for secret in accepted]
    if any(matches):
        return True
    return not token and is_local(client_host, headers)


def is_local(client_host: str | None, headers: Mapping[str, str]) -> bool:
    """Whether a request comes from a program on this host that meant to call this host.

    False for a proxy's request (its peer address says nothing about the caller) and for a web
    page's: a browser on this host reaches loopback for any page, and a page whose DNS name was
    rebound to 127.0.0.1 is same-origin, which only its Host header shows.
    """
    if not is_loopback(client_host):
        return False
    if any(name in FORWARDING_HEADERS or name.startswith(FORWARDING_PREFIX) for name in headers):
        return False
    if any(name in headers for name in BROWSER_HEADERS):
        return False
    return is_local_name(headers.get("host", "localhost"))


def is_loopback(host: str | None) -> bool:
    """Whether the peer address is this machine's loopback (a Unix socket has no address)."""
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def is_local_name(host: str) -> bool:
    """Whether a Host header names this machine: ``localhost:8000`` does, ``localhost.evil`` not."""
    match = HOST_HEADER.fullmatch(host.strip(" \t").lower())
    name = (match[1] or match[2] or "") if match else ""
    return name in LOCAL_NAMES or is_loopback(name)


def _wire_bytes(value: str) -> bytes:
    """The bytes of a header value as they were sent: servers decode them as latin-1."""
    try:
        return value.encode("latin-1")
    except UnicodeEncodeError:  # not from a server; must still not fail
        return value.encode("utf-8", "surrogatepass")


def _wire_forms(secret: str) -> set[bytes]:
    """How clients send a secret: most as UTF-8, some as latin-1 (the same for ASCII)."""
    return {secret.encode("utf-8", "surrogatepass"), _wire_bytes(secret)}


class FailureLimiter:
    """Counts failed authorisations by client address, and tells a caller with many to wait.

    With the defaults, ten failures at 0 s make ``retry_after`` 60.0 at 0 s, 1.0 at 59 s and None
    at 60 s. It spares the log and the server; a secret is protected by its length, since a valid
    credential is let in whatever was counted.

    Args:
        limit: failures within ``window`` seconds that are answered 401.
        window: seconds for which a failure counts.
        clients: most addresses remembered; the one that failed longest ago is dropped.
        clock: seconds, never running backwards.
    """

    def __init__(
        self,
        limit: int = 10,
        window: float = 60.0,
        clients: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit, self._window, self._clients, self._clock = limit, window, clients, clock
        self._failures: dict[str, deque[float]] = {}
        self._lock = threading.Lock()  # FastAPI runs plain functions in threads

    def failed(self, client: str | None) -> None:
        """Count one failed authorisation."""
        key = client_key(client)
        with self._lock:
            times = self._failures.pop(key, None) or deque(maxlen=self._limit)
            times.append(self._clock())
            self._failures[key] = times
            if len(self._failures) > self._clients:
                del self._failures[next(iter(self._failures))]

    def retry_after(self, client: str | None) -> float | None:
        """Seconds until the client's next failure is a plain 401 again; None when it is one now."""
        with self._lock:
            times = self._failures.get(client_key(client))
            if times is None or len(times) < self._limit:
                return None
            wait = times[0] + self._window - self._clock()
        return wait if wait > 0 else None


def client_key(client: str | None) -> str:
    """What failures are counted by: an IPv4 address, or the /64 network that an IPv6 host owns.

    Whatever is no address (a proxy's header can hold any text) is counted together.
    """
    try:
        address = ipaddress.ip_address(client or "")
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), 64), strict=False))


class TooManyFailures(HTTPException):
    """Answer 429 with ``Retry-After``."""

    def __init__(self, client: str | None, wait: float) -> None:
        seconds = max(1, int(-(-wait // 1)))
        super().__init__(
            429,
            f"Found no valid credential from {client}, after many others like it. A caller that "
            "is refused this often is misconfigured, or guesses. Fix: send the right credential "
            f"(it is let in at once), or wait {seconds} s for the answer that tells which.",
            headers={"Retry-After": str(seconds)},
        )
