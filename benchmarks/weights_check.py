"""Measure what a call pays to notice that weights have changed.

    python benchmarks/weights_check.py --size 0.6B --dtype bfloat16 --json weights_check.json

For weights that may be trained, all bits are summed up before a call
(``models/weights_version.py``); for those that require no gradient, torch's counts are compared.
Both are related to a speculated call of 64 tokens."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import hf_slospec
from hf_slospec.cli.benchmark import provenance
from hf_slospec.model.checksum import digest
from hf_slospec.model.transfer import synchronize
from hf_slospec.server.loading import load_pair

TOKENS = 64


def seconds(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    run()
    taken = []
    for _ in range(repeats):
        synchronize(device)
        begun_s = time.perf_counter()
        run()
        synchronize(device)
        taken.append(time.perf_counter() - begun_s)
    return median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="0.6B")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, draft, tokenizer = load_pair(None, None, options.size, options.dtype, options.device)
    model.generation_config.eos_token_id = None
    generator = hf_slospec.SLOSpecGenerator(model, draft, tokenizer)
    device = torch.device(options.device)
    inputs = tokenizer("def main():\n", return_tensors="pt").to(device)
    packed = generator.decoder.speculator.target.packed
    weights = list(model.parameters())
    model.requires_grad_(False)
    call_s = seconds(
        lambda: generator.generate(**inputs, max_new_tokens=TOKENS), device, options.repeats
    )
    frozen_s = seconds(packed.renew, device, options.repeats)
    model.requires_grad_(True)
    trained_s = seconds(packed.renew, device, options.repeats)
    digest_s = seconds(lambda: digest(weights), device, options.repeats)
    num_bytes = sum(weight.nbytes for weight in weights)
    result = {
        "size": options.size,
        "dtype": options.dtype,
        "gigabytes": num_bytes / 1e9,
        "call_s": call_s,
        "check_of_frozen_s": frozen_s,
        "check_of_trained_s": trained_s,
        "share_of_frozen": frozen_s / call_s,
        "share_of_trained": trained_s / call_s,
        "checksum_gigabytes_per_s": num_bytes / digest_s / 1e9,
    }
    print(json.dumps(result, indent=1))
    if options.json is not None:
        content = {"result": result, "provenance": provenance()}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
