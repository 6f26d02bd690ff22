"""Streams of all users of the demo: the simulated users, whom all visitors share, and visitors."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from hf_slospec.batcher.handle import RequestHandle
from hf_slospec.config import SLOSpecConfig
from hf_slospec.demo.generator import DemoGenerator
from hf_slospec.demo.personas import PERSONAS, Persona, UserRequest
from hf_slospec.demo.race import Race
from hf_slospec.demo.stream import Stream, View
from hf_slospec.errors import InvalidInputError, SLOSpecError
from hf_slospec.forks import Lock

MAX_VISITORS = 8  # visitors with a running stream
VISITOR_TIMEOUT_S = 30.0  # seconds without a refresh after which a visitor is removed
# Two requests more than users, as a cancelled request stays in the batch until the current step
# ends.
CONFIG = SLOSpecConfig(max_batch=len(PERSONAS) + MAX_VISITORS + 2, max_queue=64)


@dataclass(frozen=True)
class Scene:
    """Snapshot of all streams for one visitor."""

    policy: str
    simulated: tuple[View, ...]
    visitor: View | None  # stream of the visitor for whom the snapshot is made
    other_visitors: tuple[View, ...]
    # Finished requests of these streams since the last change of the policy: with an attained SLO,
    # with an SLO
    counts: tuple[int, int]
    race: Race | None  # the visitor's race

    @property
    def views(self) -> list[View]:
        """All streams; those of simulated users come first, so that they keep their colours."""
        own = () if self.visitor is None else (self.visitor,)
        return [*self.simulated, *own, *self.other_visitors]

    def blank(self) -> Scene:
        """Return the scene with simulated users that have not written anything."""
        views = (
            replace(view, state="waiting", pieces=(), metrics=None, tokens_per_s=0.0, nodes=0)
            for view in self.simulated
        )
        return replace(self, simulated=tuple(views))


class DemoSessions:
    """All streams of the demo. Thread-safe. Simulated users pause while no visitor refreshes the
    page.
    """

    def __init__(self, generator: DemoGenerator, clock: Callable[[], float]):
        self.generator = generator
        self.clock = clock
        self._simulated: list[Stream] = []
        self._visitors: dict[str, Stream] = {}
        self._numbers: dict[str, int] = {}  # by visitor: number in the order of arrival
        self._refreshed_s: dict[str, float] = {}  # by visitor: time of the last refresh
        self._races: dict[str, Race] = {}  # by visitor: the last race
        self._is_racing = False
        self._versions = itertools.count(1)
        self._lock = Lock()

    # ---- simulated users

    def add(self, persona: Persona, user_request: UserRequest) -> None:
        """Add a simulated user and start its request."""
        with self._lock:
            stream = self._new(persona.name, persona.description, user_request, is_simulated=True)
            self._simulated.append(stream)
            self._start(stream)

    def change(self, index: int, user_request: UserRequest) -> None:
        """Replace the request of a simulated user and start it, even if the user was stopped."""
        with self._lock:
            self._check_no_race()
            stream = self._simulated[index]
            stream.user_request = user_request
            stream.version = next(self._versions)
            self._start(stream)

    def stop(self, index: int) -> None:
        with self._lock:
            self._simulated[index].stop(self.clock())

    # ---- visitors

    def ask(self, visitor: str, user_request: UserRequest) -> None:
        """Start a visitor's request in place of the previous one."""
        with self._lock:
            self._check_no_race()
            active = [
                key
                for key, stream in self._visitors.items()
                if key != visitor and stream.view(0.0).is_active
            ]
            if len(active) >= MAX_VISITORS:
                raise InvalidInputError(
                    f"{MAX_VISITORS} visitors are being served, which is the limit; try again later"
                )
            stream = self._visitors.get(visitor)
            if stream is None:
                number = self._numbers.setdefault(visitor, len(self._numbers) + 1)
                stream = self._visitors[visitor] = self._new(
                    f"Visitor {number}", "", user_request, is_simulated=False
                )
            stream.user_request = user_request
            self._start(stream)

    def stop_own(self, visitor: str) -> None:
        with self._lock:
            if (stream := self._visitors.get(visitor)) is not None:
                stream.stop(self.clock())

    def leave(self, visitor: str) -> None:
        with self._lock:
            if (stream := self._visitors.pop(visitor, None)) is not None:
                stream.stop(self.clock())
            self._refreshed_s.pop(visitor, None)
            self._races.pop(visitor, None)

    def race(self, visitor: str, prompt: str) -> None:
        """Run a race for a visitor, and return after its end. All streams pause meanwhile, and
        their requests start again afterwards.
        """
        race = Race(prompt)
        with self._lock:
            self._check_no_race()
            self._is_racing = True
            self._races[visitor] = race
            for stream in self._streams():
                stream.pause(self.clock())
        try:
            race.run(self.generator)
        except BaseException:
            self._races.pop(visitor, None)
            raise
        finally:
            with self._lock:
                self._is_racing = False
                for stream in self._streams():
                    if stream.state == "paused":
                        self._restart(stream)

    def _check_no_race(self) -> None:
        if self._is_racing:
            raise InvalidInputError("a race is running; try again when it is over, in some seconds")

    # ---- all users

    def set_policy(self, name: str) -> None:
        """Change the policy. All counts start at zero, and all requests start again."""
        with self._lock:
            self._check_no_race()
            if name != self.generator.policy:
                self.generator.set_policy(name)
                for stream in self._streams():
                    is_stopped = stream.state == "stopped"
                    stream.stop(self.clock())
                    stream.reset()
                    if not is_stopped:
                        self._restart(stream)

    def refresh(self, visitor: str) -> Scene:
        """Return the scene for this visitor.

        Also starts the next requests of simulated users whose pause is over, and removes visitors
        that have not refreshed for :data:`VISITOR_TIMEOUT_S`.
        """
        with self._lock:
            now_s = self._refreshed_s[visitor] = self.clock()
            for key in [
                key for key, at_s in self._refreshed_s.items() if now_s - at_s > VISITOR_TIMEOUT_S
            ]:
                self.leave(key)
            for stream in self._streams():
                if stream.is_due(now_s):
                    self._restart(stream)
            stream_of_visitor = self._visitors.get(visitor)
            view = None if stream_of_visitor is None else stream_of_visitor.view(now_s)
            counts = [stream.counts for stream in self._streams()]
            return Scene(
                policy=self.generator.policy,
                simulated=tuple(stream.view(now_s) for stream in self._simulated),
                visitor=None if view is None else replace(view, name="You, among the users"),
                other_visitors=tuple(
                    s.view(now_s) for key, s in self._visitors.items() if key != visitor
                ),
                counts=(
                    sum(attained for attained, _ in counts),
                    sum(judged for _, judged in counts),
                ),
                race=self._races.get(visitor),
            )

    def _streams(self) -> list[Stream]:
        return [*self._simulated, *self._visitors.values()]

    def _new(
        self, name: str, description: str, user_request: UserRequest, is_simulated: bool
    ) -> Stream:
        version = next(self._versions)
        to_text = self.generator.to_text
        return Stream(name, description, user_request, is_simulated, version, to_text)

    def _start(self, stream: Stream) -> None:
        stream.start(self._submit, self.clock())

    def _restart(self, stream: Stream) -> None:
        with contextlib.suppress(SLOSpecError):  # the stream shows the error
            self._start(stream)

    def _submit(self, user_request: UserRequest, seed: int) -> RequestHandle:
        return self.generator.submit(user_request.prompt, seed=seed, **user_request.options)
