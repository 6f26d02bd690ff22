"""The lock that is given in the order it was asked for."""

from __future__ import annotations

import threading
import time

import pytest

from hf_slospec.engine.fair_lock import FairLock

WAIT_S = 20.0  # far more than anything here takes


def test_it_is_handed_on_in_the_order_of_asking():
    lock = FairLock()
    order = []

    def ask(name):
        with lock:
            order.append(name)

    threads = [threading.Thread(target=ask, args=(name,)) for name in range(5)]
    with lock, lock:  # its holder may enter again
        for name, thread in enumerate(threads):
            thread.start()
            until = time.monotonic() + WAIT_S
            while len(lock._waiting) <= name and time.monotonic() < until:
                time.sleep(0.001)
    for thread in threads:
        thread.join(WAIT_S)
    assert order == [0, 1, 2, 3, 4]


def test_a_thread_in_a_tight_loop_starves_nobody():
    lock = FairLock()
    is_over = threading.Event()

    def loop():
        while not is_over.is_set():
            with lock:
                time.sleep(0.001)

    greedy_thread = threading.Thread(target=loop)
    greedy_thread.start()
    for _ in range(20):
        with lock:
            pass
    is_over.set()
    greedy_thread.join(WAIT_S)
    assert not greedy_thread.is_alive()


def test_other_threads_take_it_while_it_is_released():
    lock = FairLock()
    order = []

    def ask():
        with lock:
            order.append("other")

    with lock, lock:
        with lock.released():
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join(WAIT_S)
            with lock, lock.released(), lock:  # its holder may enter and release it again
                order.append("nested")
        order.append("holder")
        late = threading.Thread(target=ask)
        late.start()
    late.join(WAIT_S)
    assert order == ["other", "nested", "holder", "other"]
    assert lock._owner is None


def test_it_is_held_again_after_an_error_while_it_was_released():
    lock = FairLock()
    with lock:
        with pytest.raises(ZeroDivisionError), lock.released():
            raise ZeroDivisionError
        assert lock._owner == threading.get_ident()
    assert lock._owner is None
