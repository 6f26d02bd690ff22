"""Trial of a model with ``exact``: the logits of a draft tree, computed beside another sequence,
must equal those of single decode steps bit for bit.
"""

from __future__ import annotations

import numpy as np
import torch

from hf_slospec.errors import UnsupportedModelError
from hf_slospec.model.batch import CachedSequence
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.properties import evaluating, refused_if_it_fails
from hf_slospec.model.tree_mask import chain
from hf_slospec.model.trial import load_plain, plain_steps, tree_logits, tree_of

# Numbers of prompt tokens of the two sequences. The first tree begins and ends in different blocks
# of 64 keys.
PROMPTS = (120, 7)
# Shape of the trees: more nodes than a kernel takes as one group of rows. All nodes of a level are
# children of the first node of the level above.
DEPTH = 12
WIDTH = 4
# Tokens per prefill forward for the tree and for single steps, if prompts may be split.
TRIAL_CHUNKS = (33, 64)


def check_exact(packed: PackedModel) -> None:
    """Raise UnsupportedModelError unless the logits of tree nodes equal those of tokens decoded one
    by one, bit for bit.

    The tokens are decoded by stock's own forward for ``exact="bits"``, else by packed forwards.
    """
    numbers = np.random.default_rng(0)
    prompts = [numbers.integers(packed.vocab_size, size=size).tolist() for size in PROMPTS]
    levels = (max(WIDTH * (depth - 2) + 1, 0) for depth in range(1, DEPTH + 1))
    parents = (-1, *(node for node in levels for _ in range(WIDTH)))
    nodes = numbers.integers(packed.vocab_size, size=(len(PROMPTS), len(parents)))
    trees = [tree_of(root, parents, iter(others)) for root, *others in nodes.tolist()]
    path = np.flatnonzero(trees[0].ancestor_mask()[-1])

    with evaluating(packed.model), refused_if_it_fails(packed.model), torch.no_grad():
        expected = [
            _one_by_one(packed, prompt, tree.tokens[path].tolist())
            for prompt, tree in zip(prompts, trees, strict=True)
        ]
        capacities = [size + len(parents) for size in PROMPTS]
        with packed.kv_cache.temporary(capacities) as sequences:
            for sequence, prompt in zip(sequences, prompts, strict=True):
                _prefill(packed, sequence, prompt, TRIAL_CHUNKS[0])
            logits = tree_logits(packed, sequences, trees)
    for ours, plain in zip(logits, expected, strict=True):
        if not torch.equal(found := ours[path], plain):
            share = float((found != plain).float().mean())
            largest = float((found - plain).abs().max())
            name = type(packed.model).__name__
            dtype = packed.model.dtype
            way_out = 'exact="self" asks for less' if packed.exact == "bits" else "leave exact out"
            raise UnsupportedModelError(
                f'exact="{packed.exact}" cannot be had of {name} in {dtype} here: {share:.1%} of the logits of a trial '
                f"tree differ from those of single tokens, by {largest:.2g} at most; {way_out}"
            )


def _prefill(packed: PackedModel, sequence: CachedSequence, prompt: list[int], chunk: int) -> None:
    """Compute a prompt's K/V as calls do: by the model's own forward if prompts are prefilled
    alone, else in chunks.
    """
    pool = packed.kv_cache.pool
    if packed.prefills_alone:
        load_plain(packed, sequence, prompt, len(prompt))
        return
    for begin in range(0, len(prompt), chunk):
        tokens = prompt[begin : begin + chunk]
        packed.forward(pool, [chain(packed, sequence, tokens)], torch.tensor([0], device="cpu"))
        sequence.length += len(tokens)


def _one_by_one(packed: PackedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Return the logits after each of ``tokens``, decoded one by one after a prompt.  ->
    [len(tokens), vocab]
    """
    if packed.exact == "bits":
        return plain_steps(packed, prompt, tokens)[0][1:]
    logits = []
    with packed.kv_cache.temporary([len(prompt) + len(tokens)]) as (sequence,):
        _prefill(packed, sequence, prompt, TRIAL_CHUNKS[1])
        for token in tokens:
            part = chain(packed, sequence, [token])
            row = torch.tensor([0], device="cpu")
            logits.append(packed.forward(packed.kv_cache.pool, [part], row).cpu())
            sequence.length += 1
    return torch.cat(logits)
