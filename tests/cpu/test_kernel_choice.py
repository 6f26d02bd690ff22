"""The choice of kernels: what is measured decides, is kept, and is not taken at a busy time."""

from __future__ import annotations

import pytest
import torch

from hf_slospec.cpu import kernels as kernel_choice
from hf_slospec.cpu.kernels import PLAIN, SIZES, KernelChoice, choose, works

needs_onednn = pytest.mark.skipif(
    not works("OneDNN", torch.float32), reason="torch has no oneDNN here"
)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path))
    kernel_choice._choices.cache_clear()
    yield tmp_path
    kernel_choice._choices.cache_clear()


def times(**seconds):
    return kernel_choice._choice(seconds)


def test_the_kernel_with_the_shortest_steps_is_chosen():
    choice = times(
        Plain=[1.0, 2.0, 3.0, 4.0, 8.0, 9.0],
        OneDNN=[1.5, 1.5, 1.8, 2.0, 3.0, 10.0],
        MKL=[1.1, 1.2, 1.5, 1.9, 9.0, 9.5],
    )
    assert choice.kernel == "MKL"  # for 1 to 16 tokens
    assert choice.is_faster == (False, True, True, True, False, False)
    assert [choice.packs(tokens) for tokens in (1, 2, 4, 16, 17, 1000)] == [
        False,
        True,
        True,
        True,
        False,
        False,
    ]


def test_torch_computes_where_packing_gains_little():
    assert times(Plain=[1.0] * 6, OneDNN=[0.99, 0.98, 0.99, 0.99, 0.1, 0.1]).kernel is None
    assert times(Plain=[1.0] * 6).kernel is None


def test_kernels_not_timed_for_many_tokens_count_as_slower():
    choice = times(Plain=[1.0] * 6, FBGEMM=[0.5, 0.5, 0.5, 0.6, None, None])
    assert choice.kernel == "FBGEMM" and choice.is_faster == (True, True, True, True, False, False)
    choice = times(Plain=[1.0, 3.0, None, None, None, None], FBGEMM=[0.9, 0.9, 1.0, 1.0, 2.0, 4.0])
    assert choice.kernel == "FBGEMM" and choice.is_faster == (True,) * 6


@needs_onednn
def test_a_choice_is_measured_once_and_kept(monkeypatch, cache):
    monkeypatch.setattr(kernel_choice, "_num_preemptions", lambda: 0)
    weights = [torch.randn(48, 40) for _ in range(3)]
    choice = choose(weights)
    assert {len(seconds) for seconds in choice.seconds.values()} == {
        len(SIZES)
    } and "Plain" in choice.seconds
    assert choose([torch.randn(48, 40)]) is choice
    kernel_choice._choices.cache_clear()  # as in another process
    monkeypatch.setattr(kernel_choice, "_measured", lambda *_: pytest.fail("measured again"))
    assert choose(weights) == choice
    (path,) = (path for path in cache.rglob("*") if path.is_file())
    path.write_text("{}")
    kernel_choice._choices.cache_clear()
    monkeypatch.setattr(kernel_choice, "_measured", lambda *_: PLAIN)
    assert choose(weights) == PLAIN


@needs_onednn
def test_busy_machines_use_the_default_kernel_and_save_nothing(monkeypatch, cache):
    preemptions = iter(range(0, 10**9, 100))
    monkeypatch.setattr(kernel_choice, "_num_preemptions", lambda: next(preemptions))
    assert choose([torch.randn(48, 40)]) == PLAIN  # small
    assert choose([torch.randn(1024, 512)]).kernel in ("MKL", "OneDNN")
    assert not [path for path in cache.rglob("*") if path.is_file()]
    measured = KernelChoice(kernel=None, seconds={"Plain": (1.0,) * 6})
    monkeypatch.setattr(kernel_choice, "_measured", lambda *_: measured)
    assert choose([torch.randn(48, 40)]) == PLAIN
    monkeypatch.setattr(kernel_choice, "_retry_s", dict.fromkeys(kernel_choice._retry_s, 0.0))
    assert choose([torch.randn(48, 40)]) == measured  # once some time has passed


@pytest.mark.skipif(not works("FBGEMM", torch.bfloat16), reason="torch has no FBGEMM here")
def test_torchs_kernel_computes_no_tokens_in_a_dtype_that_the_cpu_lacks(monkeypatch):
    monkeypatch.setattr(kernel_choice, "native_dtypes", lambda: {torch.bfloat16: False})
    monkeypatch.setattr(kernel_choice, "_measured", lambda *_: None)  # as on a busy machine
    for shape in ((48, 40), (1024, 512)):
        choice = choose([torch.randn(shape).bfloat16()])
        assert choice.kernel == "FBGEMM" and all(map(choice.packs, (1, 17, 32, 1000)))


def test_directories_that_cannot_be_written_are_warned_of(monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", "/proc/none")
    measured = KernelChoice(kernel=None, seconds={"Plain": (1.0,) * 6})
    monkeypatch.setattr(kernel_choice, "_measured", lambda *_: measured)
    monkeypatch.setattr(kernel_choice, "works", lambda *_: True)
    with pytest.warns(UserWarning, match="could not be saved"):
        assert choose([torch.randn(8, 8)]) == measured


@needs_onednn
@pytest.mark.parametrize(
    "kept",
    [
        KernelChoice(kernel="OneDNN", is_faster=(True,) * 3),
        KernelChoice(kernel="OneDNN"),
        KernelChoice(kernel="AMXFOO", is_faster=(True,) * 6),
        KernelChoice(kernel="FBGEMM", is_faster=(True,) * 6),  # fp32 weights are never held in fp16
    ],
)
def test_choices_of_other_versions_are_measured_again(monkeypatch, kept):
    kernel_choice._save({"float32 48x40": kept})
    monkeypatch.setattr(kernel_choice, "_measured", lambda *_: PLAIN)
    assert choose([torch.randn(48, 40)]) == PLAIN
