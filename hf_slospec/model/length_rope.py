"""Rotary embeddings whose frequencies depend on the sequence's length (``longrope``, ``dynamic``),
applied per token.

transformers computes such frequencies in every forward, from its largest position, and does not
rotate the K of earlier forwards again. A packed forward contains tokens of several sequences, and
tokens that stock decoding would process in several forwards. So each token gets the frequencies
that stock decoding would use for it: a prompt token is rotated for the length of the whole prompt,
a later token for the length of the sequence up to itself. In a padded batch, the length of the
longest row counts.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hf_slospec.model.batch import NewTokens
from hf_slospec.model.linear_overrides import overriding
from hf_slospec.model.transfer import to_device

KINDS = ("longrope", "dynamic")  # values of rope_type with such frequencies


def varying_ropes(config: Any) -> Iterator[tuple[str, int]]:
    """Yield rope_type and original maximum length of each RoPE in a text config whose frequencies
    depend on the sequence's length.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (
        rope.values() if all(isinstance(value, dict) for value in rope.values()) else [rope]
    ):
        if (kind := parameters.get("rope_type")) in KINDS:
            yield (
                kind,
                parameters.get("original_max_position_embeddings")
                or config.max_position_embeddings,
            )


class LengthRope:
    """The rotary embedding modules of a model whose frequencies depend on the sequence's length;
    there may be none.
    """

    def __init__(self, model: torch.nn.Module):
        """Find the modules by their rope_type.

        ``max_plain`` is the length up to which the frequencies are constant; None without such
        modules.
        """
        config: Any = model.config
        self.max_plain = min(
            (length for _, length in varying_ropes(config.get_text_config())), default=None
        )
        self.modules = [
            module for module in model.modules() if _varies(getattr(module, "rope_type", None))
        ]

    def lengths(self, parts: Sequence[NewTokens]) -> torch.Tensor | None:
        """Return the sequence length that decides each new token's frequencies.

        Returns:
            [num_tokens] int64, on the host; None if all tokens use the frequencies of short
                sequences.
        """
        if self.max_plain is None:
            return None
        lengths = torch.cat([_lengths(part).cpu() for part in parts])
        # Exactly at max_plain, a module keeps the frequencies of a longer sequence before it, so
        # this length is handled here, too.
        return lengths if int(lengths.max()) >= self.max_plain else None

    def following(self, lengths: torch.Tensor | None) -> AbstractContextManager[None]:
        """Return a context in which forwards rotate each token by the frequencies for its length,
        in this thread only.

        Args:
            lengths: see :meth:`lengths`; None: forwards are not changed.
        """
        if lengths is None:
            return nullcontext()
        groups = [
            (length, torch.nonzero(lengths == length)[:, 0]) for length in lengths.unique().tolist()
        ]
        rotations = {
            (module, "forward"): functools.partial(_rotated, _fresh(module), groups)
            for module in self.modules
        }
        return overriding(rotations, list(rotations))


def _lengths(part: NewTokens) -> torch.Tensor:
    lengths = part.positions[-part.num_tokens :] + 1
    return lengths.clamp(min=part.sequence.prompt_len) + part.sequence.num_padding


def _varies(kind: Any) -> bool:
    return any(each in KINDS for each in (kind.values() if isinstance(kind, dict) else [kind]))


def _fresh(module: torch.nn.Module) -> torch.nn.Module:
    """Copy a module, as its forward replaces the frequencies in it. The copy shares everything but
    tensors.
    """
    attributes = {name: value for name, value in vars(module).items() if name != "_buffers"}
    shared = {id(value): value for value in attributes.values() if type(value) is not torch.Tensor}
    copied = copy.deepcopy(module, shared)
    vars(copied).pop("forward", None)
    return copied


def _rotated(
    module: torch.nn.Module,
    groups: Sequence[tuple[int, torch.Tensor]],
    _: Callable[..., Any],
    x: torch.Tensor,
    position_ids: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Compute a rotary module's forward, in which each group of tokens is rotated as in a forward
    over its length.

    Args:
        module: a fresh copy of the rotary module.
        groups: sequence lengths, and indices of the tokens that use the frequencies for each,
            [num_tokens_of_group] int64.
        x: hidden states; the module reads only their dtype and device.
        position_ids: [1, num_tokens] int64.
    """
    outputs = []
    order = torch.cat([tokens for _, tokens in groups])
    for length, tokens in groups:
        first = position_ids.new_zeros(1, 1)
        last = position_ids.new_full((1, 1), length - 1)
        module(x, first, *args, **kwargs)  # resets the frequencies of longer sequences
        positions = position_ids[:, to_device(tokens, position_ids.device)]
        output = module(x, torch.cat((positions, last), dim=1), *args, **kwargs)
        outputs.append(output if isinstance(output, tuple) else (output,))
    in_order = to_device(order.argsort(), position_ids.device)
    pairs = zip(*outputs, strict=True)
    merged = tuple(
        torch.cat([part[:, :-1] for part in parts], dim=1)[:, in_order] for parts in pairs
    )
    return merged if isinstance(output, tuple) else merged[0]
