"""Log probabilities of a prompt's own tokens."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import torch

from hf_slospec.engine.request import Request
from hf_slospec.engine.scheduling.static_batch import CHUNK
from hf_slospec.errors import InvalidInputError, UnsupportedModelError
from hf_slospec.generate.speculator import Speculator
from hf_slospec.models.compatibility.running import evaluating, vocab_size
from hf_slospec.models.kv_cache.request_sequences import RequestSequences
from hf_slospec.models.sampling import TokenLogprobs
from hf_slospec.models.whole_prompts import sees_later_tokens


@torch.no_grad()
def prompt_logprobs(speculator: Speculator, tokens: Sequence[int], num_top: int) -> list[TokenLogprobs | None]:
    """Return the target's log probabilities of tokens, each given those before it; None for the first.

    Steps of other threads go on between chunks of the prompt.

    Args:
        num_top: number of most probable tokens to return for each place.

    Raises:
        InvalidInputError: ``num_top`` is no number, a token is outside of the vocabulary, or the prompt is longer than
            the model can be.
        UnsupportedModelError: tokens of the model's prompts see those behind them.
        MemoryError: there is no room for the prompt's K/V.
    """
    if sees_later_tokens(speculator.target.model):
        raise UnsupportedModelError(
            f"{type(speculator.target.model).__name__} sees a prompt from both sides, so its tokens have no log "
            "probabilities given those before"
        )
    if isinstance(num_top, bool) or not isinstance(num_top, numbers.Integral) or num_top < 0:
        raise InvalidInputError(f"num_top must be a number of tokens, at least 0, got {num_top!r}")
    speculator.renew()
    packed, size = speculator.target.packed, vocab_size(speculator.target.model)
    if max(tokens) >= size:
        raise InvalidInputError(f"prompt has token {max(tokens)}, and the vocabulary has {size} tokens")
    if packed.max_positions is not None and len(tokens) > packed.max_positions:
        raise InvalidInputError(f"prompt has {len(tokens)} tokens, and the model takes at most {packed.max_positions}")
    request, found = Request(0, list(tokens), 0), list[TokenLogprobs | None]([None])
    sequences = RequestSequences(packed, 0)
    try:
        for begin in range(0, len(tokens) - 1, CHUNK):
            piece = tokens[begin : min(begin + CHUNK, len(tokens) - 1)]
            with speculator.lock, evaluating(packed.model):
                sequences.reserve_for(request, len(tokens))
                logits = sequences.forward([sequences.chain(request, piece)], torch.arange(len(piece))).logits
                sequences.of(request).length += len(piece)
            logprobs = logits.float().log_softmax(-1)
            following = tokens[begin + 1 : begin + 1 + len(piece)]
            found += [TokenLogprobs.of(*pair, num_top) for pair in zip(logprobs, following, strict=True)]
    finally:
        with speculator.lock:
            sequences.close()
        speculator.lock.rest()
    return found
