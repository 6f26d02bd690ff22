"""Random checkpoints of block heads (DFlash, DSpark, Domino, XPress, LiLiCorr) in their publishers'
layouts, and the trees that they must draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.heads import references
from tests.heads.checkpoints import (
    DRAFT_VOCAB,
    HIDDEN,
    random_tensors,
    target_of,
    vocabulary_maps,
)
from tests.support.toys.tiny_models import VOCAB

BLOCK = 5
MASK = 100
RANK = 6
HEAD_DIM = 8
INNER = 48
WINDOW = 6
GRU, GLOBAL_DIM = (
    7,
    16,
)  # sizes of Domino's state, and of heads of Gemma 4's layers that attend to the whole text
CANDIDATES, FACTORS, LATTICE_HEADS = 4, 5, 2  # of LiLiCorr
SIZES: dict[str, Any] = dict(
    hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=HEAD_DIM, vocab_size=VOCAB, max_position_embeddings=160,
)  # fmt: skip
SLIDING = dict(
    sliding_window=WINDOW,
    use_sliding_window=True,
    layer_types=["sliding_attention", "full_attention"],
)
MARKOV_TENSORS: dict[str, dict[str, tuple[int, ...]]] = {
    "": {},
    "vanilla": {},
    "gated": {"gate_proj.weight": (RANK, HIDDEN + RANK), "gate_proj.bias": (RANK,)},
    "rnn": {"joint_proj.weight": (3 * RANK, 2 * RANK + HIDDEN), "joint_proj.bias": (3 * RANK,)},
}
Tensors = dict[str, torch.Tensor]


def layer_shapes(head_dim=HEAD_DIM, num_kv_heads=2, input_size=HIDDEN):
    """Shapes of a Qwen3 layer's weights."""
    kv_size = num_kv_heads * head_dim
    return {
        "self_attn.q_proj": (4 * head_dim, input_size), "self_attn.k_proj": (kv_size, input_size),
        "self_attn.v_proj": (kv_size, input_size), "self_attn.o_proj": (HIDDEN, 4 * head_dim),
        "self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,), "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER), "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }  # fmt: skip


def with_gemma4_layers(tensors, num_layers, keys_are_values, input_size=HIDDEN):
    """Replace the layers by those of Gemma 4."""
    layer = layer_shapes(GLOBAL_DIM, 1 if keys_are_values else 2, input_size)
    layer |= dict.fromkeys(("pre_feedforward_layernorm", "post_feedforward_layernorm"), (HIDDEN,))
    if keys_are_values:
        del layer["self_attn.v_proj"]
    own = {
        f"layers.{index}.{name}.weight": shape
        for index in range(num_layers)
        for name, shape in layer.items()
    }
    scalars = {
        f"layers.{index}.layer_scalar": torch.tensor([0.7 + 0.2 * index])
        for index in range(num_layers)
    }
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith("layers.")}
    return rest | random_tensors(own, seed=7) | scalars


def block_tensors(markov="", confidence=0, draft_vocab=VOCAB, num_features=2):
    """Tensors of a head; ``confidence`` is the size of the confidence head's input, 0: there is
    none.
    """
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, num_features * HIDDEN)}
    shapes |= {"hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for index in range(2):
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer_shapes().items()}
    if markov in ("selector", "convolved lattice"):
        for index, part in (
            (index, part) for index in range(2) for part in ("attention_conv", "mlp_conv")
        ):
            shapes[f"layers.{index}.{part}.base_kernel"] = (2, 2, HIDDEN)
            shapes[f"layers.{index}.{part}.kernel_projection.weight"] = (
                2 * 2 * HIDDEN // 16,
                HIDDEN,
            )
    if markov in ("lattice", "convolved lattice"):
        shapes |= lattice_shapes(HIDDEN if markov == "lattice" else 2 * RANK)
    elif markov == "xpress":
        linears = dict(down_h=(RANK, HIDDEN), down_g=(RANK, HIDDEN), in_proj=(RANK, 3 * RANK))
        linears |= dict(
            mlp_gate=(2 * RANK, RANK), mlp_up=(2 * RANK, RANK), mlp_down=(RANK, 2 * RANK)
        )
        linears |= dict(token_embed=(VOCAB, RANK), readout=(draft_vocab, RANK))
        shapes |= {f"refiner_head.{name}.weight": shape for name, shape in linears.items()}
        shapes |= {"refiner_head.mix_l": (RANK, BLOCK, BLOCK)}
    elif markov == "selector":
        shapes |= {
            f"candidate_selector.{part}_codebook": (VOCAB, RANK)
            for part in ("predecessor", "successor")
        }
        shapes |= {"candidate_selector.hidden_projection.weight": (RANK, HIDDEN)}
    elif markov == "domino":
        shapes |= {
            "prefix_gru.weight_ih_l0": (3 * GRU, HIDDEN),
            "prefix_gru.weight_hh_l0": (3 * GRU, GRU),
        }
        shapes |= {
            "embed_proj.0.weight": (RANK, HIDDEN + GRU),
            "embed_proj.2.weight": (VOCAB, RANK),
        }
    elif markov:
        shapes |= {f"markov_head.{name}": shape for name, shape in MARKOV_TENSORS[markov].items()}
        shapes |= {
            "markov_head.markov_w1.weight": (VOCAB, RANK),
            "markov_head.markov_w2.weight": (draft_vocab, RANK),
        }
    if confidence:
        shapes |= {
            "confidence_head.proj.weight": (1, confidence),
            "confidence_head.proj.bias": (1,),
        }
    tensors = random_tensors(shapes)
    if markov == "xpress":
        tensors["refiner_head.readout.weight"] *= 0.1  # else one child has all the probability
    return tensors


def lattice_shapes(size):
    """Shapes of LiLiCorr's tensors, with a lattice of this hidden size."""
    linears = {
        "pass_hidden_proj": (size, HIDDEN), "context_proj": (size, HIDDEN), "feature_mlp.up_proj": (size, 5),
        "feature_mlp.down_proj": (size, size), "factor_input_proj": (size, 3 * size), "out_head": (FACTORS, size),
        "in_head": (FACTORS, size), "anchor_out_head": (FACTORS, size), "layers.0.attn.out_proj": (size, size),
        "layers.0.mlp.up_proj": (2 * size, size), "layers.0.mlp.down_proj": (size, 2 * size),
    } | ({} if size == HIDDEN else {"token_proj": (size, HIDDEN)})  # fmt: skip
    norms = ("layers.0.attn_norm", "layers.0.mlp_norm", "output_norm", "anchor_norm")
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.weight": shape for name, shape in linears.items()
    }
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linears.items()}
    shapes |= {f"{name}.weight": (size,) for name in norms}
    shapes |= {
        "feature_norm.weight": (5,), "feature_norm.bias": (5,), "slot_embedding": (1, 1, BLOCK - 1, 1, size),
        "rank_embedding": (1, 1, 1, CANDIDATES, size), "relative_slot_bias": (LATTICE_HEADS, 2 * BLOCK - 1),
        "same_slot_bias": (LATTICE_HEADS,), "layers.0.attn.in_proj_weight": (3 * size, size),
        "layers.0.attn.in_proj_bias": (3 * size,),
    }  # fmt: skip
    return {f"lilicorr.{name}": shape for name, shape in shapes.items()}


def reduced(tensors):
    """Add the tensors of a reduced vocabulary."""
    own = random_tensors({"lm_head.weight": (DRAFT_VOCAB, HIDDEN)}, seed=6)
    return tensors | own | vocabulary_maps(DRAFT_VOCAB)


def whole(tensors):
    """Add embeddings and an output layer of the head's own."""
    return tensors | random_tensors(
        {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}, seed=6
    )


def copies(tensors):
    """Add what a head's classes replace with the target's own modules."""
    return whole(tensors) | {
        "verifier_norm.weight": torch.ones(HIDDEN),
        "verifier_lm_head.weight": torch.ones(2, 2),
    }


@dataclass(frozen=True)
class Case:
    """A checkpoint and what is known of its head."""

    config: dict[str, Any]
    tensors: Tensors
    markov: str = ""
    features: tuple[int, ...] = (2, 5)  # hidden states that it reads
    first_slot: int = 1
    layers: list[tuple[int | None, bool]] = field(default_factory=lambda: [(None, False)] * 2)
    has_own_modules: bool = False  # embeddings and output layer of a whole vocabulary
    cap: float = 0.0  # bound of the logits; those of DFlash2 are halved before
    num_uncorrected: int = 0  # positions that Domino leaves as they are
    is_gemma4: bool = False
    saved: Callable[[Tensors], Tensors] = lambda tensors: tensors  # the publisher's names

    def expected(self, tokens, features, first, plan):
        """Paths of a tree and their probabilities, by the reference."""
        del first
        target: Any = target_of("llama")
        embed = target.get_input_embeddings().weight
        lm_head = target.get_output_embeddings().weight
        if self.has_own_modules:
            embed = self.tensors["embed_tokens.weight"]
            lm_head = self.tensors["lm_head.weight"]
        ids = torch.arange(VOCAB)
        if "d2t" in self.tensors:
            lm_head, ids = (
                self.tensors["lm_head.weight"],
                torch.arange(DRAFT_VOCAB) + self.tensors["d2t"],
            )
        block = embed[[tokens[-1]] + [MASK] * (BLOCK - 1)]
        with torch.no_grad():
            if self.is_gemma4:
                block = block * HIDDEN**0.5
                states = references.gemma4_block_states(
                    features, block, self.tensors, len(self.layers), GLOBAL_DIM
                )
            else:
                states = references.block_states(
                    features, block, self.tensors, self.layers, HEAD_DIM
                )
            if self.markov:

                def after(path):
                    return self._after(tokens, path, states, lm_head, features)

                return best_paths(after, ids, plan, BLOCK - self.first_slot)
            probs = references.capped(states[self.first_slot :] @ lm_head.T, self.cap).softmax(-1)
        return best_products(probs, ids, plan)

    def _after(self, tokens, path, states, lm_head, features):
        """Logits after a path, and the probability that a child is accepted."""
        root = tokens[-1]
        if self.markov == "xpress":
            read = [*tokens[-1 - self.first_slot :], *path]
            return references.xpress(read, states, lm_head, self.tensors), 1.0
        if "lattice" in self.markov:
            embed = target_of("llama").get_input_embeddings().weight
            own = references.lilicorr(path, states[1:], features[-1], embed, lm_head, self.tensors)
            return own, 1.0
        if self.markov == "domino":
            embed = target_of("llama").get_input_embeddings().weight
            hidden = states[self.first_slot + len(path)]
            own = references.domino(
                [root, *path], hidden, embed, lm_head, self.tensors, self.num_uncorrected
            )
            return own, 1.0
        read = [root] * (1 + self.first_slot) + list(path)  # the first slot may predict nothing
        reference = references.dflash2 if self.markov == "selector" else references.dspark
        return reference(read, states[: len(read)], lm_head, self.tensors, self.cap)


def best_paths(after, ids, plan, num_levels):
    """Paths that a beam search finds and their probabilities.

    ``after`` gives a path's logits and the probability that a child is accepted.
    """
    beam = {(): 1.0}
    every = dict[tuple[int, ...], float]()
    for depth in range(min(plan.depth, num_levels)):
        following = {}
        for path, prob in beam.items():
            logits, confidence = after(path)
            best = logits.softmax(-1).topk(plan.width)
            for own, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                following[*path, int(ids[index])] = prob * confidence * own
        assert len(next(iter(following))) == depth + 1
        beam = dict(sorted(following.items(), key=lambda item: -item[1])[: plan.width])
        every |= beam
    return every


def best_products(probs, ids, plan):
    """The most probable prefixes of independent positions, of [num_slots, draft_vocab]
    probabilities.
    """
    num_nodes = plan.depth * plan.width
    beam = {(): 1.0}
    every = dict[tuple[int, ...], float]()
    for row in probs[: plan.depth]:
        best = row.topk(num_nodes)
        pairs = list(zip(best.values.tolist(), best.indices.tolist(), strict=True))
        beam = {
            (*path, int(ids[index])): prob * own
            for path, prob in beam.items()
            for own, index in pairs
        }
        beam = dict(sorted(beam.items(), key=lambda item: -item[1])[:num_nodes])
        every |= beam
    return dict(sorted(every.items(), key=lambda item: -item[1])[:num_nodes])


def speculators(kind, layers=None, **changes):
    """The config of speculators: layers without the defaults of Qwen3Config, in a section of their
    own.
    """
    return dict(
        architectures=["DFlashDraftModel" if kind == "dflash" else "DSparkDraftModel"],
        speculators_model_type=kind,
        transformer_layer_config=SIZES | dict(model_type="qwen3") | (layers or {}),
        speculators_config={"algorithm": kind, "verifier": {"name_or_path": "some/target"}},
        aux_hidden_state_layer_ids=[2, 5], block_size=BLOCK, mask_token_id=MASK, draft_vocab_size=VOCAB,
    ) | changes  # fmt: skip


def flat(name, **changes):
    """The config of z-lab, SpecForge and ModelOpt: the block's settings in dflash_config."""
    own = dict(block_size=BLOCK, mask_token_id=MASK, target_layer_ids=[1, 4])
    return (
        dict(architectures=[name], model_type="qwen3", dflash_config=own | changes.pop("own", {}))
        | SIZES
        | changes
    )


def deepspec(**changes):
    """The config of DeepSpec: all settings at the top level."""
    own = dict(
        block_size=BLOCK,
        mask_token_id=MASK,
        target_layer_ids=[-1, 4],
        num_anchors=8,
        num_target_layers=8,
    )
    own |= dict(markov_rank=RANK, markov_head_type="vanilla", enable_confidence_head=False)
    return dict(architectures=["Qwen3DSparkModel"], model_type="qwen3") | SIZES | own | changes


def domino(name="DominoDraftModel", **own):
    """The config of Domino by SpecForge; by ModelOpt, and as SGLang loads it, the class is that of
    DFlash.
    """
    sizes = dict(projector_type="domino", gru_hidden_dim=GRU, emb_dim=RANK)
    return flat(name, own=sizes | own)


def gemma4(name="Gemma4DSparkModel", **changes):
    """The config of DeepSpec's heads for Gemma 4: a copy of the target's, with the head's settings."""
    copied = dict(
        model_type="gemma4_unified_text", global_head_dim=GLOBAL_DIM, num_global_key_value_heads=1,
        attention_k_eq_v=True, hidden_size_per_layer_input=0, sliding_window=1024, final_logit_softcapping=3.0,
        layer_types=["full_attention"] * 2, enable_moe_block=False, num_kv_shared_layers=0, tie_word_embeddings=False,
    )  # fmt: skip
    return deepspec(architectures=[name]) | copied | changes


def lilicorr(size, **own):
    """The config of LiLiCorr by ModelOpt; ``size`` 0 stands for that of the head."""
    sizes = dict(
        candidate_topk=CANDIDATES,
        hidden_size=size,
        num_layers=1,
        num_heads=LATTICE_HEADS,
        mlp_ratio=2.0,
    )
    sizes |= dict(factor_dim=FACTORS, vector_eps=1e-6, logit_scale=3.0)
    return flat(
        "LiLiCorrDraftModel", own={f"lilicorr_{name}": each for name, each in sizes.items()} | own
    )


def under_xpress_head(tensors):
    """Names of XPress as its authors publish it."""
    short = {"token_embed.": "w1.", "readout.": "w2.", "mix_l": "mix.L"}
    short |= {f"mlp_{part}.": f"mlp.{part}_proj." for part in ("gate", "up", "down")}
    renamed = {}
    for name, tensor in tensors.items():
        new = name.replace("refiner_head.", "xpress_head.")
        for old, publishers in short.items():
            new = new.replace(old, publishers) if name.startswith("refiner_head.") else new
        renamed[new] = tensor
    return renamed


def under_logit_head(tensors):
    own = ("prefix_gru.", "embed_proj.")
    return {
        f"logit_head.{name}" if name.startswith(own) else name: tensor
        for name, tensor in tensors.items()
    }


def without_module(tensors):
    return {name.removeprefix("markov_head."): tensor for name, tensor in tensors.items()}


def as_embeddings(tensors):
    return {
        f"{name}.weight" if name.endswith("codebook") else name: tensor
        for name, tensor in tensors.items()
    }


ALL_SLIDING = SLIDING | dict(layer_types=["sliding_attention"] * 2)
SELECTOR = dict(conv_kernel_size=2, conv_group_size=16, selector_rank=RANK, selector_top_k=4)
MARKOV = dict(markov_rank=RANK, enable_confidence_head=True, confidence_head_with_markov=True)
CASES = {
    "speculators dflash": Case(
        speculators("dflash", SLIDING, draft_vocab_size=DRAFT_VOCAB, sliding_window_non_causal=False),
        reduced(block_tensors(draft_vocab=DRAFT_VOCAB)), layers=[(WINDOW, True), (None, False)],
    ),
    "speculators dflash from the anchor": Case(
        speculators("dflash", SLIDING, sample_from_anchor=True, sliding_window_non_causal=True),
        copies(block_tensors()), layers=[(WINDOW, False), (None, False)], first_slot=0,
    ),
    "dflash of sliding layers": Case(
        flat("DFlashDraftModel", own=dict(use_swa=True, swa_window_size=WINDOW)), block_tensors(),
        layers=[(WINDOW, True)] * 2,
    ),
    "jetspec": Case(flat("DFlashDraftModel", own=dict(causal_head=True)), block_tensors(), layers=[(None, True)] * 2),
    "dflash without named layers": Case(
        flat("DFlashDraftModel", dflash_config=dict(block_size=BLOCK, mask_token_id=MASK)), block_tensors(),
        features=(2, 6),
    ),
    "deepspec": Case(
        deepspec(enable_confidence_head=True, confidence_head_with_markov=True),
        whole(block_tensors("vanilla", HIDDEN + RANK)), "vanilla", (0, 5), 0, has_own_modules=True,
    ),
    "deepspec rnn": Case(
        deepspec(markov_head_type="rnn"), whole(block_tensors("rnn")), "rnn", (0, 5), 0, has_own_modules=True
    ),
    "deepspec dflash": Case(
        deepspec(markov_rank=0, markov_head_type=None), whole(block_tensors()), "", (0, 5), 0, has_own_modules=True
    ),
    "specforge": Case(
        flat("DSparkDraftModel", own=dict(projector_type="dspark"), markov_head_type="vanilla", **MARKOV),
        block_tensors("vanilla", HIDDEN + RANK), "vanilla", first_slot=0,
    ),
    "modelopt": Case(
        flat("DFlashDraftModel", own=dict(markov_rank=RANK, markov_head_type="gated")), block_tensors("gated"), "gated",
        first_slot=0, saved=without_module,
    ),
    "dflash2": Case(
        flat("DFlash2DraftModel", own=SELECTOR | dict(final_logit_softcapping=3.0, output_multiplier=0.5),
             **ALL_SLIDING),
        block_tensors("selector"), "selector", layers=[(WINDOW, False)] * 2, cap=3.0, saved=as_embeddings,
    ),
    "speculators dflash2": Case(
        speculators("dflash2", ALL_SLIDING, **SELECTOR), block_tensors("selector"), "selector",
        layers=[(WINDOW, False)] * 2,
    ),
    "domino": Case(
        domino("DFlashDraftModel", shift_label=True, pure_draft_prefix_len=1), block_tensors("domino"), "domino",
        first_slot=0, num_uncorrected=1,
    ),
    "domino from the first mask": Case(
        domino(shift_label=False), block_tensors("domino"), "domino", saved=under_logit_head,
    ),
    "speculators xpress": Case(
        speculators("xpress", draft_vocab_size=DRAFT_VOCAB, xpress_rank=RANK, xpress_mlp_ratio=2, num_jacobi_passes=6),
        reduced(block_tensors("xpress", draft_vocab=DRAFT_VOCAB)), "xpress",
    ),
    "speculators xpress from the anchor": Case(
        speculators("xpress", sample_from_anchor=True, xpress_rank=RANK), copies(block_tensors("xpress")), "xpress",
        first_slot=0,
    ),
    "xpress": Case(
        flat("Qwen3XPressModel", own=dict(block_size=None), xpress_rank=RANK, xpress_mlp_hidden=2 * RANK,
             xpress_block_size=BLOCK, xpress_topc=0, xpress_num_passes=6),
        block_tensors("xpress"), "xpress", saved=under_xpress_head,
    ),
    "lilicorr": Case(lilicorr(0), block_tensors("lattice"), "lattice"),
    "lilicorr with convolutions": Case(
        lilicorr(2 * RANK, conv_kernel_size=2, conv_group_size=16), block_tensors("convolved lattice"),
        "convolved lattice",
    ),
    "deepspec gemma 4": Case(
        gemma4(enable_confidence_head=True, confidence_head_with_markov=True),
        with_gemma4_layers(whole(block_tensors("vanilla", HIDDEN + RANK)), 2, keys_are_values=True), "vanilla", (0, 5),
        0, has_own_modules=True, cap=3.0, is_gemma4=True,
    ),
    "deepspec dflash gemma 4": Case(
        gemma4(markov_rank=0, markov_head_type=None, attention_k_eq_v=False, final_logit_softcapping=None),
        with_gemma4_layers(whole(block_tensors()), 2, keys_are_values=False), "", (0, 5), 0, has_own_modules=True,
        is_gemma4=True,
    ),
    "speculators dspark": Case(
        speculators("dspark", draft_vocab_size=DRAFT_VOCAB, sample_from_anchor=True, markov_head_type="gated",
                    **MARKOV),
        reduced(block_tensors("gated", HIDDEN + RANK, DRAFT_VOCAB)), "gated", first_slot=0,
    ),
    "speculators dspark from the first mask": Case(
        speculators("dspark", draft_vocab_size=DRAFT_VOCAB, markov_head_type="rnn",
                    **MARKOV | dict(confidence_head_with_markov=False)),
        reduced(block_tensors("rnn", HIDDEN, DRAFT_VOCAB)), "rnn",
    ),
}  # fmt: skip
