"""Addresses of machines, and which of them are loopback addresses."""

from __future__ import annotations

import ipaddress


def is_address(host: str) -> bool:
    """Return whether a host is an IP address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)
