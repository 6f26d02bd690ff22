"""Rollouts: several sampled continuations of one prompt, the same as stock ``generate`` writes,
faster.

    python examples/rollouts.py [TEMPERATURE]

The draft model knows the noise that chooses the target's tokens; the last row shows what that is
worth. Runs on the embedded pair, its target inflated to about 0.1 B parameters, in the dtype that
this CPU is fast in; nothing is downloaded. In bf16, near-ties may be decided differently.
Takes about a minute on two idle cores, and another one on the first run, which compiles; many times
as long where other processes are busy on these cores.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from hf_slospec import SLOSpecConfig
from hf_slospec.cli.activity import activity
from hf_slospec.cli.benchmark import Bench, Method, summarize
from hf_slospec.server.loading import load_pair

PROMPT = 'class Queue:\n    """A first-in, first-out container."""\n\n    def __init__(self'


def main(
    temperature: float = 1.0,
    size: str = "0.1B",
    dtype: str = "fast",
    repeats: int = 2,
    new_tokens: int = 48,
) -> None:
    model, draft, tokenizer = load_pair(None, None, size, dtype, "cpu")
    # Arguments of every call of generate.
    sampling = dict(temperature=temperature, top_k=0, num_return_sequences=8)
    with activity("compiling, unless an earlier run did") as show:
        bench = Bench(model, draft, tokenizer, [PROMPT], 64, new_tokens, sampling=sampling)
        unaware = bench.ours(SLOSpecConfig(coupling=False))
        methods = [
            *bench.gain_methods(1),
            Method("without the noise", 1, unaware),
        ]
        samples = bench.run(methods, repeats, show)

    table = Table("method", "tokens/step", "speed", "same rollouts")
    for row in summarize(samples, new_tokens):
        table.add_row(
            row["name"],
            f"{row['acceptance_length'] or 1.0:.2f}",
            f"{row['speedup_vs_generate']:.2f}x",
            row["rows_equal_to_generate"].replace("/", " of "),
        )
    Console(width=120).print(table)  # complete in a narrow terminal, too


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]))
