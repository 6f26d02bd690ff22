"""Every attention call of a whole model, done by its backend and by the reference."""

from __future__ import annotations

import numpy as np
import torch

from hf_slospec.model.attention.sdpa import masked_attention
from hf_slospec.model.sequences import Sequences
from hf_slospec.model.tree_mask import chain, chain_and_tree
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import TokenTree
from tests.support.packed import packed_model

PROMPTS = (90, 7, 30)  # the first is fed as a long chain, as the causal kernel gets it
PARENTS = ((-1, 0, 0, 1, 3), (-1, 0, 1), (-1,))


class Compared:
    """A backend that checks each of its results against the reference in fp32, on the very same
    inputs.
    """

    __name__ = "compared"

    def __init__(self, backend, tolerance):
        self.backend = backend
        self.tolerance = tolerance
        self.num_calls = 0

    def __call__(self, query, keys, values, row, *rest):
        out = self.backend(query, keys, values, row, *rest)
        right = masked_attention(query.float(), keys.float(), values.float(), row, *rest)
        assert out.dtype == query.dtype and out.shape == right.shape
        torch.testing.assert_close(
            out.float(), right, rtol=0, atol=self.tolerance * float(values.abs().max())
        )
        self.num_calls += 1
        return out


@torch.no_grad()
def compare_layers(model, tolerance, attention="flash"):
    """Feed prompts and verify trees with this attention; ``tolerance`` is relative to the largest
    value.

    Returns:
        How many attention calls were compared.
    """
    packed = packed_model(model, attention)
    packed.eager.backend = compared = Compared(packed.backend, tolerance)
    requests = [
        Request(
            i, RequestParams(torch.randint(3, packed.vocab_size, (n,)).tolist(), max_new_tokens=0)
        )
        for i, n in enumerate(PROMPTS)
    ]
    sequences = Sequences(packed, max_nodes=max(map(len, PARENTS)))
    sequences.reserve(requests)
    none = torch.empty(0, dtype=torch.int64, device=packed.device)
    device = packed.device
    parts = [chain(packed, sequences.of(request), request.tokens[:-3]) for request in requests]
    sequences.forward(parts, none)
    for request in requests:
        sequences.of(request).length = request.prompt_len - 3
    parts = [
        chain_and_tree(packed, sequences.of(request), request.tokens[-3:], _tree(request, parents))
        for request, parents in zip(requests, PARENTS, strict=True)
    ]
    sequences.forward(parts, torch.arange(3, device=device))
    return compared.num_calls


def _tree(request, parents):
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    tokens = [request.tokens[-1], *range(5, 4 + len(parents))]
    return TokenTree(np.array(tokens), np.array(parents), np.array(depths), 0.5 ** np.array(depths))
