"""Loads: who comes when, with what, and what is promised to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_slospec.algo.tree import FloatArray
from hf_slospec.errors import InvalidInputError


@dataclass(frozen=True)
class Job:
    """A request to come."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    tpot_s: float | None = None  # target
    ttft_s: float | None = None  # target
    kind: str = "all"  # class, for tables and plots
    priority: int = 0
    max_new_tokens: int | None = None  # what schedulers are told; None: the very output_tokens
    is_sampled: bool = True  # whether its text was drawn, as made-up ones are, or chosen greedily

    @property
    def most_tokens(self) -> int:
        """Output tokens that schedulers are told of."""
        return max(self.max_new_tokens or 0, self.output_tokens)


# ---- arrivals


def poisson(rng: np.random.Generator, rate: float, number: int) -> FloatArray:
    """Seconds of each arrival, ``rate`` per second on average.  -> [number] f64"""
    return gamma(rng, rate, number, 1.0)


def gamma(rng: np.random.Generator, rate: float, number: int, variation: float) -> FloatArray:
    """Bursts: gaps drawn from a gamma distribution with this coefficient of variation; 1 is a Poisson process."""
    shape = 1.0 / variation**2
    return np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), number))


def on_off(
    rng: np.random.Generator, rate: float, number: int, on_s: float = 10.0, off_s: float = 20.0, low: float = 0.2
) -> FloatArray:
    """A Poisson process that is by turns busy and quiet, for exponential times; quiet it has ``low`` of its busy rate.

    ``rate`` is the average.
    """
    busy_rate = rate * (on_s + off_s) / (on_s + low * off_s)
    times, now_s, is_busy = list[float](), 0.0, True
    while len(times) < number:
        end_s = now_s + rng.exponential(on_s if is_busy else off_s)
        own_rate = busy_rate * (1.0 if is_busy else low)
        at_s = now_s
        while len(times) < number and own_rate > 0.0 and (at_s := at_s + rng.exponential(1.0 / own_rate)) < end_s:
            times.append(at_s)
        now_s, is_busy = end_s, not is_busy
    return np.array(times)


MOST_S = 1e10  # of a clock: much later it could not tell steps apart
ARRIVALS = ("poisson", "gamma", "on-off")
MOST_REQUESTS = 1_000_000
MOST_SPAN_S = 1e7  # from the first to the last
VARIATIONS = 0.01, 100.0


def arrivals(kind: str, rng: np.random.Generator, rate: float, number: int, variation: float = 3.0) -> FloatArray:
    if not (math.isfinite(rate) and rate > 0.0):
        raise InvalidInputError(f"rate must be a positive number of requests per second, got {rate}")
    if not 1 <= number <= MOST_REQUESTS:
        raise InvalidInputError(f"the number of requests must lie within 1..{MOST_REQUESTS}, got {number}")
    if number / rate > MOST_SPAN_S:
        raise InvalidInputError(f"at a rate of {rate:g} per second {number} requests would take {number / rate:.3g} s")
    if kind == "poisson":
        return poisson(rng, rate, number)
    if kind == "gamma":
        if not VARIATIONS[0] <= variation <= VARIATIONS[1]:
            raise InvalidInputError(f"variation must lie within {VARIATIONS[0]}..{VARIATIONS[1]:g}, got {variation}")
        return gamma(rng, rate, number, variation)
    if kind == "on-off":
        return on_off(rng, rate, number)
    raise InvalidInputError(f"unknown arrivals {kind!r}; known are: {', '.join(ARRIVALS)}")


# ---- mixes


@dataclass(frozen=True)
class Length:
    """Tokens, from a log-normal distribution of this mean and standard deviation."""

    mean: float
    std: float
    most: int
    least: int = 1

    def draw(self, rng: np.random.Generator) -> int:
        variance = math.log1p((self.std / self.mean) ** 2)
        drawn = rng.lognormal(math.log(self.mean) - variance / 2.0, math.sqrt(variance))
        return int(min(max(round(drawn), self.least), self.most))


@dataclass(frozen=True)
class Kind:
    """A class of requests."""

    name: str
    share: float
    input: Length
    output: Length
    tpot_s: float | None = None
    ttft_s: float | None = None
    ttft_slowdown: float | None = None  # the target as a multiple of what the prompt takes alone, if there is no other
    priority: int = 0


def _slos_serve(name: str, share: float, ttft: float, tpot_s: float, *lengths: float) -> Kind:
    in_mean, in_std, in_most, out_mean, out_std, out_most = lengths
    sizes = Length(in_mean, in_std, int(in_most), 8), Length(out_mean, out_std, int(out_most), 4)
    return Kind(name, share, *sizes, tpot_s=tpot_s, ttft_slowdown=ttft)


# Statistics of the papers' data sets (SLOs-Serve, table 4; AdaServe, section 6; the Azure LLM traces).
CHATBOT = (763, 424, 1591, 266, 160, 619)
CODER = (847, 617, 2010, 26, 47, 232)
SUMMARIZER = (1333, 444, 1946, 202, 234, 1508)
TOOLLLM = (690, 356, 2131, 116, 66, 363)
MIXES: dict[str, tuple[Kind, ...]] = {
    "adaserve": (
        Kind("coding", 0.6, Length(150, 60, 1000), Length(206, 80, 256, 5), tpot_s=0.036, priority=2),
        Kind("chat", 0.2, Length(250, 350, 2000), Length(206, 80, 256, 5), tpot_s=0.050, priority=1),
        Kind("summary", 0.2, Length(800, 300, 2000), Length(206, 80, 256, 5), tpot_s=0.150),
    ),
    "chatbot": (_slos_serve("chatbot", 1.0, 5.0, 0.1, *CHATBOT),),
    "coder": (_slos_serve("coder", 1.0, 5.0, 0.05, *CODER),),
    "summarizer": (_slos_serve("summarizer", 1.0, 3.0, 0.1, *SUMMARIZER),),
    "toolllm": (_slos_serve("toolllm", 1.0, 3.0, 0.1, *TOOLLLM),),
    "mixed": (
        _slos_serve("chatbot", 1 / 3, 5.0, 0.1, *CHATBOT),
        _slos_serve("coder", 1 / 3, 5.0, 0.05, *CODER),
        _slos_serve("summarizer", 1 / 3, 3.0, 0.1, *SUMMARIZER),
    ),
    "azure-code": (Kind("code", 1.0, Length(2048, 1900, 7400), Length(28, 60, 1000, 1), tpot_s=0.05),),
    "azure-conversation": (Kind("chat", 1.0, Length(1155, 1100, 8000), Length(211, 160, 1500, 2), tpot_s=0.1),),
}


def jobs_of(
    mix: Sequence[Kind], times_s: FloatArray, rng: np.random.Generator, prompt_s: Callable[[int], float]
) -> list[Job]:
    """Requests of a mix that come at these times.

    Args:
        prompt_s: seconds that a prompt of so many tokens takes alone; what slowdowns multiply.
    """
    shares = np.array([kind.share for kind in mix])
    jobs = []
    for time_s, index in zip(times_s, rng.choice(len(mix), len(times_s), p=shares / shares.sum()), strict=True):
        kind = mix[index]
        num_input, num_output = kind.input.draw(rng), kind.output.draw(rng)
        ttft_s = kind.ttft_s
        if ttft_s is None and kind.ttft_slowdown is not None:
            ttft_s = kind.ttft_slowdown * prompt_s(num_input)
        jobs.append(Job(float(time_s), num_input, num_output, kind.tpot_s, ttft_s, kind.name, kind.priority))
    return jobs


def mix_of(name: str) -> tuple[Kind, ...]:
    if name not in MIXES:
        raise InvalidInputError(f"unknown mix {name!r}; known are: {', '.join(MIXES)}")
    return MIXES[name]


def early_ends(jobs: Sequence[Job], rng: np.random.Generator, whole: float, least: int = 5) -> list[Job]:
    """Outputs that end by themselves: a share ``whole`` runs to its given length, others anywhere before it."""
    made = []
    for job in jobs:
        length = job.output_tokens
        if rng.random() >= whole:
            length = int(rng.integers(min(least, length), length + 1))
        made.append(replace(job, output_tokens=length, max_new_tokens=job.max_new_tokens or job.output_tokens))
    return made
