"""Index of prompts: what replicas were given, by the longest common beginning of whole blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hf_slospec.replicas.directory import PrefixIndex

PROMPTS = st.lists(st.integers(0, 2), max_size=12)
NAMES = ("a", "b", "c")


@given(st.lists(st.tuples(st.sampled_from(NAMES), PROMPTS), max_size=12), PROMPTS)
def test_longest_common_beginning_of_whole_blocks_is_found(given_, prompt):
    index = PrefixIndex(block=2)
    for name, text in given_:
        index.record(name, text)
    expected = [
        max(
            (_common(text, prompt) // 2 * 2 for holder, text in given_ if holder == name), default=0
        )
        for name in NAMES
    ]
    assert index.num_known(NAMES, prompt) == expected


def _common(a, b):
    return next(
        (place for place, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]),
        min(len(a), len(b)),
    )


def test_salts_share_nothing_and_replicas_are_forgotten():
    index = PrefixIndex(block=2)
    index.record("a", [1, 2, 3, 4], salt="one")
    assert index.num_known(["a"], [1, 2, 3, 4], "one") == [4]
    assert index.num_known(["a"], [1, 2, 3, 4]) == [0]
    index.forget("a")
    assert index.num_known(["a"], [1, 2, 3, 4], "one") == [0]


def test_beginnings_used_least_recently_are_dropped():
    index = PrefixIndex(block=1, max_blocks=3)
    index.record("a", [1])
    index.record("a", [2])
    index.record("b", [1])
    index.record("a", [3, 4])
    assert index.num_known(["a", "b"], [1]) == [1, 1]
    assert index.num_known(["a"], [2]) == [0]
    assert index.num_known(["a"], [3, 4]) == [2]
