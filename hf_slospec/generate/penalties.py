"""OpenAI's presence and frequency penalties, as a logits processor."""

from __future__ import annotations

import torch
from transformers.generation import LogitsProcessor


class OccurrencePenalties(LogitsProcessor):
    """Processor that lowers the logits of tokens in the output: by one penalty per occurrence, by the other once.

    Source: OpenAI's API reference. Tokens of the prompt do not count, as in vLLM.
    """

    def __init__(self, prompt_len: int, presence: float, frequency: float):
        """``prompt_len``: tokens of the prompt, padding included."""
        self.prompt_len, self.presence, self.frequency = prompt_len, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores with penalties, [num_rows, vocab]; ``input_ids`` [num_rows, length] int64."""
        new = input_ids[:, self.prompt_len :]
        counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)
