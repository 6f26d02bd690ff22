"""Networks of drafting heads: against reference forwards, and packed against plain forwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_layers import MtpModel

from hf_slospec.heads.loading import load_head
from hf_slospec.heads.mtp import DraftHead, ShippedMtpHead, own_modules
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.trial import check_by_trial
from tests.heads import references
from tests.heads.checkpoints import (
    CONFIGS,
    DRAFT_VOCAB,
    FLAGS,
    HIDDEN,
    eagle3_tensors,
    mtp_tensors,
    published_config,
    speculators_config,
    target_of,
    with_single_experts,
    write,
)
from tests.support.toys.tiny_models import VOCAB

PROMPT = 7
LEVELS = 2
Reference = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
FLAG_SETS = [set(), *({flag} for flag in FLAGS), {"norm_before_residual", "norm_output", "fc_norm"}]


def eagle3_head(folder, flags, **changes):
    config = published_config(**dict.fromkeys(flags, True), **changes)
    return load_head(write(folder, config, eagle3_tensors(flags, **changes)), target_of("llama"))


def renamed_layer(tensors):
    """Return tensors under the names of speculators, as the references read them."""
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def mtp_head(folder, family):
    tensors = {f"mtp.{name}": tensor for name, tensor in mtp_tensors(family).items()}
    return load_head(write(folder, CONFIGS[family], tensors), target_of(family))


@torch.no_grad()
def shipped_head():
    target = target_of("glm4-moe")
    head = ShippedMtpHead(target, MtpModel(target, 1))
    head.eval()
    for name, weight in head.mtp.layers.named_parameters():
        weight.copy_(
            torch.rand_like(weight) + 0.5 if "norm" in name else 0.3 * torch.randn_like(weight)
        )
    return head


@torch.no_grad()
def assert_same(head, combined, reference, vocab):
    """Compare a prompt and levels below it, each forwarded by the head after the entries before it."""
    assert head.target_ids is None or len(head.target_ids) == vocab
    tokens = torch.randint(VOCAB, (PROMPT + LEVELS,))
    embeds = head.embed_tokens(tokens)
    cache = DynamicCache()
    hidden = combined
    done = 0
    for num_entries in (PROMPT, *[1] * LEVELS):
        positions = torch.arange(done, done + num_entries)
        inputs = torch.cat((embeds[positions], hidden[positions]), dim=-1)[None]
        out = head(inputs_embeds=inputs, position_ids=positions[None], cache=cache).logits[0]
        done += num_entries
        logits, following = reference(embeds[:done], hidden, torch.arange(done))
        torch.testing.assert_close(out[:, :vocab], logits[positions], rtol=1e-4, atol=5e-5)
        torch.testing.assert_close(out[:, vocab:], following[positions], rtol=1e-4, atol=5e-5)
        hidden = torch.cat((hidden, following[-1:]))


@pytest.mark.parametrize("flags", FLAG_SETS, ids=lambda flags: "+".join(sorted(flags)) or "none")
def test_eagle3(tmp_path, flags):
    head = eagle3_head(tmp_path, flags)
    weights = eagle3_tensors(flags)
    features = torch.randn(PROMPT, 3 * HIDDEN)
    combined = references.eagle3_combined(features, weights, head.config.rms_norm_eps, flags)
    torch.testing.assert_close(head.combine(features), combined, rtol=1e-5, atol=1e-5)
    reference: Reference = lambda *entries: references.eagle3(  # noqa: E731
        *entries, renamed_layer(weights), head.config, flags=flags
    )
    assert_same(head, combined, reference, DRAFT_VOCAB)


def test_eagle3_with_biases_embeddings_and_layout_of_its_own(tmp_path):
    weights = eagle3_tensors({"norm_before_residual"}, attention_bias=True)
    assert "midlayer.self_attn.q_proj.bias" in weights
    own = torch.randn(VOCAB, HIDDEN)
    tensors = renamed_layer(weights)
    config = speculators_config(
        norm_before_residual=True, eagle_aux_hidden_state_layer_ids=[1, 3, 8]
    )
    config["transformer_layer_config"]["attention_bias"] = True
    head = load_head(
        write(tmp_path, config, tensors | {"embed_tokens.weight": own}), target_of("llama")
    )
    assert head.feature_layers == (1, 3, 8)
    torch.testing.assert_close(head.get_input_embeddings().weight, own)
    reference: Reference = lambda *entries: references.eagle3(  # noqa: E731
        *entries, tensors, head.config, flags={"norm_before_residual"}
    )
    assert_same(head, torch.randn(PROMPT, HIDDEN), reference, DRAFT_VOCAB)


def plain_levels(head, embeds, hidden, positions):
    """Compute the entries by the head's modules, with transformers' causal mask and no cache."""
    both = head.pre_fc_norm_embedding(embeds[None]), head.pre_fc_norm_hidden(hidden[None])
    states = head.fc(torch.cat(both, dim=-1))
    embeddings = head.rotary_emb(states, positions[None])
    mask = torch.full((len(positions), len(positions)), -torch.inf).triu(1)[None, None]
    states = head.layers[0](states, position_embeddings=embeddings, attention_mask=mask)
    states = head.norm(states)[0]
    return states @ head.lm_head.weight.T, states


@pytest.mark.parametrize("family", ["llama", "qwen3-next"])
def test_mtp(tmp_path, family):
    head = mtp_head(tmp_path, family)
    weights = mtp_tensors(family)
    target = target_of(family)
    features = torch.randn(PROMPT, HIDDEN)
    assert head.feature_layers == (target.config.num_hidden_layers,)
    torch.testing.assert_close(head.combine(features), features)
    lm_head = target.get_output_embeddings().weight
    reference: Reference = lambda *entries: references.mtp(*entries, weights, head.config, lm_head)  # noqa: E731
    if family == "qwen3-next":  # experts, and norms around 1
        reference = partial(plain_levels, head)
    assert with_single_experts(own_modules(head, target).state_dict()).keys() == weights.keys()
    for name, tensor in with_single_experts(own_modules(head, target).state_dict()).items():
        assert torch.equal(tensor, weights[name]), name
    assert_same(head, features, reference, VOCAB)


@pytest.mark.parametrize("publisher", ["mimo", "speculators"])
def test_mtp_of_other_publishers(tmp_path, publisher):
    """Their names; MiMo's projection takes the hidden state before the embedding."""
    weights = mtp_tensors("llama")
    target = target_of("llama")
    names = {"pre_fc_norm_embedding": "token_layernorm", "pre_fc_norm_hidden": "hidden_layernorm"}
    names |= {"fc": "input_proj", "norm": "final_layernorm"}
    prefix = "model.mtp_layers.0." if publisher == "mimo" else "mtp_layers.0."
    theirs = {}
    for name, tensor in weights.items():
        part, _, rest = name.removeprefix("layers.0.").partition(".")
        theirs[f"{prefix}{names.get(part, part)}.{rest}"] = tensor
    if publisher == "mimo":
        projection = theirs[f"{prefix}input_proj.weight"]
        theirs[f"{prefix}input_proj.weight"] = projection.roll(HIDDEN, dims=1)
    assert f"{prefix}self_attn.q_proj.weight" in theirs and f"{prefix}input_proj.weight" in theirs
    config = (
        {"speculators_model_type": "mtp"}
        if publisher == "speculators"
        else {"architectures": ["MiMoForCausalLM"]}
    )
    head = load_head(write(tmp_path, config, theirs), target)
    lm_head = target.get_output_embeddings().weight
    reference: Reference = lambda *entries: references.mtp(*entries, weights, head.config, lm_head)  # noqa: E731
    assert_same(head, torch.randn(PROMPT, HIDDEN), reference, VOCAB)


@torch.no_grad()
def test_shipped_mtp():
    """The first level is that of transformers; levels below it apply the same layer."""
    head = shipped_head()
    tokens = torch.randint(VOCAB, (1, PROMPT))
    hidden = torch.randn(1, PROMPT, HIDDEN)
    positions = torch.arange(PROMPT)[None]
    theirs, logits, _ = head.mtp(tokens, hidden, None, positions, DynamicCache())
    inputs = torch.cat((head.embed_tokens(tokens), hidden), dim=-1)
    out = head(inputs_embeds=inputs, position_ids=positions).logits[:, -1]
    torch.testing.assert_close(out[:, :VOCAB], logits[:, -1], rtol=1e-5, atol=1e-5)
    assert out[0, :VOCAB].argmax() == theirs[0, -1]
    reference: Reference = lambda embeds, hidden, positions: (  # noqa: E731
        lambda y: (head.logits(y), y)
    )(
        head.mtp.forward_layer(
            0, hidden[None], positions[None], DynamicCache(), inputs_embeds=embeds[None]
        )[0]
    )
    assert_same(head, hidden[0], reference, VOCAB)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["qwen3-next", "shipped"])
def test_packed_forwards_are_those_of_plain_ones(tmp_path, kind, implementation):
    head: DraftHead = shipped_head() if kind == "shipped" else mtp_head(tmp_path, kind)
    head.config._attn_implementation = implementation
    check_by_trial(PackedModel(head))
