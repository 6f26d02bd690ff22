"""Costs of simulated machines: lines, curves and latency files."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_slospec.errors import InvalidFileError, InvalidInputError
from hf_slospec.lab.files import line_and_column
from hf_slospec.lab.hardware import HARDWARE, MAX_TOKENS, curve, hardware_of, lines
from tests.support.paths import ROOT

LINES = st.tuples(
    st.integers(0, 500).map(lambda n: n / 10), st.integers(0, 100).map(lambda n: n / 100)
)  # ms


@given(parts=st.lists(LINES, min_size=1, max_size=4), tokens=st.integers(1, MAX_TOKENS))
def test_lines_cost_the_highest_of_them(parts, tokens):
    expected = max(base + slope * tokens for base, slope in parts) / 1e3
    most = max(slope for _, slope in parts) / 1e3  # within a token of where lines cross
    assert float(lines(*parts)(tokens)) == pytest.approx(expected, abs=most + 1e-9)


def test_curves_are_linear_between_points_and_go_on_beyond():
    cost = curve({1: 10.0, 11: 20.0, 21: 60.0})
    assert [float(cost(n)) for n in (1, 6, 11, 16, 31)] == pytest.approx(
        [0.01, 0.015, 0.02, 0.04, 0.1]
    )


@pytest.mark.parametrize("name", HARDWARE)
def test_known_hardware_never_gets_faster_with_tokens(name):
    hardware = hardware_of(name)
    for cost in (hardware.target, hardware.draft):
        seconds = [float(cost(tokens)) for tokens in range(1, 2000, 7)]
        assert seconds == sorted(seconds) and seconds[0] > 0.0
    assert float(hardware.draft(1)) < float(hardware.target(1))


FORWARD = {
    "tokens": [1, 64],
    "ms": [10.0, 20.0],
    "ms_per_further_request": 0.5,
    "ms_per_1000_keys": 2.0,
}
WHOLE = {"target": FORWARD, "draft": {"tokens": [1], "ms": [1.0]}}


def written(tmp_path, data):
    path = tmp_path / "lat.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(path)


def test_latency_files_are_read_with_all_their_terms(tmp_path):
    more = {"mixed_ms": 3.0, "host_ms": 4.0, "drafting_request_ms": 0.5, "kv_tokens": 77}
    hardware = hardware_of(written(tmp_path, {**WHOLE, **more}))
    assert float(hardware.target(64, 3, 2000)) == pytest.approx((20.0 + 2 * 0.5 + 2 * 2.0) / 1e3)
    assert float(hardware.draft(500)) == pytest.approx(1e-3)
    extra = hardware.mixed_s, hardware.host_s, hardware.drafting_request_s, hardware.kv_tokens
    assert extra == pytest.approx((3e-3, 4e-3, 5e-4, 77))


def test_what_profile_writes_is_a_latency_file(tmp_path):
    record = {"measured": [{"tokens": 1, "ms": 10.2}], "held_out": []}
    results = {"target": {**record, "fit": FORWARD}, "draft": {**record, "fit": WHOLE["draft"]}}
    profiled = hardware_of(written(tmp_path, {"provenance": {"cpu": "x"}, "results": results}))
    assert profiled == hardware_of(written(tmp_path, WHOLE))


def test_a_profile_that_was_measured_here_is_one_too():
    hardware = hardware_of(str(ROOT / "benchmarks/results/profile-cpu-2core-0.6B-bf16.json"))
    assert 0.0 < float(hardware.draft(1)) < float(hardware.target(1)) < float(hardware.target(512))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", r":1:1: Expecting value"),
        ("[]", r":1:1: "),
        ("null", r":1:1: "),
        ('{\n "target": 1,\n}', r":2:13: |:3:1: "),
        ('{\n\t"target":\t5,\n\t"draft": 7}', r":2:12: target: "),  # tabs are JSON
        ('{"target": {"tokens": [1], "ms": [1]}}', r":1:1: draft: Field required"),
        ('{"target": {"tokens": [1],\n "ms": ["x"]}, "draft": 1}', r":2:9: target\.ms\.0: "),
        ('{"target": {"tokens": [1],\n "ms": [NaN]}, "draft": 1}', r":2:9: target\.ms\.0: "),
        ('{"target": {"tokens": [1],\n "ms": [-1]}, "draft": 1}', r":2:9: target\.ms\.0: "),
        ('{"target": {"tokens": [0],\n "ms": [1]}, "draft": 1}', r":1:24: target\.tokens\.0: "),
        ('{"target": {"tokens": [],\n "ms": []}, "draft": 1}', r":1:23: target\.tokens: "),
        (
            '{"target":\n {"tokens": [2, 1], "ms": [1, 2]}, "draft": 1}',
            r":2:2: target: tokens must increase",
        ),
        (
            '{"target":\n {"tokens": [1, 2], "ms": [2, 1]}, "draft": 1}',
            r":2:2: target: tokens must increase",
        ),
        (
            '{"target":\n {"tokens": [1, 2], "ms": [1]}, "draft": 1}',
            r":2:2: target: tokens and ms .* got 2 and 1",
        ),
        (
            '{"target":\n {"tokens": [1], "ms": [0]}, "draft": 1}',
            r":2:2: target: .* at least 0\.01 ms",
        ),
        ('{"target": 1, "draft": 1,\n "kv_tokens": 0}', r":2:15: kv_tokens: "),
        ('{"target": 1, "draft": 1,\n "host_s": 0}', r":2:12: host_s: "),
        (
            '{"target": {"tokens": [1], "ms": [1],\n "ms_per_key": 1}, "draft": 1}',
            r":2:16: target\.ms_per_key: ",
        ),
        (
            '{"results":\n {"target": {"fit": {"tokens": [1, 0]}}}}',
            r":2:36: results\.target\.fit\.tokens\.1: ",
        ),
        ('{"results":\n {"target": {}}}', r":2:13: results\.target\.fit: Field required"),
        (
            '{"results":\n {"target": {"fit": {"tokens": [1], "ms": [0]}}, "draft": 1}}',
            r":2:21: .* at least 0\.01 ms",
        ),
        ('{"target": ' + "9" * 5000 + "}", r":1:1: "),
        ("[" * 100_000, r":1:1: "),
    ],
)
def test_malformed_files_say_where(text, fault, tmp_path):
    with pytest.raises(InvalidFileError, match=fault) as error:
        hardware_of(written(tmp_path, text))
    assert all("lat.json:" in line for line in str(error.value).splitlines())


def test_unknown_names_list_the_known_ones_and_folders_are_none(tmp_path):
    for name in ("h100", "", "{" * 5000):
        with pytest.raises(InvalidInputError, match="llama-7b-h100"):
            hardware_of(name)
    with pytest.raises(InvalidFileError, match="folder"):
        hardware_of(str(tmp_path))
    (tmp_path / "utf16").write_bytes(json.dumps(WHOLE).encode("utf-16"))
    with pytest.raises(InvalidFileError, match="UTF-8"):
        hardware_of(str(tmp_path / "utf16"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(data=JSON, indent=st.sampled_from([None, 1, "\t"]), draw=st.data())
def test_line_and_column_are_where_a_value_begins(data, indent, draw):
    text = json.dumps(data, indent=indent)
    value = data
    location = []
    while isinstance(value, (list, dict)) and value:
        step = draw.draw(
            st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value)))
        )
        location.append(step)
        value = value[step]
    line, column = map(int, line_and_column(text, tuple(location)).split(":"))
    at = sum(len(own) + 1 for own in text.split("\n")[: line - 1]) + column - 1
    assert json.JSONDecoder().raw_decode(text, at)[0] == value
    assert line_and_column(text, (*location, "missing")) == f"{line}:{column}"
