"""Toy models in real packed storage: the next token depends on every token whose K/V is read, so
wrong K/V shows.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import torch

from hf_slospec.model.batch import LayerShape
from hf_slospec.model.kv_cache import KVCache, KVPool
from hf_slospec.model.packed_model import Outputs
from hf_slospec.request.request import Request
from tests.support.toys.trees import stored

VOCAB = 5
ROWS = 64
LONGEST = 256
TABLE = np.random.default_rng(0).gumbel(size=(ROWS, VOCAB)).astype(np.float32)
NOISE = np.random.default_rng(1).gumbel(size=(8, LONGEST, VOCAB)).astype(np.float32)


def row_of(tokens, is_draft=False):
    """The place of the next token's logits; the draft's are the target's after three of four texts."""
    digest = zlib.crc32(tokens)
    return (digest >> 10 if is_draft and digest >> 8 & 3 == 0 else digest) % ROWS


def chosen(rows, request, positions):
    """The tokens that plain decoding takes at positions of a request's output, given logits
    [num_tokens, vocab].
    """
    return (
        rows + NOISE[request.index % 8][positions] if request.params.is_sampled else rows
    ).argmax(-1)


def plain_token(request):
    row = TABLE[row_of(bytes(request.tokens))]
    return int(chosen(row[None], request, np.array([request.num_emitted]))[0])


class FaultyPool(KVPool):
    """Storage whose operations may run out of memory."""

    def __init__(self, world, name, num_slots):
        world.at(f"{name} pool")
        super().__init__([LayerShape(stored(1, 1), stored(1, 1))], num_slots)
        self.world = world
        self.name = name

    def move(self, source, destination):
        if source:
            self.world.at(f"{self.name} move")
        super().move(source, destination)

    def copy(self, source, destination, length):
        self.world.at(f"{self.name} copy")
        super().copy(source, destination, length)

    def _shift(self, sequence, start):
        if sequence.start != start:
            self.world.at(f"{self.name} repack")
        super()._shift(sequence, start)


class SimulatedModel:
    """A packed model that stores tokens as K and their positions as V, and reads the text from
    there.
    """

    family = SimpleNamespace(has_states=False)
    vocab_size = VOCAB
    device = torch.device("cpu")
    num_one_off_forwards = 0
    ranks = SimpleNamespace(number=1, least=lambda value: value)
    rope = SimpleNamespace(max_plain=None)

    def __init__(self, world, name, seconds):
        """``seconds`` that forwards take, in turn."""
        self.world = world
        self.name = name
        self.seconds = seconds
        self.model = torch.nn.Module()
        self.num_forwards = 0
        self.version = SimpleNamespace(weights=0, notice=lambda structure=True: None)
        self._shared: Any = lambda: None

    @property
    def kv_cache(self):
        cache = self._shared()
        if cache is None:
            cache = KVCache(
                lambda num_slots: FaultyPool(self.world, self.name, num_slots), self._empty()
            )
            self._shared = ref(cache)
        return cache

    def _empty(self):
        return KVPool([LayerShape(stored(1, 1), stored(1, 1))], 0)

    @property
    def num_held(self):
        cache = self._shared()
        return 0 if cache is None else cache.num_held

    def keep_if_captured(self, cache):
        if cache.pool.num_slots and not cache.pool.sequences:
            cache._pool = self._empty()

    def clamp_tokens(self, tokens):
        return tokens

    clamp_positions = clamp_tokens

    def status(self, feature_layers=()):
        return "eager"

    def num_draft_rows(self, num_requests):
        return None

    def draft(self, pool, parts, logit_rows, level):
        own = level.resolved(parts)
        ids = [level.inputs({"input_ids": part.input_ids[None]})["input_ids"][0] for part in own]
        own = [replace(part, input_ids=tokens) for part, tokens in zip(own, ids, strict=True)]
        return level.outputs(self.outputs(pool, own, logit_rows).logits)

    def outputs(
        self,
        pool,
        parts,
        logit_rows,
        feature_layers=(),
    ):
        self.num_forwards += 1
        self.world.at(f"{self.name} forward", self.seconds[self.num_forwards % len(self.seconds)])
        wanted = logit_rows.tolist()
        rows = list[int]()
        begin = 0
        keys = pool.keys[0].numpy()[:, 0, 0]
        values = pool.values[0].numpy()[:, 0, 0]
        for part in parts:
            own, new_tokens, new_places = (
                part.sequence,
                part.input_ids.numpy(),
                part.positions.numpy(),
            )
            num_new = len(new_tokens)
            num_staged = len(new_places)
            end = own.start + own.length + num_staged
            assert own.length + num_staged <= own.capacity, "K/V is staged in slots of others"
            keys[end - num_new : end], values[end - num_new : end] = (
                new_tokens,
                new_places[-num_new:],
            )
            if own_rows := [row - begin for row in wanted if begin <= row < begin + num_new]:
                tokens, places, mask = (
                    keys[own.start : end].astype(np.uint8),
                    values[own.start : end],
                    part.mask.numpy(),
                )
                for row in own_rows:
                    visible = np.concatenate((np.ones(own.length, np.bool_), mask[row]))
                    seen = places[visible]
                    assert (seen == np.arange(len(seen))).all(), "K/V of other positions"
                    rows.append(row_of(tokens[visible].tobytes(), self.name == "draft"))
            begin += num_new
        return Outputs(torch.from_numpy(TABLE[rows]))


class SimulatedSampler:
    """Chooses what plain decoding does; each position of a request is chosen once, as processors
    may have state.
    """

    def __init__(self, world):
        self.world = world
        self.fails_at = dict[Request, tuple[int, BaseException]]()
        self.next_position = dict[Request, int]()

    def choose(self, requests, logits, trees):
        self.world.at("sampler")
        rows = logits.numpy()
        choosers = list[Any]()
        begin = 0
        for request, tree in zip(requests, trees, strict=True):
            own = rows[begin : begin + tree.num_nodes]
            choosers.append(
                self._chooser(request, chosen(own, request, request.num_emitted + tree.depths))
            )
            begin += tree.num_nodes
        return torch.empty(0, dtype=torch.int64), lambda _: choosers

    def _chooser(self, request, tokens):
        def choose(node):
            position = request.num_emitted
            due = self.next_position.get(request, request.stats.num_resumed)
            assert position == due, (
                f"position {position} of request {request.index} is chosen in place of {due}"
            )
            self.next_position[request] = position + 1
            fails_at, error = self.fails_at.get(request, (-1, None))
            if error is not None and position == fails_at:
                raise error
            return int(tokens[node])

        return choose
