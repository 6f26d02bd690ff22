"""The Triton kernel for trees, run by Triton's interpreter, against attention of every token alone."""

from __future__ import annotations

import os

import pytest
import torch

from hf_slospec.cuda import tree_attention, tree_kernels
from hf_slospec.cuda.tree_attention import MIN_WIDTH, TreeAttention, plan_tree
from hf_slospec.errors import UnsupportedOptionError
from hf_slospec.model.batch import AttentionRules, CachedSequence, PackedBatch, Span
from hf_slospec.model.transfer import flattened
from tests.support.oracles.attention_rows import BRANCHING, CHAIN, OPTIONS, ROOT, TOLERANCE, case
from tests.support.packed import packed_model
from tests.support.stand_ins.triton import tree_attention_stand_in
from tests.support.toys.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled: see tests/gpu"
)
SPANS = [
    (7, 1, BRANCHING),
    (0, 3, CHAIN),
    (5, 1, ROOT),
]  # tokens committed, tokens of a chain, the tree at its end
SHAPES = [(4, 2, 16, 16), (6, 2, 24, 8), (3, 1, 8, 8)]  # query heads, KV heads, key_dim, value_dim


def check(  # type: ignore[no-untyped-def]
    spans, heads, dtype, is_padded=False, by_path=False, window=None, softcap=None, has_sinks=False, chunk=None,
    kernel=None
):  # fmt: skip
    num_heads, num_kv_heads, key_dim, value_dim = heads
    made = case(spans, num_kv_heads, key_dim, value_dim, dtype)
    made.row.is_padded = is_padded
    query = torch.randn(num_heads, len(made.tokens), key_dim, dtype=dtype)
    sinks = torch.randn(num_heads) if has_sinks else None
    by_position = window is not None or chunk is not None
    plan = plan_tree(made.row, window is not None, by_position, num_heads // num_kv_heads, by_path)
    rules = AttentionRules(key_dim**-0.5, window, softcap, sinks, chunk)
    out = (kernel or tree_kernels.tree_attention)(query, made.keys, made.values, plan, rules)
    assert out.dtype == dtype
    atol = TOLERANCE[dtype] * float(made.values.abs().max())
    torch.testing.assert_close(out.float(), made.expected(query, rules), rtol=0, atol=atol)


@pytest.fixture(params=[1, 3], ids=["whole", "split"])
def num_splits(request, monkeypatch):
    """Set the number of parts into which the kernel divides the keys of a sequence."""
    monkeypatch.setattr(tree_kernels, "ENOUGH_PROGRAMS", 10**6)
    monkeypatch.setattr(tree_kernels, "MAX_SPLITS", request.param)


CASES = {
    **{name: (SPANS, SHAPES[0], torch.float32, options) for name, options in OPTIONS.items()},
    "groups of three": (SPANS[:2], SHAPES[1], torch.float32, {}),
    "heads of 8": (SPANS[:2], SHAPES[2], torch.float32, {}),
    "bf16": (SPANS[:2], SHAPES[0], torch.bfloat16, dict(has_sinks=True)),
    "fp16": (SPANS[:2], SHAPES[0], torch.float16, dict(has_sinks=True)),
    "padded": (SPANS, SHAPES[0], torch.float32, dict(is_padded=True, window=6)),
    "several tiles": ([(5, 40, ROOT), (0, 1, BRANCHING)], SHAPES[0], torch.float32, {}),
}


@pytest.mark.usefixtures("num_splits")
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_attention_of_every_token_alone(name):
    *case, options = CASES[name]
    check(*case, **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_the_stand_in_equals_attention_of_every_token_alone(heads, options):
    check(SPANS, heads, torch.float32, kernel=tree_attention_stand_in, **options)


def test_sizes_of_a_padded_plan_do_not_depend_on_lengths():
    """Or each of them would need a captured forward of its own."""
    plans = []
    for prefix_len, tree in ((3, BRANCHING), (900, BRANCHING), (40, CHAIN)):
        made = case([(prefix_len, 1, tree), (1, 7 - tree.num_nodes, ROOT)], 2, 8, 8)
        made.row.is_padded = True
        plans.append(plan_tree(made.row, False, False, 2))
    assert flattened(plans[0])[1] == flattened(plans[1])[1] == flattened(plans[2])[1]
    assert plans[0].mask.shape[1] == MIN_WIDTH


def test_triton_is_refused_without_cuda():
    with pytest.raises(
        UnsupportedOptionError, match=r'attention="triton" is not available: .* needs a CUDA device'
    ):
        packed_model(tiny_model("llama"), "triton")


def test_layers_beyond_the_kernel_use_sdpa(monkeypatch):
    monkeypatch.setattr(tree_attention, "MAX_DIM", 8)
    made = case(SPANS, 2, 16, 16)
    query = torch.randn(4, len(made.tokens), 16)
    out = TreeAttention()(query, made.keys, made.values, made.row, AttentionRules(0.25))
    torch.testing.assert_close(out, made.expected(query, AttentionRules(0.25)), rtol=0, atol=1e-5)
    assert plan_tree not in {make for make, *_ in made.row.plans}


PATHS = [
    (60, 1, CHAIN),
    (61, 9, ROOT),
    (7, 58, BRANCHING),
]  # all of them pass a multiple of 64 keys


@pytest.mark.parametrize(
    ("heads", "options"),
    [
        (SHAPES[1], {}),
        ((40, 2, 8, 8), OPTIONS["window"]),
        (SHAPES[0], dict(window=1, has_sinks=True)),
    ],
)
def test_paths_equal_masks(heads, options):
    check(PATHS, heads, torch.float32, by_path=True, **options)


@pytest.mark.parametrize(
    ("dtype", "groups", "options"),
    [
        (torch.float32, 1, {}),
        pytest.param(torch.float16, 3, dict(window=6, softcap=2.0), marks=pytest.mark.nightly),
        pytest.param(torch.bfloat16, 3, dict(window=63, has_sinks=True), marks=pytest.mark.nightly),
    ],
)
def test_bits_depend_on_the_path_only(dtype, groups, options):
    """Each token's result is that of decoding it alone, with all tokens before it committed in any
    way.
    """
    made = case(PATHS, 2, 16, 16, dtype)
    query = torch.randn(2 * groups, len(made.tokens), 16).to(dtype)
    sinks = torch.randn(2 * groups) if options.get("has_sinks") else None
    rules = AttentionRules(0.25, options.get("window"), options.get("softcap"), sinks)

    def attended(spans, queries, keys, values):
        batch = PackedBatch(spans, [span.visible for span in spans])
        has_window = rules.window is not None
        plan = plan_tree(batch, has_window, has_window, groups, by_path=True)
        return tree_kernels.tree_attention(queries, keys, values, plan, rules)

    together = attended(made.row.spans, query, made.keys, made.values)
    for index in (0, 3, 4, 6, 7, 12, 14, 68, 70, 71, 74, 75):
        slots = made.tokens[index].slots
        length = len(slots) - 1
        sequence = CachedSequence(0, length + 1, length)  # as if the path had been committed
        for is_chain in (False, True):
            span = Span(sequence, 0, 1, torch.ones(1, 1).bool(), torch.tensor([length]), is_chain)
            own = query[:, index : index + 1]
            alone = attended([span], own, made.keys[slots], made.values[slots])
            assert torch.equal(alone[0], together[index])


def test_paths_beyond_the_kernel_are_refused():
    made = case(SPANS, 1, 8, 8)
    query = torch.randn(65, len(made.tokens), 8)
    with pytest.raises(
        UnsupportedOptionError, match=r'exact="self" is not available .* 65 query heads per KV head'
    ):
        TreeAttention(by_path=True)(query, made.keys, made.values, made.row, AttentionRules(0.25))
