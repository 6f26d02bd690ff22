"""A batch as stock ``generate`` lays it out, and the requests it stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation import EosTokenCriteria, GenerationConfig, MaxLengthCriteria, StoppingCriteriaList

from hf_slospec.engine.request import Request
from hf_slospec.errors import InvalidInputError, UnsupportedOptionError
from hf_slospec.models.sampling import StockSampler
from hf_slospec.models.sequences import CHUNK
from hf_slospec.models.target import PackedTarget


@dataclass
class Context:
    """What the first forward of stock ``generate`` would read: one column per token, the cached ones first."""

    tokens: torch.Tensor  # [batch, length] int64
    mask: torch.Tensor  # [batch, length] bool, False = padding
    embeds: torch.Tensor | None  # [batch, length, hidden], in place of the tokens' embeddings
    cache: Any  # a transformers cache that holds the first num_cached columns, or None
    num_cached: int

    @classmethod
    def of(
        cls, input_ids: torch.Tensor, model_kwargs: dict[str, Any], config: GenerationConfig, embedding: torch.nn.Module
    ) -> Context:
        """Read it from what stock ``generate`` prepared."""
        embeds, mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
        cache = model_kwargs.get("past_key_values")
        num_cached = 0 if cache is None else cache.get_seq_length()
        tokens = input_ids
        if embeds is not None:
            if input_ids.shape[1] not in (0, embeds.shape[1]):
                raise UnsupportedOptionError(
                    f"input_ids of length {input_ids.shape[1]} and inputs_embeds of length {embeds.shape[1]} cannot be "
                    "combined with slo_tpot; pass input_ids of the same length, or none"
                )
            tokens = input_ids if input_ids.shape[1] else nearest_tokens(embeds, embedding)
        elif num_cached:
            length = getattr(config, "_mask_length", -1) if mask is None else mask.shape[1]
            if length != input_ids.shape[1]:  # only what is new was passed; what came before is in the cache alone
                tokens = torch.cat((input_ids.new_zeros(len(input_ids), num_cached), input_ids), dim=1)
        if tokens.shape[1] <= num_cached:
            raise InvalidInputError(
                f"past_key_values holds {num_cached} tokens, which is all of the prompt; at least one must be left "
                "to feed, so pass the whole text so far, or new tokens with an attention_mask over old and new ones"
            )
        if mask is None:
            mask = torch.ones_like(tokens)
        if mask.shape != tokens.shape:
            raise InvalidInputError(
                f"attention_mask has shape {list(mask.shape)}; with this prompt it must be {list(tokens.shape)}"
            )
        context = cls(tokens, mask.bool(), embeds, cache, num_cached)
        context._check_positions(model_kwargs.get("position_ids"))
        return context

    def _check_positions(self, position_ids: torch.Tensor | None) -> None:
        """Refuse positions other than those of the tokens, counted without padding."""
        if position_ids is None:
            return
        expected = (self.mask.long().cumsum(-1) - 1).masked_fill(~self.mask, 0)
        given = position_ids[..., -expected.shape[1] :]
        if given.shape[-1] != expected.shape[1] or bool(((given != expected) & self.mask).any()):
            raise UnsupportedOptionError("position_ids cannot be combined with slo_tpot; leave positions to generate")

    @property
    def is_cache_given(self) -> bool:
        """Whether the caller passed the cache, and so expects to find the text in it."""
        return getattr(self.cache, "_is_user_defined", False)

    def kept(self, row: int) -> torch.Tensor:
        """The columns of a row's tokens, padding left out.  -> [prompt_len] int64"""
        return self.mask[row].nonzero()[:, 0]

    def prompt(self, row: int) -> list[int]:
        kept = self.kept(row)
        if len(kept) and int(kept[-1]) != self.tokens.shape[1] - 1:
            raise InvalidInputError(
                f"attention_mask masks the last token of row {row}; pad on the left (tokenizer.padding_side = 'left')"
            )
        return self.tokens[row, kept].tolist()

    def hand_over(self, requests: list[Request], target: PackedTarget) -> None:
        """Give embeddings and cached K/V to the requests, one per row."""
        for request in requests:
            kept = self.kept(request.index)
            if self.embeds is not None:
                target.sequences.give_embeds(request, self.embeds[request.index, kept])
            cached = kept[kept < self.num_cached]
            if len(cached):
                pairs = [(layer.keys[request.index], layer.values[request.index]) for layer in self._cached_layers()]
                layers = [tuple(_columns(tensor, cached, self.num_cached) for tensor in pair) for pair in pairs]
                target.sequences.load(request, layers, len(cached))

    def _cached_layers(self) -> list[Any]:
        return [layer for layer in self.cache.layers if getattr(layer, "keys", None) is not None]


def _columns(tensor: torch.Tensor, columns: torch.Tensor, num_cached: int) -> torch.Tensor:
    """Some columns of a cache layer [num_heads, n, dim], that holds the last (sliding window) or room for more."""
    held = tensor[:, :num_cached]
    dropped = num_cached - held.shape[1]
    return held[:, (columns[columns >= dropped] - dropped).to(tensor.device)]


def nearest_tokens(embeds: torch.Tensor, embedding: torch.nn.Module) -> torch.Tensor:
    """The token whose embedding points the same way: what a draft is told of a prompt given as embeddings.

    Args:
        embeds: [batch, length, hidden].

    Returns:
        [batch, length] int64; zeros if the table is not in memory.
    """
    table = embedding.weight
    if table.device.type == "meta":
        return torch.zeros(embeds.shape[:2], dtype=torch.int64, device=embeds.device)
    norms = torch.linalg.vector_norm(table, dim=-1, dtype=torch.float32).clamp(min=1e-12)
    return ((embeds.to(table) @ table.T) / norms).argmax(-1).to(embeds.device)


@dataclass
class Rows:
    """The rows of a call: where each stops, what is streamed, and what comes out."""

    input_ids: torch.Tensor  # [batch, padded_len] int64, as the caller gets them back
    context: Context
    pad: int
    streamer: Any
    requests: list[Request] = field(default_factory=list)
    _num_streamed: int = 0
    _stopped: dict[int, int] = field(default_factory=dict)  # row -> tokens at its stop, where stock goes on writing

    @classmethod
    def of(
        cls,
        input_ids: torch.Tensor,
        context: Context,
        config: GenerationConfig,
        criteria: StoppingCriteriaList,
        targets: list[float | None],
        arrived_s: float,
        streamer: Any,
    ) -> Rows:
        """One request per row, its padding left out."""
        pad = config._pad_token_tensor
        rows = cls(input_ids, context, 0 if pad is None else int(pad), streamer)
        max_new_tokens = criteria.max_length - input_ids.shape[1]
        for row, target_s in enumerate(targets):
            tokens = context.prompt(row)
            stop = rows._stop_of(row, criteria, len(tokens))
            rows.requests.append(Request(row, tokens, max_new_tokens, target_s, stop, arrived_s))
        return rows

    @property
    def num_new(self) -> int:
        """The longest row's new tokens; where stopped rows are written on, up to where the last one stopped."""
        if self._stopped and len(self._stopped) == len(self.requests):
            return max(self._stopped.values())
        return max(request.num_emitted for request in self.requests)

    def _stop_of(self, row: int, criteria: StoppingCriteriaList, prompt_len: int) -> Callable[[list[int]], bool]:
        eos = {int(i) for c in criteria if isinstance(c, EosTokenCriteria) for i in c.eos_token_id}
        others = [c for c in criteria if not isinstance(c, (EosTokenCriteria, MaxLengthCriteria))]
        # Without an end-of-sequence criterion stock does not pad: a row that stopped is written on until all have.
        is_padded = len(self.input_ids) == 1 or any(hasattr(c, "eos_token_id") for c in criteria)
        prompt = self.input_ids[row].tolist()

        def is_stop(tokens: list[int]) -> bool:
            if tokens[-1] in eos or not others:
                return tokens[-1] in eos
            text = torch.tensor([prompt + tokens[prompt_len:]], device=self.input_ids.device)
            is_hit = any(bool(torch.as_tensor(criterion(text, None)).all()) for criterion in others)
            if is_padded:
                return is_hit
            num_new = len(tokens) - prompt_len
            if is_hit:
                self._stopped.setdefault(row, num_new)
            return len(self._stopped) == len(self.requests) and num_new >= max(self._stopped.values())

        return is_stop

    def _new_tokens(self, request: Request, begin: int, end: int) -> list[int]:
        own = request.tokens[request.prompt_len :][begin:end]
        return own + [self.pad] * (end - begin - len(own))

    def begin(self) -> None:
        if self.streamer is not None:
            self.streamer.put(self.input_ids.cpu())

    def stream(self) -> None:
        """Hand over every position that all unfinished rows have reached, one [batch] tensor each, as stock does."""
        if self.streamer is None:
            return
        unfinished = [request.num_emitted for request in self.requests if not request.is_finished]
        ready = min(unfinished) if unfinished else self.num_new
        for position in range(self._num_streamed, ready):
            column = [self._new_tokens(request, position, position + 1)[0] for request in self.requests]
            self.streamer.put(torch.tensor(column))
        self._num_streamed = max(self._num_streamed, ready)

    def end(self) -> None:
        """All rows are finished: drop what was written beyond the end."""
        for request in self.requests:
            del request.tokens[request.prompt_len + self.num_new :]
        if self.streamer is not None:
            self.streamer.end()

    def sequences(self) -> torch.Tensor:
        """-> [batch, padded_len + num_new] int64"""
        new = [self._new_tokens(request, 0, self.num_new) for request in self.requests]
        return torch.cat((self.input_ids, torch.tensor(new, device=self.input_ids.device)), dim=-1)

    def write_on(self, target: PackedTarget, sampler: StockSampler) -> None:
        """Feed finished rows the padding that stock feeds them until the longest row ends.

        Only what is returned beside the tokens needs it: scores, logits and the cache.
        """
        for request in self.requests:
            sequence = target.sequences.of(request)
            text = request.tokens[: request.prompt_len] + self._new_tokens(request, 0, self.num_new)
            sequence.length = min(sequence.length, len(text) - 1)  # the last token has no K/V
            while sequence.length < len(text) - 1:
                piece = text[sequence.length : len(text) - 1][:CHUNK]
                positions = torch.arange(len(piece), device=target.sequences.packed.device)
                logits = target.sequences.forward([target.sequences.chain(request, piece)], positions)
                for place, row in enumerate(logits, sequence.length + 1):
                    if sampler.record is not None and place >= request.prompt_len + request.num_emitted:
                        sampler.scores(request, text[:place], row)
                sequence.length += len(piece)

    def fill_cache(self, target: PackedTarget, cache: Any) -> None:
        """Append to the call's cache what it lacks of all columns but the last, as stock does; padding is zeros."""
        batch = len(self.requests)
        length = self.context.tokens.shape[1] + self.num_new - 1
        own = [target.sequences.read(request) for request in self.requests]
        for index, layer in enumerate(zip(*own, strict=True)):
            filled = []
            for kind in range(2):  # K, V
                like = layer[0][kind]
                columns = like.new_zeros(batch, like.shape[0], length, like.shape[-1])
                for row, request, pair in zip(columns, self.requests, layer, strict=True):
                    kept = self.context.kept(request.index).to(like.device)
                    row[:, kept] = pair[kind][:, : len(kept)]
                    row[:, self.context.tokens.shape[1] :] = pair[kind][:, len(kept) :]
                filled.append(columns[:, :, self.context.num_cached :])
            cache.update(*filled, index)


def by_position(rows: list[list[torch.Tensor]], num_new: int) -> tuple[torch.Tensor, ...]:
    """A record as stock returns it: one [batch, vocab] tensor per position."""
    return tuple(torch.stack(column) for column in zip(*(row[:num_new] for row in rows), strict=True))
