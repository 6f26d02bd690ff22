"""Prompts with images: time to the first token and speed beside stock ``generate``, with 1 and 4
images.

    python benchmarks/images.py [--dtype bfloat16] [--repeats 5] [--json FILE]

The model has the architecture of Qwen2-VL with about 0.4 B parameters, random weights and an output
that follows a permutation of the vocabulary. The drafter knows the text, is right with probability
0.8 per token, and costs nothing (see hybrids.py). Runs of stock and ours alternate; figures are
medians of ratios."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hybrids import NEW, VOCAB, KnownText, follow_permutation, seconds
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.cli.benchmark import provenance

IMAGE, SIDE, PATCH = (
    VOCAB - 1,
    32,
    14,
)  # placeholder, patches of an image's side (448 pixels), pixels of a patch's
TEXT = dict(
    vocab_size=VOCAB, hidden_size=1024, intermediate_size=4096, num_hidden_layers=20, num_attention_heads=16,
    num_key_value_heads=4, tie_word_embeddings=False, pad_token_id=0, eos_token_id=None, bos_token_id=None,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 8, 8]},
)  # fmt: skip
VISION = dict(depth=12, embed_dim=640, hidden_size=1024, num_heads=10, patch_size=PATCH)


def build(dtype: torch.dtype) -> Any:
    """Return the model."""
    torch.manual_seed(0)
    config = Qwen2VLConfig(
        text_config=TEXT, vision_config=VISION, image_token_id=IMAGE, pad_token_id=0
    )
    return follow_permutation(Qwen2VLForConditionalGeneration(config)).to(dtype).eval()


def prompt(num_images: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the inputs of ``generate`` for one text with images."""
    generator = torch.Generator().manual_seed(num_images)
    ids = torch.randint(3, VOCAB - 10, (24,), generator=generator).tolist()
    for _ in range(num_images):
        ids += [IMAGE] * (SIDE // 2) ** 2 + torch.randint(
            3, VOCAB - 10, (8,), generator=generator
        ).tolist()
    input_ids = torch.tensor([ids])
    return {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": (input_ids == IMAGE).int(),
        "pixel_values": torch.rand(num_images * SIDE**2, 3 * 2 * PATCH**2, generator=generator).to(
            dtype
        ),
        "image_grid_thw": torch.tensor([[1, SIDE, SIDE]] * num_images),
    }


def measured(model: Any, num_images: int, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Return the ratios of stock's times to ours for a first token and for a whole answer."""
    inputs = prompt(num_images, dtype)
    stock = type(model).generate
    options: Any = dict(do_sample=False, pad_token_id=0)
    texts = stock(model, **inputs, **options, max_new_tokens=NEW).tolist()
    generator = SLOSpecGenerator(
        model, drafter=KnownText(texts, 0.8), config=SLOSpecConfig(policy="auto")
    )
    is_same = generator.generate(**inputs, **options, max_new_tokens=NEW).tolist() == texts
    runs = {"stock": lambda **own: stock(model, **own), "ours": generator.generate}
    rounds = [
        {
            (name, length): seconds(lambda: run(**inputs, **options, max_new_tokens=length))  # noqa: B023 - run at once
            for length in (1, NEW)
            for name, run in runs.items()
        }
        for _ in range(repeats)
    ]
    return {
        "images": num_images,
        "prompt_tokens": inputs["input_ids"].shape[1],
        "stock_first_token_s": round(median(own["stock", 1] for own in rounds), 2),
        "first_token_of_stock": round(
            median(own["ours", 1] / own["stock", 1] for own in rounds), 3
        ),
        "speed_of_stock": round(median(own["stock", NEW] / own["ours", NEW] for own in rounds), 3),
        "same_tokens": is_same,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    model = build(dtype)
    found = []
    for num_images in (1, 4):
        found.append(measured(model, num_images, dtype, arguments.repeats))
        print(found[-1], flush=True)
    if arguments.json is not None:
        results = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "images": found,
        }
        arguments.json.write_text(
            json.dumps({"provenance": provenance(), "dtype": arguments.dtype} | results, indent=2)
        )


if __name__ == "__main__":
    main()
