"""Versions of flash-attention, by functions with the parameters and results that each has."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from hf_slospec.cuda import flash_attention, flash_kernels
from hf_slospec.cuda.flash import Entries
from hf_slospec.model.batch import AttentionRules
from tests.support.stand_ins.flash import StandIn

CPU = torch.device("cpu")
PACKAGES = ("flash_attn", "flash_attn.cute", "flash_attn_interface", "kernels")


def attend(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal, window, cap):
    entries = Entries(cu_q, cu_q, cu_k, max_q, max_k)
    left, right = window
    assert (left, right) in ((-1, -1), (None, None)) or (causal and right == 0)
    rules = AttentionRules(scale, None if left in (-1, None) else left + 1, cap or None)
    return StandIn(q.device)(q, k, v, entries, causal, rules)


# Parameters are those of the packages' own functions, in their order.
def of_version_2(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    out, lse = attend(q, k, v, *lengths, softmax_scale, causal, window_size, softcap)
    return (out, lse, None) if return_attn_probs else out


def of_version_3(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    window_size=(-1, -1),
    softcap=0.0,
):
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return attend(q, k, v, *lengths, softmax_scale, causal, window_size, softcap)


def of_later_version_3(
    *args,
    window_size=(-1, -1),
    softcap=0.0,
    return_softmax=False,
    **rest,
):
    out, lse = of_version_3(*args, window_size=window_size, softcap=softcap, **rest)
    return (out, lse) if return_softmax else out


def of_version_4(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    softcap=0.0,
    return_lse=False,
):
    assert window_size == (None, None) or -1 not in window_size
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    out, lse = attend(q, k, v, *lengths, softmax_scale, causal, window_size, softcap)
    return out, (lse if return_lse else None)


def before_softcap(q, k, v, window_size=(-1, -1), return_attn_probs=False):
    raise AssertionError


class CompilerError(Exception):
    """As compilers of kernels have their own."""


def that_does_not_compile(*args, window_size=(None, None), softcap=0.0, **rest):
    raise CompilerError("no such instruction")


@pytest.fixture(autouse=True)
def _no_device_is_needed(monkeypatch):
    monkeypatch.setattr(flash_kernels, "_require_cuda", lambda device: None)
    flash_attention._first_working.cache_clear()
    for package in PACKAGES:  # whatever is installed
        monkeypatch.setitem(sys.modules, package, None)


def install(monkeypatch, module, **content):
    made = ModuleType(module)
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, module, made)


def chosen(needs_softcap=False):
    return flash_attention.kernel_on(CPU, torch.bfloat16, 64, needs_softcap)


VERSIONS = {
    "flash-attn": ("flash_attn", of_version_2),
    "flash-attn-3": ("flash_attn_interface", of_version_3),
    "later flash-attn-3": ("flash_attn_interface", of_later_version_3),
    "flash-attn-4": ("flash_attn.cute", of_version_4),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_an_installed_version_is_used(version, monkeypatch):
    module, function = VERSIONS[version]
    install(monkeypatch, "flash_attn")
    install(monkeypatch, module, flash_attn_varlen_func=function)
    kernel = chosen(
        needs_softcap=True
    )  # its trial has compared it, by windows and softcaps as well
    assert kernel.name == version.removeprefix("later ")


def test_the_newest_version_is_used_that_works(monkeypatch, caplog):
    install(monkeypatch, "flash_attn", flash_attn_varlen_func=of_version_2)
    install(monkeypatch, "flash_attn_interface", flash_attn_varlen_func=before_softcap)
    install(monkeypatch, "flash_attn.cute", flash_attn_varlen_func=that_does_not_compile)
    with caplog.at_level(logging.DEBUG, "hf_slospec.cuda"):
        assert chosen().name == "flash-attn"
    assert "flash-attn-4 failed in a trial with CompilerError" in caplog.text
    assert "flash-attn-3 has no softcap; upgrade it" in caplog.text


def test_the_build_that_transformers_would_load_from_the_hub(monkeypatch):
    asked = list[tuple[str, int | None]]()

    def get_kernel(repository, version=None):
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


def test_why_there_is_none():
    message = chosen(needs_softcap=True)
    for package in PACKAGES:
        assert f"{package}." in message
