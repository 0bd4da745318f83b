"""Who may call the plugin's routes."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Mapping

from vllm_parity_plugin.wire import TOKEN_HEADER

FORWARDING_HEADERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


def authorised(
    client_host: str | None, headers: Mapping[str, str], token: str | None, api_keys: list[str]
) -> bool:
    """Whether a caller may use ``/v1/parity``.

    A configured token is always required (or one of the server's API keys). Without a token, a
    caller on loopback is let in, unless a header shows that the request was forwarded: then the
    peer is a proxy and its address says nothing about the caller.

    Args:
        client_host: address of the peer, None when unknown.
        headers: request headers, lower-case names.
        token: ``VLLM_PARITY_TOKEN``.
        api_keys: the server's ``--api-key`` values.
    """
    presented = [headers.get(TOKEN_HEADER, "")]
    scheme, _, credential = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        presented.append(credential.strip())
    accepted = [secret for secret in [token, *api_keys] if secret]
    # All pairs are compared, in constant time each, so that timing tells nothing.
    matches = [
        secrets.compare_digest(offer.encode(), secret.encode())
        for offer in presented
        for secret in accepted
    ]
    if any(matches):
        return True
    if token:
        return False
    return is_loopback(client_host) and not any(name in headers for name in FORWARDING_HEADERS)


def is_loopback(host: str | None) -> bool:
    """Whether the peer address is this machine's loopback (a Unix socket has no address)."""
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
