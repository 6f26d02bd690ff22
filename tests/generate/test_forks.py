"""Forked children that generate, while other threads of the parent are anywhere within a call."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import warnings

import pytest
import torch

import hf_slospec
from hf_slospec import NotRunningError, PastAnswers, SLOSpecConfig, SLOSpecGenerator, load_drafter
from tests.support.enabled_model import OPTIONS
from tests.support.forks import ALARM_S, passes_in_child
from tests.support.toys.tiny_models import ragged_prompts, tiny_copy

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
WAIT_S = 120.0


@pytest.fixture(autouse=True)
def one_thread():
    """GNU's OpenMP, and stock generate with it, hangs in children of processes that used several
    threads.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@contextlib.contextmanager
def stopped_within(module, call):
    """Keep ``call`` in another thread within a forward of a module."""
    is_within = threading.Event()
    is_over = threading.Event()
    callers = []
    plain = module.forward

    def forward(*args, **kwargs):
        if threading.get_ident() in callers and not is_over.is_set():
            is_within.set()
            is_over.wait(WAIT_S)
        return plain(*args, **kwargs)

    def work():
        callers.append(threading.get_ident())
        call()

    forward.per_token = True
    module.forward = forward
    call()  # takes in the replaced forward
    thread = threading.Thread(target=work)
    thread.start()
    assert is_within.wait(WAIT_S)
    try:
        yield
    finally:
        is_over.set()
        thread.join(WAIT_S)


DRAFTERS = {
    "a model": lambda target: tiny_copy("llama", noise=0.03),
    "lookup": lambda target: "lookup",
    "past answers": lambda target: load_drafter("lookup", target, share_texts=PastAnswers()),
}


# Passes by itself; after many other tests in one process its children took too long
@pytest.mark.nightly
@pytest.mark.parametrize("prepack", [False, True])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_child_generates_while_another_thread_is_within_a_forward(drafter, prepack):
    target = tiny_copy("llama")
    classes = [type(module) for module in target.modules()]
    inputs = ragged_prompts(2)
    stock = target.generate(**ragged_prompts(2), **OPTIONS)
    model = hf_slospec.enable(
        target,
        drafter=DRAFTERS[drafter](target),
        config=SLOSpecConfig(prepack=prepack, compile=False),
    )

    def is_same():
        return torch.equal(model.generate(**inputs, **OPTIONS, slo_tpot=1.0), stock)

    def is_same_in_child():
        is_plain = [type(module) for module in model.modules()] == classes
        return is_plain and model.config._attn_implementation == "sdpa" and is_same() and is_same()

    with stopped_within(model.model.layers[1].mlp.down_proj, is_same):
        assert passes_in_child(is_same_in_child)
    assert is_same()


def test_children_generate_while_two_threads_generate():
    target = tiny_copy("llama")
    inputs = ragged_prompts(2)
    stock = target.generate(**ragged_prompts(2), **OPTIONS)
    draft = tiny_copy("llama", noise=0.03)
    config = SLOSpecConfig(compile=False)
    model = hf_slospec.enable(target, draft, config=config)
    differing = []
    is_over = threading.Event()

    def is_same():
        return torch.equal(model.generate(**inputs, **OPTIONS, slo_tpot=1.0), stock)

    def go_on():
        while not is_over.is_set():
            if not is_same():
                differing.append(True)

    threads = [threading.Thread(target=go_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert all(passes_in_child(is_same) for _ in range(4))
        forked = multiprocessing.get_context("fork").Process(target=_end_with, args=(is_same,))
        with warnings.catch_warnings(action="ignore"):  # Python 3.12 warns of forks beside threads
            forked.start()
        forked.join(ALARM_S)
        assert forked.exitcode == 7
    finally:
        is_over.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert not differing


def _end_with(is_same):
    os._exit(7 if is_same() else 1)


def test_a_child_of_a_running_batcher_is_told_so_and_generates():
    target = tiny_copy("llama")
    prompt = ragged_prompts(1)["input_ids"]
    stock = target.generate(prompt, **OPTIONS)
    new = stock[0, prompt.shape[1] :].tolist()
    options = OPTIONS
    generator = SLOSpecGenerator(target, tiny_copy("llama", noise=0.03))

    def is_right():
        for refused in (
            lambda: generator.submit(prompt[0].tolist(), **options),
            lambda: handle.result(timeout=WAIT_S),
            lambda: list(handle),
            lambda: generator._service._batcher.load(),
        ):
            with contextlib.suppress(NotRunningError):
                refused()
                return False
        handle.cancel()
        generator.stop()
        generator.stats()
        if not torch.equal(generator.generate(prompt, **options), stock):
            return False
        with generator:
            return (
                generator.submit(prompt[0].tolist(), **options).result(timeout=WAIT_S).token_ids
                == new
            )

    with generator:
        for _ in range(2):
            handle = generator.submit(prompt[0].tolist(), **(options | {"max_new_tokens": 100}))
            next(iter(handle.tokens()))
            assert passes_in_child(is_right)
            assert len(handle.result(timeout=WAIT_S).token_ids) > 0
        assert (
            generator.submit(prompt[0].tolist(), **options).result(timeout=WAIT_S).token_ids == new
        )


def test_a_call_whose_callback_forks_goes_on_in_both_processes():
    target = tiny_copy("llama")
    inputs = ragged_prompts(1)
    stock = target.generate(**inputs, **OPTIONS)
    draft = tiny_copy("llama", noise=0.03)
    config = SLOSpecConfig(compile=False)
    model = hf_slospec.enable(target, draft, config=config)
    forked = []
    has_begun = threading.Event()

    def fork_once(input_ids, scores):
        if has_begun.is_set() and not forked:
            with warnings.catch_warnings(action="ignore"):
                forked.append(os.fork())
        has_begun.set()
        return scores

    is_same = False
    try:
        is_same = torch.equal(
            model.generate(**inputs, **OPTIONS, slo_tpot=1.0, logits_processor=[fork_once]), stock
        )
    finally:
        if forked == [0]:
            os._exit(0 if is_same else 1)
    assert os.waitpid(forked[0], 0)[1] == 0
    assert is_same
