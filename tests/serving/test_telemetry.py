"""Statistics of a running generator, and the same for Prometheus."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hf_slospec import SLOSpecGenerator
from hf_slospec.serving.telemetry import Telemetry
from tests.support.served_pair import CONFIG, PROMPTS, WAIT_S


@pytest.mark.parametrize("name", ["on_step", "on_end"])
def test_all_is_counted_before_the_result_is_seen(
    name: str, pair: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_submitted, seen, count = threading.Event(), list[tuple[int, str | None]](), getattr(Telemetry, name)

    def watched(telemetry: Telemetry, news: Any) -> None:
        assert is_submitted.wait(WAIT_S)
        seen.append((len(handle.token_ids), handle.finish_reason))
        count(telemetry, news)

    monkeypatch.setattr(Telemetry, name, watched)
    with SLOSpecGenerator(*pair, CONFIG) as generator:
        handle = generator.submit(PROMPTS[0], max_new_tokens=12)
        is_submitted.set()
        assert len(handle.result(WAIT_S).token_ids) == 12
    assert seen
    assert all(num_tokens < 12 and reason is None for num_tokens, reason in seen)


def test_stats_and_prometheus(pair: tuple[Any, Any, Any]) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    target, draft, tokenizer = pair
    generator = SLOSpecGenerator(target, draft, tokenizer, CONFIG)
    assert generator.stats().steps == 0
    assert generator.stats().memory is None
    with generator:
        handles = [generator.submit(p, max_new_tokens=15, slo_tpot=1e3, slo_ttft=1e3) for p in PROMPTS[:3]]
        for handle in handles:
            handle.result(WAIT_S)
        doomed = generator.submit(PROMPTS[0], max_new_tokens=2000)
        doomed.cancel()
        with pytest.raises(Exception, match="cancelled"):
            doomed.result(WAIT_S)
        assert generator.stats().memory.draft_kv > 0
    stats = generator.stats()
    assert stats.memory.staging == 0  # nobody runs
    assert (stats.running, stats.waiting, stats.kv_tokens, stats.kv_limit) == (0, 0, 0, 20_000)
    assert stats.finished == {"length": 3, "cancelled": 1}
    assert (stats.attained, stats.missed, stats.guaranteed, stats.broken) == (3, 0, 3, 0)
    assert stats.generated_tokens >= 45
    assert stats.tpot_s is not None
    assert stats.ttft_s is not None
    registry = prometheus.CollectorRegistry()
    registry.register(generator.collector())
    text = prometheus.generate_latest(registry).decode()
    for line in (
        "hf_slospec:slo_attained_total 3.0",
        "hf_slospec:num_requests_running 0.0",
        'hf_slospec:request_success_total{finished_reason="length"} 3.0',
        'hf_slospec:time_to_first_token_seconds_bucket{le="+Inf"}',
    ):
        assert line in text, text
