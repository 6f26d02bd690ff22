"""One ragged batch with a TPOT SLO per row, one of them in two stages.

    python examples/batch_with_slos.py

The SLOs are multiples of the time per token of plain ``generate`` for the same batch, measured
first, so that there are a tight, a middling and a relaxed one on any machine. A row without an SLO
gets the remaining capacity. Runs on the embedded pair, its target inflated to about 0.1 B
parameters; nothing is downloaded."""

from __future__ import annotations

import time

import torch
from rich.console import Console
from rich.table import Table

from hf_slospec import RequestMetrics, SLOSpecGenerator, SLOStage, load_tiny_pair
from hf_slospec.tiny.inflate import inflate
from hf_slospec.tiny.shapes import SHAPES

PROMPTS = [
    "def read_lines(path):\n",
    'class Stack:\n    """A last-in, first-out container."""\n\n    def __init__(self',
    "import os\nimport sys\n\n\ndef walk(names):\n    for name in names:\n        if os.path.isdir(name):\n",
    "    def test_empty(self):\n        self.assertEqual(",
    "def parse(text):\n",
]


def ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.0f}"


def table(names: list[str], rows: list[RequestMetrics]) -> Table:
    result = Table(
        title="milliseconds per token: SLO, TPOT, and the slowest ten consecutive tokens"
    )
    for heading in ("row", "SLO", "TPOT", "slowest", "met", "tok/step", "drafted", "accepted"):
        result.add_column(heading, no_wrap=True)
    for name, row in zip(names, rows, strict=True):
        met = {True: "yes", False: "no", None: ""}[row.attained]
        length = "" if row.acceptance_length is None else f"{row.acceptance_length:.2f}"
        times = ms(row.tpot_slo_s), ms(row.tpot_s), ms(row.worst_tpot_s)
        result.add_row(name, *times, met, length, str(row.drafted), str(row.accepted))
    return result


def main(new_tokens: int = 64) -> None:
    tiny, draft, tokenizer = load_tiny_pair(torch.float32)
    model = inflate(tiny, SHAPES["0.1B"])
    model.generation_config.eos_token_id = None  # every row gets all its tokens
    gen = SLOSpecGenerator(model, draft, tokenizer)
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left")
    options = dict(max_new_tokens=new_tokens, do_sample=False)

    begun_s = time.perf_counter()
    plain = model.generate(**batch, **options)
    plain_s = (time.perf_counter() - begun_s) / new_tokens

    # Fast for the first half, then at reading speed. `until="</think>"` would end the stage at this
    # text.
    staged = [
        SLOStage(slo_tpot=0.8 * plain_s, tokens=new_tokens // 2),
        SLOStage(slo_tpot=2.0 * plain_s),
    ]
    slos = [0.7 * plain_s, 1.0 * plain_s, 2.0 * plain_s, None, staged]
    gen.generate(**batch, max_new_tokens=2)  # measures step times, once per machine
    out = gen.generate(**batch, **options, slo_tpot=slos, return_dict_in_generate=True)

    names = ["tight", "middling", "relaxed", "no SLO", "in two stages"]
    for name, row in zip(names, out.sequences, strict=True):
        print(f"--- {name}\n{tokenizer.decode(row, skip_special_tokens=True)}")
    Console(width=120).print(table(names, out.slo))  # complete in a narrow terminal, too
    same = "yes" if torch.equal(out.sequences, plain) else "no"
    print(f"plain generate took {ms(plain_s)} ms per token; identical tokens: {same}")


if __name__ == "__main__":
    main()
