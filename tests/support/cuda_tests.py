"""Tests that run on a CUDA device and on its stand-in; modules that import them collect them."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_slospec import (
    SLOSpecConfig,
    SLOSpecGenerator,
    UnsupportedOptionError,
    load_tiny_pair,
    tiny_prompts,
)
from hf_slospec.cuda import flash as packing
from hf_slospec.cuda import flash_kernels as kernel_choice
from hf_slospec.cuda import graphs
from hf_slospec.cuda.flash_attention import FlashAttention, kernel_on
from hf_slospec.cuda.flash_kernels import KernelUnavailable
from hf_slospec.cuda.graphs import Graphs
from hf_slospec.drafters import beam
from hf_slospec.drafters.assistant import AssistantDrafter
from hf_slospec.drafters.methods import Room
from hf_slospec.engine.interfaces import Plan
from hf_slospec.model.attention.sdpa import sdpa_attention
from hf_slospec.model.batch import AttentionRules
from hf_slospec.model.transfer import DeferredFlags
from tests.support.breadth import nightly_but
from tests.support.graph_bench import Bench
from tests.support.oracles.attention_rows import TREES, case
from tests.support.packed import packed_model
from tests.support.toys.tiny_models import (
    FAMILIES,
    assert_same_as_stock,
    ragged_prompts,
    tiny_model,
)

CUDA = torch.device("cuda:0")
# Shares of the largest value, between flash attention in half precision and the reference in fp32:
# weights and outputs are rounded to 8 bits (bf16) or 11 (fp16), each by up to half a spacing.
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@pytest.fixture(
    params=nightly_but(
        set(kernel_choice.KERNELS) - {kernel_choice.TorchVarlen}, kernel_choice.KERNELS
    ),
)
def kernel(request, monkeypatch):
    """Each kernel that can be loaded here, being the only one that there is."""
    try:
        request.param(CUDA)
    except KernelUnavailable as reason:
        pytest.skip(f"{request.param.name}: {reason}")
    monkeypatch.setattr(kernel_choice, "KERNELS", (request.param,))
    found = kernel_on(CUDA, torch.bfloat16, 64)
    assert not isinstance(found, str), found  # what can be loaded passes its trial
    return found


def on_cuda(model, dtype=torch.float32):
    return copy.deepcopy(model).to(CUDA, dtype)


def moved(inputs):
    return {name: tensor.to(CUDA) for name, tensor in inputs.items()}


@pytest.mark.parametrize(
    "sampling", [{}, dict(do_sample=True, temperature=0.8, top_k=30)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_fp32_token_for_token_by_sdpa(family, sampling):
    model = on_cuda(tiny_model(family))
    draft = on_cuda(tiny_model(family, noise=0.03))
    generator = SLOSpecGenerator(model, draft, config=SLOSpecConfig(check_invariants=True))
    assert generator.generate(**moved(ragged_prompts(1)), max_new_tokens=2).is_cuda
    options = dict(do_sample=False) | sampling
    assert_same_as_stock(
        model, generator.generate, moved(ragged_prompts(3)), max_new_tokens=20, **options
    )


def test_auto_is_the_faster_of_triton_and_flash():
    half, full = (on_cuda(tiny_model("llama"), dtype) for dtype in (torch.bfloat16, torch.float32))
    kernel = kernel_on(CUDA, torch.bfloat16, 8)
    if isinstance(kernel, str):
        pytest.skip(kernel)
    names = [
        packed_model(half, attention).backend.__name__ for attention in ("auto", "triton", "flash")
    ]
    assert names == [
        f"fastest_attention[tree_attention[triton]; flash_attention[{kernel.name}]]",
        "tree_attention[triton]",
        f"flash_attention[{kernel.name}]",
    ]
    assert packed_model(half, "sdpa").backend is packed_model(full).backend is sdpa_attention
    for attention in ("triton", "flash"):
        with pytest.raises(UnsupportedOptionError, match=r"does not compute in torch.float32"):
            packed_model(full, attention)


def test_pieces_of_few_keys(kernel, monkeypatch):
    monkeypatch.setattr(packing, "PIECE_KEYS", 4)
    check_row(
        [(0, 1, TREES[1]), (2, 1, TREES[2]), (21, 3, TREES[1])],
        (8, 2, 64),
        torch.bfloat16,
        None,
        None,
        True,
    )


def check_row(spans, heads, dtype, window, softcap, has_sinks, backend=None):
    num_heads, num_kv_heads, dim = heads
    made = case(spans, num_kv_heads, dim, dim, dtype, "cuda:0")
    query = torch.randn(num_heads, len(made.tokens), dim, device=CUDA, dtype=dtype)
    sinks = torch.randn(num_heads, device=CUDA) if has_sinks else None
    rules = AttentionRules(dim**-0.5, window, softcap, sinks)
    out = (backend or FlashAttention(""))(query, made.keys, made.values, made.row, rules)
    assert out.dtype == dtype
    atol = TOLERANCE[dtype] * float(made.values.abs().max())
    torch.testing.assert_close(out.float(), made.expected(query, rules), rtol=0, atol=atol)


def check_self(target, draft, prompts, **options):
    """Compare outputs by ``exact="self"``: by plain decoding one by one, and by trees beside each
    other.
    """
    alone = dict(policy="none", max_batch=1)
    beside = dict(
        policy="fixed",
        max_depth=4,
        max_width=3,
        prefill_chunk=7,
        kv_tokens=2 * max(map(len, prompts)) + 150,
    )
    texts = []
    for drafter, order, own in ((None, 1, alone), (draft, -1, beside)):
        config = SLOSpecConfig(exact="self", check_invariants=True, **own)
        with SLOSpecGenerator(target, drafter, config=config) as generator:
            handles = [generator.submit(prompt, **options) for prompt in prompts[::order]]
            texts.append([handle.result(300).token_ids for handle in handles[::order]])
    assert texts[0] == texts[1]
    assert all(texts[0])


@pytest.fixture
def captures(monkeypatch):
    """One entry for each forward that was captured while the test runs."""
    made = list[None]()
    capture = Graphs._capture

    def counted(self, *arguments):
        outputs = capture(self, *arguments)
        if outputs is not None:
            made.append(None)
        return outputs

    monkeypatch.setattr(Graphs, "_capture", counted)
    return made


@pytest.mark.parametrize("family", nightly_but(("gemma3",), ("llama", "gpt2", "gemma3")))
def test_replays_are_what_forwards_compute(kernel, captures, family):
    model = on_cuda(tiny_model(family), torch.bfloat16)
    replayed = Bench(model)
    plain = Bench(model)
    assert plain.graphs is not None
    plain.graphs.patience = 10**9  # padded all the same
    for _ in range(8):
        torch.testing.assert_close(replayed.verify(), plain.verify())
        for bench in (replayed, plain):
            bench.grow(2)
    assert captures


def serve(num_requests, new_tokens):
    target, draft, tokenizer = load_tiny_pair(torch.bfloat16)
    config = SLOSpecConfig(attention="flash", policy="fixed", max_batch=3, check_invariants=True)
    with SLOSpecGenerator(target.to(CUDA), draft.to(CUDA), tokenizer, config) as generator:
        prompts = tiny_prompts()[:num_requests]
        handles = [
            generator.submit(prompt, max_new_tokens=new_tokens, do_sample=False)
            for prompt in prompts
        ]
        assert all(len(handle.result(120).token_ids) for handle in handles)


def test_too_much_memory_ends_it(kernel, captures, monkeypatch):
    bench = Bench(on_cuda(tiny_model("llama"), torch.bfloat16))
    monkeypatch.setattr(bench.graphs._capturer, "max_bytes", 0)
    out = [bench.verify() for _ in range(4)]
    assert len(captures) == 1 and bench.graphs.is_off
    torch.testing.assert_close(out[-1], out[0])


def test_a_capture_that_fails_leaves_cuda_usable(kernel, captures, monkeypatch):
    model = on_cuda(tiny_model("llama"), torch.bfloat16)
    layer = model.model.layers[1].mlp
    plain = layer.forward

    def waiting(hidden):
        torch.cuda.synchronize()  # is forbidden while capturing
        return plain(hidden)

    layer.forward = waiting
    monkeypatch.setattr(graphs, "RETRY_AFTER", 1)
    bench = Bench(model)
    out = [bench.verify() for _ in range(2)]
    torch.rand(1, device=CUDA)  # refused while the generator is one of a capture
    out += [bench.verify() for _ in range(8)]
    assert not captures and bench.graphs.is_off
    torch.testing.assert_close(out[-1], out[0])
    assert torch.cuda.current_stream(CUDA) == torch.cuda.default_stream(CUDA)
    torch.cuda.empty_cache()
    other = Bench(on_cuda(tiny_model("gpt2"), torch.bfloat16))
    for _ in range(4):
        other.verify()
    assert captures


@pytest.mark.parametrize("patience", [0, 10**9])
def test_drafting_and_verifying_wait_for_nothing(kernel, captures, patience, monkeypatch):
    bench = Bench(on_cuda(tiny_model("llama"), torch.bfloat16))
    drafter = AssistantDrafter(bench.packed, Room(20, 101))
    plan = Plan(4, 2, min_path_prob=1e-9, min_gain=1e-9)
    drafter.draft(bench.requests, plan)  # feeds the prompts
    monkeypatch.setattr(beam, "_trees", lambda nodes, sizes: list(nodes))  # the copy to the host
    for is_watched in (False, False, True):
        bench.graphs.patience = patience
        for request in bench.requests:
            drafter.sequences.of(request).length -= 1
        torch.cuda.set_sync_debug_mode("error" if is_watched else "default")
        try:
            drafter._draft({request: request for request in bench.requests}, plan)
            bench.verify()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert bool(captures) == (patience == 0)


def test_an_answer_one_question_late():
    answers = DeferredFlags(CUDA)
    asked = [torch.tensor(answer, device=CUDA) for answer in (False, True, False)]
    assert [answers.next(answer) for answer in asked] == [None, False, True]
