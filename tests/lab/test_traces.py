"""CSV traces: read back as written, and every fault by file, line and column."""

from __future__ import annotations

import csv

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.errors import InvalidFileError, InvalidInputError
from hf_slospec.lab.files import REQUIRED, read_trace
from hf_slospec.lab.workload import Job

TARGETS = st.none() | st.floats(1e-6, 100.0)
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=5)
HEADER = "arrival_s,input_tokens,output_tokens,slo"


@st.composite
def a_job(draw):
    num_output = draw(st.integers(1, 1000))
    return Job(
        draw(st.floats(0.0, 1e9)),
        draw(st.integers(1, 10**6)),
        num_output,
        draw(TARGETS),
        draw(TARGETS),
        draw(NAMES),
        draw(st.integers(-5, 5)),
        draw(st.none() | st.integers(num_output, 2000)),
    )


@given(jobs=st.lists(a_job(), min_size=1, max_size=6))
@settings(deadline=None, max_examples=50)
def test_traces_are_read_as_they_were_written(jobs, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "load.csv"
    rows = [(j.arrival_s, j.input_tokens, j.output_tokens, j.tpot_slo_s, j.ttft_slo_s, j.kind, j.priority,
             j.max_new_tokens) for j in jobs]  # fmt: skip
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(
            [(*REQUIRED, "slo", "ttft_s", "class", "priority", "max_new_tokens"), *rows]
        )
    assert read_trace(path) == sorted(jobs, key=lambda job: job.arrival_s)


def written(tmp_path, text):
    path = tmp_path / "load.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    "text",
    [
        HEADER + "\n0.5,7,9,0.05\n",
        "\ufeff" + HEADER + "\n0.5,7,9,0.05\n",
        HEADER + "\r\n0.5,7,9,0.05\r\n\r\n",
        HEADER + "\r0.5,7,9,0.05\r",
        HEADER + "\n\n\n0.5,7,9,0.05",
        '"arrival_s","input_tokens","output_tokens","slo"\n"0.5","7","9","0.05"\n',
        " arrival_s , input_tokens,output_tokens,slo\n 0.5 , 7 ,9,  0.05\n",
        "slo,output_tokens,input_tokens,arrival_s\n5e-2,9,7,+0.5\n",
    ],
)
def test_csv_comes_in_many_shapes(text, tmp_path):
    assert read_trace(written(tmp_path, text)) == [Job(0.5, 7, 9, 0.05, kind="50 ms")]


def test_optional_fields_may_be_empty_or_missing(tmp_path):
    header = "arrival_s,input_tokens,output_tokens,slo,ttft_s,class,priority,max_new_tokens\n"
    jobs = read_trace(written(tmp_path, header + '2,1,1\n1,1,3,,2.5,"a, b",-1,4\n0,1,1,0.1,,,,\n'))
    assert jobs == [
        Job(0.0, 1, 1, 0.1, kind="100 ms"),
        Job(1.0, 1, 3, None, 2.5, "a, b", -1, 4),
        Job(2.0, 1, 1, kind="none"),
    ]


def test_ratios_multiply_a_base_and_negative_ones_are_milliseconds(tmp_path):
    path = written(
        tmp_path, "arrival_s,input_tokens,output_tokens,slo_ratio\n0,1,1,1.2\n1,1,1,-50\n2,1,1,\n"
    )
    assert [job.tpot_slo_s for job in read_trace(path, 0.03)] == [pytest.approx(0.036), 0.05, None]
    with pytest.raises(InvalidInputError, match="--base-tpot"):
        read_trace(path)
    for base_s in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidInputError, match="--base-tpot"):
            read_trace(path, base_s)


LINE = "0,5,5,0.1"


MALFORMED_LINES = [
    (",5,5,0.1", "arrival_s: is empty"),
    ("0,5", "output_tokens: is empty"),
    ("  ", "is empty"),
    ("-1,5,5,0.1", "arrival_s: '-1' is not within"),
    ("nan,5,5,0.1", "arrival_s: 'nan' is not within"),
    ("inf,5,5,0.1", "arrival_s: 'inf' is not within"),
    ("1e300,5,5,0.1", "arrival_s: '1e300' is not within"),
    ("soon,5,5,0.1", "arrival_s: 'soon' is not a number"),
    ("0,0,5,0.1", "input_tokens: '0' is not within"),
    ("0,2.5,5,0.1", "input_tokens: '2.5' is not a whole number"),
    ("0,100000000000,5,0.1", "input_tokens: '100000000000' is not within"),
    ("0," + "9" * 400 + ",5,0.1", "input_tokens: '9{40}...' is not within"),
    ("0," + "9" * 5000 + ",5,0.1", "input_tokens: '9{40}...' is not"),
    ("0,5\0,5,0.1", "input_tokens: |NUL"),
    ("0,5,0,0.1", "output_tokens: '0' is not within"),
    ("0,5,100000000000,0.1", "output_tokens: '100000000000' is not within"),
    ("0,5,5,0", "slo: an SLO of 0"),
    ("0,5,5,-0.1", "slo: '-0.1' is not within"),
    ("0,5,5,fast", "slo: 'fast' is not a number"),
    ("0,5,5,0.1,7", "more fields than the header"),
    ("0,5,5," + "1" * 200_000, "field limit"),
    ('0,5,5,"0.1"x', "expected after"),
]
MALFORMED_FIELDS = [
    ("ttft_s", "0", "an SLO of 0"),
    ("ttft_s", "-2", "is not within"),
    ("priority", "high", "is not a whole number"),
    ("priority", "9" * 400, "is not within"),
    ("max_new_tokens", "4", "4 is less than the 5 output_tokens"),
    ("max_new_tokens", "0", "is not within"),
    *(("slo_ratio", value, "") for value in ("0", "nan", "1e300", "x")),
]
MALFORMED: list[tuple[str | bytes, str]] = [
    ("", ":1: column arrival_s, input_tokens, output_tokens is missing"),
    ("arrival_s;input_tokens;output_tokens\n0;1;1\n", ":1: column .* is missing; found: arrival_s;"),
    ("arrival_s,input_tokens\n0,1\n", ":1: column output_tokens is missing;"),
    (HEADER + ",speed\n", ":1: unknown column speed; known: "),
    (HEADER + ",\n", ":1: unknown column"),
    (HEADER + ",slo_ratio\n", ":1: columns slo and slo_ratio exclude"),
    (HEADER + ",slo\n", ":1: two columns have the same name"),
    (HEADER + "\n", ": contains no requests"),
    (HEADER + '\n0,5,5,"0.1\n1,5,5,0.1\n', ":[23]: unexpected end of data"),
    ((HEADER + "\n" + LINE).encode("utf-16"), ": is not UTF-8"),
    *((f"{HEADER}\n{LINE}\n\n{line}\n{LINE}\n", rf":4: .*({fault})") for line, fault in MALFORMED_LINES),
    *((f"{HEADER.removesuffix(',slo')},{column}\n0,5,5,{value}\n", f":2: column {column}: .*{fault}")
      for column, value, fault in MALFORMED_FIELDS),
]  # fmt: skip


@pytest.mark.parametrize(("text", "fault"), MALFORMED, ids=lambda value: str(value)[:40])
def test_malformed_files_are_refused_with_line_and_column(text, fault, tmp_path):
    with pytest.raises(InvalidFileError, match=r"load\.csv" + fault):
        read_trace(written(tmp_path, text), 0.03)


def test_files_that_cannot_be_read_are_named(tmp_path):
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(InvalidFileError, match="cannot be read") as error:
            read_trace(path)
        assert str(path) in str(error.value)
