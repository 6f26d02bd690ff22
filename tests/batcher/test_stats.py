"""Statistics of a running generator, and the same for Prometheus."""

from __future__ import annotations

import threading

import pytest

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.batcher.stats import Telemetry
from tests.support.served_pair import CONFIG, PROMPTS, WAIT_S


@pytest.mark.parametrize("name", ["on_step", "on_end"])
def test_steps_and_ends_are_counted_before_results_are_visible(name, pair, monkeypatch):
    is_submitted = threading.Event()
    seen = []
    count = getattr(Telemetry, name)

    def watched(telemetry, news):
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


def scraped(collector):
    """Return what Prometheus reads of a collector."""
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    registry.register(collector)
    return str(prometheus.generate_latest(registry).decode())


def test_stats_and_prometheus(pair):
    target, draft, tokenizer = pair
    generator = SLOSpecGenerator(target, draft, tokenizer, CONFIG)
    assert generator.stats().steps == 0
    assert generator.stats().memory is None
    with generator:
        handles = [
            generator.submit(p, max_new_tokens=15, slo_tpot=1e3, slo_ttft=1e3) for p in PROMPTS[:3]
        ]
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
    text = scraped(generator.collector())
    for line in (
        "hf_slospec:slo_attained_total 3.0",
        "hf_slospec:num_requests_running 0.0",
        'hf_slospec:request_success_total{finished_reason="length"} 3.0',
        'hf_slospec:time_to_first_token_seconds_bucket{le="+Inf"}',
    ):
        assert line in text, text


def test_speculation_is_counted_by_tree_and_level_as_vllm_does(pair):
    config = SLOSpecConfig(policy="fixed", max_depth=3, max_width=2, kv_tokens=5000)
    with SLOSpecGenerator(*pair, config) as generator:
        handles = [generator.submit(prompt, max_new_tokens=30) for prompt in PROMPTS[:3]]
        commits = [
            commit for handle in handles for commit in handle.result(WAIT_S) and handle.commits
        ]
        stats = generator.stats()
    lengths = [commit.num_accepted for commit in commits if commit.num_nodes > 1]
    assert stats.drafts == len(lengths) > 0
    assert stats.accepted_per_position == [
        sum(length > level for length in lengths) for level in range(max(lengths))
    ]
    assert sum(stats.accepted_per_position) == stats.accepted_tokens > 0
    text = scraped(generator.collector("vllm:"))
    assert f"vllm:spec_decode_num_drafts_total {stats.drafts:.1f}" in text
    first = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {stats.accepted_per_position[0]:.1f}'
    assert first in text
    gaps = len(commits) - len(handles)
    for line in (
        f"vllm:inter_token_latency_seconds_count {gaps}.0",
        "vllm:request_queue_time_seconds_count 3.0",
        "vllm:request_prefill_time_seconds_count 3.0",
        "vllm:request_generation_tokens_sum 90.0",
        "vllm:request_max_num_generation_tokens_sum 90.0",
        'vllm:request_params_max_tokens_bucket{le="50.0"} 3.0',
        "vllm:request_time_per_output_token_seconds_count 3.0",
    ):
        assert line in text, text


def test_phases_of_a_request_add_up(pair):
    with SLOSpecGenerator(*pair, CONFIG) as generator:
        metrics = generator.submit(PROMPTS[0], max_new_tokens=12).result(WAIT_S).metrics
        sums = {
            family.name.removeprefix("hf_slospec:"): sample.value
            for family in generator.collector().collect()
            for sample in family.samples
            if sample.name.endswith("_sum")
        }
    queue_s, prefill_s, decode_s = (
        sums[f"request_{name}_time_seconds"] for name in ("queue", "prefill", "decode")
    )
    assert queue_s + prefill_s == pytest.approx(metrics.ttft_s) and min(queue_s, prefill_s) >= 0.0
    assert prefill_s + decode_s == pytest.approx(sums["request_inference_time_seconds"])
    assert queue_s + prefill_s + decode_s == pytest.approx(metrics.e2e_s)
    assert sums["inter_token_latency_seconds"] == pytest.approx(decode_s)
