"""Forwards padded to few sizes, and the contents of the padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.cuda.captured import MAX_PADDING_SLOTS, SHORT, padded
from hf_slospec.cuda.graphs import BATCHES, BUCKETS, bucket_for
from hf_slospec.model.batch import CachedSequence, NewTokens
from hf_slospec.model.kv_cache import KVPool
from tests.support.breadth import quick_or
from tests.support.graph_bench import Bench
from tests.support.toys.tiny_models import tiny_model


def fresh(length):
    return NewTokens(
        CachedSequence(0, 999),
        torch.ones(length),
        torch.ones(length),
        torch.ones(length, length).bool(),
    )


@given(st.lists(st.integers(1, 20), min_size=1, max_size=64), st.data())
@settings(max_examples=quick_or(66, 200))
def test_padded_batches_have_few_sizes(lengths, data):
    pool = KVPool([], 1000, MAX_PADDING_SLOTS)
    parts = [fresh(length) for length in lengths]
    num_logits = data.draw(st.integers(0, sum(lengths)))
    larger = padded(parts, torch.arange(num_logits), pool)
    if larger is None:
        assert (
            sum(lengths) > BUCKETS[-1] - 16
        )  # padding sequences that the number of sequences needs
        return
    more, logit_rows = larger
    assert more[: len(parts)] == parts and (len(more) in BATCHES or len(more) == len(parts) + 1)
    assert sum(len(part.input_ids) for part in more) in BUCKETS and len(logit_rows) in (
        0,
        1,
        *BUCKETS,
    )
    assert (
        logit_rows[:num_logits].tolist() == list(range(num_logits))
        and not logit_rows[num_logits:].any()
    )
    slots = [slot for added in more[len(parts) :] for slot in own_slots(added)]
    assert slots == list(range(1000, 1000 + len(slots))) and len(slots) <= MAX_PADDING_SLOTS
    for added in more[len(parts) :]:
        assert 1 <= len(added.input_ids) <= max(bucket_for(max(lengths)), SHORT)
        assert torch.equal(added.mask, torch.eye(len(added.input_ids)).bool())


@pytest.mark.parametrize("num_requests", [1, 5, 33, 64, 65, 80])
def test_levels_of_drafts_and_short_steps_have_a_size(num_requests):
    pool = KVPool([], 1000, MAX_PADDING_SLOTS)
    for num_tokens in range(num_requests, 4 * num_requests + 1):
        lengths = [
            num_tokens * (i + 1) // num_requests - num_tokens * i // num_requests
            for i in range(num_requests)
        ]
        larger = padded([fresh(length) for length in lengths], torch.arange(num_tokens), pool)
        assert larger is not None
        assert sum(len(part.input_ids) for part in larger[0]) <= max(32, 2 * num_tokens), (
            "mostly padding"
        )


def own_slots(part):
    start = part.sequence.start + part.sequence.length
    return range(start, start + len(part.input_ids))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_padding_reads_and_writes_no_other_slots(family, tapes):
    """Whatever their slots hold; before the capture, with it, and replayed as texts grow over their
    window.
    """
    ours = Bench(tiny_model(family))
    plain = Bench(tiny_model(family), cuda_graphs=False)
    pool = ours.sequences.cache.pool
    for _ in range(8):
        own = [slot for part in ours.parts() for slot in own_slots(part)]
        others = torch.ones(pool.num_slots, dtype=torch.bool).index_fill(
            0, torch.tensor(own), False
        )
        before = [stored[: pool.num_slots].clone() for stored in (*pool.keys, *pool.values)]
        for stored in (*pool.keys, *pool.values):
            stored[pool.num_slots :] = torch.nan
        torch.testing.assert_close(ours.verify(), plain.verify())
        for stored, old in zip((*pool.keys, *pool.values), before, strict=True):
            assert torch.equal(stored[: pool.num_slots][others], old[others])
            assert (
                not torch.equal(stored[own], old[own])
                and not stored[: pool.num_slots].isnan().any()
            )
        ours.grow(2)
        plain.grow(2)
        ours.sequences.check(ours.requests)
    assert tapes.num_replayed > tapes.num_captured > 0
