"""Schedules of a simulated batcher: users, faults and settings, drawn by a seed, and made smaller
where they fail.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from hf_slospec.scheduler.continuous import Limits

MEMORY = ("target pool", "target move", "target copy", "target repack", "target forward", "sampler")
HOST = ("plan", "select", "learn")  # memory of policies, which do not use torch
DRAFT_MEMORY = ("draft pool", "draft copy", "draft repack", "draft forward")
RARE = (
    "target move",
    "target copy",
    "target repack",
    "draft copy",
    "draft repack",
)  # points of few schedules
OBSERVER = ("on_step", "on_end")
FATAL = ("target forward", "target move", "draft forward", "close")


class DeviceError(Exception):
    """Of the whole engine."""


@dataclass(frozen=True)
class Job:
    """A request, and what its user does with it."""

    family: int
    prompt_len: int
    own_tokens: int  # in its prompt, behind the common beginning
    new: int
    tpot_slo_s: float | None = None
    ttft_slo_s: float | None = None
    priority: int = 0
    best_effort: bool = False
    must_guarantee: bool = False
    is_sampled: bool = False
    salt: str = ""
    consumer: str = "result"  # "result", "tokens", "streamer" or "none"
    ends_after: int | None = (
        None  # tokens after which the user cancels it, or ends it with an error
    )
    ends_with_error: bool = False
    fails_at: int | None = None  # position at which its processor raises
    in_criterion: bool = False  # its criterion, after the token
    processor_memory: bool = False  # MemoryError
    stops_at: int | None = None  # position after which its criterion stops it
    block: bool = False
    timeout: float | None = None
    resumes: bool = False  # if it is cancelled, another request goes on
    batcher: int = 0


@dataclass(frozen=True)
class Pause:
    seconds: float


@dataclass(frozen=True)
class Stop:
    drain: bool
    timeout: float | None
    batcher: int = 0


@dataclass(frozen=True)
class Start:
    batcher: int = 0


@dataclass(frozen=True)
class Load:
    batcher: int = 0


@dataclass(frozen=True)
class Cancel:
    """Cancel a request of this user, by its number."""

    number: int


@dataclass(frozen=True)
class Generate:
    """Call ``generate`` beside the batchers; only the prompts of its jobs, and how they are
    decoded, count.
    """

    jobs: tuple[Job, ...]


Action = Job | Pause | Stop | Start | Load | Cancel | Generate


@dataclass(frozen=True)
class Fault:
    point: str
    number: int  # index among the calls of this point
    kind: str  # "memory", "torch" (its own class), "observer" or "fatal"

    def error(self):
        errors = {
            "memory": MemoryError,
            "torch": torch.OutOfMemoryError,
            "observer": KeyError,
            "fatal": DeviceError,
        }
        return errors[self.kind](f"injected: {self.point} {self.number}")


@dataclass(frozen=True)
class Schedule:
    """All that happens in one simulation, but for the order of the threads, which the seed decides."""

    seed: int
    limits: Limits
    max_queue: int
    kept: float
    admission: str
    prefill: str
    policy: str
    depth: int
    width: int
    has_assistant: bool
    num_batchers: int
    seconds: tuple[float, ...]  # per forward, in turn
    users: tuple[tuple[Action, ...], ...]
    faults: tuple[Fault, ...]
    switching: float
    output_tokens: float  # at which the length of outputs is estimated at first


def schedule_of(seed):
    """Draw a schedule."""
    rng = random.Random(seed)
    num_batchers = rng.choice([1, 1, 1, 2])
    depth, width = rng.choice([(0, 1), (1, 1), (2, 2), (2, 2), (3, 1), (3, 2)])
    has_assistant = rng.random() < 0.6
    max_nodes = depth * width
    kv_tokens = rng.choice([45, 70, 90, 130, 400]) + max_nodes
    chunk = rng.choice([1, 4, 16, 16, 64, 64])
    starvation_s = rng.choice([2.0, 20.0, 1e9])
    limits = Limits(rng.randrange(1, 5), kv_tokens, max_nodes, chunk, starvation_s)
    # Prompts of few chunks, as steps that only prefill are much alike; some are long anyway.
    longest = rng.choice({1: [4, 4, 4, 50], 4: [12, 12, 50]}.get(chunk, [50]))
    users = tuple(
        tuple(_actions(rng, rng.randrange(1, 5), longest, kv_tokens - max_nodes, num_batchers))
        for _ in range(rng.randrange(1, 4))
    )
    return Schedule(
        seed, limits, rng.choice([1, 3, 100]), rng.choice([0, 40, float("inf"), float("inf")]),
        rng.choice(["slo", "slo", "slo", "edf", "fcfs", "priority"]),
        rng.choice(["beside", "beside", "first", "chunked"]),
        rng.choice(["whole", "whole", "now and then", "auto"]), depth, width, has_assistant, num_batchers,
        tuple(rng.choice([0.0, 0.1, 1.0, 1.0, 1.0, 3.0, 1e5]) for _ in range(7)),
        users, _faults(rng), rng.choice([0.1, 0.5, 0.9]), rng.choice([0.0, 3.0, 100.0]),
    )  # fmt: skip


def _actions(rng, number, longest, room, num_batchers):
    for _ in range(number):
        batcher = rng.randrange(num_batchers)
        if rng.random() < 0.7:
            yield _job(rng, longest, room, batcher)
            continue
        action = rng.choice(
            [
                Pause(rng.choice([0.0, 1.0, 10.0, 1e6])), Pause(1.0), Start(batcher), Load(batcher),
                Stop(rng.random() < 0.6, rng.choice([None, 0.0, 2.0]), batcher), Cancel(rng.randrange(3)), Cancel(0),
                Generate((_plain_job(rng),) * rng.randrange(1, 3)),
            ]
        )  # fmt: skip
        yield action
        if isinstance(action, Stop) and rng.random() < 0.5:
            yield Start(batcher)


def _job(rng, longest, room, batcher):
    new = rng.choice([1, 2, 5, 9, 14])
    least = 18 if longest == 50 and rng.random() < 0.6 else 1  # so that others may begin alike
    prompt_len = rng.randrange(least, min(longest, room - new))
    must_guarantee = rng.random() < 0.1
    return Job(
        family=rng.randrange(2), prompt_len=prompt_len, own_tokens=rng.randrange(min(prompt_len, 6)), new=new,
        tpot_slo_s=rng.choice([None, None, 1e-6, 2.0, 1e3]), ttft_slo_s=rng.choice([None, None, 3.0, 60.0, 1e7]),
        priority=rng.randrange(2), best_effort=not must_guarantee and rng.random() < 0.2,
        must_guarantee=must_guarantee,
        is_sampled=rng.random() < 0.5, salt=rng.choice(["", "", "", "x"]),
        consumer=rng.choice(["result", "tokens", "streamer", "none"]),
        ends_after=rng.choice([None] * 5 + [0, 2]), ends_with_error=rng.random() < 0.3,
        fails_at=rng.choice([None] * 10 + [0, 2]), in_criterion=rng.random() < 0.4,
        processor_memory=rng.random() < 0.3,
        stops_at=rng.choice([None] * 4 + [1, 4]), block=rng.random() < 0.5, timeout=rng.choice([None, 0.5, 50.0]),
        resumes=rng.random() < 0.5, batcher=batcher,
    )  # fmt: skip


def _plain_job(rng):
    prompt_len = rng.randrange(1, 30)
    own_tokens = rng.randrange(min(prompt_len, 6))
    return Job(
        rng.randrange(2),
        prompt_len,
        own_tokens,
        rng.choice([1, 2, 5]),
        is_sampled=rng.random() < 0.5,
    )


def _faults(rng):
    kind = rng.random()
    memory = (*MEMORY, *DRAFT_MEMORY)
    if kind < 0.3:
        return ()
    if kind < 0.75:
        points = [rng.choice((*memory, *RARE, *HOST)) for _ in range(rng.choice([1, 1, 2, 3, 6]))]
        numbers = [
            rng.choice([0, 0, 1] if point in RARE else [0, 0, 1, 2, 3, 5, 8]) for point in points
        ]
        return tuple(
            Fault(point, number, "memory" if point in HOST else rng.choice(["memory", "torch"]))
            for point, number in zip(points, numbers, strict=True)
        )
    if kind < 0.85:
        point = rng.choice(["target forward", "draft forward", "sampler"])
        first = rng.randrange(6)
        return tuple(
            Fault(point, first + number, "memory") for number in range(rng.choice([3, 8, 16]))
        )
    if kind < 0.93:
        return (Fault(rng.choice(OBSERVER), rng.randrange(3), "observer"),)
    return (Fault(rng.choice(FATAL), rng.randrange(6), "fatal"),)


def shrunk(plan, fails):
    """Return a smaller schedule that fails as well: fewer faults, users and actions, plainer
    settings.
    """
    while (smaller := next(filter(fails, _smaller(plan)), None)) is not None:
        plan = smaller
    return plan


def _smaller(plan):
    for place in range(len(plan.faults)):
        yield replace(plan, faults=plan.faults[:place] + plan.faults[place + 1 :])
    for place, actions in enumerate(plan.users):
        before = plan.users[:place]
        behind = plan.users[place + 1 :]
        yield replace(plan, users=before + behind)
        for at, action in enumerate(actions):
            yield replace(plan, users=(*before, actions[:at] + actions[at + 1 :], *behind))
            if isinstance(action, Job):
                plain = Job(
                    action.family,
                    action.prompt_len,
                    action.own_tokens,
                    action.new,
                    batcher=action.batcher,
                )
                for name in Job.__dataclass_fields__:
                    if getattr(action, name) != getattr(plain, name):
                        other = replace(action, **{name: getattr(plain, name)})
                        yield replace(
                            plan,
                            users=(*before, (*actions[:at], other, *actions[at + 1 :]), *behind),
                        )
    plain = dict(
        num_batchers=1,
        kept=0,
        has_assistant=False,
        policy="whole",
        prefill="beside",
        seconds=(1.0,),
        max_queue=100,
    )
    for name, value in plain.items():
        if getattr(plan, name) != value and (name != "num_batchers" or not _uses_second(plan)):
            yield replace(plan, **{name: value})


def _uses_second(plan):
    return any(getattr(action, "batcher", 0) for actions in plan.users for action in actions)
