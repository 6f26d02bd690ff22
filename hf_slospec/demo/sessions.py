"""All users of the demo's one engine: simulated ones that every visitor sees, and each visitor's own."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hf_slospec.config import SLOSpecConfig
from hf_slospec.demo.personas import MAX_PROMPT_TOKENS, Person, Wish
from hf_slospec.demo.stream import Stream, View
from hf_slospec.errors import InvalidInputError, NotRunningError, SLOSpecError
from hf_slospec.serving.generator import SLOSpecGenerator
from hf_slospec.serving.handle import RequestHandle

MAX_SIMULATED = 6
MAX_VISITORS = 8  # whose streams run at a time
GONE_S = 30.0  # a visitor who has not looked for so long has left
# The engine has room for all of them, and for those cancelled in a step that still runs.
CONFIG = SLOSpecConfig(max_batch=MAX_SIMULATED + MAX_VISITORS + 2, max_queue=64)
POLICIES = {
    "none": SLOSpecConfig(policy="none"),
    "fixed": SLOSpecConfig(policy="fixed", max_depth=4, max_width=1),
    "adaserve": SLOSpecConfig(policy="adaserve"),
    "auto": SLOSpecConfig(policy="auto"),
}


@dataclass(frozen=True)
class Scene:
    """What one visitor sees at a moment."""

    policy: str
    simulated: tuple[View | None, ...]  # by place
    own: View | None
    others: tuple[View, ...]  # other visitors' streams
    record: tuple[int, int]  # answers that met their target since the policy was chosen, of those that had one

    @property
    def everybody(self) -> list[View]:
        """Who comes stands behind who was there, so that the others' colours stay."""
        own = [] if self.own is None else [self.own]
        return [*(view for view in self.simulated if view is not None), *own, *self.others]


class Crowd:
    """May be used from any thread. Simulated users ask on only while somebody looks."""

    def __init__(self, generator: SLOSpecGenerator, clock: Callable[[], float]):
        assert generator.tokenizer is not None
        self.generator, self.clock, self.policy = generator, clock, "auto"
        self._tokenizer: Any = generator.tokenizer
        self._simulated: list[Stream | None] = [None] * MAX_SIMULATED
        self._visitors: dict[str, Stream] = {}
        self._numbers: dict[str, int] = {}  # of visitors, in the order they came
        self._seen_s: dict[str, float] = {}
        self._record = (0, 0)  # of streams that are gone
        self._versions = itertools.count(1)
        self._lock = threading.RLock()

    # ---- what simulated users do

    def add(self, person: Person, wish: Wish) -> int:
        """-> its place"""
        with self._lock:
            if None not in self._simulated:
                raise InvalidInputError(f"there is room for {MAX_SIMULATED} simulated users; remove one first")
            place = self._simulated.index(None)
            stream = self._new(person.name, person.wants, wish, is_simulated=True)
            self._simulated[place] = stream
            self._begin(stream)
            return place

    def change(self, place: int, wish: Wish) -> None:
        """Have one ask for something else, from the beginning; also starts one that was stopped."""
        with self._lock:
            stream = self._at(place)
            stream.wish, stream.version = wish, next(self._versions)
            self._begin(stream)

    def stop(self, place: int) -> None:
        with self._lock:
            self._at(place).end(self.clock())

    def remove(self, place: int) -> None:
        with self._lock:
            self._dismiss(self._at(place))
            self._simulated[place] = None

    def _at(self, place: int) -> Stream:
        stream = self._simulated[place]
        if stream is None:
            raise InvalidInputError("this user has been removed meanwhile")
        return stream

    # ---- what visitors do

    def ask(self, visitor: str, wish: Wish) -> None:
        """A visitor's own request; replaces the one before."""
        with self._lock:
            others = [key for key, stream in self._visitors.items() if key != visitor and stream.view(0.0).is_active]
            if len(others) >= MAX_VISITORS:
                raise InvalidInputError(f"{MAX_VISITORS} visitors are being served; try again in a moment")
            stream = self._visitors.get(visitor)
            if stream is None:
                number = self._numbers.setdefault(visitor, len(self._numbers) + 1)
                stream = self._visitors[visitor] = self._new(f"Visitor {number}", "", wish, is_simulated=False)
            stream.wish = wish
            self._begin(stream)

    def stop_own(self, visitor: str) -> None:
        with self._lock:
            if (stream := self._visitors.get(visitor)) is not None:
                stream.end(self.clock())

    def leave(self, visitor: str) -> None:
        with self._lock:
            if (stream := self._visitors.pop(visitor, None)) is not None:
                self._dismiss(stream)
            self._seen_s.pop(visitor, None)

    # ---- for everybody

    def set_policy(self, name: str) -> None:
        """From the next step on; what runs goes on. Targets met are counted anew."""
        if name not in POLICIES:
            raise InvalidInputError(f"there is no policy {name!r}; choose one of {', '.join(POLICIES)}")
        with self._lock:
            if name != self.policy:
                self.generator.set_policy(POLICIES[name])
                self.policy, self._record = name, (0, 0)
                for stream in self._streams():
                    stream.forget_record()

    def look(self, visitor: str) -> Scene:
        """What this visitor sees now. Looking is what keeps the simulated users going."""
        with self._lock:
            now_s = self._seen_s[visitor] = self.clock()
            for key in [key for key, seen_s in self._seen_s.items() if now_s - seen_s > GONE_S]:
                self.leave(key)
            for stream in self._streams():
                if stream.is_due(now_s):
                    self._try(stream)
            own = self._visitors.get(visitor)
            records = [self._record, *(stream.record for stream in self._streams())]
            return Scene(
                policy=self.policy,
                simulated=tuple(None if stream is None else stream.view(now_s) for stream in self._simulated),
                own=None if own is None else replace(own.view(now_s), name=f"You ({own.name.lower()})"),
                others=tuple(s.view(now_s) for key, s in self._visitors.items() if key != visitor),
                record=(sum(kept for kept, _ in records), sum(judged for _, judged in records)),
            )

    # ----

    def _streams(self) -> list[Stream]:
        return [*(stream for stream in self._simulated if stream is not None), *self._visitors.values()]

    def _new(self, name: str, wants: str, wish: Wish, is_simulated: bool) -> Stream:
        def to_text(ids: list[int]) -> str:
            return str(self._tokenizer.decode(ids, skip_special_tokens=True))

        return Stream(name, wants, wish, is_simulated, to_text, next(self._versions))

    def _dismiss(self, stream: Stream) -> None:
        stream.end(self.clock())
        (kept, judged), (own_kept, own_judged) = self._record, stream.record
        self._record = kept + own_kept, judged + own_judged

    def _begin(self, stream: Stream) -> None:
        stream.begin(self._submit, self.clock())

    def _try(self, stream: Stream) -> None:
        try:
            self._begin(stream)
        except SLOSpecError:  # the stream shows it
            return

    def _submit(self, wish: Wish) -> RequestHandle:
        prompt: Any = wish.prompt
        num_tokens = len(self._tokenizer(wish.prompt)["input_ids"])
        if num_tokens > MAX_PROMPT_TOKENS:
            raise InvalidInputError(f"the prompt has {num_tokens} tokens; {MAX_PROMPT_TOKENS} are the limit here")
        if getattr(self._tokenizer, "chat_template", None) is not None:
            prompt = [{"role": "user", "content": wish.prompt}]
        try:
            return self.generator.submit(prompt, **wish.options)
        except NotRunningError:  # the engine died of an error; those who were served show it
            self.generator.start()
            return self.generator.submit(prompt, **wish.options)
