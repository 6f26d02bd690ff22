"""Threads and time of a simulation: one thread runs at a time, and a seed decides which goes on
wherever one may wait.

``Threading`` and ``Time`` stand in for the modules ``threading`` and ``time`` of the code under
test, and for the locks of :mod:`hf_slospec.forks`.
"""

from __future__ import annotations

import random
from contextlib import contextmanager

from greenlet import GreenletExit, getcurrent, greenlet

from hf_slospec.batcher import batcher, handle
from hf_slospec.engine import fair_lock

REPLACED = (
    (batcher, "threading"),
    (batcher, "time"),
    (batcher, "Condition"),
    (batcher, "Lock"),
    (handle, "threading"),
    (handle, "time"),
    (handle, "Condition"),
    (fair_lock, "threading"),
)
MOST_TURNS = 20_000  # more are a loop without end


class StuckError(AssertionError):
    """No thread can go on, or they go on for ever."""


class World:
    """All threads of one simulation, their clock, and the faults that strike them."""

    def __init__(self, seed, switching=0.3):
        """``switching``: how often a thread that need not wait lets another one go first."""
        self.rng = random.Random(seed)
        self.switching = switching
        self.now_s = 0.0
        self.threads = []  # that have begun and not ended
        self.running = None
        self.hub = getcurrent()
        self.faults = {}
        self.struck = []
        self._counts = {}
        self.is_over = False
        self._num_turns = 0

    def clock(self):
        return self.now_s

    def at(self, point, seconds=0.0):
        """Let time pass and others go first at a named point, where a fault may strike."""
        self.now_s += seconds
        self.pause()
        number = self._counts[point] = self._counts.get(point, -1) + 1
        if (error := self.faults.get((point, number))) is not None:
            self.struck.append((point, error))
            raise error

    def pause(self):
        if self.running is not None and self.rng.random() < self.switching:
            self.running.is_ready = None
            self._let_others_run()

    def wait_for(self, is_ready, timeout=None):
        """Let others go on until this thread is ready; return False if that takes longer."""
        me = self.running
        if me is None:  # all threads have ended
            assert is_ready(), "the simulation itself would have to wait"
            return True
        me.is_ready = is_ready
        me.until_s = None if timeout is None else self.now_s + timeout
        self._let_others_run()
        me.until_s = None
        return is_ready()

    def _let_others_run(self):
        """Go on with one of the threads that are ready, which may be this one."""
        if self.is_over:
            raise GreenletExit
        me = self.running
        chosen = self._chosen()
        if chosen is None:
            self.hub.switch()  # which raises why there is none
        elif chosen is not me:
            self.running = chosen
            chosen.greenlet.switch()
        if self.is_over:
            raise GreenletExit

    def _chosen(self):
        self._num_turns += 1
        if self._num_turns > MOST_TURNS:
            return None
        while True:
            now_s = self.now_s
            ready = [
                thread
                for thread in self.threads
                if thread.is_ready is None
                or thread.is_ready()
                or (thread.until_s is not None and now_s >= thread.until_s)
            ]
            if ready:
                return ready[int(self.rng.random() * len(ready))]
            ends = [thread.until_s for thread in self.threads if thread.until_s is not None]
            if not ends:
                return None
            self.now_s = min(ends)

    def run(self):
        """Run all threads to their ends."""
        while self.threads:
            self.running = self._chosen()
            if self.running is None:
                what = "wait" if self._num_turns <= MOST_TURNS else "do not end"
                raise StuckError(
                    f"these threads {what}: {[thread.name for thread in self.threads]}"
                )
            self.running.greenlet.switch()
        self.running = None

    def end(self):
        """End what is left of the threads."""
        self.is_over = True
        for thread in list(self.threads):
            self.running = thread
            for _ in range(20):  # it may catch the exit
                if thread.is_alive():
                    thread.greenlet.throw(GreenletExit)
        self.running = None

    @contextmanager
    def in_place(self):
        """Put these threads and this clock in the place of real ones."""
        own = Threading(self)
        stand_ins = {
            "threading": own,
            "time": Time(self),
            "Condition": own.Condition,
            "Lock": own.RLock,
        }
        real = {(module, name): getattr(module, name) for module, name in REPLACED}
        for module, name in REPLACED:
            setattr(module, name, stand_ins[name])
        try:
            yield
        finally:
            self.end()
            for module, name in REPLACED:
                setattr(module, name, real[module, name])


class Thread:
    def __init__(
        self,
        world,
        target,
        args=(),
        name="",
    ):
        self.world = world
        self.name = name
        self.is_ready = None  # None: it need not wait
        self.until_s = None
        self.target = target
        self.args = args
        self.greenlet = greenlet(self._run, world.hub)
        self.has_begun = False

    def start(self):
        self.has_begun = True
        self.world.threads.append(self)
        self.world.pause()

    def _run(self):
        try:
            self.target(*self.args)
        finally:
            self.world.threads.remove(self)

    def is_alive(self):
        return self in self.world.threads

    def join(self, timeout=None):
        if not self.has_begun:
            raise RuntimeError("cannot join thread before it is started")
        self.world.wait_for(lambda: not self.is_alive(), timeout)


class Lock:
    def __init__(self, world):
        self.world = world
        self.is_held = False

    def acquire(self):
        self.world.pause()
        if self.is_held:
            self.world.wait_for(lambda: not self.is_held)
        self.is_held = True
        return True

    def release(self):
        assert self.is_held
        self.is_held = False

    def __enter__(self):
        self.acquire()

    def __exit__(self, *_):
        self.release()


class RLock:
    def __init__(self, world):
        self.lock = Lock(world)
        self.world = world
        self.owner = None
        self.depth = 0

    def __enter__(self):
        if self.depth and self.owner is self.world.running:
            self.depth += 1
            return
        self.lock.acquire()
        self.owner = self.world.running
        self.depth = 1

    def __exit__(self, *_):
        self.depth -= 1
        if not self.depth:
            self.owner = None
            self.lock.release()


class Condition(RLock):
    def __init__(self, world):
        super().__init__(world)
        self.waiters = []

    def wait(self, timeout=None):
        assert self.depth == 1 and self.owner is self.world.running
        told = []
        self.waiters.append(told)
        self.__exit__()
        try:
            return self.world.wait_for(lambda: bool(told), timeout)
        finally:
            if not self.world.is_over:
                if told in self.waiters:
                    self.waiters = [other for other in self.waiters if other is not told]
                self.__enter__()

    def wait_for(self, predicate, timeout=None):
        until_s = None if timeout is None else self.world.now_s + timeout
        while not (found := predicate()):
            left_s = None if until_s is None else until_s - self.world.now_s
            if left_s is not None and left_s <= 0.0:
                return found
            self.wait(left_s)
        return found

    def notify_all(self):
        assert self.owner is self.world.running
        for told in self.waiters:
            told.append(True)
        self.waiters = []


class Threading:
    """Stands in for the module ``threading``."""

    def __init__(self, world):
        self.world = world

    def Thread(  # noqa: N802
        self,
        target,
        args=(),
        name="",
        daemon=False,
    ):
        return Thread(self.world, target, args, name)

    def Lock(self):  # noqa: N802
        return Lock(self.world)

    def RLock(self):  # noqa: N802
        return RLock(self.world)

    def Condition(self):  # noqa: N802
        return Condition(self.world)

    def current_thread(self):
        return self.world.running or self.world

    def get_ident(self):
        return id(self.world.running)


class Time:
    """Stands in for the module ``time``."""

    def __init__(self, world):
        self.monotonic = self.perf_counter = world.clock
