"""Web pages and a server without keys: pages of others cannot drive it, and other clients need
nothing new.
"""

from __future__ import annotations

import http.client
import json

import httpx
import pytest

from hf_slospec.server.app import ServerSettings
from hf_slospec.server.options import ServeOptions, SLOLimits
from tests.server.conftest import serving

PAGE = "https://page.example"
BODY = json.dumps({"prompt": "x", "max_tokens": 1})


@pytest.fixture(scope="module")
def url(generator):
    with serving(
        generator, allowed_origins=("https://friend.example",), allowed_hosts=("Box.lan",)
    ) as served:
        yield served.url


def answer(url, path="/v1/completions", method="POST", **headers):
    """Return status and body of a request with exactly these headers; a Host of "" is left out."""
    address = url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=120.0)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    content = BODY.encode() if method == "POST" else b""
    own = {
        "Host": address,
        "Content_Type": "application/json",
        "Content_Length": str(len(content)),
    } | headers
    for name, value in own.items():
        if value:
            connection.putheader(name.replace("_", "-"), value)
    connection.endheaders(content)
    response = connection.getresponse()
    status = response.status
    text = response.read()
    connection.close()
    return status, json.loads(text) if text else {}


def said(url, **request):
    """Return the message of a request that is refused."""
    status, body = answer(url, **request)
    assert status in (403, 415), body
    return body["error"]["message"]


@pytest.mark.parametrize(
    "origin", [PAGE, "null", "http://localhost:3000", "http://127.0.0.1", "file://", "x"]
)
@pytest.mark.parametrize("kind", ["text/plain;charset=UTF-8", "application/json"])
def test_pages_of_others_run_nothing(url, generator, origin, kind):
    before = generator.stats().finished
    assert origin in said(url, Origin=origin, Content_Type=kind)
    assert generator.stats().finished == before


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_bodies_must_say_that_they_are_json(url, kind):
    assert "application/json" in said(url, Content_Type=kind)
    assert answer(url, Content_Type="application/JSON; charset=utf-8")[0] == 200


@pytest.mark.parametrize("host", ["page.example", "page.example:80", "localhost.page.example",
                                  "127.0.0.1.page.example", "127.1", "2130706433", "[::1",
                                  "localhost@page.example"])  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/completions", "/metrics", "/v1/models"])
def test_names_of_others_lead_nowhere(url, host, path):
    method = "POST" if path.endswith("completions") else "GET"
    assert host in said(url, path=path, method=method, Host=host)
    assert host in said(url, path=path, method=method, Host=host, Origin=f"http://{host}")


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "192.168.1.7", "box.lan:80"],
)
def test_names_of_this_machine_and_addresses_are_its_own(url, host):
    assert answer(url, Host=host)[0] == 200
    assert answer(url, Host=host, Origin=f"http://{host}")[0] == 200, "a page of its own"


def test_pages_that_are_allowed_may_call(url):
    origin = {"Origin": "https://friend.example"}
    assert answer(url, **origin)[0] == 200
    headers = (
        httpx.get(f"{url}/v1/models", headers=origin)
        .headers["access-control-expose-headers"]
        .lower()
    )
    assert set(headers.split(", ")) == {"retry-after", "x-slo-guaranteed", "x-slo-attained"}
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    found = httpx.options(f"{url}/v1/completions", headers=origin | asked)
    assert (
        found.status_code == 200
        and found.headers["access-control-allow-origin"] == origin["Origin"]
    )
    assert (
        httpx.options(f"{url}/v1/completions", headers={"Origin": PAGE} | asked).status_code == 403
    )


def test_with_keys_any_name_will_do(generator):
    with serving(generator, api_keys={"key": SLOLimits()}) as served:
        request = {"Host": "llm.example", "Origin": "https://app.example"}
        assert answer(served.url, **request)[0] == 401
        assert answer(served.url, Authorization="Bearer key", **request)[0] == 200


def test_name_that_is_listened_on_is_allowed():
    options = ServeOptions(host="box.lan", no_api_key=True, allowed_hosts=("llm.lan",))
    assert ServerSettings.of(options).allowed_hosts == ("box.lan", "llm.lan")
