"""The methods that are compared."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import CompileConfig

from benchmarks.gpu.continuous import ContinuousBatching
from benchmarks.gpu.variants import CONFIGS, CONSTANTS, VARIANTS
from hf_slospec.cli.benchmark import ASSISTED, OURS, PLAIN, Bench, GenerateCall, Method
from hf_slospec.config import SLOSpecConfig
from hf_slospec.errors import UnsupportedOptionError
from hf_slospec.model.packed_model import PackedModel

COMPILED = "generate, static cache, compiled"
CONTINUOUS = "continuous batching"
IMPORTANT = (PLAIN, OURS, COMPILED, ASSISTED)  # measured first, in this order
BY_COMPILING = (
    "_compiled_call",
    "_last_compile_config",
    "_previous_max_cache_length",
)  # attributes that generate sets


class SameAsError(Exception):
    """A variant has the same effective settings as another one."""


METHODS = tuple(dict.fromkeys((*IMPORTANT, CONTINUOUS, *VARIANTS)))
ALL_METHODS = (*METHODS, *CONSTANTS)  # METHODS are timed if none is named


def names_at(batch: int, methods: Sequence[str] = METHODS) -> list[str]:
    """Return the names of those of ``methods`` that support a batch size, most important first."""
    return [name for name in ALL_METHODS if name in methods and (name != ASSISTED or batch == 1)]


@contextlib.contextmanager
def contestant(bench: Bench, batch: int, name: str) -> Iterator[tuple[Method, dict[str, Any]]]:
    """Yield a method and the settings that it chose, which may be completed by calls; release all
    that it keeps.

    Raises:
        SameAsError: on this machine it would be the same as one before it.
    """
    target = bench.target
    facts = dict[str, Any]()
    run: GenerateCall = bench.stock()
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    with contextlib.ExitStack() as stack:
        if name in CONFIGS:
            facts |= _effective(target, CONFIGS[name])
            if (other := _same_as(target, name, facts)) is not None:
                raise SameAsError(other)
            # What compiles forwards on a CPU would be waited for in a dry run.
            run = bench.ours(CONFIGS[name].model_copy(update={"compile": False}))
        elif name == ASSISTED:
            run = bench.stock(assistant_model=bench.draft)
        elif name == COMPILED:
            run = bench.stock(cache_implementation="static", compile_config=CompileConfig())
            stack.callback(_forget_compiled, target)
        elif name == CONTINUOUS:
            continuous = ContinuousBatching(target, batch, bench.prompt_tokens, bench.new_tokens)
            run = _with_facts(continuous, facts)
            around = continuous.running
            stack.callback(continuous.close)
        yield Method(name, batch, run, around), facts
        if name == COMPILED:
            facts["compiled"] = hasattr(target, "_compiled_call")  # only on a GPU


def _effective(target: Any, config: SLOSpecConfig) -> dict[str, Any]:
    packed = PackedModel(target, config.model_copy(update={"compile": False}))
    return {
        "attention": packed.backend.__name__,
        "cuda_graphs": packed.path("cuda_graphs") is not None,
    }


def _same_as(target: Any, name: str, facts: dict[str, Any]) -> str | None:
    """Return an earlier variant with the same effective settings."""
    by_machine = {"attention", "cuda_graphs"}
    for other, config in list(CONFIGS.items())[: list(CONFIGS).index(name)]:
        if config.model_dump(exclude=by_machine) == CONFIGS[name].model_dump(exclude=by_machine):
            with contextlib.suppress(UnsupportedOptionError):  # the other one is refused here
                if _effective(target, config) == facts:
                    return other
    return None


def _with_facts(continuous: ContinuousBatching, facts: dict[str, Any]) -> GenerateCall:
    def run(encoded: dict[str, torch.Tensor]) -> torch.Tensor:
        facts.update(continuous.facts)
        return continuous(encoded)

    return run


def _forget_compiled(target: Any) -> None:
    """Free what the compiled forward keeps, such as its CUDA graphs."""
    for attribute in BY_COMPILING:
        target.__dict__.pop(attribute, None)
    if (
        "torch._dynamo" in sys.modules
    ):  # importing it takes seconds, for nothing where nothing was compiled
        torch.compiler.reset()
