"""Locks and shared state in forked children, whose parents have threads that use them."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hf_slospec.engine.fair_lock import FairLock
from hf_slospec.forks import Condition, Lock, cached_property, undone
from hf_slospec.model.linear_overrides import ReplacedAttributes
from hf_slospec.model.properties import evaluating
from tests.support.forks import passes_in_child

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
WAIT_S = 60.0


@contextmanager
def held_elsewhere(context):
    """Keep a context open in another thread."""
    is_held = threading.Event()
    is_over = threading.Event()

    def hold():
        with context:
            is_held.set()
            is_over.wait(WAIT_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(WAIT_S)
    try:
        yield
    finally:
        is_over.set()
        thread.join(WAIT_S)


def take(lock, taken):
    with lock, lock:
        taken.append(lock)


def can_be_taken_by_two_threads(lock):
    taken = list[Any]()
    take(lock, taken)
    thread = threading.Thread(target=take, args=(lock, taken))
    thread.start()
    thread.join(WAIT_S)
    return len(taken) == 2


@pytest.mark.parametrize("make", [Lock, FairLock, Condition])
class TestLocks:
    def test_a_child_finds_it_free(self, make):
        lock = make()
        with held_elsewhere(lock):
            assert passes_in_child(lambda: can_be_taken_by_two_threads(lock))
        assert can_be_taken_by_two_threads(lock)

    def test_the_thread_that_forks_keeps_it(self, make):
        lock = make()

        def goes_on():
            others = threading.Thread(target=take, args=(lock, []))
            others.start()
            others.join(0.2)
            waits = others.is_alive()
            lock.__exit__(None, None, None)
            others.join(WAIT_S)
            return waits and not others.is_alive() and can_be_taken_by_two_threads(lock)

        with lock:
            assert passes_in_child(goes_on)


class Part:
    value = 1


class Replaced:
    value = 1


def replacing(replaced, parts):
    @contextmanager
    def context():
        replaced.replace([(part, "value") for part in parts], lambda value, _: value + 10)
        try:
            yield
        finally:
            replaced.restore([(part, "value") for part in parts])

    return context()


def test_attributes_that_another_thread_replaced_are_set_back_in_a_child():
    replaced = ReplacedAttributes()
    mine = Part()
    shared = Part()
    shared.value = 2

    def is_restored():
        before = (mine.value, shared.value, Replaced.value)
        replaced.restore([(mine, "value")])
        return before == (11, 2, 1) and vars(mine) == {} and vars(shared) == {"value": 2}

    with held_elsewhere(replacing(replaced, [shared, Replaced])), replacing(replaced, [mine]):
        assert (shared.value, Replaced.value) == (12, 11)
        assert passes_in_child(is_restored)
        assert (shared.value, Replaced.value) == (12, 11)
    assert (vars(mine), shared.value, Replaced.value) == ({}, 2, 1)


def test_half_of_a_replacement_is_set_back_in_a_child():
    replaced = ReplacedAttributes()
    parts = [Part(), Part()]
    is_half = threading.Event()
    is_over = threading.Event()

    class Slow(Part):
        def __setattr__(self, name, value):
            is_half.set()
            is_over.wait(WAIT_S)
            super().__setattr__(name, value)

    parts.append(Slow())
    thread = threading.Thread(
        target=replaced.replace, args=([(part, "value") for part in parts], lambda value, _: 5)
    )
    thread.start()
    assert is_half.wait(WAIT_S)
    assert passes_in_child(lambda: not any(map(vars, parts)))
    is_over.set()
    thread.join(WAIT_S)
    assert [part.value for part in parts] == [5, 5, 5]


def test_layers_that_another_thread_evaluates_train_again_in_a_child():
    layer = torch.nn.Dropout()
    with held_elsewhere(evaluating(layer)):
        assert not layer.training
        assert passes_in_child(lambda: layer.training)
    assert layer.training


def test_a_context_is_undone_once():
    undone_by = list[str]()
    with undone(lambda: undone_by.append("end")):
        assert passes_in_child(lambda: not undone_by)
    assert undone_by == ["end"]


def test_a_property_that_another_thread_computes_can_be_computed_in_a_child():
    is_begun = threading.Event()
    is_over = threading.Event()

    class Waiting:
        def __init__(self, waits):
            self.waits = waits

        @cached_property
        def value(self):
            is_begun.set()
            return int(self.waits and is_over.wait(WAIT_S))

    thread = threading.Thread(target=lambda: Waiting(True).value)
    thread.start()
    assert is_begun.wait(WAIT_S)
    assert passes_in_child(lambda: Waiting(False).value == 0)
    is_over.set()
    thread.join(WAIT_S)
    once = Waiting(False)
    assert once.value == 0
    assert vars(once)["value"] == 0
