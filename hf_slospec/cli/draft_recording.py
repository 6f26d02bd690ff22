"""Recording of a draft's probabilities for texts of the target, which the simulator replays under any policy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from hf_slospec.lab.texts import RecordedText

NUM_CHILDREN = 8


@torch.no_grad()
def recorded(draft: PreTrainedModel, tokens: Sequence[int], prompt_len: int) -> RecordedText:
    """Return one output: the draft's most probable tokens per position, and which one the target chose.

    Args:
        draft: forwarded once over the whole text.
        tokens: the prompt followed by the target's output, at least one token each.
        prompt_len: number of prompt tokens.
    """
    ids = torch.tensor(tokens, device=draft.device)
    logits = draft(input_ids=ids[None, :-1]).logits[0, prompt_len - 1 :].float()  # [output_len, vocab]
    top = logits.softmax(-1).topk(min(NUM_CHILDREN, logits.shape[-1]), dim=-1)
    is_chosen = top.indices == ids[prompt_len:, None]
    ranks = torch.where(is_chosen.any(-1), is_chosen.int().argmax(-1), top.indices.shape[-1])
    probs = [[round(p, 5) for p in row] for row in top.values.clamp(max=1.0).tolist()]
    return RecordedText(input_tokens=prompt_len, child_probs=probs, ranks=ranks.tolist())
