"""Files of any content for the simulator; ``scripts/fuzz.py`` tries more of them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_slospec.errors import InvalidInputError
from hf_slospec.lab import comparison
from hf_slospec.lab.files import OPTIONAL, REQUIRED, read_trace
from hf_slospec.lab.hardware import HARDWARE, hardware_of
from hf_slospec.lab.outcomes import METRICS
from hf_slospec.lab.systems import SYSTEMS
from hf_slospec.lab.texts import Recording, TextModel
from hf_slospec.lab.workload import Job
from tests.support.fuzzing import fuzzed

KNOWN = HARDWARE["llama-8b-h100"]
JOBS = (Job(0.0, 5, 4, 0.1), Job(0.1, 50, 3))
MOST_TOKENS = 500  # larger loads are not simulated
numbers = (
    st.integers(-1, 5) | st.integers() | st.floats() | st.sampled_from((10**400, 1e308, 5e-324))
)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("target", "ms", "a")), inner)
    ),
    max_leaves=6,
)
raw = st.binary(max_size=30) | st.sampled_from(
    (b"[" * 100_000, b"9" * 5000, "\ud800".encode("utf-8", "surrogatepass"))
)


def rather(valid):
    """Values of the strategy, and one of ten of any kind."""
    return st.integers(0, 9).flatmap(lambda number: json_values if number == 9 else valid)


def as_file(content):
    """The content as JSON, or as it is if it is a text, and one of ten files of any bytes."""
    encoded = content.map(lambda own: own if isinstance(own, str) else json.dumps(own))
    written = encoded.map(lambda text: text.encode("utf-8", "surrogatepass"))
    return st.integers(0, 9).flatmap(lambda number: raw if number == 9 else written)


def check_simulated(system, jobs, texts, hardware=KNOWN, replicas=1):
    if sum(job.output_tokens for job in jobs) > MOST_TOKENS:
        return
    load = comparison.Load.of("x", jobs, texts, np.random.default_rng(0))
    runs = comparison.compare([system], [load], hardware, replicas=replicas, seed=0)
    for metric in METRICS:
        comparison.table(runs, [load], metric)
        (record,) = json.loads(json.dumps(comparison.records(runs, [load], metric)))
        assert record["requests"] == len(jobs) and 0 <= (record["attainment"] or 0) <= 1


def ascending(values, number, unique=False):
    return st.lists(values, min_size=number, max_size=number, unique=unique).map(sorted)


forwards = st.integers(1, 4).flatmap(
    lambda number: st.fixed_dictionaries(
        {
            "tokens": rather(
                ascending(st.integers(1, 100) | st.integers(1, 10**9), number, unique=True)
            ),
            "ms": rather(
                ascending(st.floats(0.01, 1e3) | st.sampled_from((1e6, 0, 5e-324)), number)
            ),
        },
        optional=dict.fromkeys(
            ("ms_per_further_request", "ms_per_1000_keys"), rather(st.floats(0, 1e6))
        ),
    )
)
extra = st.floats(0, 1) | st.floats(0, 1e6)
latencies = st.fixed_dictionaries(
    {"target": rather(forwards), "draft": rather(forwards)},
    optional={name: rather(extra) for name in ("mixed_ms", "host_ms", "drafting_request_ms")}
    | {"kv_tokens": rather(st.integers(1, 10**9))},
)
fits = st.fixed_dictionaries({"fit": rather(forwards)})
profiles = st.fixed_dictionaries(
    {"results": rather(st.fixed_dictionaries({"target": rather(fits), "draft": fits}))}
)
systems = st.sampled_from(list(SYSTEMS))


@fuzzed(25)
@given(content=as_file(latencies | profiles), system=systems)
def test_latency_files(tmp_path: Path, content: bytes, system: str) -> None:
    (tmp_path / "latency.json").write_bytes(content)
    with contextlib.suppress(InvalidInputError):
        check_simulated(system, JOBS, TextModel(), hardware_of(str(tmp_path / "latency.json")))


texts = st.integers(1, 4).flatmap(
    lambda length: st.fixed_dictionaries(
        {
            "input_tokens": rather(st.integers(1, 10**30)),
            "child_probs": rather(
                st.lists(
                    ascending(st.floats(0, 0.5), 2).map(lambda probs: probs[::-1]),
                    min_size=length,
                    max_size=length,
                )
            ),
            "ranks": rather(st.lists(st.integers(0, 2), min_size=length, max_size=length)),
        }
    )
)
recordings = st.fixed_dictionaries(
    {"texts": rather(st.lists(texts, min_size=1, max_size=3))},
    optional={"version": rather(st.just(1)), "provenance": rather(st.just({}))},
)


@fuzzed(20)
@given(content=as_file(recordings), system=systems)
def test_recordings(tmp_path: Path, content: bytes, system: str) -> None:
    (tmp_path / "texts.json").write_bytes(content)
    with contextlib.suppress(InvalidInputError):
        check_simulated(system, JOBS, Recording.read(tmp_path / "texts.json"))


CELLS: dict[str, st.SearchStrategy[Any]] = {
    "arrival_s": st.floats(0, 3) | st.floats(0, 1e10),
    "input_tokens": st.integers(1, 10**6),
    "output_tokens": st.integers(1, 30),
    "slo": st.just("") | st.floats(1e-3, 10) | st.floats(0, 1e10),
    "slo_ratio": st.floats(-10, 10),
    "ttft_s": st.just("") | st.floats(0, 10),
    "class": st.text(max_size=4),
    "priority": st.integers(-(10**6), 10**6),
    "max_new_tokens": st.just("") | st.integers(1, 40),
}
odd_cells = (
    st.text(max_size=4)
    | numbers
    | st.sampled_from(("1_0", "\u0661", "0x1", "1e400", '"', "nan", " 3 ", "1" * 5000))
)


@st.composite
def traces(draw):
    names = draw(
        st.permutations([*REQUIRED, *draw(st.lists(st.sampled_from(OPTIONAL), max_size=4))])
    )
    lines = [",".join(names)]
    for _ in range(draw(st.integers(0, 4))):
        cells = [
            draw(odd_cells if draw(st.integers(0, 19)) == 19 else CELLS[name]) for name in names
        ]
        lines.append(",".join(map(str, cells)))
    if draw(st.integers(0, 9)) == 9:
        lines.insert(draw(st.integers(0, len(lines))), draw(st.text(max_size=12)))
    return draw(st.sampled_from(("\n", "\r\n", "\r"))).join(lines)


@fuzzed(25)
@given(
    content=as_file(traces()), system=systems, base_tpot_s=st.none() | st.floats(0.01, 1) | st.floats(),
    rate=st.none() | st.floats(0.1, 10) | st.floats(), replicas=st.integers(1, 3),
)  # fmt: skip
def test_traces(
    tmp_path: Path, content: bytes, system: str, base_tpot_s: Any, rate: float | None, replicas: int
) -> None:
    (tmp_path / "trace.csv").write_bytes(content)
    with contextlib.suppress(InvalidInputError):
        jobs = read_trace(tmp_path / "trace.csv", base_tpot_s)
        jobs = jobs if rate is None else comparison.at_rate(jobs, rate)
        check_simulated(system, jobs, TextModel(), replicas=replicas)
