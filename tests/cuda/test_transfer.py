"""Signatures of forwards, and copies to the device."""

from __future__ import annotations

import torch

from hf_slospec.cuda.captured import padded
from hf_slospec.cuda.flash import pack
from hf_slospec.model.inputs import ForwardInputs
from hf_slospec.model.transfer import DeviceCopy, flattened, tensors_in
from hf_slospec.model.tree_mask import chain_and_tree
from tests.support.graph_bench import CPU, TREES, Bench, tree
from tests.support.toys.tiny_models import tiny_model


def test_a_forward_of_the_same_sizes_has_the_same_signature_and_of_others_another(tapes):
    bench = Bench(tiny_model("gemma3"))
    plans = bench.packed.eager.find_plans()

    def inputs(trees=TREES):
        pairs = zip(bench.requests, trees, strict=True)
        parts = [
            chain_and_tree(bench.packed, bench.sequences.of(r), r.tokens[-1:], tree(r, parents))
            for r, parents in pairs
        ]
        pool = bench.sequences.cache.pool
        larger = padded(parts, torch.arange(5), pool)
        assert larger is not None
        return ForwardInputs(pool, *larger, is_padded=True).tensors(plans)

    first = inputs()
    assert (
        any(key[0] is pack and key[2] is not None for key in first.plans)
        and len(tensors_in(first)) > 10
    )
    assert flattened(inputs([(-1, 0, 1, 1, 2), (-1,), (-1, 0, 0)]))[1] == flattened(first)[1]
    assert flattened(inputs([(-1, *range(12)), (-1,), (-1,)]))[1] != flattened(first)[1]
    bench.grow(3)
    later = inputs()
    assert flattened(later)[1] == flattened(first)[1]
    assert any(
        not torch.equal(a, b) for a, b in zip(tensors_in(later), tensors_in(first), strict=True)
    )


def test_whatever_the_host_reads_is_in_the_signature():
    def made(**changes):
        values = dict(a=torch.ones(2, 3), n=4, none=None, items=[torch.ones(1)], key=7) | changes
        return {values.pop("key"): values}

    first = flattened(made())[1]
    assert flattened(made(a=torch.zeros(2, 3)))[1] == first
    for changes in (
        dict(a=torch.ones(3, 2)), dict(a=torch.ones(2, 3).bool()), dict(a=torch.ones(2, 3, device="meta")),
        dict(n=5), dict(n=4.0), dict(none=torch.ones(1)), dict(items=[torch.ones(1)] * 2), dict(key=8),
        dict(items=(torch.ones(1),)),
    ):  # fmt: skip
        assert flattened(made(**changes))[1] != first, changes


def test_a_parcel_holds_what_is_put_in():
    def made(start):
        ranges = [torch.arange(start, start + n) for n in (3, 0, 5)]
        return {
            "a": ranges,
            "b": (torch.tensor([[True, False]]), ranges[2].int(), ranges[0].double().view(3, 1)),
            "c": 1,
        }

    parcel = DeviceCopy(made(0), CPU)
    for start in (3, 9):
        parcel.fill(tensors_in(made(start)))
        assert flattened(parcel.content)[1] == flattened(made(start))[1]
        for found, right in zip(tensors_in(parcel.content), tensors_in(made(start)), strict=True):
            assert torch.equal(found, right)
