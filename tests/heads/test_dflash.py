"""DFlash heads through the packed runner against a reference from the formulas."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from hf_slospec.cuda import flash_kernels as kernel_choice
from hf_slospec.errors import UnsupportedModelError
from hf_slospec.heads.block_drafter import block_tokens, context_tokens
from hf_slospec.heads.dflash import DFlashHead
from hf_slospec.model.packed_model import PackedModel
from tests.heads import references
from tests.support.packed import packed_model
from tests.support.stand_ins.flash import StandIn

VOCAB = 53
HIDDEN = 32
TARGET_HIDDEN = 24
BLOCK = 5
MASK = 50
WINDOW = 7
SMALL: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
)
HYBRID = dict(
    use_sliding_window=True,
    sliding_window=WINDOW,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "windows": HYBRID,
    "windows-not-causal": HYBRID | dict(is_causal=False),
    "causal": HYBRID | dict(causal=True),
    "scaled": dict(input_embedding_scale=3.0, output_multiplier=0.3, final_logit_softcapping=2.0),
}
NOTHING = torch.empty(0, dtype=torch.int64)


def config_of(variant="full", **settings):
    """A config as z-lab writes them: the block's settings in ``dflash_config``, others beside it."""
    names = "causal", "input_embedding_scale", "output_multiplier", "final_logit_softcapping"
    given = VARIANTS[variant] | settings
    own = dict(block_size=BLOCK, mask_token_id=MASK, target_layer_ids=[0, 2])
    sizes = SMALL | dict(
        num_hidden_layers=3, head_dim=16, num_key_value_heads=2, target_hidden_size=TARGET_HIDDEN
    )
    return Qwen3Config(
        **(
            sizes
            | dict(rms_norm_eps=1e-5)
            | {name: value for name, value in given.items() if name not in names}
        ),
        dflash_config=own | {name: value for name, value in given.items() if name in names},
    )


def random_head(config):
    torch.manual_seed(0)
    head = DFlashHead(config).eval()
    for parameter in head.parameters():  # norms with weights other than 1, and sharp attention
        parameter.data.copy_(torch.randn(parameter.shape) * (0.3 if parameter.ndim > 1 else 1.0))
    return head


def reference(head, features, root):
    """Logits of the block after a text whose tokens but the root have these features.  -> [BLOCK,
    VOCAB]
    """
    config = head.config
    settings = head.config.dflash_config
    layers = list[tuple[int | None, bool]]()
    for kind in config.layer_types:
        is_windowed = kind == "sliding_attention"
        is_causal = settings.get("causal", getattr(config, "is_causal", is_windowed))
        layers.append((WINDOW if is_windowed else None, is_causal))
    weights = dict(head.named_parameters())
    embeds = head.embed_tokens.weight[[root] + [MASK] * (BLOCK - 1)] * settings.get(
        "input_embedding_scale", 1.0
    )
    states = references.block_states(features, embeds, weights, layers, 16, config.rms_norm_eps)
    logits = states @ head.lm_head.weight.T * settings.get("output_multiplier", 1.0)
    return references.capped(logits, settings.get("final_logit_softcapping", 0.0))


class Texts:
    """Texts of random features, whose context is cached piece by piece."""

    def __init__(self, packed, sequences, num_tokens=40):
        self.packed = packed
        self.head = packed.model
        self.sequences = sequences
        self.features = torch.randn(len(sequences), num_tokens, 2 * TARGET_HIDDEN)

    def cache(self, counts):
        """Cache so many further tokens of every text, in one packed batch."""
        parts = []
        for own, features, count in zip(self.sequences, self.features, counts, strict=True):
            if count:
                parts.append(
                    context_tokens(
                        own,
                        own.length,
                        self.head.combine(features[own.length : own.length + count]),
                    )
                )
        pool = self.packed.kv_cache.pool
        assert self.packed.forward(pool, parts, NOTHING).shape == (0, VOCAB)
        for own, count in zip(self.sequences, counts, strict=True):
            own.length += count

    def blocks(self, roots):
        """Logits of all tokens of every text's block.  -> [num_texts, BLOCK, VOCAB]"""
        pairs = zip(self.sequences, roots, strict=True)
        parts = [block_tokens(self.head, own, [0] * own.length + [root]) for own, root in pairs]
        rows = torch.arange(BLOCK * len(parts))
        return self.packed.forward(self.packed.kv_cache.pool, parts, rows).view(
            len(parts), BLOCK, VOCAB
        )

    def expected(self, roots):
        head, triples = (
            copy.deepcopy(self.head).double(),
            zip(self.sequences, self.features.double(), roots, strict=True),
        )
        return torch.stack(
            [reference(head, features[: own.length], root) for own, features, root in triples]
        ).float()


@contextmanager
def texts_of(packed, num_texts):
    cache = packed.kv_cache
    with torch.no_grad(), cache.temporary([60] * num_texts) as sequences:
        yield Texts(packed, sequences)


@pytest.mark.parametrize("attention", ["sdpa", "4d_mask", "flash"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_are_those_of_the_formulas(variant, attention, monkeypatch):
    monkeypatch.setattr(kernel_choice, "KERNELS", (StandIn,))
    packed = packed_model(random_head(config_of(variant)), attention)
    with texts_of(packed, 3) as texts:
        for counts, roots in (
            ([4, 1, 9], [3, 4, 5]),
            ([0, 6, 2], [8, 4, 9]),
            ([17, 1, 20], [1, 1, 2]),
        ):
            texts.cache(counts)
            torch.testing.assert_close(
                texts.blocks(roots), texts.expected(roots), rtol=1e-5, atol=1e-5
            )


def test_context_costs_neither_queries_nor_mlps():
    packed = PackedModel(random_head(config_of()))
    called = set[str]()
    for name, module in packed.model.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.add(name.rpartition(".")[2]))
    with texts_of(packed, 1) as texts:
        combined = texts.head.combine(texts.features[0, :4])
        called.clear()
        packed.forward(
            packed.kv_cache.pool,
            [context_tokens(texts.sequences[0], texts.sequences[0].length, combined)],
            NOTHING,
        )
        assert called - {""} == {"k_proj", "k_norm", "v_proj", "rotary_emb"}


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (
            dict(dflash_config=dict(mask_token_id=3, target_layer_ids=[1], selector_rank=8)),
            "selector_rank",
        ),
        (dict(target_layer_ids=[1]), "mask_token_id"),
        (dict(mask_token_id=3), "target_layer_ids"),
        (
            dict(
                mask_token_id=3,
                target_layer_ids=[1],
                use_sliding_window=True,
                sliding_window=9,
                max_window_layers=0,
            ),
            "sliding window of 9",
        ),
    ],
)
def test_heads_that_compute_something_else_are_refused(settings, match):
    with pytest.raises(UnsupportedModelError, match=match):
        DFlashHead(Qwen3Config(**SMALL, **settings))
