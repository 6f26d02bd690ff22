"""``WholePrompts``: prompts that the model's own forward prefills as a whole, since they contain
images, audio or video or their tokens attend to later ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_slospec.errors import UnsupportedInputError, UnsupportedOptionError
from hf_slospec.generate.prompt import CallInputs
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.prefilled_prompts import (
    Prefilled,
    cached_tensors,
    own_cache,
    sees_later_tokens,
)
from hf_slospec.model.properties import CACHE_NAME, CACHE_NAMES, cache_option, vocab_size


def names_beside_text(model: PreTrainedModel, model_kwargs: Mapping[str, Any]) -> list[str]:
    """Return the names of the inputs that are images, audio or video, or that state their positions
    in the text; empty for a mere text.
    """
    modalities = model.input_modalities
    if not set([modalities] if isinstance(modalities, str) else modalities) - {"text"}:
        return []
    names = [name for name, value in model_kwargs.items() if _holds_tensors(value)]
    if names == ["mm_token_type_ids"] and not bool(model_kwargs["mm_token_type_ids"].any()):
        return []  # processors return mm_token_type_ids (all zeros) for a mere text, too
    return names


def _holds_tensors(value: Any) -> bool:
    parts = list(value.values()) if isinstance(value, Mapping) else value
    if isinstance(parts, (list, tuple)):
        return any(map(_holds_tensors, parts))
    return isinstance(parts, torch.Tensor)


@contextlib.contextmanager
def keeping_rope_deltas(model: PreTrainedModel) -> Iterator[None]:
    """Reset the model's ``rope_deltas`` on exit to their values on entry. Stock ``generate`` sets
    them for later calls that continue its cache.
    """
    owners: list[Any] = [module for module in model.modules() if "rope_deltas" in vars(module)]
    before = [owner.rope_deltas for owner in owners]
    try:
        yield
    finally:
        for owner, deltas in zip(owners, before, strict=True):
            owner.rope_deltas = deltas


class WholePrompts:
    """The prompts of one call, prefilled by one forward of the model with all inputs, as stock
    ``generate`` does it.

    All prompts of the call share that forward. A prompt that is needed again after preemption is
    forwarded again.
    """

    def __init__(
        self,
        packed: PackedModel,
        prompt: CallInputs,
        model_kwargs: dict[str, Any],
        names: Sequence[str],
    ):
        """Take the inputs that stock ``generate`` prepared.

        Args:
            packed: the target.
            prompt: the prompts' tokens.
            model_kwargs: the inputs by name.
            names: names of the inputs that are images, audio or video.

        Raises:
            UnsupportedOptionError, UnsupportedInputError: the inputs cannot be speculated.
        """
        self._model: Any = packed.model
        self._prompt = prompt
        self._family = packed.family
        self._inputs = {
            name: value for name, value in model_kwargs.items() if name not in CACHE_NAMES
        }
        self._inputs["use_cache"] = True
        self._is_exact = packed.exact is not None
        self._prefilled: dict[
            int, Prefilled
        ] = {}  # keyed by row; removed when prefill() returns it
        listed = ", ".join(names)
        kind = type(self._model).__name__
        if self._is_exact and names and len(prompt.tokens) > 1:
            raise UnsupportedOptionError(
                f"exact cannot be combined with batches of prompts with {listed}; pass one row per call"
            )
        seen = listed or f"{kind}, whose prompts are seen from both sides"
        what = "exact" if self._is_exact else seen
        if prompt.embeds is not None:
            raise UnsupportedOptionError(
                f"inputs_embeds cannot be combined with slo_tpot and {what}; pass input_ids, or use stock generate "
                "(fallback=True)"
            )
        if prompt.num_cached:
            raise UnsupportedOptionError(
                f"{CACHE_NAME} that holds tokens cannot be combined with slo_tpot and {what}; pass the whole text "
                "with all of its images, without the cache"
            )
        # Without placeholder tokens, the model inserts image embeddings before the text.
        if names and not _placeholders(self._model.config):
            raise UnsupportedOptionError(
                f"{what} of {kind}, which has no placeholder tokens for them, cannot be combined with slo_tpot; use "
                "stock generate (fallback=True)"
            )
        if names:
            self._check_ends()

    @classmethod
    def of(
        cls,
        packed: PackedModel,
        prompt: CallInputs,
        model_kwargs: dict[str, Any],
        names: list[str],
    ) -> WholePrompts | None:
        """Return the prompts of a call, or None if they can be prefilled in chunks."""
        if names or sees_later_tokens(packed.model) or packed.prefills_alone:
            return cls(packed, prompt, model_kwargs, names)
        return None

    def _check_ends(self) -> None:
        """Raise UnsupportedInputError if a prompt ends with an image: the last token is verified
        together with draft tokens, which are text.
        """
        kinds = self._inputs.get("mm_token_type_ids")
        last = self._prompt.tokens[:, -1]
        is_text = last < vocab_size(self._model)
        for placeholder in _placeholders(self._model.config):
            is_text &= last != placeholder
        if kinds is not None:
            is_text &= kinds[:, -1] == 0
        if not bool(is_text.all()):
            raise UnsupportedInputError(
                f"row {int(is_text.int().argmin())} of input_ids ends with an image, audio or video, which cannot be "
                "combined with slo_tpot; end the prompt with text, as chat templates do"
            )

    def prefill(self, row: int) -> Prefilled:
        """Return one row's prefilled prompt. The caller must hold the model's lock."""
        if self._is_exact:
            return self._process_alone(row)
        if row not in self._prefilled:
            self._prefilled = dict(enumerate(self._process()))
        return self._prefilled.pop(row)

    @torch.no_grad()
    def _process_alone(self, row: int) -> Prefilled:
        """Prefill one row by itself, with the forward that stock ``generate`` would run for that
        row alone.
        """
        columns = self._prompt.columns_of(row)
        cache, inputs, logits = self._forwarded(
            lambda by_token: by_token[..., row : row + 1, columns]
        )
        length = len(columns) - 1
        places = torch.arange(length + 1, device="cpu").split([length, 1])
        held, last = (list(cached_tensors(cache, 0, part, length + 1)) for part in places)
        offset = _last_position(inputs.get("position_ids"), 0, length) - length
        return Prefilled(held, length, offset, None, logits[0], last)

    def _forwarded(
        self, part: Callable[[Any], torch.Tensor]
    ) -> tuple[DynamicCache, dict[str, Any], torch.Tensor]:
        """Run the model's own forward on a part of the inputs.

        Args:
            part: selects rows and columns of a tensor that has one number per token.

        Returns:
            The cache, the inputs that the model prepared for the forward, and the last position's
            logits, [num_rows, vocab].
        """
        cache = own_cache(self._model)
        ids = self._prompt.tokens
        # Dicts are copied, as models add encoder outputs to them.
        inputs = {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in self._inputs.items()
        }
        inputs |= {name: part(value) for name, value in inputs.items() if _is_by_token(value, ids)}
        inputs = self._model.prepare_inputs_for_generation(
            part(ids), is_first_iteration=True, **cache_option(cache), **inputs
        )
        return cache, inputs, self._model(**inputs, return_dict=True).logits[:, -1]

    @torch.no_grad()
    def _process(self) -> list[Prefilled]:
        """Prefill all rows by one forward of the model.

        The last token is verified together with draft tokens afterwards. If layers keep recurrent
        states, the forward leaves it out, since a state cannot be rolled back.
        """
        num_left_out = int(self._family.has_states)
        end = self._prompt.tokens.shape[1] - num_left_out
        cache, inputs, logits = self._forwarded(lambda by_token: by_token[..., :end])
        prefilled = []
        for row in range(len(logits)):
            columns = self._prompt.columns_of(row)
            length = len(columns) - 1
            tensors = list(cached_tensors(cache, row, columns[:-1], end))
            last = _last_position(inputs.get("position_ids"), row, length - num_left_out)
            states = self._family.read_states(cache, row, length)
            offset = last + num_left_out - length
            prefilled.append(
                Prefilled(tensors, length, offset, states, None if num_left_out else logits[row])
            )
        return prefilled


def _is_by_token(value: Any, ids: torch.Tensor) -> bool:
    """Return whether an input has one integer per token, such as a mask, or positions on one or
    several axes.
    """
    return (
        isinstance(value, torch.Tensor)
        and not value.is_floating_point()
        and value.shape[-2:] == ids.shape
    )


def _placeholders(config: Any) -> list[int]:
    """Return the ids of the tokens that stand for images, audio or video in a prompt."""
    names = [
        f"{kind}_token_{key}" for kind in ("image", "video", "audio") for key in ("id", "index")
    ]
    return [value for name in names if isinstance(value := getattr(config, name, None), int)]


def _last_position(position_ids: torch.Tensor | None, row: int, counted: int) -> int:
    """Return the position of a row's last token.

    Args:
        position_ids: [batch, length] int64, or [num_axes, batch, length]; text has the same
            position on all axes. None: the model counts positions itself.
        row: index of the row.
        counted: the position if the model counts.
    """
    if position_ids is None:
        return counted
    by_axis = position_ids[..., min(row, position_ids.shape[-2] - 1), -1].reshape(-1)
    return int(by_axis[-1])
