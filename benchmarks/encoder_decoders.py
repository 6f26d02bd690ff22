"""Whisper in batches: speed of whole calls beside stock ``generate``, with a draft of half the
decoder's layers.

    python benchmarks/encoder_decoders.py [--shape small] [--batch 8] [--acceptance 0.7] [--dtype float32] [--json FILE]

The target has a published shape of Whisper and random weights, as no checkpoint can be loaded here,
and writes a permutation of the vocabulary. The draft is the first half of its decoder, and follows
another permutation for a share of the tokens, so that it is right with about the given probability.
Runs of stock and ours alternate; figures are medians of ratios.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hybrids import seconds
from transformers import WhisperConfig, WhisperForCausalLM, WhisperForConditionalGeneration

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.cli.benchmark import provenance

VOCAB = 51_865
NEW = 100
SHAPES = {  # channels, layers and heads of encoder and decoder, neurons
    "toy": (64, 2, 2, 128),
    "tiny": (384, 4, 6, 1536),
    "base": (512, 6, 8, 2048),
    "small": (768, 12, 12, 3072),
}


def target(shape: str) -> Any:
    """Return a Whisper whose next token is a permutation of its last one, whatever its layers add."""
    width, layers, heads, neurons = SHAPES[shape]
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=VOCAB, d_model=width, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=neurons, decoder_ffn_dim=neurons, tie_word_embeddings=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    model: Any = WhisperForConditionalGeneration(config).eval()
    model.generation_config.update(suppress_tokens=[2], begin_suppress_tokens=None, max_length=None)
    embedding = model.get_input_embeddings().weight.data.normal_()
    model.proj_out.weight.data.copy_(embedding[torch.randperm(VOCAB)])
    return model


def half(model: Any, acceptance: float) -> Any:
    """Return a draft of half the decoder's layers that is right after a share of the tokens."""
    config = copy.deepcopy(model.config)
    config.decoder_layers //= 2
    draft = WhisperForCausalLM(config).eval()
    draft.model.decoder.load_state_dict(model.model.decoder.state_dict(), strict=False)
    weight = model.proj_out.weight.data.clone()
    wrong = torch.rand(VOCAB) >= acceptance
    weight[wrong] = weight[wrong].roll(1, 0)
    draft.proj_out.weight.data.copy_(weight)
    return draft.to(model.dtype)


def measured(model: Any, draft: Any, batch: int, repeats: int, new: int) -> dict[str, Any]:
    """Return the ratio of stock's times to ours."""
    features = torch.randn(
        batch, model.config.num_mel_bins, 2 * model.config.max_source_positions
    ).to(model.dtype)
    options: Any = dict(input_features=features, max_new_tokens=new)
    ours, stock = (
        SLOSpecGenerator(model, draft, config=SLOSpecConfig(policy="auto")),
        type(model).generate,
    )
    is_same = torch.equal(ours.generate(**options), stock(model, **options))
    encoder = [seconds(lambda: model.get_encoder()(features)) for _ in range(repeats)]
    rounds = [
        (seconds(lambda: stock(model, **options)), seconds(lambda: ours.generate(**options)))
        for _ in range(repeats)
    ]
    return {
        "batch": batch,
        "new_tokens": new,
        "encoder_s": round(median(encoder), 3),
        "stock_s": round(median(theirs for theirs, _ in rounds), 3),
        "speed_of_stock": round(median(theirs / own for theirs, own in rounds), 3),
        "same_tokens": is_same,
    }


@torch.no_grad()
def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="small", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--new", type=int, default=NEW)
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model = target(arguments.shape).to(getattr(torch, arguments.dtype))
    found = {"shape": arguments.shape, "acceptance": arguments.acceptance, "dtype": arguments.dtype}
    found |= measured(
        model, half(model, arguments.acceptance), arguments.batch, arguments.repeats, arguments.new
    )
    print(found, flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"provenance": provenance()} | found, indent=2))


if __name__ == "__main__":
    main()
