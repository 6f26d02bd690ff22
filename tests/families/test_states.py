"""What a sequence's states take in, and what they refuse to."""

from __future__ import annotations

import pytest
import torch

from hf_slospec.families.recurrences import Inputs, Whole
from hf_slospec.families.states import CONVOLUTION, Key, RecurrentStates
from hf_slospec.model.batch import CachedSequence

KEY: Key = (0, 0, CONVOLUTION)


def staged(num_tokens=4):
    """States of a convolution over 3 tokens, after 10 of them, with ``num_tokens`` staged."""
    rows = torch.arange(1.0, 1 + num_tokens)[:, None]
    return RecurrentStates(10, {KEY: torch.tensor([[-1.0], [0.0]])}, {KEY: Inputs(rows)})


def test_committed_nodes_are_taken_in_and_others_dropped():
    states = staged()
    states.kept = [0, 2]
    states.take_in(12)
    assert states.length == 12 and not states.staged and states.kept is None
    torch.testing.assert_close(states.states[KEY], torch.tensor([[1.0], [3.0]]))


def test_without_a_choice_the_first_nodes_are_taken_in():
    states = staged()
    states.take_in(13)
    torch.testing.assert_close(states.states[KEY], torch.tensor([[2.0], [3.0]]))


def test_nodes_of_the_same_step_stay_staged():
    states = staged()
    states.take_in(10, num_earlier=4)
    assert KEY in states.staged
    states.take_in(10)
    assert not states.staged and states.length == 10


def test_tokens_that_were_never_staged_are_an_error():
    with pytest.raises(RuntimeError, match="2 tokens were committed, and 0 are staged"):
        RecurrentStates(10).take_in(12)
    states = staged()
    states.kept = [0]
    with pytest.raises(RuntimeError, match="2 tokens were committed, and 1 are staged"):
        states.take_in(12)
    with pytest.raises(RuntimeError, match="cannot be taken back to 9"):
        states.take_in(9)


def test_a_long_chain_is_committed_as_a_whole():
    states = RecurrentStates(0, {KEY: torch.zeros(1, 2)}, {KEY: Whole(torch.ones(1, 2), 40)})
    with pytest.raises(AssertionError, match="as a whole"):
        states.take_in(39)
    states.take_in(40)
    assert states.states[KEY].sum() == 2


def test_copies_share_states_and_go_on_apart():
    states = staged()
    other = states.copy()
    assert other.states[KEY] is states.states[KEY] and not other.staged
    states.take_in(11)
    torch.testing.assert_close(other.states[KEY], torch.tensor([[-1.0], [0.0]]))


def test_truncation_keeps_what_was_not_taken_in_or_nothing():
    sequence = CachedSequence(0, 20, length=14, states=staged())
    sequence.truncate(15)
    assert sequence.length == 14
    sequence.truncate(11)
    assert (sequence.length, sequence.states is not None) == (11, True)
    sequence.truncate(9)
    assert (sequence.length, sequence.states) == (0, None)
