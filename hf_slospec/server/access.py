"""Access control: API keys with their limits and cache salts, and refusal of requests that other
sites' web pages send.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from hf_slospec.server.answers import error_body
from hf_slospec.server.bodies import SamplingBody
from hf_slospec.server.options import (
    AccessOptions,
    Objective,
    ServerOptions,
    SLOLimits,
    is_address,
    is_loopback,
)
from hf_slospec.server.orders import asked_slos

ANY = "*"  # in allowed_origins or allowed_hosts: all are allowed


@dataclass(frozen=True)
class Tenant:
    """All clients that use one API key. Their requests have the same limits, and share no K/V with
    requests of other keys.
    """

    limits: SLOLimits
    key: str  # the API key; empty if all clients are one tenant
    secret: bytes  # salts are derived from it; all processes of the server share it
    name: str = ""  # identifies the key without revealing it; for fair scheduling

    def arguments(
        self, body: SamplingBody, headers: Mapping[str, str], objective: Objective
    ) -> dict[str, Any]:
        """Return the arguments of ``submit`` that depend on the tenant or the request's objective:
        SLOs, priority, ``best_effort`` and cache salt.

        Raises:
            InvalidInputError: the request asks for more than the key allows.
        """
        ranks = {
            name: getattr(body if name in body.model_fields_set else objective, name)
            for name in ("priority", "best_effort")
        }
        self.limits.check_priority(ranks["priority"])
        slos = self.limits.apply(asked_slos(body, headers, objective))
        return slos | ranks | {"cache_salt": self.salt(body.cache_salt)}

    def salt(self, requested: str) -> str:
        """Return the cache salt for ``submit``: a hash of the API key and the requested salt.

        It depends on the server's secret, so no client can request a salt that gives the same hash
        as another key. Empty if there is neither key nor requested salt.
        """
        if not self.key and not requested:
            return ""
        return hmac.digest(
            self.secret, json.dumps([self.key, requested]).encode(), hashlib.sha256
        ).hex()


class ServerSettings(AccessOptions):
    """Settings of the HTTP application: its access options, and the name of the model."""

    model_name: str
    # key of the hashes that are used as cache salts
    secret: bytes = Field(default_factory=partial(secrets.token_bytes, 32), repr=False)

    @classmethod
    def of(cls, options: ServerOptions) -> ServerSettings:
        access = {name: getattr(options, name) for name in AccessOptions.model_fields}
        return cls(model_name=options.name, **access | {"allowed_hosts": options.hosts})

    def tenant(self, header: str) -> Tenant | None:
        """Return the tenant of an Authorization header; None if its key is missing or wrong. The
        time does not depend on the key, so that it cannot be guessed from response times.
        """
        if not self.api_keys:
            return Tenant(self.limits, "", self.secret)
        scheme, _, credentials = header.partition(" ")
        # latin-1 is the encoding of HTTP headers
        sent = credentials.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
        tenant = None
        for number, (key, limits) in enumerate(self.api_keys.items()):
            if hmac.compare_digest(key.encode(), sent):
                shared_key = "" if self.share_prefixes else key
                tenant = Tenant(limits, shared_key, self.secret, f"key {number}")
        return tenant


class OwnPagesOnly:
    """ASGI middleware for a server without API keys: refuses requests that a browser sends on
    behalf of another site's web page.

    A visitor's browser may reach this server where the site cannot. Its requests name the site in
    the header Origin or, after DNS rebinding, in Host. Clients other than browsers send no Origin.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Sequence[str], allowed_hosts: Sequence[str]):
        self._app = app
        self._origins = allowed_origins
        self._hosts = [host.lower() for host in allowed_hosts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fault = self._fault(Headers(scope=scope)) if scope["type"] == "http" else None
        if fault is None:
            await self._app(scope, receive, send)
        else:
            await JSONResponse(error_body(fault, "permission_error"), 403)(scope, receive, send)

    def _fault(self, headers: Headers) -> str | None:
        """Return the reason to refuse a request; None if it is allowed."""
        hosts = headers.getlist("host")
        for host in hosts:
            if not self._is_this_server(host):
                return (
                    f"Host {host!r} is no name of this server, which asks for no API key; call it by its address, "
                    "or start it with --allowed-hosts NAME"
                )
        for origin in headers.getlist("origin"):
            is_same_site = origin.partition("://")[2].lower() in map(str.lower, hosts)
            if not is_same_site and origin not in self._origins and ANY not in self._origins:
                return (
                    f"web pages of {origin!r} may not call this server, which asks for no API key; "
                    f"to let them, start it with --allowed-origin {origin}"
                )
        return None

    def _is_this_server(self, host: str) -> bool:
        """Return True if a Host header is an address, a loopback name or an allowed name. Any other
        name may be another site's, which resolves to this server's address (DNS rebinding).
        """
        if ANY in self._hosts:
            return True
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return is_loopback(name) or is_address(name) or name in self._hosts
