"""``CallInputs``, the prompts of a call (tokens, embeddings, given cache), their checks, and the
log probabilities of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.generation import GenerationConfig

from hf_slospec.errors import (
    InvalidInputError,
    UnsupportedInputError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_slospec.forks import cached_property
from hf_slospec.model.checked_model import CheckedModel
from hf_slospec.model.length_rope import varying_ropes
from hf_slospec.model.prefilled_prompts import (
    cached_layers,
    cached_tensors,
    sees_later_tokens,
)
from hf_slospec.model.properties import CACHE_NAME, given_cache
from hf_slospec.model.ranks import whole
from hf_slospec.model.record import TokenLogprobs
from hf_slospec.model.sequences import Sequences
from hf_slospec.model.transfer import to_device
from hf_slospec.request.request import Request
from hf_slospec.scheduler.prefill import CHUNK


@dataclass
class CallInputs:
    """Inputs of stock ``generate``'s first forward: one column per token, cached tokens first."""

    tokens: torch.Tensor  # [batch, length] int64
    mask: torch.Tensor  # [batch, length] bool, False: padding
    embeds: torch.Tensor | None  # [batch, length, hidden], instead of the tokens' embeddings
    cache: Any  # a transformers cache that holds the first num_cached columns; None: no cache
    num_cached: int

    @classmethod
    def of(
        cls,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any],
        config: GenerationConfig,
        embedding: torch.nn.Module,
        has_own_positions: bool = False,
    ) -> CallInputs:
        """Take the inputs that stock ``generate`` prepared.

        Args:
            input_ids: [batch, length] int64.
            model_kwargs: the other inputs by name.
            config: generation config of the call.
            embedding: the model's embedding layer, with which tokens are guessed from
                ``inputs_embeds``.
            has_own_positions: the model computes positions itself, so ``position_ids`` are not
                checked.

        Raises:
            InvalidInputError, UnsupportedOptionError: the inputs contradict each other, or cannot
                be speculated.
        """
        embeds = model_kwargs.get("inputs_embeds")
        mask = model_kwargs.get("attention_mask")
        cache_name, cache = given_cache(model_kwargs)
        num_cached = 0 if cache is None or all(cache.is_linear) else int(cache.get_seq_length())
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
            # Only new tokens were passed, so the cached ones are unknown; zeros stand for them.
            if length != input_ids.shape[1]:
                tokens = torch.cat(
                    (input_ids.new_zeros(len(input_ids), num_cached), input_ids), dim=1
                )
        if tokens.shape[1] <= num_cached:
            raise InvalidInputError(
                f"{cache_name} holds {num_cached} tokens, which is all of the prompt; at least one must be left "
                "to process, so pass the whole text so far, or new tokens with an attention_mask over old and new ones"
            )
        if mask is None:
            mask = torch.ones_like(tokens)
        if mask.shape != tokens.shape:
            raise InvalidInputError(
                f"attention_mask has shape {list(mask.shape)}; with this prompt it must be {list(tokens.shape)}"
            )
        rows = {len(layer.keys) for layer in cached_layers(cache)} if num_cached else set()
        if rows - {len(tokens)}:
            raise InvalidInputError(
                f"{CACHE_NAME} holds {rows.pop()} rows, and this batch has {len(tokens)}; use a cache per batch"
            )
        prompt = cls(tokens, mask.bool(), embeds, cache, num_cached)
        if not has_own_positions:
            prompt._check_positions(model_kwargs.get("position_ids"))
        return prompt

    def _check_positions(self, position_ids: torch.Tensor | None) -> None:
        """Raise UnsupportedOptionError unless ``position_ids`` count each row's tokens from 0,
        padding excluded.
        """
        if position_ids is None:
            return
        expected = (self.mask.long().cumsum(-1) - 1).masked_fill(~self.mask, 0)
        given = position_ids[..., -expected.shape[1] :]
        if given.shape[-1] != expected.shape[1] or bool(((given != expected) & self.mask).any()):
            raise UnsupportedOptionError(
                "slo_tpot needs position_ids that count each row's tokens from 0, padding left out; leave position_ids "
                f"out, and where {CACHE_NAME} holds images, pass the whole text with its images in its place"
            )

    @property
    def is_cache_given(self) -> bool:
        """Return whether the caller passed the cache, and so expects it to hold the K/V of the
        whole text after the call.
        """
        return getattr(self.cache, "_is_user_defined", False)

    @property
    def cached_shapes(self) -> list[tuple[int, int]]:
        """Number of heads and size of K in each layer of a cache from an earlier call; empty
        without such a cache.
        """
        return [
            (layer.keys.shape[1], layer.keys.shape[-1])
            for layer in cached_layers(self.cache)
            if self.num_cached
        ]

    def columns_of(self, row: int) -> torch.Tensor:
        """Return the columns of a row that are not padding.  -> [prompt_len] int64, on the CPU"""
        return self._on_host[1][row].nonzero()[:, 0]

    @cached_property
    def _on_host(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and mask on the CPU. Copied once, since every copy waits for the device."""
        return self.tokens.cpu(), self.mask.cpu()

    def tokens_of(self, row: int) -> list[int]:
        """Return a row's tokens without padding.

        Raises:
            UnsupportedInputError: the row is padded on the right.
        """
        tokens = self._on_host[0][row]
        columns = self.columns_of(row)
        if len(columns) and int(columns[-1]) != len(tokens) - 1:
            raise UnsupportedInputError(
                f"attention_mask masks the last token of row {row}; pad on the left (tokenizer.padding_side = 'left')"
            )
        return tokens[columns].tolist()

    def check(
        self, checked: CheckedModel, max_new_tokens: int, padded_len: int, has_placeholders: bool
    ) -> None:
        """Refuse prompts that the target cannot process exactly as stock ``generate`` does.

        Args:
            checked: the target.
            max_new_tokens: maximum number of new tokens.
            padded_len: length of the rows that the caller gets back.
            has_placeholders: token ids beyond the vocabulary may stand for images.

        Raises:
            InvalidInputError, UnsupportedInputError, UnsupportedOptionError: the message names the
                row and the argument.
        """
        target = checked.packed
        limit = target.max_positions
        counts_all = target.family.has_states or any(
            each.window or each.chunk for each in target.layers
        )
        masks = self._on_host[1]  # [batch, length] bool
        for row, length in enumerate(masks.sum(1).tolist()):
            max_len = length + max_new_tokens
            mask = masks[row]
            if length == 0:
                raise UnsupportedInputError(
                    f"row {row} of input_ids is empty or all padding; give it at least one token"
                )
            if limit is not None and max_len - 1 > limit:  # the last new token is not forwarded
                raise UnsupportedInputError(
                    f"row {row}: prompt of {length} tokens + max_new_tokens={max_new_tokens} "
                    f"exceed the model's {limit} positions; shorten the prompt or set max_new_tokens to at most "
                    f"{max(limit - length + 1, 0)}"
                )
            if target.num_selected is not None and max_len > target.num_selected:
                raise UnsupportedInputError(
                    f"row {row} may get {max_len} tokens long, and beyond {target.num_selected} this model's "
                    "layers select keys, of which equal scores leave the choice open; lower max_new_tokens to at most "
                    f"{max(target.num_selected - length, 0)}, or use stock generate (fallback=True)"
                )
            if not bool(mask.all()) and checked.counts_padding:
                raise UnsupportedInputError(
                    f"attention_mask masks tokens of row {row}, and {type(target.model).__name__} counts them as "
                    "text, so its output would depend on the other rows; pass rows of one length, or one row at a time"
                )
            if bool((mask[:-1] & ~mask[1:]).any()) and (counts_all or checked.counts_gaps):
                raise UnsupportedOptionError(
                    f"attention_mask masks tokens inside row {row}, which a sliding window, a chunk, a recurrent "
                    "state or a bias by place would count; pad on the left only, or use stock generate (fallback=True)"
                )
        self._check_rope(checked, int(masks.sum(1).max()), padded_len, max_new_tokens)
        ids = self.tokens.clamp(max=0) if has_placeholders else self.tokens
        check_ids("input_ids", (int(ids.min()), int(ids.max())), target.vocab_size)
        shapes = [(each.shape.key.num_heads, each.shape.key.dim) for each in target.layers]
        if self.cached_shapes and self.cached_shapes != shapes:
            raise InvalidInputError(
                f"{CACHE_NAME} holds {len(self.cached_shapes)} layers, whose shapes are not those of this model's "
                f"{len(shapes)}; pass a cache that the same model wrote"
            )

    def _check_rope(
        self, checked: CheckedModel, longest: int, padded_len: int, max_new_tokens: int
    ) -> None:
        """Raise UnsupportedOptionError if an output may grow to a length at which RoPE changes, and
        either stock ``generate`` recomputes K/V there or the RoPE type is not known.

        Stock recomputes K/V for models whose class overrides ``prepare_inputs_for_generation``.
        """
        model: Any = checked.model
        stock_prepares = GenerationMixin.prepare_inputs_for_generation
        is_plain = type(model).prepare_inputs_for_generation is stock_prepares
        end = padded_len + max_new_tokens
        for kind, trained in varying_ropes(model.config.get_text_config()):
            num_left = max(trained - padded_len, 0)
            remedy = (
                f"lower max_new_tokens to at most {num_left}, or use stock generate (fallback=True)"
            )
            if end > trained and not checked.packed.rope.modules:
                raise UnsupportedOptionError(
                    f"this model's {kind} RoPE changes beyond {trained} tokens, and none of its modules has a "
                    f"rope_type; {remedy}"
                )
            if longest <= trained < end and not is_plain:
                raise UnsupportedOptionError(
                    f"this model's {kind} RoPE changes beyond {trained} tokens, where stock computes the K/V of the "
                    f"text anew, and the prompt of {longest} tokens may grow to {end}; {remedy}"
                )

    def load_into(self, requests: list[Request], sequences: Sequences) -> None:
        """Load embeddings and cached K/V of each row into the sequence of its request."""
        sequences.reserve(requests)
        if self.embeds is None and not self.num_cached:
            return
        for request in requests:
            columns = self.columns_of(request.index)
            if self.embeds is not None:
                sequences.of(request).embeds = self.embeds[request.index, columns]
            cached = columns[columns < self.num_cached]
            if len(cached):
                family = sequences.packed.family
                states = family.read_states(self.cache, request.index, len(cached))
                tensors = cached_tensors(self.cache, request.index, cached, self.num_cached)
                sequences.load(request, tensors, len(cached), states=states)
                request.kv.num_cached = len(cached)

    def fill(self, cache: Any, requests: list[Request], sequences: Sequences, num_new: int) -> None:
        """Append the K/V of all columns but the last to the call's cache, as stock ``generate``
        does; the K/V of padding is zero.

        Args:
            cache: the cache, which holds the first ``num_cached`` columns.
            requests: one per row.
            sequences: hold the K/V of the requests.
            num_new: number of new columns in the output.
        """
        length = self.tokens.shape[1] + num_new - 1
        lacking = torch.ones(len(requests), length, dtype=torch.bool, device="cpu")
        lacking[:, : self.tokens.shape[1]] = self._on_host[1][
            [request.index for request in requests]
        ]
        lacking = lacking[:, self.num_cached :]
        rows, columns = lacking.nonzero(as_tuple=True)  # tokens whose K/V is appended, row by row
        lengths = lacking.sum(1).tolist()
        slots = torch.cat(
            [sequences.of(each).last_slots(n) for each, n in zip(requests, lengths, strict=True)]
        )
        places = dict[torch.device, Any]()
        for layer, stored in zip(sequences.packed.layers, sequences.cache.pool.layers, strict=True):
            filled = []
            for tensor in stored:  # K, V, index keys: [num_slots, num_heads, dim]
                if tensor.device not in places:
                    places[tensor.device] = to_device((rows, columns, slots), tensor.device)
                to_rows, to_columns, from_slots = places[tensor.device]
                _, num_heads, dim = tensor.shape
                new = tensor.new_zeros(len(requests), num_heads, length - self.num_cached, dim)
                new.transpose(1, 2)[to_rows, to_columns] = tensor[from_slots]
                filled.append(new)
            cache.update(*filled[:2], layer.layer_idx)
            if len(filled) > 2:
                cache.update_indexer(filled[2][:, 0], layer.layer_idx)
        states = [sequences.of(each).present_states() for each in requests]
        sequences.packed.family.write_states(cache, states)


def nearest_tokens(embeds: torch.Tensor, embedding: Any) -> torch.Tensor:
    """Return the token with the most similar embedding at each position, for drafters that need the
    tokens of a prompt given as embeddings.

    Args:
        embeds: [batch, length, hidden].
        embedding: the model's embedding layer.

    Returns:
        [batch, length] int64; zeros if the embedding weights are on the meta device.
    """
    table = whole(embedding.weight)
    if table.device.type == "meta":
        return torch.zeros(embeds.shape[:2], dtype=torch.int64, device=embeds.device)
    norms = torch.linalg.vector_norm(table, dim=-1, dtype=torch.float32).clamp(min=1e-12)
    pieces = embeds.to(table).flatten(0, 1).split(CHUNK)
    nearest = torch.cat([((piece @ table.T) / norms).argmax(-1) for piece in pieces])
    return nearest.view(embeds.shape[:2]).to(embeds.device)


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidInputError, whose message names the argument, if a token id is outside the
    vocabulary.
    """
    if wrong := [token for token in ids if not 0 <= token < vocab_size]:
        raise InvalidInputError(
            f"{name} has token {wrong[0]}, outside of the vocabulary of {vocab_size} tokens; use this model's tokenizer"
        )


class PromptLogprobs:
    """Collects log probabilities of a prompt's tokens, each given the tokens before it, while the
    target prefills the prompt.
    """

    def __init__(self, tokens: Sequence[int], num_top: int):
        """Begin before the first token of the prompt.

        Args:
            tokens: the prompt's tokens.
            num_top: number of most probable tokens to record at each position.
        """
        self._tokens = tokens
        self._num_top = num_top
        self.logprobs: list[TokenLogprobs | None] = [None]  # per token; None for the first

    @property
    def num_read(self) -> int:
        """Number of prompt tokens whose next-token logits have been received so far."""
        return len(self.logprobs) - 1

    def take(self, logits: torch.Tensor) -> None:
        """Take the logits after each of the next prompt tokens, [num_tokens, vocab]."""
        logprobs = logits.float().log_softmax(-1)
        following = torch.tensor(
            self._tokens[len(self.logprobs) :][: len(logits)], device=logits.device
        )
        of_tokens = logprobs.gather(-1, following[:, None])[:, 0].tolist()
        top = logprobs.topk(min(self._num_top, logits.shape[-1]))
        rows = zip(of_tokens, top.indices.tolist(), top.values.tolist(), strict=True)
        self.logprobs += [
            TokenLogprobs(logprob, list(zip(ids, values, strict=True)))
            for logprob, ids, values in rows
        ]


def prompt_reader(
    model: Any, tokens: Sequence[int], num_top: int | None, is_whole: bool
) -> PromptLogprobs | None:
    """Return the object that collects the log probabilities of a submitted prompt; None if
    ``num_top`` is None.

    Args:
        model: the target.
        tokens: the prompt's tokens.
        num_top: number of most probable tokens to record at each position; None: record nothing.
        is_whole: one forward of the model processes the whole prompt, e.g. since it has images.

    Raises:
        UnsupportedModelError: prompt tokens of this model attend to later tokens.
        UnsupportedOptionError: ``is_whole`` is True.
    """
    if num_top is None:
        return None
    if sees_later_tokens(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} sees a prompt from both sides, so its tokens have no log probabilities given "
            "those before; leave prompt_logprobs out"
        )
    if is_whole:
        raise UnsupportedOptionError(
            "a prompt with images is processed as a whole; leave prompt_logprobs out"
        )
    return PromptLogprobs(tokens, num_top)
