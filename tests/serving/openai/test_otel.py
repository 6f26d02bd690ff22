"""Spans and metrics by OpenTelemetry's SDK, read by its in-memory exporters."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, NamedTuple

import openai
import pytest

from hf_slospec import InvalidInputError, MissingExtraError, SLOSpecGenerator, extras
from hf_slospec.serving.openai import app as server
from hf_slospec.serving.openai import otel
from hf_slospec.serving.openai.access import ServerSettings
from hf_slospec.serving.openai.bodies import CompletionBody
from hf_slospec.serving.openai.engine import LocalEngine
from tests.serving.openai.conftest import Served, serving
from tests.serving.openai.hostile.clients import wait_until

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

MESSAGES: Any = [{"role": "user", "content": "def secret():"}]


class Observed(NamedTuple):
    served: Served
    exporter: InMemorySpanExporter
    reader: InMemoryMetricReader

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.served.url}/v1", api_key="none", max_retries=0)

    def span(self) -> Any:
        """Return the only finished span, and forget it; that of a stream may end after the client has read it."""
        wait_until(lambda: len(self.exporter.get_finished_spans()) > 0)
        (span,) = self.exporter.get_finished_spans()
        self.exporter.clear()
        return span

    def points(self) -> dict[str, list[Any]]:
        """Return the points of all histograms by name."""
        data = json.loads(self.reader.get_metrics_data().to_json())
        (scope,) = data["resource_metrics"][0]["scope_metrics"]
        return {metric["name"]: metric["data"]["data_points"] for metric in scope["metrics"]}


@pytest.fixture
def observed(generator: SLOSpecGenerator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Observed]:
    exporter, reader, tracers = InMemorySpanExporter(), InMemoryMetricReader(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = otel.GenAITelemetry("tiny", tracers, MeterProvider([reader]))
    monkeypatch.setattr(server, "observer_by_environment", lambda model, is_wanted: telemetry)
    for served in serving(generator, ServerSettings(model_name="tiny")):
        yield Observed(served, exporter, reader)


def test_a_chat_is_a_span_and_adds_to_the_histograms(observed: Observed) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with observed.client as client:
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_completion_tokens=12, temperature=0, seed=3,
            extra_body={"slo_tpot": 60.0}, extra_headers={"traceparent": parent},
        )  # fmt: skip
    usage, span = answer.usage, observed.span()
    assert usage is not None
    assert span.name == "chat tiny" and span.kind is SpanKind.SERVER and span.status.status_code is StatusCode.UNSET
    assert f"{span.context.trace_id:032x}" in parent and f"{span.parent.span_id:016x}" in parent
    expected = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "hf_slospec",
        "gen_ai.request.model": "tiny", "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 12, "gen_ai.request.temperature": 0.0, "gen_ai.request.seed": 3,
        "gen_ai.response.id": answer.id, "gen_ai.response.finish_reasons": (answer.choices[0].finish_reason,),
        "gen_ai.usage.input_tokens": usage.prompt_tokens, "gen_ai.usage.output_tokens": usage.completion_tokens,
        "hf_slospec.slo.guaranteed": True, "hf_slospec.slo.attained": True,
    }  # fmt: skip
    assert expected.items() <= dict(span.attributes).items()
    assert 0 < span.end_time - span.start_time < 600e9
    text = answer.choices[0].message.content
    assert text and "secret" not in span.to_json() and text not in span.to_json()
    points = observed.points()
    totals = {point["attributes"]["gen_ai.token.type"]: point["sum"] for point in points["gen_ai.client.token.usage"]}
    assert totals == {"input": usage.prompt_tokens, "output": usage.completion_tokens}
    metrics: Any = answer.model_dump()["metrics"]
    for name, field in (("time_to_first_token", "time_to_first_token_ms"), ("time_per_output_token", "mean_itl_ms")):
        (point,) = points[f"gen_ai.server.{name}"]
        assert point["sum"] == pytest.approx(metrics[field] / 1e3, abs=1e-6) and point["count"] == 1
        assert point["explicit_bounds"] == list(otel.HISTOGRAMS[f"gen_ai.server.{name}"][1])


def test_streams_responses_and_completions_are_spans_when_they_end(observed: Observed) -> None:
    with observed.client as client:
        for _ in client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=6, stream=True):
            pass
        span = observed.span()
        assert span.attributes["gen_ai.request.stream"] and span.attributes["gen_ai.usage.output_tokens"] == 6
        client.responses.create(model="tiny", input="x", max_output_tokens=4)
        assert observed.span().name == "chat tiny"
        client.completions.create(model="tiny", prompt="x", max_tokens=4, n=2)
    span = observed.span()
    assert span.name == "text_completion tiny" and span.attributes["gen_ai.request.choice.count"] == 2
    assert span.attributes["gen_ai.usage.output_tokens"] == 8
    assert [point["count"] for point in observed.points()["gen_ai.server.time_to_first_token"]] == [2, 2]


def test_errors_have_a_type_and_no_tokens(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    with observed.client as client, pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="x", max_tokens=10**6)
    span = observed.span()
    assert span.status.status_code is StatusCode.ERROR and span.attributes["error.type"] == "ContextOverflowError"
    points = observed.points()
    (point,) = points["gen_ai.server.request.duration"]
    assert point["attributes"]["error.type"] == "ContextOverflowError" and "gen_ai.client.token.usage" not in points


def test_the_end_of_the_server_sends_what_is_left(generator: SLOSpecGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, tracers = InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1e6))
    telemetry = otel.GenAITelemetry("tiny", tracers, MeterProvider([]))
    monkeypatch.setattr(server, "observer_by_environment", lambda model, is_wanted: telemetry)
    app = server.make_app(LocalEngine(generator), ServerSettings(model_name="tiny"))

    async def run() -> None:
        async with app.router.lifespan_context(app):
            telemetry.begin(CompletionBody(prompt="x"), {}, "id")([], None)
            assert not exporter.get_finished_spans()

    asyncio.run(run())
    assert len(exporter.get_finished_spans()) == 1
    tracers.shutdown()


def test_it_is_off_unless_turned_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in (*otel.SWITCHES, "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    assert type(otel.observer_by_environment("tiny", False)) is otel.Observer
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "nonsense")
    assert type(otel.observer_by_environment("tiny", False)) is otel.Observer
    assert "OTEL_TRACES_EXPORTER is set" in caplog.text and "opentelemetry-exporter-nonsense" in caplog.text
    with pytest.raises(InvalidInputError, match="nonsense"):
        otel.observer_by_environment("tiny", True)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert type(otel.observer_by_environment("tiny", True)) is otel.Observer
    monkeypatch.delenv("OTEL_SDK_DISABLED")
    monkeypatch.setitem(extras.MODULES, "otel", ("opentelemetry_that_is_missing.sdk",))
    with pytest.raises(MissingExtraError, match="otel"):
        otel.observer_by_environment("tiny", True)


ONE_REQUEST = (
    "from hf_slospec.serving.openai import otel\n"
    "from hf_slospec.serving.openai.bodies import CompletionBody\n"
    "observer = otel.observer_by_environment('tiny', False)\n"
    "observer.begin(CompletionBody(prompt='x', max_tokens=3), {}, 'id')([], ValueError('x'))\n"
)


def record_one_request(**variables: str) -> str:
    """Record a request in a process with these variables, and return what it printed."""
    run = subprocess.run(
        [sys.executable, "-c", ONE_REQUEST], env=os.environ | {"OTEL_SERVICE_NAME": "here"} | variables,
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return run.stdout


def test_the_environment_names_the_exporters() -> None:
    printed = record_one_request(OTEL_TRACES_EXPORTER="console", OTEL_METRICS_EXPORTER="console")
    assert '"text_completion tiny"' in printed and '"service.name": "here"' in printed
    assert "gen_ai.server.request.duration" in printed


def test_spans_and_histograms_arrive_by_otlp_over_http() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received: dict[str, bytes] = {}

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Receiver) as receiver:
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        record_one_request(OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{receiver.server_port}")
        receiver.shutdown()
    (spans,) = ExportTraceServiceRequest.FromString(received["/v1/traces"]).resource_spans
    (span,) = spans.scope_spans[0].spans
    attributes = {each.key: each.value for each in span.attributes}
    assert any(each.key == "service.name" and each.value.string_value == "here" for each in spans.resource.attributes)
    assert span.name == "text_completion tiny" and attributes["gen_ai.request.max_tokens"].int_value == 3
    (metrics,) = ExportMetricsServiceRequest.FromString(received["/v1/metrics"]).resource_metrics
    (metric,) = metrics.scope_metrics[0].metrics
    assert (metric.name, metric.unit) == ("gen_ai.server.request.duration", "s")
    assert metric.histogram.data_points[0].count == 1


def test_names_are_those_of_the_semantic_conventions(observed: Observed) -> None:
    attributes = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    metrics = pytest.importorskip("opentelemetry.semconv._incubating.metrics.gen_ai_metrics")
    known = {value for module in (attributes, metrics) for value in vars(module).values() if isinstance(value, str)}
    with observed.client as client:
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=6, temperature=0.5, top_p=0.9, seed=1
        )
    written = {*observed.span().attributes, *otel.HISTOGRAMS, "gen_ai.token.type"}
    assert {name for name in written if name.startswith("gen_ai.")} <= known
