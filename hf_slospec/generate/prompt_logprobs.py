"""Log probabilities of a prompt's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_slospec.errors import UnsupportedModelError, UnsupportedOptionError
from hf_slospec.families.prefilled_prompts import sees_later_tokens
from hf_slospec.generate.prepare import Call
from hf_slospec.model.sampling import TokenLogprobs


class PromptLogprobs:
    """The target's log probabilities of a prompt's tokens, each given those before it, as its steps
    compute them.
    """

    def __init__(self, tokens: Sequence[int], num_top: int):
        """``num_top``: number of most probable tokens to keep at each position."""
        self._tokens = tokens
        self._num_top = num_top
        self.logprobs: list[TokenLogprobs | None] = [None]  # per token; None for the first

    @property
    def num_read(self) -> int:
        """Number of tokens after which the logits were taken."""
        return len(self.logprobs) - 1

    def take(self, logits: torch.Tensor) -> None:
        """Take the logits after each of the next tokens, [num_tokens, vocab]."""
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


def prompt_logprobs_of(call: Call, num_top: int) -> PromptLogprobs:
    """Return what takes the log probabilities of the prompt of a call of one row, as its
    ``prompt_reader``.

    Raises:
        UnsupportedModelError: tokens of the model's prompts attend to later ones.
        UnsupportedOptionError: the prompt is processed as a whole, as it has images.
    """
    (params,) = call.rows.params
    model = call.speculator.target.model
    if sees_later_tokens(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} sees a prompt from both sides, so its tokens have no log probabilities given "
            "those before; leave prompt_logprobs out"
        )
    if params.prefill is not None:
        raise UnsupportedOptionError(
            "a prompt with images is processed as a whole; leave prompt_logprobs out"
        )
    return PromptLogprobs(params.prompt, num_top)
