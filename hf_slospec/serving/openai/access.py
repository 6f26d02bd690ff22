"""Access to the server: what a client may do, which texts are its own, and which requests web pages may make."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from hf_slospec.errors import InputModel
from hf_slospec.serving.addresses import is_address, is_loopback
from hf_slospec.serving.openai.answers import error_body
from hf_slospec.serving.openai.bodies import SamplingBody
from hf_slospec.serving.openai.limits import RequestLimits
from hf_slospec.serving.openai.orders import SLOLimits, asked_slos
from hf_slospec.serving.telemetry import PREFIX

ANY = "*"  # among allowed origins or hosts
PREFIX_PATTERN = "^[a-zA-Z_:][a-zA-Z0-9_:]*$"


class Tenant:
    """Clients with one API key: what they may ask for, and what tells their texts from those of other keys."""

    def __init__(self, limits: SLOLimits, key: str, secret: bytes, name: str = ""):
        """``key`` is empty where all clients are one tenant; ``secret`` is the server's own.

        ``name`` tells clients with a key from others without naming the key.
        """
        self.limits, self._key, self._secret, self.name = limits, key, secret, name

    def arguments(self, body: SamplingBody, headers: Mapping[str, str]) -> dict[str, Any]:
        """Return the arguments of ``submit`` that depend on the tenant.

        Raises:
            InvalidInputError: the request asks for more than the key allows.
        """
        self.limits.check_priority(body.priority)
        return self.limits.apply(asked_slos(body, headers)) | {"cache_salt": self.salt(body.cache_salt)}

    def salt(self, asked: str) -> str:
        """Return the salt of texts: a hash of the key and of the salt that the request asks for.

        It depends on a secret, so that no choice of a salt leads to the texts of another key.
        """
        if not self._key and not asked:
            return ""
        return hmac.digest(self._secret, json.dumps([self._key, asked]).encode(), hashlib.sha256).hex()


class AccessOptions(InputModel):
    """Options of an HTTP application that do not depend on its model."""

    api_keys: dict[str, SLOLimits] = Field(
        default_factory=dict, description="Limits by API key; empty: no key is asked for."
    )
    limits: SLOLimits = Field(SLOLimits(), description="Limits where there are no keys.")
    share_prefixes: bool = Field(False, description="Requests of all keys share K/V and suffix trees.")
    allowed_origins: tuple[str, ...] = Field((), description="Origins of web pages that may call the server (CORS).")
    allowed_hosts: tuple[str, ...] = Field(
        (), description="Names by which clients without a key may call the server, beside localhost and addresses."
    )
    special_tokens: Literal["allow", "refuse", "escape"] = Field(
        "allow", description="What to do with special tokens in the texts of chats."
    )
    bounds: RequestLimits = Field(RequestLimits(), description="Limits of what one request may ask for.")
    metrics_prefix: str = Field(PREFIX, pattern=PREFIX_PATTERN)

    def tenant(self, header: str, secret: bytes) -> Tenant | None:
        """Return the tenant of an Authorization header, in a time that does not depend on the key.

        Args:
            secret: of the server; the same in all of its processes.

        Returns:
            None if the key is missing or wrong.
        """
        if not self.api_keys:
            return Tenant(self.limits, "", secret)
        scheme, _, key_given = header.partition(" ")
        given = key_given.strip().encode("latin-1") if scheme.lower() == "bearer" else b""  # as headers are read
        found = None
        for number, (key, limits) in enumerate(self.api_keys.items()):
            if hmac.compare_digest(key.encode(), given):
                found = Tenant(limits, "" if self.share_prefixes else key, secret, f"key {number}")
        return found


OPTIONS = [name for name in AccessOptions.model_fields if name != "api_keys"]  # that are taken over as they are


class OwnPagesOnly:
    """ASGI middleware for a server without keys: refuses what web pages make the browsers of their visitors send.

    Browsers reach addresses that other machines cannot. The header Origin tells a page's requests, except where a name
    of the page's own leads to this machine (DNS rebinding); then Host is that name. Other clients send no Origin.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Sequence[str], allowed_hosts: Sequence[str]):
        self._app, self._origins = app, allowed_origins
        self._hosts = [host.lower() for host in allowed_hosts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        fault = self._fault(Headers(scope=scope)) if scope["type"] == "http" else None
        if fault is None:
            await self._app(scope, receive, send)
        else:
            await JSONResponse(error_body(fault, "permission_error"), 403)(scope, receive, send)

    def _fault(self, headers: Headers) -> str | None:
        """Return why a request is refused; None if it is not."""
        hosts = headers.getlist("host")
        for host in hosts:
            if not self._is_own(host):
                return (
                    f"Host {host!r} is no name of this server, which asks for no API key; call it by its address, "
                    "or start it with --allowed-hosts NAME"
                )
        for origin in headers.getlist("origin"):
            is_own = origin.partition("://")[2].lower() in map(str.lower, hosts)
            if not is_own and origin not in self._origins and ANY not in self._origins:
                return (
                    f"web pages of {origin!r} may not call this server, which asks for no API key; "
                    f"to let them, start it with --allowed-origin {origin}"
                )
        return None

    def _is_own(self, host: str) -> bool:
        """Return whether a Host header names this server, and cannot be another site's name for it."""
        if ANY in self._hosts:
            return True
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return is_loopback(name) or is_address(name) or name in self._hosts
