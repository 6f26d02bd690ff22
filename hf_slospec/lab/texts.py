"""Output texts of the simulated target, with the draft's probabilities at every token: synthetic,
or recorded from real runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from hf_slospec.engine.acceptance import SHARPNESS
from hf_slospec.errors import InputModel
from hf_slospec.forks import cached_property
from hf_slospec.lab.files import read_json, validated
from hf_slospec.tree.tree import FloatArray, IntArray

NUM_CHILDREN = 4  # default number of children per position of synthetic texts
# Largest standard deviation of log-probability changes that is tried to reach a distance
MAX_SCALE = 50.0
# Number of tokens besides the children that texts with a distance or coupled drafting have
NUM_REST = 28


@dataclass(frozen=True)
class SimulatedText:
    """Output of one request.

    Token ids are ranks among the draft's candidates for the position: id 0 is the draft's most
    probable token, and id ``num_children`` is any token that the draft does not propose."""

    # [length, num_children] f64, probabilities of the draft's candidates, descending
    child_probs: FloatArray
    # [length] int64, rank of the target's token; num_children: none of the candidates
    ranks: IntArray

    def __len__(self) -> int:
        return len(self.ranks)

    def up_to(self, length: int) -> SimulatedText:
        """Return the first ``length`` tokens."""
        return SimulatedText(self.child_probs[:length], self.ranks[:length])


class TextModel(InputModel):
    """Random source of synthetic texts.

    The probability of the draft's first choice at a position is drawn from a beta distribution
    around the request's mean, which is drawn from a beta distribution around ``acceptance``.
    Further choices share the remaining probability. The target's token is drawn with these
    probabilities, so a draft of ``sharpness`` 1 is calibrated.

    With a ``distance`` these probabilities are the target's, ``NUM_REST`` more tokens share the
    probability that is left, and the draft's probabilities are log-normal around the target's. With
    ``coupled`` the draft ranks its tokens with the noise that the target samples with.

    Args:
        acceptance: mean probability that the target chooses the draft's first choice.
        spread: sum of the parameters of the beta distribution over requests; larger: requests are
            more alike; inf: all have the same mean.
        evenness: sum of the parameters of the beta distribution over the positions of a request;
            small: the first choice is either almost certain or almost impossible.
        sibling: share of the remaining probability that each further choice gets.
        sharpness: exponent of the probabilities that the draft reports; above 1: the draft is
            over-confident.
        num_children: candidates per position.
        matched: share of steps in which a request gets any proposal, as with prompt lookup.
        distance: mean total variation distance between the draft's and the target's probabilities
            in each text.
        coupled: the draft knows the target's noise, as in coupled drafting of sampled requests.

    Raises:
        InvalidInputError: a parameter is out of its range.
    """

    acceptance: float = Field(gt=0, lt=1)
    spread: float = Field(gt=0)
    evenness: float = Field(2.0, gt=0)
    sibling: float = Field(0.5, ge=0, le=1)
    sharpness: float = Field(1.0, gt=0)
    num_children: int = Field(NUM_CHILDREN, ge=1)
    matched: float = Field(1.0, ge=0, le=1)
    distance: float = Field(0.0, ge=0, lt=1)
    coupled: bool = False

    def __init__(
        self, acceptance: float = 0.8, spread: float = 12.0, **parameters: float | bool
    ) -> None:
        super().__init__(acceptance=acceptance, spread=spread, **parameters)

    def write(self, rng: np.random.Generator, length: int) -> SimulatedText:
        """Return a random text of ``length`` tokens."""
        mean = _beta(rng, np.array(self.acceptance), self.spread)
        first = _beta(rng, np.full(length, mean), self.evenness)
        parts = self.sibling * (1.0 - self.sibling) ** np.arange(self.num_children - 1)
        probs = np.concatenate((first[:, None], (1.0 - first)[:, None] * parts), axis=1)
        if self.coupled or self.distance:
            return self._drawn_by_noise(rng, probs)
        drawn = rng.random(length)[:, None] >= np.cumsum(probs, axis=1)
        return SimulatedText(*_sorted_by_prob(self._reported(probs), drawn.sum(axis=1)))

    def _drawn_by_noise(self, rng: np.random.Generator, probs: FloatArray) -> SimulatedText:
        """Return a text that is drawn from the target's probabilities ``probs``, with draft
        probabilities at :attr:`distance` from them.

        Args:
            rng: draws the draft's probabilities and the text.
            probs: [length, num_children] f64.
        """
        rest = np.maximum(1.0 - probs.sum(axis=1, keepdims=True), 0.0)
        target = np.concatenate((probs, np.repeat(rest / NUM_REST, NUM_REST, axis=1)), axis=1)
        draft = self._reported(
            _at_distance(target, rng.standard_normal(target.shape), self.distance)
        )
        noise = rng.exponential(size=target.shape)
        if self.coupled:
            draft = (draft / noise) ** (1.0 / SHARPNESS)
            draft /= draft.sum(axis=1, keepdims=True)
        reported, ranks = _sorted_by_prob(draft, (target / noise).argmax(axis=1))
        return SimulatedText(reported[:, : self.num_children], np.minimum(ranks, self.num_children))

    def _reported(self, probs: FloatArray) -> FloatArray:
        powers = probs**self.sharpness
        rest = np.maximum(1.0 - probs.sum(axis=1), 0.0) ** self.sharpness
        reported: FloatArray = powers / np.maximum(powers.sum(axis=1) + rest, 1e-300)[:, None]
        return reported


def _at_distance(probs: FloatArray, change: FloatArray, distance: float) -> FloatArray:
    """Return ``probs * exp(scale * change)``, normalised, with the scale that gives this total
    variation distance.

    Args:
        probs: [length, num_tokens] f64.
        change: [length, num_tokens] f64.
        distance: mean total variation distance over all positions.
    """
    low = 0.0
    high = MAX_SCALE
    for _ in range(40):  # bisection
        scale = (low + high) / 2
        changed: FloatArray = probs * np.exp(scale * change)
        changed /= changed.sum(axis=1, keepdims=True)
        is_too_far = 0.5 * np.abs(changed - probs).sum(axis=1).mean() > distance
        low, high = (low, scale) if is_too_far else (scale, high)
    return changed


def _beta(rng: np.random.Generator, mean: FloatArray, total: float) -> FloatArray:
    if not np.isfinite(total):
        return mean
    mean = np.clip(mean, 1e-3, 1.0 - 1e-3)
    return np.asarray(rng.beta(total * mean, total * (1.0 - mean)), np.float64)


def _sorted_by_prob(probs: FloatArray, chosen: IntArray) -> tuple[FloatArray, IntArray]:
    """Return each position's probabilities in descending order, and the ranks of the chosen
    children.

    Args:
        probs: [length, num_children] f64.
        chosen: [length] int64, indices of children; num_children: none.
    """
    order = np.argsort(-probs, axis=1, kind="stable")
    ranks = np.argsort(order, axis=1)
    padded = np.concatenate((ranks, np.full((len(probs), 1), probs.shape[1])), axis=1)
    return np.take_along_axis(probs, order, axis=1), np.take_along_axis(
        padded, chosen[:, None], axis=1
    )[:, 0]


class Library:
    """Texts of all requests, concatenated.

    Args:
        texts: ``texts[i]`` is the output of request ``i``; all have the same number of children.
        matched: share of steps in which a request gets any proposal.
    """

    def __init__(self, texts: Sequence[SimulatedText], matched: float = 1.0):
        self.matched = matched
        self.lengths = np.array([len(text) for text in texts])
        self.starts = np.cumsum(self.lengths) - self.lengths  # [num_texts] int64
        # [num_rows, num_children] f64
        self.child_probs = np.concatenate([text.child_probs for text in texts])
        self.ranks = np.concatenate([text.ranks for text in texts])  # [num_rows] int64

    @property
    def num_children(self) -> int:
        """Number of draft candidates at every position."""
        return int(self.child_probs.shape[1])

    @cached_property
    def _tokens(self) -> list[list[int]]:
        return [
            self.ranks[b : b + n].tolist() for b, n in zip(self.starts, self.lengths, strict=True)
        ]

    def token(self, index: int, position: int) -> int:
        """Return the target's token at a position of a text; beyond the end, the last token is
        repeated.
        """
        tokens = self._tokens[index]
        return tokens[min(position, len(tokens) - 1)]

    def rows(self, indices: IntArray, positions: IntArray) -> IntArray:
        """Return the rows of :attr:`child_probs` and :attr:`ranks` for positions in texts.  ->
        [len(indices)] int64
        """
        rows: IntArray = self.starts[indices] + np.minimum(positions, self.lengths[indices] - 1)
        return rows


class RecordedText(BaseModel):
    """One recorded output of a real run. ``input_tokens`` is the prompt's length, for information
    only.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    input_tokens: int = Field(ge=1)
    child_probs: list[list[float]] = Field(min_length=1)
    ranks: list[int]

    @model_validator(mode="after")
    def _check(self) -> RecordedText:
        width = len(self.child_probs[0])
        if not width or any(len(row) != width for row in self.child_probs):
            raise ValueError(
                "child_probs must have the same number of probabilities, at least one, for every "
                "token"
            )
        probs = np.array(self.child_probs)
        if not ((probs >= 0.0) & (probs <= 1.0 + 1e-6)).all():
            raise ValueError("child_probs must lie within 0..1")
        if (probs.sum(axis=1) > 1.001).any():  # the recorded values are rounded
            raise ValueError("child_probs of a token must not sum to more than 1")
        if (np.diff(probs, axis=1) > 0.0).any():
            raise ValueError("child_probs must be in descending order")
        ranks = np.array(self.ranks)
        if ranks.shape != probs.shape[:1] or ((ranks < 0) | (ranks > width)).any():
            raise ValueError(
                f"ranks must be the index of one of the {width} children, or {width}, for every "
                "token"
            )
        return self

    def text(self) -> SimulatedText:
        """Return the text as arrays."""
        return SimulatedText(np.minimum(np.array(self.child_probs), 1.0), np.array(self.ranks))


class Recording(BaseModel):
    """Texts recorded by ``benchmarks/fidelity.py``: the target's tokens with the draft's
    probabilities.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    provenance: dict[str, object] = Field(default_factory=dict)
    texts: list[RecordedText] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_width(self) -> Recording:
        if len({len(text.child_probs[0]) for text in self.texts}) > 1:
            raise ValueError("all texts must have the same number of children")
        return self

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Read a recording.

        Raises:
            InvalidFileError: the file is invalid; the message has line and column of each fault.
        """
        return validated(cls, path, *read_json(path))

    def write(self, path: Path) -> None:
        """Write the recording as JSON."""
        path.write_text(
            json.dumps(self.model_dump(), separators=(",", ":")) + "\n", encoding="utf-8"
        )
