"""Four prompts in one batch: the same tokens as plain ``generate``, faster, and with an SLO each.

Runs on the embedded pair; nothing is downloaded. The target is inflated to about 0.1 B parameters,
which makes its forwards slower without changing its output, so that there is something to speed up.
The first run on a machine also compiles its forwards, for about half a minute.
"""

from __future__ import annotations

import torch

import hf_slospec
from hf_slospec.cli.activity import activity
from hf_slospec.cli.benchmark import Bench
from hf_slospec.cli.gain import measure_gain
from hf_slospec.tiny.inflate import inflate
from hf_slospec.tiny.shapes import SHAPES

PROMPTS = [
    'class Stack:\n    """A last-in, first-out container."""\n\n    def __init__(self',
    "import os\n\ndef read_lines(path):\n",
    "    def test_empty(self):\n        self.assertEqual(",
    "def main():\n    parser = argparse.ArgumentParser(",
]
# SLOs as multiples of the measured seconds per token; None: no SLO.
FACTORS = [1.5, 2.0, 4.0, None]


def main(new_tokens: int = 64, repeats: int = 3) -> None:
    tiny, draft, tokenizer = hf_slospec.load_tiny_pair(torch.float32)
    model = inflate(tiny, SHAPES["0.1B"])
    with activity("compiling, unless an earlier run did"):
        bench = Bench(model, draft, tokenizer, PROMPTS, 64, new_tokens)
        generator = bench.generator
    with activity("measuring") as show:
        gain = measure_gain(bench, len(PROMPTS), repeats, show)

    slos = [None if factor is None else factor * gain.tpot_s for factor in FACTORS]
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    out = generator.generate(
        **batch, slo_tpot=slos, max_new_tokens=new_tokens, return_dict_in_generate=True
    )
    for row, metrics in zip(out.sequences, out.slo, strict=True):
        print("-" * 100)
        print(tokenizer.decode(row, skip_special_tokens=True))
        slo = "no SLO" if metrics.tpot_slo_s is None else f"SLO {metrics.tpot_slo_s * 1e3:.1f} ms"
        verdict = {True: " attained", False: " missed", None: ""}[metrics.attained]
        print(f"\n>>> {metrics.tpot_s * 1e3:.1f} ms per token ({slo}{verdict}); ", end="")
        print(
            f"{metrics.acceptance_length:.2f} tokens per step, {metrics.drafted / metrics.steps:.1f} nodes drafted"
        )
    print("=" * 100)
    print(
        f"plain generate: {gain.stock_tpot_s * 1e3:.1f} ms per token, hf_slospec: {gain.tpot_s * 1e3:.1f} ms"
    )
    print(gain)
    print(f"identical tokens: {'yes' if gain.is_equal else 'no'}")


if __name__ == "__main__":
    main()
