"""The way of ``slo_tpot`` from ``submit`` to the policy: few files, and none of them twice."""

from __future__ import annotations

import inspect
import sys

import hf_slospec
from hf_slospec import Policy, Request, RequestHandle, RequestParams, SLOSpecGenerator
from hf_slospec.engine.interfaces import Plan, Selection
from hf_slospec.request.slo import Stage
from tests.support.served_pair import WAIT_S

SLO_S = 0.123456
MOST_FILES = 9


def holds_slo(value):
    """Whether an argument is the SLO, or an object that passes it on."""
    if isinstance(value, (tuple, list)):
        return any(map(holds_slo, value[:4]))
    if isinstance(value, Stage):
        return value.tpot_slo_s == SLO_S
    if isinstance(value, RequestParams):
        return holds_slo(value.stages)
    if isinstance(value, Request):
        return holds_slo(getattr(value, "params", None))
    if isinstance(value, RequestHandle):
        return holds_slo(getattr(value, "request", None))
    return isinstance(value, float) and value == SLO_S


def module_of(frame):
    """Return the module of a frame; methods that dataclasses generate have that of their class."""
    name = "" if frame is None else frame.f_globals.get("__name__", "")
    return name.removeprefix("hf_slospec.") if name.startswith("hf_slospec.") else ""


def arguments_of(frame):
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [frame.f_locals[name] for name in names if name in frame.f_locals]


class Walk:
    """Modules that code of other modules enters with the SLO."""

    def __init__(self):
        self.modules = []

    def __call__(self, frame, event, _):
        module = module_of(frame)
        is_entered = event == "call" and module and module != module_of(frame.f_back)
        if is_entered and any(map(holds_slo, arguments_of(frame))):
            self.modules.append(module)


class AtTheEnd(Policy):
    """A policy that notes the modules through which the engine's thread comes to it."""

    def __init__(self, *_):
        self.modules = []

    def plan(self, requests, begun_s, num_prefill_tokens=0):
        if not self.modules and any(map(holds_slo, requests)):
            frame = inspect.currentframe()
            while frame is not None:
                module = module_of(frame)
                # Only policies of users are checked.
                if module not in ("", "engine.checks", *self.modules[:1]):
                    self.modules.insert(0, module)
                frame = frame.f_back
        return Plan(0, 1)

    def select(self, requests, candidates, plan):
        return Selection.of_roots(candidates)


def test_an_slo_visits_few_files_between_submit_and_the_policy_and_none_twice():
    model, draft, tokenizer = hf_slospec.load_tiny_pair()
    policy = AtTheEnd()
    walk = Walk()
    with SLOSpecGenerator(model, draft, tokenizer, make_policy=lambda *_: policy) as generator:
        sys.setprofile(walk)
        try:
            handle = generator.submit("def f(x):", slo_tpot=SLO_S, max_new_tokens=4)
        finally:
            sys.setprofile(None)
        handle.result(WAIT_S)
    assert policy.modules[0] == walk.modules[-1] == "batcher.batcher"
    modules = walk.modules + policy.modules[1:]
    assert modules == [
        "batcher.generator",
        "batcher.service",
        "generate.prepare",
        "request.slo",
        "request.params",
        "request.request",
        "batcher.handle",
        "batcher.batcher",
        "engine.step",
    ]
    assert len(modules) == len({*modules}) <= MOST_FILES
