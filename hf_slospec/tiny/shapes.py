"""Sizes that the embedded pair can be inflated to."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """Size of an inflated Llama, by the names of its config."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    # None: scaled with the hidden size, as are the K/V heads.
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None  # None: as in the embedded target, also for the fields below
    vocab_size: int | None = None
    tie_word_embeddings: bool | None = None


# Hidden sizes are 4**n times the embedded target's 256, which makes the scaling of norms exact in
# any float format.
SHAPES = {
    "0.1B": Shape(1024, 3072, 8),
    "0.3B": Shape(1024, 5120, 16),
    "0.6B": Shape(1024, 7168, 24),
    "1B": Shape(1024, 11008, 28),
    "8B": Shape(4096, 14336, 32, 32, 8, 128, 128256, tie_word_embeddings=False),  # Llama-3.1-8B
}
# Shapes of drafts by the size of their target; other sizes have the embedded draft.
DRAFT_SHAPES = {
    "8B": Shape(2048, 8192, 16, 32, 8, 64, 128256, tie_word_embeddings=True),  # Llama-3.2-1B
}
# Shapes of EAGLE-3 heads by the size of their target, with the head's own vocabulary; heads of
# other sizes are scaled with the hidden size.
HEAD_SHAPES = {
    "8B": Shape(4096, 14336, 1, 32, 8, 128, 32000),  # as those of EAGLE's authors for Llama-3.1-8B
}
SIZES = ("tiny", *SHAPES)
