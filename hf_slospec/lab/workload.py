"""Simulated loads: arrival times, lengths and SLOs of requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_slospec.errors import InvalidInputError
from hf_slospec.tree.tree import FloatArray


@dataclass(frozen=True)
class Job:
    """One request of a simulated load: its arrival, lengths and SLOs."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    tpot_slo_s: float | None = None
    ttft_slo_s: float | None = None
    kind: str = "all"  # class of the request, for tables and plots
    priority: int = 0
    # Limit for which the scheduler reserves K/V slots; None: output_tokens
    max_new_tokens: int | None = None
    is_sampled: bool = True  # the target samples, as in synthetic texts; False: greedy decoding
    # Index of an earlier request; this one arrives ``arrival_s`` seconds after that one finished
    after: int | None = None
    # The prompt begins with prompt and output of request ``after``, whose K/V is reused if cached
    continues: bool = False
    # Output tokens before the answer; ``tpot_slo_s`` applies to the answer only
    think_tokens: int = 0
    think_tpot_slo_s: float | None = None
    answer_ttft_slo_s: float | None = None  # seconds from the end of thinking to the next token

    @property
    def max_output_tokens(self) -> int:
        """Output tokens for which the scheduler reserves K/V slots."""
        return max(self.max_new_tokens or 0, self.output_tokens)


# ---- arrivals


def poisson(rng: np.random.Generator, rate: float, number: int) -> FloatArray:
    """Return the arrival times of a Poisson process in seconds, ``rate`` per second on average.  ->
    [number] f64
    """
    return gamma(rng, rate, number, 1.0)


def gamma(rng: np.random.Generator, rate: float, number: int, variation: float) -> FloatArray:
    """Return arrival times with gamma-distributed gaps.  -> [number] f64

    Args:
        rate: arrivals per second on average.
        variation: coefficient of variation of the gaps; 1 is a Poisson process, above 1 there are
            bursts.
    """
    shape = 1.0 / variation**2
    return np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), number))


# For on_off(): mean seconds at the high rate and at the low rate, and low rate / high rate
ON_S = 10.0
OFF_S = 20.0
LOW = 0.2


def on_off(rng: np.random.Generator, rate: float, number: int) -> FloatArray:
    """Return arrival times of a Poisson process that alternates between two rates for exponentially
    distributed times, ``rate`` per second on average.  -> [number] f64
    """
    busy_rate = rate * (ON_S + OFF_S) / (ON_S + LOW * OFF_S)
    times = list[float]()
    now_s = 0.0
    is_busy = True
    while len(times) < number:
        end_s = now_s + rng.exponential(ON_S if is_busy else OFF_S)
        current_rate = busy_rate * (1.0 if is_busy else LOW)
        at_s = now_s
        while len(times) < number and (at_s := at_s + rng.exponential(1.0 / current_rate)) < end_s:
            times.append(at_s)
        now_s = end_s
        is_busy = not is_busy
    return np.array(times)


MAX_TIME_S = 1e10  # limit of the virtual clock, beyond which f64 seconds do not resolve a step
ARRIVALS = ("poisson", "gamma", "on-off")
MAX_REQUESTS = 1_000_000
MAX_SPAN_S = 1e7  # maximum seconds from the first arrival to the last
MIN_VARIATION = 0.01
MAX_VARIATION = 100.0


def check_rate(rate: float) -> None:
    """Raise InvalidInputError unless the rate is positive and finite."""
    if not (math.isfinite(rate) and rate > 0.0):
        raise InvalidInputError(
            f"rate must be a positive number of requests per second, got {rate}"
        )


def arrivals(
    kind: str, rng: np.random.Generator, rate: float, number: int, variation: float = 3.0
) -> FloatArray:
    """Return the arrival times of the process ``kind``, one of :data:`ARRIVALS`.  -> [number] f64

    Args:
        rate: arrivals per second on average.
        variation: for ``gamma`` only, see :func:`gamma`.

    Raises:
        InvalidInputError: an argument is out of its range.
    """
    check_rate(rate)
    if not 1 <= number <= MAX_REQUESTS:
        raise InvalidInputError(
            f"the number of requests must be within 1..{MAX_REQUESTS}, got {number}"
        )
    if number / rate > MAX_SPAN_S:
        raise InvalidInputError(
            f"at a rate of {rate:g} per second {number} requests take {number / rate:.3g} s, more "
            f"than {MAX_SPAN_S:g} "
            "s; raise the rate, or simulate fewer requests"
        )
    if kind == "poisson":
        return poisson(rng, rate, number)
    if kind == "gamma":
        if not MIN_VARIATION <= variation <= MAX_VARIATION:
            raise InvalidInputError(
                f"variation must be within {MIN_VARIATION}..{MAX_VARIATION:g}, got {variation}"
            )
        return gamma(rng, rate, number, variation)
    if kind == "on-off":
        return on_off(rng, rate, number)
    raise InvalidInputError(f"unknown arrival process {kind!r}; known are: {', '.join(ARRIVALS)}")


# ---- mixes


@dataclass(frozen=True)
class Length:
    """Log-normal distribution of a number of tokens, clipped to limits."""

    mean: float
    std: float
    max_tokens: int
    min_tokens: int = 1

    def draw(self, rng: np.random.Generator) -> int:
        """Return a random number of tokens."""
        variance = math.log1p((self.std / self.mean) ** 2)
        drawn = rng.lognormal(math.log(self.mean) - variance / 2.0, math.sqrt(variance))
        return int(min(max(round(drawn), self.min_tokens), self.max_tokens))


@dataclass(frozen=True)
class Kind:
    """One class of requests in a mix."""

    name: str
    share: float
    input: Length
    output: Length
    tpot_slo_s: float | None = None
    ttft_slo_s: float | None = None
    # TTFT SLO / prefill time of the prompt on an idle engine; ignored if ttft_slo_s is set
    ttft_slowdown: float | None = None
    priority: int = 0
    think: Length | None = None  # thinking tokens, before those of ``output``; None: no thinking
    think_tpot_slo_s: float | None = None
    answer_ttft_slo_s: float | None = None


def _slos_serve(
    name: str, share: float, slowdown: float, tpot_slo_s: float, *lengths: float
) -> Kind:
    in_mean, in_std, in_max, out_mean, out_std, out_max = lengths
    sizes = Length(in_mean, in_std, int(in_max), 8), Length(out_mean, out_std, int(out_max), 4)
    return Kind(name, share, *sizes, tpot_slo_s=tpot_slo_s, ttft_slowdown=slowdown)


# Statistics of the papers' data sets (SLOs-Serve, table 4; AdaServe, section 6; the Azure LLM
# traces). SLOs-Serve: TTFT SLO / prefill time of the prompt, TPOT SLO in seconds; then mean,
# standard deviation and maximum of the prompt tokens, and of the output tokens. AdaServe: share of
# the requests, prompt tokens, TPOT SLO in seconds.
SLOS_SERVE = {
    "chatbot": (5.0, 0.1, 763, 424, 1591, 266, 160, 619),
    "coder": (5.0, 0.05, 847, 617, 2010, 26, 47, 232),
    "summarizer": (3.0, 0.1, 1333, 444, 1946, 202, 234, 1508),
    "toolllm": (3.0, 0.1, 690, 356, 2131, 116, 66, 363),
}
ADASERVE = {
    "coding": (0.6, Length(150, 60, 1000), 0.036),
    "chat": (0.2, Length(250, 350, 2000), 0.050),
    "summary": (0.2, Length(800, 300, 2000), 0.150),
}
MIXES: dict[str, tuple[Kind, ...]] = {
    "adaserve": tuple(
        Kind(name, share, prompt, Length(206, 80, 256, 5), tpot_slo_s, priority=priority)
        for priority, (name, (share, prompt, tpot_slo_s)) in enumerate(ADASERVE.items())
    ),
    **{name: (_slos_serve(name, 1.0, *values),) for name, values in SLOS_SERVE.items()},
    "mixed": tuple(
        _slos_serve(name, 1 / 3, *SLOS_SERVE[name]) for name in ("chatbot", "coder", "summarizer")
    ),
    "reasoning": (
        Kind(
            "reasoning",
            1.0,
            Length(127, 83, 421, 8),
            Length(803, 280, 1650, 4),
            tpot_slo_s=0.1,
            ttft_slowdown=3.0,
            think=Length(4693, 1442, 7297, 4),
            think_tpot_slo_s=0.05,
        ),
    ),
    "azure-code": (
        Kind("code", 1.0, Length(2048, 1900, 7400), Length(28, 60, 1000, 1), tpot_slo_s=0.05),
    ),
    "azure-conversation": (
        Kind("chat", 1.0, Length(1155, 1100, 8000), Length(211, 160, 1500, 2), tpot_slo_s=0.1),
    ),
}


def jobs_of(
    mix: Sequence[Kind],
    times_s: FloatArray,
    rng: np.random.Generator,
    prompt_s: Callable[[int], float],
) -> list[Job]:
    """Return requests of a mix with random classes and lengths.

    Args:
        mix: classes of requests, drawn in proportion to their shares.
        times_s: [num_requests] f64, arrival times.
        rng: draws classes and lengths.
        prompt_s: takes a prompt's number of tokens, returns the seconds of its prefill on an idle
            engine. A TTFT SLO given as ``ttft_slowdown`` is a multiple of them.
    """
    shares = np.array([kind.share for kind in mix])
    jobs = []
    for time_s, index in zip(
        times_s, rng.choice(len(mix), len(times_s), p=shares / shares.sum()), strict=True
    ):
        kind = mix[index]
        num_input = kind.input.draw(rng)
        num_output = kind.output.draw(rng)
        ttft_slo_s = kind.ttft_slo_s
        if ttft_slo_s is None and kind.ttft_slowdown is not None:
            ttft_slo_s = kind.ttft_slowdown * prompt_s(num_input)
        num_think = 0 if kind.think is None else kind.think.draw(rng)
        jobs.append(
            Job(
                float(time_s),
                num_input,
                num_think + num_output,
                kind.tpot_slo_s,
                ttft_slo_s,
                kind.name,
                kind.priority,
                think_tokens=num_think,
                think_tpot_slo_s=kind.think_tpot_slo_s,
                answer_ttft_slo_s=kind.answer_ttft_slo_s,
            )
        )
    return jobs


def in_rounds(
    answers: Sequence[Job],
    call: Kind,
    rounds: tuple[float, float],
    rng: np.random.Generator,
    prompt_s: Callable[[int], float],
    pause_s: float | None = None,
) -> list[Job]:
    """Return requests of agents: each answer is preceded by a random number of tool calls, which
    are requests, too. Each request arrives after the one before it has finished.

    Args:
        answers: the last requests of the agents.
        call: lengths and SLOs of the tool calls.
        rounds: mean and standard deviation of the number of requests per agent, answer included.
        rng: draws lengths, numbers of requests and pauses.
        prompt_s: as for :func:`jobs_of`.
        pause_s: mean seconds that a tool takes, exponentially distributed. A prompt then begins
            with prompt and output of the agent's previous request. None: tools take no time, and
            the requests share no text.
    """
    jobs: list[Job] = []
    for answer in answers:
        number = max(round(rng.normal(*rounds)), 1)
        first, *later = [*jobs_of((call,), np.zeros(number - 1), rng, prompt_s), answer]
        jobs.append(replace(first, arrival_s=answer.arrival_s, after=None, continues=False))
        for job in later:
            previous = jobs[-1]
            arrival_s = 0.0
            num_input = job.input_tokens
            if pause_s is not None:
                arrival_s = rng.exponential(pause_s)
                num_input += previous.input_tokens + previous.output_tokens
            jobs.append(
                replace(
                    job,
                    arrival_s=arrival_s,
                    after=len(jobs) - 1,
                    continues=pause_s is not None,
                    input_tokens=num_input,
                )
            )
    return jobs


def mix_of(name: str) -> tuple[Kind, ...]:
    """Return the mix of :data:`MIXES` with this name.

    Raises:
        InvalidInputError: there is no mix of this name.
    """
    if name not in MIXES:
        raise InvalidInputError(f"unknown mix {name!r}; known are: {', '.join(MIXES)}")
    return MIXES[name]
