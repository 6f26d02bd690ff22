"""Tiny random models of many families, and the stock-against-ours comparison they are put through."""

from __future__ import annotations

import copy
import functools

import torch
import transformers
from transformers import AutoModelForCausalLM, Cache, EncoderDecoderCache

VOCAB = 101
POSITIONS = 160
SMALL = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=POSITIONS,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
GROUPED = SMALL | dict(num_key_value_heads=2)
WINDOW = 9  # shorter than every prompt and output of the tests
FAMILIES = {
    "llama": ("LlamaConfig", GROUPED),
    "qwen2": ("Qwen2Config", GROUPED),
    "qwen2-window": (
        "Qwen2Config",
        GROUPED | dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    ),
    "qwen3": ("Qwen3Config", GROUPED | dict(head_dim=8)),
    "mistral": ("MistralConfig", GROUPED | dict(sliding_window=None)),
    "mistral-window": ("MistralConfig", GROUPED | dict(sliding_window=WINDOW)),
    "mixtral": ("MixtralConfig", GROUPED | dict(num_local_experts=4, num_experts_per_tok=2)),
    "phi3": ("Phi3Config", GROUPED),
    "gpt-neox": ("GPTNeoXConfig", SMALL),
    "gpt2": (
        "GPT2Config",
        dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS, bos_token_id=1, eos_token_id=2),
    ),
    "opt": ("OPTConfig", SMALL | dict(ffn_dim=48, word_embed_proj_dim=32)),
    "gemma2": ("Gemma2Config", GROUPED | dict(head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8)),
    "gemma3": ("Gemma3TextConfig", GROUPED | dict(head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8,
                                                  layer_types=["sliding_attention", "full_attention"])),
    "gpt-oss": (
        "GptOssConfig",
        GROUPED | dict(head_dim=8, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2,
                       rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    ),
}  # fmt: skip


@functools.cache
def tiny_model(family, seed=0, noise=0.0):
    name, settings = FAMILIES[family]
    return sharpened(
        lambda: AutoModelForCausalLM.from_config(getattr(transformers, name)(**settings)),
        seed,
        noise,
    )


def tiny_copy(family, seed=0, noise=0.0):
    """Return a copy of a tiny model, which a test may change."""
    return copy.deepcopy(tiny_model(family, seed, noise))


def sharpened(build, seed, noise=0.0):
    """A random model with sharp, uneven predictions; with ``noise`` a draft that agrees with it
    only sometimes.
    """
    torch.manual_seed(seed)
    model = build().float().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4.0)
        parameter.data.add_(noise * torch.randn_like(parameter))
    return model


def ragged_prompts(batch, seed=0):
    """Left-padded prompts of different lengths (12 to 24 tokens), as a tokenizer would return them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(12, 25, (batch,), generator=generator).tolist()
    longest = max(lengths)
    input_ids = torch.randint(3, VOCAB, (batch, longest), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    for row, length in enumerate(lengths):
        input_ids[row, : longest - length] = 0
        attention_mask[row, : longest - length] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def ragged_texts(batch):
    """Return the tokens of :func:`ragged_prompts`, without padding."""
    rows = zip(*ragged_prompts(batch).values(), strict=True)
    return [row[mask.bool()].tolist() for row, mask in rows]


def assert_same_as_stock(model, generate, inputs, **options):
    """Stock and ours on the same inputs and seed: equal outputs, and the global generator left in
    the same state.

    Tokens and what is streamed are equal exactly, scores, logits and K/V up to rounding.
    """
    options = {"return_dict_in_generate": True, **options}
    theirs = copy.deepcopy(options)
    torch.manual_seed(7)
    stock = type(model).generate(model, **copy.deepcopy(inputs), **theirs)
    states = _rng_states()
    torch.manual_seed(7)
    ours = generate(**inputs, **options)
    assert all(torch.equal(mine, own) for mine, own in zip(_rng_states(), states, strict=True))
    if "streamer" in options:
        assert options["streamer"].puts == theirs["streamer"].puts
    assert_same_output(ours, stock, inputs.get("attention_mask"))
    return ours


def assert_same_output(ours, stock, attention_mask=None):
    """Compare outputs of any type, part by part."""
    if isinstance(stock, torch.Tensor):
        if stock.is_floating_point():
            torch.testing.assert_close(ours, stock, rtol=1e-3, atol=1e-3)
        else:
            assert torch.equal(ours, stock)
    elif isinstance(stock, EncoderDecoderCache):
        assert ours.is_updated == stock.is_updated
        for name in ("self_attention_cache", "cross_attention_cache"):
            assert_same_cache(getattr(ours, name), getattr(stock, name))
    elif isinstance(stock, Cache):
        assert_same_cache(ours, stock, attention_mask)
    elif isinstance(stock, dict):
        assert ours.keys() - {"slo", "steps"} == stock.keys()
        for name, value in stock.items():
            assert_same_output(ours[name], value, attention_mask)
    elif isinstance(stock, (list, tuple)):
        assert len(ours) == len(stock)
        for mine, theirs in zip(ours, stock, strict=True):
            assert_same_output(mine, theirs, attention_mask)
    else:
        assert ours == stock


def _rng_states():
    return [
        torch.get_rng_state(),
        *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ()),
    ]


def assert_same_cache(ours, stock, attention_mask=None):
    """Same layers, and the same K and V wherever the prompt is not padding."""
    assert len(ours) == len(stock) and ours.get_seq_length() == stock.get_seq_length()
    for own, theirs in zip(ours.layers, stock.layers, strict=True):
        for name in ("conv_states", "recurrent_states"):
            for index, state in getattr(theirs, name, {}).items():
                if state is not None:  # the first column of a convolution is not read
                    begin = int(name == "conv_states")
                    mine = getattr(own, name)[index]
                    torch.testing.assert_close(
                        mine[..., begin:], state[..., begin:], rtol=1e-3, atol=1e-3
                    )
        if not hasattr(theirs, "keys"):
            continue
        if theirs.keys is None or not theirs.keys.numel():
            assert own.keys is None or not own.keys.numel()
            continue
        for a, b in ((own.keys, theirs.keys), (own.values, theirs.values)):
            assert a.shape == b.shape
            dropped = stock.get_seq_length() - a.shape[2]  # by a sliding window
            seen = torch.ones(len(a), a.shape[2], dtype=torch.bool)
            if attention_mask is not None and dropped < attention_mask.shape[1]:
                masks = attention_mask.repeat_interleave(len(a) // len(attention_mask), 0)[
                    :, max(dropped, 0) :
                ].bool()
                seen[:, : masks.shape[1]] = masks[:, : seen.shape[1]]
            torch.testing.assert_close(
                a.transpose(1, 2)[seen], b.transpose(1, 2)[seen], rtol=1e-3, atol=1e-3
            )
