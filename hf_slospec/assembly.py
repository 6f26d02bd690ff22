"""Loading of plugins, and construction of engines for a ``generate`` call, the batcher and the
simulator.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.checks import NO_CHECKS, Checks
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.interfaces import Clock, Drafter, Policy, Target
from hf_slospec.engine.step import Engine
from hf_slospec.request.request import Request
from hf_slospec.scheduler.continuous import ContinuousScheduler, Limits

# Packages that register forward paths, attention kernels, model families and drafters with the
# core. Each may be missing.
PLUGINS = ("hf_slospec.cpu", "hf_slospec.cuda", "hf_slospec.families", "hf_slospec.heads")


@functools.cache
def load_plugins() -> None:
    """Import each installed plugin and call its ``register`` function, if it has one."""
    for name in PLUGINS:
        try:
            plugin = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
        else:
            register: Callable[[], None] | None = getattr(plugin, "register", None)
            if register is not None:
                register()


class EngineParts(NamedTuple):
    """Components of an engine, which differ between real, toy and simulated models."""

    target: Target
    drafter: Drafter
    policy: Policy
    costs: StepCosts
    clock: Clock
    # Returns a context in which other engines may use the models; entered while a user's callbacks
    # run.
    shared: Callable[[], AbstractContextManager[Any]] = nullcontext
    checks: Checks = NO_CHECKS


def new_engine(
    config: SLOSpecConfig,
    parts: EngineParts,
    limits: Limits | None = None,
    requests: Sequence[Request] = (),
    shares_prompts: bool = False,
) -> Engine[ContinuousScheduler]:
    """Return an engine that decodes ``requests``, or requests that are added while it runs.

    Args:
        limits: limits of the scheduler of an engine to which requests are added; None: the
            engine decodes ``requests`` only.
        shares_prompts: the target reuses the K/V of equal prompts, so that of the requests with
            equal prompts one is prefilled first.
    """
    target, drafter, policy, costs, clock, shared, checks = parts
    if limits is None:
        scheduler = ContinuousScheduler.of_call(requests, costs, config.guarantee, shares_prompts)
    else:
        scheduler = ContinuousScheduler(
            limits,
            costs,
            config.admission,
            config.prefill,
            target.num_reusable,
            config.guarantee,
            policy.falls_back,
            shares_prompts,
        )
    return Engine(
        target, drafter, policy, scheduler, costs, clock, config.check_invariants, shared, checks
    )


def limits_of(config: SLOSpecConfig, kv_tokens: int, max_nodes: int) -> Limits:
    """Return the scheduler's limits.

    Args:
        config: the other limits.
        kv_tokens: K/V slots for all requests, chosen for the models.
        max_nodes: maximum number of draft nodes per request, chosen for the models.
    """
    return Limits(config.max_batch, kv_tokens, max_nodes, config.prefill_chunk, config.starvation_s)
