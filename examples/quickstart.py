"""Four prompts, four TPOT SLOs, one batch: the same tokens as plain ``generate``, faster.

Runs on the embedded pair; nothing is downloaded. The target is inflated to about 0.1 B parameters,
which makes its forwards slower without changing its output, so that there is something to speed up.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from tqdm import tqdm
from transformers.generation import BaseStreamer

import hf_slospec
from hf_slospec.tiny.inflate import inflate
from hf_slospec.tiny.shapes import SHAPES

SLOS = [0.02, 0.05, 0.1, None]  # seconds per output token; None: no SLO
PROMPTS = [
    'class Stack:\n    """A last-in, first-out container."""\n\n    def __init__(self',
    "import os\n\ndef read_lines(path):\n",
    "    def test_empty(self):\n        self.assertEqual(",
    "def main():\n    parser = argparse.ArgumentParser(",
]


class Progress(BaseStreamer):
    """Progress bar that counts the tokens of every row."""

    def __init__(self, title: str, new_tokens: int):
        self.bar = tqdm(total=new_tokens, desc=title, unit="tok")
        self.is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        self.bar.update(0 if self.is_prompt else 1)
        self.is_prompt = False

    def end(self) -> None:
        self.bar.close()


def timed(generate: Any, title: str, new_tokens: int, **options: Any) -> tuple[Any, float]:
    started_s = time.perf_counter()
    progress = Progress(title, new_tokens)
    out = generate(**options, max_new_tokens=new_tokens, do_sample=False, streamer=progress)
    return out, time.perf_counter() - started_s


def main(new_tokens: int = 96) -> None:
    tiny, draft, tokenizer = hf_slospec.load_tiny_pair(torch.float32)
    model = inflate(tiny, SHAPES["0.1B"])
    hf_slospec.enable(model, assistant_model=draft)
    model.generation_config.eos_token_id = None  # every row gets all its tokens
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    print(
        "warming up; the first run on a machine measures step times, for some seconds", flush=True
    )
    model.generate(**batch, max_new_tokens=2, slo_tpot=0.1)

    plain, plain_s = timed(model.generate, "plain generate    ", new_tokens, **batch)
    ours = dict(slo_tpot=SLOS, return_dict_in_generate=True)
    out, ours_s = timed(model.generate, "with slo_tpot     ", new_tokens, **batch, **ours)

    for row, metrics in zip(out.sequences, out.slo, strict=True):
        print("-" * 100)
        print(tokenizer.decode(row, skip_special_tokens=True))
        slo = "no SLO" if metrics.tpot_slo_s is None else f"SLO {metrics.tpot_slo_s * 1e3:.0f} ms"
        verdict = {True: "attained", False: "missed", None: ""}[metrics.attained]
        print(f"\n>>> {metrics.tpot_s * 1e3:.1f} ms per token ({slo}) {verdict}; ", end="")
        print(
            f"{metrics.acceptance_length:.2f} tokens per step, {metrics.drafted / metrics.steps:.1f} nodes drafted"
        )
    print("=" * 100)
    same = torch.equal(out.sequences, plain)
    print(
        f"speed: {plain_s / ours_s:.2f}x plain generate, identical tokens: {'yes' if same else 'no'}"
    )


if __name__ == "__main__":
    main()
