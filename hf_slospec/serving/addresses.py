"""Addresses of machines: which of them lead to this machine only."""

from __future__ import annotations

import ipaddress


def is_address(host: str) -> bool:
    """Return whether a host is written as an IP address, and not as a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)
