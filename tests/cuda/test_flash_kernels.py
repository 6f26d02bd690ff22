"""Versions of flash-attention, by functions with the parameters and results that each has."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from hf_slospec.cuda import flash_kernels
from hf_slospec.cuda import flash_kernels as kernel_choice
from hf_slospec.cuda.flash import Entries
from hf_slospec.model.batch import AttentionRules
from tests.support.stand_ins.flash import StandIn

CPU = torch.device("cpu")
PACKAGES = ("flash_attn", "flash_attn.cute", "flash_attn_interface", "kernels")


def attend(
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: int,
    max_k: int,
    scale: Any,
    causal: bool,
    window: Any,
    cap: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    entries = Entries(cu_q, cu_q, cu_k, max_q, max_k)
    left, right = window
    assert (left, right) in ((-1, -1), (None, None)) or (causal and right == 0)
    rules = AttentionRules(scale, None if left in (-1, None) else left + 1, cap or None)
    return StandIn(q.device)(q, k, v, entries, causal, rules)


# Parameters are those of the packages' own functions, in their order.
def of_version_2(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    out, lse = attend(q, k, v, *lengths, softmax_scale, causal, window_size, softcap)
    return (out, lse, None) if return_attn_probs else out


def of_version_3(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    qv: Any = None,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
) -> Any:
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return attend(q, k, v, *lengths, softmax_scale, causal, window_size, softcap)


def of_later_version_3(
    *args: Any,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    return_softmax: bool = False,
    **rest: Any,
) -> Any:
    out, lse = of_version_3(*args, window_size=window_size, softcap=softcap, **rest)
    return (out, lse) if return_softmax else out


def of_version_4(
    q: Any,
    k: Any,
    v: Any,
    qv: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    min_seqlen_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = (None, None),
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Any:
    assert window_size == (None, None) or -1 not in window_size
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    out, lse = attend(q, k, v, *lengths, softmax_scale, causal, window_size, softcap)
    return out, (lse if return_lse else None)


def before_softcap(
    q: Any, k: Any, v: Any, window_size: Any = (-1, -1), return_attn_probs: bool = False
) -> Any:
    raise AssertionError


class CompilerError(Exception):
    """As compilers of kernels have their own."""


def that_does_not_compile(
    *args: Any, window_size: Any = (None, None), softcap: float = 0.0, **rest: Any
) -> Any:
    raise CompilerError("no such instruction")


@pytest.fixture(autouse=True)
def _no_device_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_kernels, "_require_cuda", lambda device: None)
    kernel_choice._first_working.cache_clear()
    for package in PACKAGES:  # whatever is installed
        monkeypatch.setitem(sys.modules, package, None)


def install(monkeypatch: pytest.MonkeyPatch, module: str, **content: Any) -> None:
    made = ModuleType(module)
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, module, made)


def chosen(needs_softcap: bool = False) -> Any:
    return kernel_choice.kernel_on(CPU, torch.bfloat16, 64, needs_softcap)


VERSIONS = {
    "flash-attn": ("flash_attn", of_version_2),
    "flash-attn-3": ("flash_attn_interface", of_version_3),
    "later flash-attn-3": ("flash_attn_interface", of_later_version_3),
    "flash-attn-4": ("flash_attn.cute", of_version_4),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_an_installed_version_is_used(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, function = VERSIONS[version]
    install(monkeypatch, "flash_attn")
    install(monkeypatch, module, flash_attn_varlen_func=function)
    kernel = chosen(
        needs_softcap=True
    )  # its trial has compared it, by windows and softcaps as well
    assert kernel.name == version.removeprefix("later ")


def test_the_newest_version_is_used_that_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, "flash_attn", flash_attn_varlen_func=of_version_2)
    install(monkeypatch, "flash_attn_interface", flash_attn_varlen_func=before_softcap)
    install(monkeypatch, "flash_attn.cute", flash_attn_varlen_func=that_does_not_compile)
    with caplog.at_level(logging.DEBUG, "hf_slospec.cuda"):
        assert chosen().name == "flash-attn"
    assert "flash-attn-4 failed in a trial with CompilerError" in caplog.text
    assert "flash-attn-3 has no softcap; upgrade it" in caplog.text


def test_the_build_that_transformers_would_load_from_the_hub(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[tuple[str, int | None]]()

    def get_kernel(repository: str, version: int | None = None) -> Any:
        asked.append((repository, version))
        if len(asked) > 1:
            raise FileNotFoundError("no build for this machine")
        loaded: Any = ModuleType("loaded")
        loaded.flash_attn_varlen_func = of_version_2
        return loaded

    install(monkeypatch, "kernels", get_kernel=get_kernel)
    assert chosen(needs_softcap=True).name == "flash-attn by kernels"
    ((repository, version),) = asked
    assert "flash-attn" in repository and version is not None
    assert "flash-attn2 cannot be loaded from the Hub (no build for this machine)" in chosen()


def test_why_there_is_none() -> None:
    message = chosen(needs_softcap=True)
    for package in PACKAGES:
        assert f"{package}." in message
