"""Every family with states: packed batches of chunks and trees, step after step, against plain
forwards.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from hf_slospec.families.mixers import MAX_AT_ONCE
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.properties import evaluating
from hf_slospec.model.tree_mask import chain, chain_and_tree
from hf_slospec.tree.tree import TokenTree
from tests.support.toys.tiny_configs import tiny_config
from tests.support.toys.tiny_models import VOCAB

FAMILIES = """BailingHybrid Bamba FalconH1 FalconMamba GraniteMoeHybrid Jamba KimiLinear Lfm2 Lfm2Moe Lfm3 Mamba Mamba2
NemotronH OlmoHybrid Qwen3Next Qwen3_5 Qwen3_5Moe Zamba Zamba2""".split()
# Trees of two sequences: (parents, accepted nodes).
STEPS: tuple[Any, ...] = (
    (([-1, 0, 0, 1, 3], [1, 3]), ([-1, 0, 1, 1], [1, 3])),
    (([-1], []), ([-1, 0, 0, 2], [2])),
    (([-1, 0, 1, 2, 0], [1, 2, 3]), ([-1, 0, 1, 2, 0], [4])),
)


def tree(root, parents, generator):
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    tokens = torch.randint(3, VOCAB, (len(parents),), generator=generator).numpy()
    tokens[0] = root
    return TokenTree(
        tokens,
        torch.tensor(parents).numpy(),
        torch.tensor(depths).numpy(),
        torch.ones(len(parents)).numpy(),
    )


def plain(model, text):
    logits: torch.Tensor = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_forwards_are_plain_ones(family):
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{family}ForCausalLM")
    packed = PackedModel(model_class(tiny_config(model_class.config_class)).float().eval())
    assert packed.family.has_states and packed.family.state_bytes > 0
    generator = torch.Generator().manual_seed(1)
    lengths = MAX_AT_ONCE + 9, 5
    texts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    cache = packed.kv_cache
    with evaluating(packed.model), torch.no_grad(), cache.temporary([90, 60]) as sequences:
        prefill(packed, sequences, texts, [MAX_AT_ONCE + 2, 2])
        prefill(packed, sequences, texts, [6, 2])
        for step in STEPS:
            trees = [
                tree(text[-1], parents, generator)
                for text, (parents, _) in zip(texts, step, strict=True)
            ]
            parts = [
                chain_and_tree(packed, own, [text[-1]], drawn)
                for own, text, drawn in zip(sequences, texts, trees, strict=True)
            ]
            sizes = [drawn.num_nodes for drawn in trees]
            found = packed.forward(cache.pool, parts, torch.arange(sum(sizes))).split(sizes)
            for text, drawn, logits, own, (_, accepted) in zip(
                texts, trees, found, sequences, step, strict=True
            ):
                for node in range(drawn.num_nodes):
                    path = torch.tensor(drawn.ancestor_mask()[node]).nonzero()[:, 0].tolist()
                    expected = plain(packed.model, [*text[:-1], *drawn.tokens[path].tolist()])[-1]
                    torch.testing.assert_close(logits[node], expected, rtol=1e-3, atol=1e-4)
                nodes = [0, *accepted]
                slots = [own.start + own.length + node for node in nodes]
                cache.pool.move(slots, list(range(slots[0], slots[0] + len(nodes))))
                own.commit(nodes)
                text += [*drawn.tokens[accepted].tolist(), 7]


def prefill(packed, sequences, texts, lengths):
    pieces = [
        text[own.length :][:length]
        for own, text, length in zip(sequences, texts, lengths, strict=True)
    ]
    parts = [chain(packed, own, piece) for own, piece in zip(sequences, pieces, strict=True)]
    ends = torch.tensor(lengths).cumsum(0) - 1
    found = packed.forward(packed.kv_cache.pool, parts, ends)
    for own, text, piece, logits in zip(sequences, texts, pieces, found, strict=True):
        own.commit(range(len(piece)))
        torch.testing.assert_close(
            logits, plain(packed.model, text[: own.length])[-1], rtol=1e-3, atol=1e-4
        )
