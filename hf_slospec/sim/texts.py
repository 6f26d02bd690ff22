"""What targets will write, and what the draft believes on the way: made up, or recorded from real runs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from hf_slospec.algo.tree import FloatArray, IntArray
from hf_slospec.errors import InvalidInputError
from hf_slospec.sim.files import read_json, validated


@dataclass(frozen=True)
class Text:
    """One request's output, token by token.

    Tokens are told apart only by how the draft ranks them: token ``j`` at a place is the draft's ``j``-th most probable
    one there, ``num_children`` one that it does not propose.
    """

    child_probs: FloatArray  # [length, num_children] f64, the draft's most probable tokens at each place, descending
    ranks: IntArray  # [length] int64, which of them the target chooses; num_children: none

    def __len__(self) -> int:
        return len(self.ranks)

    def up_to(self, length: int) -> Text:
        return Text(self.child_probs[:length], self.ranks[:length])


@dataclass(frozen=True)
class TextModel:
    """A random source of texts: beta-distributed confidence of the draft, around a difficulty of each request's own.

    How probable the draft's first choice is at a place is drawn from a beta distribution around the request's own mean,
    which is drawn from one around ``acceptance``. Further choices share what is left. The target's token is then drawn
    with these very probabilities, so a draft of ``sharpness`` 1 is calibrated.
    """

    acceptance: float = 0.8  # mean probability that the target takes the draft's first choice
    spread: float = 12.0  # of requests around it: parameters of the beta distribution sum to this; inf: none
    evenness: float = 2.0  # of places within a request, likewise: small means sure or clueless, hardly in between
    sibling: float = 0.5  # each further choice's part of what those before it left
    sharpness: float = 1.0  # the draft shows probabilities to this power: above 1 it is too sure of itself
    num_children: int = 4
    matched: float = 1.0  # share of steps in which a request has anything proposed, as with prompt lookup

    def __post_init__(self) -> None:
        if not 0.0 < self.acceptance < 1.0:
            raise InvalidInputError(f"acceptance must lie between 0 and 1, got {self.acceptance}")
        for name in ("spread", "evenness", "sharpness"):
            if not getattr(self, name) > 0.0:
                raise InvalidInputError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0.0 <= self.sibling <= 1.0:
            raise InvalidInputError(f"sibling must lie within 0..1, got {self.sibling}")
        if not 0.0 <= self.matched <= 1.0:
            raise InvalidInputError(f"matched must lie within 0..1, got {self.matched}")
        if self.num_children < 1:
            raise InvalidInputError(f"num_children must be at least 1, got {self.num_children}")

    def write(self, rng: np.random.Generator, length: int) -> Text:
        own = _beta(rng, np.array(self.acceptance), self.spread)
        first = _beta(rng, np.full(length, own), self.evenness)
        parts = self.sibling * (1.0 - self.sibling) ** np.arange(self.num_children - 1)
        probs = np.concatenate((first[:, None], (1.0 - first)[:, None] * parts), axis=1)
        drawn = rng.random(length)[:, None] >= np.cumsum(probs, axis=1)
        return Text(*_ranked(self._shown(probs), drawn.sum(axis=1)))

    def _shown(self, probs: FloatArray) -> FloatArray:
        powers = probs**self.sharpness
        rest = np.maximum(1.0 - probs.sum(axis=1), 0.0) ** self.sharpness
        shown: FloatArray = powers / np.maximum(powers.sum(axis=1) + rest, 1e-300)[:, None]
        return shown


def _beta(rng: np.random.Generator, mean: FloatArray, total: float) -> FloatArray:
    if not np.isfinite(total):
        return mean
    mean = np.clip(mean, 1e-3, 1.0 - 1e-3)
    return np.asarray(rng.beta(total * mean, total * (1.0 - mean)), np.float64)


def _ranked(probs: FloatArray, chosen: IntArray) -> tuple[FloatArray, IntArray]:
    """Children in descending order, and where the chosen ones went."""
    order = np.argsort(-probs, axis=1, kind="stable")
    places = np.argsort(order, axis=1)
    padded = np.concatenate((places, np.full((len(probs), 1), probs.shape[1])), axis=1)
    return np.take_along_axis(probs, order, axis=1), np.take_along_axis(padded, chosen[:, None], axis=1)[:, 0]


class Library:
    """Texts of all requests in one set of arrays."""

    def __init__(self, texts: Sequence[Text], matched: float = 1.0):
        """``texts[i]`` is what request ``i`` writes; all have equally many children.

        ``matched`` is the share of steps in which a request has anything proposed.
        """
        self.matched = matched
        self.lengths = np.array([len(text) for text in texts])
        self.starts = np.cumsum(self.lengths) - self.lengths  # [num_texts] int64
        self.child_probs = np.concatenate([text.child_probs for text in texts])  # [num_places, num_children]
        self.ranks = np.concatenate([text.ranks for text in texts])  # [num_places]

    @property
    def num_children(self) -> int:
        return int(self.child_probs.shape[1])

    @cached_property
    def _tokens(self) -> list[list[int]]:
        return [self.ranks[b : b + n].tolist() for b, n in zip(self.starts, self.lengths, strict=True)]

    def token(self, index: int, place: int) -> int:
        """What the target writes there; beyond its end a text goes on as it ended."""
        own = self._tokens[index]
        return own[min(place, len(own) - 1)]

    def places(self, indices: IntArray, places: IntArray) -> IntArray:
        """Rows of :attr:`child_probs` and :attr:`ranks` of places in texts.  -> [len(indices)]"""
        rows: IntArray = self.starts[indices] + np.minimum(places, self.lengths[indices] - 1)
        return rows


class RecordedText(BaseModel):
    """One output of a real run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input_tokens: int = Field(ge=1)
    child_probs: list[list[float]] = Field(min_length=1)
    ranks: list[int]

    @model_validator(mode="after")
    def _fits(self) -> RecordedText:
        width = len(self.child_probs[0])
        if not width or any(len(row) != width for row in self.child_probs):
            raise ValueError("child_probs must hold equally many probabilities, at least one, for every token")
        if any(not 0.0 <= p <= 1.0 + 1e-6 for row in self.child_probs for p in row):
            raise ValueError("child_probs must lie within 0..1")
        if any(sum(row) > 1.001 for row in self.child_probs):  # they are rounded
            raise ValueError("child_probs of a place must not sum to more than 1")
        if any(a < b for row in self.child_probs for a, b in itertools.pairwise(row)):
            raise ValueError("child_probs must descend")
        if len(self.ranks) != len(self.child_probs) or any(not 0 <= rank <= width for rank in self.ranks):
            raise ValueError(f"ranks must name one of the {width} children, or {width} for none, for every token")
        return self

    def text(self) -> Text:
        return Text(np.minimum(np.array(self.child_probs), 1.0), np.array(self.ranks))


class Recording(BaseModel):
    """What ``bench --record`` writes: how the draft saw what the target wrote."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    provenance: dict[str, object] = Field(default_factory=dict)
    texts: list[RecordedText] = Field(min_length=1)

    @model_validator(mode="after")
    def _is_even(self) -> Recording:
        if len({len(text.child_probs[0]) for text in self.texts}) > 1:
            raise ValueError("all texts must have equally many children")
        return self

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Raises InvalidFileError with the line and column at fault."""
        return validated(cls, path, *read_json(path))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.model_dump(), separators=(",", ":")) + "\n", encoding="utf-8")
