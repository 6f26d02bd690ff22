"""OpenTelemetry's GenAI spans and metrics of requests, recorded at their ends; the environment says where they go.

Nothing that clients or the model wrote is recorded.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import hf_slospec
from hf_slospec.errors import InvalidInputError, MissingExtraError
from hf_slospec.extras import need
from hf_slospec.serving.openai.answers import usage
from hf_slospec.serving.openai.bodies import ChatBody, SamplingBody
from hf_slospec.serving.openai.choices import Choice

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

logger = logging.getLogger(__name__)
End = Callable[[Sequence[Choice], BaseException | None], None]  # records the end of a request

PROVIDER = "hf_slospec"
ENDPOINT = "OTEL_EXPORTER_OTLP{}_ENDPOINT"
SWITCHES = (  # variables that turn this on
    *("OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER"),
    *(ENDPOINT.format(signal) for signal in ("", "_TRACES", "_METRICS")),
)
# Units and bounds of the histograms by name, as in the semantic conventions.
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "gen_ai.client.token.usage": ("{token}", [float(4**power) for power in range(14)]),
    "gen_ai.server.request.duration": ("s", [0.01 * 2**power for power in range(14)]),
    "gen_ai.server.time_to_first_token": (
        "s",
        [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0],
    ),
    "gen_ai.server.time_per_output_token": (
        "s",
        [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5],
    ),
}
ASKED = ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed", "stream")


class Observer:
    """Observer of requests; this one records nothing."""

    def begin(self, body: SamplingBody, headers: Mapping[str, str], answer_id: str) -> End:
        """Begin the record of a request, and return the function that ends it."""
        return lambda choices, error: None

    def flush(self) -> None:
        """Send what has been recorded, before the process ends."""


class GenAITelemetry(Observer):
    """Records each request as a span, and in histograms."""

    def __init__(self, model: str, tracers: TracerProvider, meters: MeterProvider):
        """Create tracer and histograms; ``model`` is the served name."""
        self._model, self._providers = model, (tracers, meters)
        self._tracer = tracers.get_tracer(PROVIDER, hf_slospec.__version__)
        meter = meters.get_meter(PROVIDER, hf_slospec.__version__)
        self._histograms = {
            name: meter.create_histogram(name, unit, explicit_bucket_boundaries_advisory=bounds)
            for name, (unit, bounds) in HISTOGRAMS.items()
        }

    def begin(self, body: SamplingBody, headers: Mapping[str, str], answer_id: str) -> End:
        """Begin a span in the current one or, without it, the one that the headers name; return what ends it."""
        from opentelemetry.context import get_current
        from opentelemetry.propagate import extract
        from opentelemetry.trace import get_current_span

        has_parent = get_current_span().get_span_context().is_valid  # that of FastAPI or of an instrumentation
        context = get_current() if has_parent else extract(headers)
        return partial(self._end, body, context, answer_id, time.time_ns())

    def flush(self) -> None:
        """Send what has been recorded; providers of the API alone have nothing to send."""
        for provider in self._providers:
            if (flush := getattr(provider, "force_flush", None)) is not None:
                flush()

    def _end(
        self,
        body: SamplingBody,
        context: Any,
        answer_id: str,
        begun_ns: int,
        choices: Sequence[Choice],
        error: BaseException | None,
    ) -> None:
        from opentelemetry.trace import SpanKind, StatusCode

        operation = "chat" if isinstance(body, ChatBody) else "text_completion"
        common: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
        }
        if (kind := _error_type(choices, error)) is not None:
            common["error.type"] = kind
        span = self._tracer.start_span(
            f"{operation} {self._model}", context, SpanKind.SERVER, start_time=begun_ns,
            attributes=common | _asked(body) | _answered(answer_id, choices),
        )  # fmt: skip
        if kind is not None:
            span.set_status(StatusCode.ERROR)
        ended_ns = time.time_ns()
        span.end(ended_ns)
        for name, value, further in _measured(choices, (ended_ns - begun_ns) / 1e9, kind is None):
            self._histograms[name].record(value, common | further)


def _error_type(choices: Sequence[Choice], error: BaseException | None) -> str | None:
    """Return a class of errors; None for a request that was answered, or whose stream its client left."""
    if error is not None:
        return type(error).__name__
    is_failed = any(choice.decoding.finish_reason == "error" for choice in choices)
    return "_OTHER" if is_failed else None  # the conventions' value for errors without a class


def _asked(body: SamplingBody) -> dict[str, Any]:
    """Return a span's attributes of a request."""
    asked = {name: getattr(body, name) for name in ASKED if name in body.model_fields_set}
    asked["max_tokens"] = getattr(body, "max_completion_tokens", None) or body.max_tokens
    asked["choice.count"] = body.n if body.n > 1 else None
    return {f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None}


def _answered(answer_id: str, choices: Sequence[Choice]) -> dict[str, Any]:
    """Return a span's attributes of an answer, whole or in part."""
    if not choices:
        return {}
    counts, metrics = usage(choices), [choice.decoding.metrics for choice in choices]
    attained = [one.attained for one in metrics if one.attained is not None]
    answered: dict[str, Any] = {
        "gen_ai.response.id": answer_id,
        "gen_ai.response.finish_reasons": [str(choice.decoding.finish_reason or "cancelled") for choice in choices],
        "gen_ai.response.time_to_first_chunk": metrics[0].ttft_s,
        "gen_ai.usage.input_tokens": counts["prompt_tokens"],
        "gen_ai.usage.output_tokens": counts["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": counts["prompt_tokens_details"]["cached_tokens"],
        "gen_ai.usage.reasoning.output_tokens": counts["completion_tokens_details"]["reasoning_tokens"],
        "hf_slospec.drafted_tokens": sum(one.drafted for one in metrics),
        "hf_slospec.accepted_tokens": sum(one.accepted for one in metrics),
        "hf_slospec.slo.guaranteed": all(one.guaranteed for one in metrics),
        "hf_slospec.slo.attained": all(attained) if attained else None,
    }
    return {name: value for name, value in answered.items() if value is not None}


def _measured(
    choices: Sequence[Choice], duration_s: float, is_answered: bool
) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """Yield histogram, value and further attributes of what a request adds to the metrics."""
    yield "gen_ai.server.request.duration", duration_s, {}
    if not choices or not is_answered:
        return
    counts = usage(choices)
    for token_type, name in (("input", "prompt_tokens"), ("output", "completion_tokens")):
        yield "gen_ai.client.token.usage", counts[name], {"gen_ai.token.type": token_type}
    for metrics in (choice.decoding.metrics for choice in choices):
        if metrics.ttft_s is not None:
            yield "gen_ai.server.time_to_first_token", metrics.ttft_s, {}
        if metrics.tpot_s is not None:
            yield "gen_ai.server.time_per_output_token", metrics.tpot_s, {}


def observer_by_environment(model: str, is_wanted: bool) -> Observer:
    """Return what records requests with OpenTelemetry's global providers, if a variable or ``is_wanted`` turns it on.

    Unless the process has such providers, as under ``opentelemetry-instrument``, they are made with the exporters that
    the environment names. Variables may be meant for other programs: where a package is missing, they alone log a
    warning.

    Raises:
        MissingExtraError, InvalidInputError: it is wanted, and the extra ``otel`` or an exporter is missing.
    """
    named = [name for name in SWITCHES if os.environ.get(name)]
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or not (is_wanted or named):
        return Observer()
    try:
        need("otel", "--otel")
        return GenAITelemetry(model, _tracers(), _meters())
    except (MissingExtraError, InvalidInputError) as error:
        if is_wanted:
            raise
        logger.warning("%s is set, but no spans and metrics are sent: %s", named[0], error)
        return Observer()


def _tracers() -> TracerProvider:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return trace.get_tracer_provider()
    tracers = TracerProvider()
    for exporter in _exporters("traces"):
        tracers.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(tracers)
    return tracers


def _meters() -> MeterProvider:
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader

    if isinstance(meters := metrics.get_meter_provider(), MeterProvider):
        return meters
    exporters = _exporters("metrics")
    meters = MeterProvider(
        [each if isinstance(each, MetricReader) else PeriodicExportingMetricReader(each) for each in exporters]
    )
    metrics.set_meter_provider(meters)
    return meters


def _exporters(signal: str) -> Iterator[Any]:
    """Yield the exporters of ``traces`` or ``metrics`` that the environment names; OTLP over HTTP by default."""
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    for name in os.environ.get(variable, "otlp").split(","):
        name = name.strip()
        if name == "otlp":
            protocols = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
            protocol = next((os.environ[key] for key in protocols if os.environ.get(key)), "http/protobuf")
            name = f"otlp_proto_{protocol.partition('/')[0]}"
        if name in ("", "none"):
            continue
        found = entry_points(group=f"opentelemetry_{signal}_exporter", name=name)
        if not found:
            raise InvalidInputError(
                f"{variable}: the exporter {name!r} is not installed; pip install "
                f"opentelemetry-exporter-{name.replace('_', '-')}, or name another one (otlp, console, none)"
            )
        yield next(iter(found)).load()()
