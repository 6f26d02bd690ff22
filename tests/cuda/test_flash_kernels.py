"""Versions of flash-attention, by functions with the parameters that we use of each."""

from __future__ import annotations

import logging
import sys
from inspect import Parameter, Signature, signature
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


def varlen(no_window=(-1, -1), lse_option=None):
    """Return a version of ``flash_attn_varlen_func``.

    ``no_window``: its default for ``window_size``; ``lse_option``: what asks for the log-sum-exp,
    None: nothing, it is always returned.
    """

    def function(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
        window_size=no_window, softcap=0.0, **options,
    ):  # fmt: skip
        assert window_size == no_window or (causal and window_size[1] == 0)
        window = None if window_size == no_window else window_size[0] + 1
        entries = Entries(cu_seqlens_q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        rules = AttentionRules(softmax_scale, window, softcap or None)
        out, lse = StandIn(q.device)(q, k, v, entries, causal, rules)
        return out if options != dict.fromkeys(filter(None, [lse_option]), True) else (out, lse)

    *parameters, _ = signature(function).parameters.values()
    if lse_option is not None:
        parameters.append(Parameter(lse_option, Parameter.KEYWORD_ONLY, default=False))
    function.__signature__ = Signature(parameters)
    return function


def before_softcap(q, k, v, window_size=(-1, -1), return_attn_probs=False):
    raise AssertionError


class CompilerError(Exception):
    """As compilers of kernels have their own."""


def not_compiling(*args, window_size=(None, None), softcap=0.0, **rest):
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
    "flash-attn": ("flash_attn", varlen(lse_option="return_attn_probs")),
    "flash-attn-3": ("flash_attn_interface", varlen()),
    "later flash-attn-3": ("flash_attn_interface", varlen(lse_option="return_softmax")),
    "flash-attn-4": ("flash_attn.cute", varlen((None, None), "return_lse")),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_an_installed_version_is_used(version, monkeypatch):
    module, function = VERSIONS[version]
    install(monkeypatch, "flash_attn")
    install(monkeypatch, module, flash_attn_varlen_func=function)
    # Its trial has compared it, by windows and softcaps as well.
    assert chosen(needs_softcap=True).name == version.removeprefix("later ")


def test_the_newest_version_that_works_is_used(monkeypatch, caplog):
    install(monkeypatch, "flash_attn", flash_attn_varlen_func=VERSIONS["flash-attn"][1])
    install(monkeypatch, "flash_attn_interface", flash_attn_varlen_func=before_softcap)
    install(monkeypatch, "flash_attn.cute", flash_attn_varlen_func=not_compiling)
    with caplog.at_level(logging.DEBUG, "hf_slospec.cuda"):
        assert chosen().name == "flash-attn"
    assert "flash-attn-4 failed in a trial with CompilerError" in caplog.text
    assert "flash-attn-3 has no softcap; upgrade it" in caplog.text


def test_the_build_on_the_hub_is_the_last_resort(monkeypatch):
    asked = list[tuple[str, int | None]]()

    def get_kernel(repository, version=None):
        asked.append((repository, version))
        if len(asked) > 1:
            raise FileNotFoundError("no build for this machine")
        loaded: Any = ModuleType("loaded")
        loaded.flash_attn_varlen_func = VERSIONS["flash-attn"][1]
        return loaded

    install(monkeypatch, "kernels", get_kernel=get_kernel)
    assert chosen(needs_softcap=True).name == "flash-attn by kernels"
    ((repository, version),) = asked
    assert "flash-attn" in repository and version is not None
    assert "flash-attn2 cannot be loaded from the Hub (no build for this machine)" in chosen()


def test_reasons_name_every_package_that_is_missing():
    message = chosen(needs_softcap=True)
    for package in PACKAGES:
        assert f"{package}." in message
