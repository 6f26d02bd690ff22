"""A custom drafter: n-grams learnt from a folder of files and from each request's text.

    python examples/custom_drafter.py [FOLDER]      # with Python files; default: the standard library

Any object with ``draft`` and ``release`` can draft, here without a model. Its proposals change the
speed and never the
text: the same prompts are decoded with it, with prompt lookup and with the embedded draft model.
Runs on the embedded pair, its target inflated to about 0.1 B parameters; nothing is downloaded.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from hf_slospec import Plan, Request, SLOSpecGenerator, TokenTree, load_tiny_pair, tiny_prompts
from hf_slospec.tiny.inflate import inflate
from hf_slospec.tiny.shapes import SHAPES

MAX_FILES = 60
MAX_NGRAM = 4  # tokens before the predicted one
DISCOUNT = 0.5  # subtracted from counts: a continuation seen once gets probability 1/3


class NgramCounts:
    """Number of times that each token followed each n-gram."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        self.num_learnt = 0

    def learn(self, tokens: list[int]) -> None:
        """Count the new tokens of a growing text."""
        for at in range(max(self.num_learnt, 1), len(tokens)):
            for length in range(1, min(MAX_NGRAM, at) + 1):
                self.counts[tuple(tokens[at - length : at])][tokens[at]] += 1
        self.num_learnt = len(tokens)


class NgramDrafter:
    """Predicts by the longest n-gram that is known from the request's text, or else from the files."""

    def __init__(self, texts: Sequence[list[int]]):
        self.files = NgramCounts()
        for tokens in texts:
            self.files.num_learnt = 0
            self.files.learn(tokens)
        self.own: dict[Request, NgramCounts] = defaultdict(NgramCounts)

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        for request in requests:
            self.own[request].learn(request.tokens)
        return [self.tree(request, plan) for request in requests]

    def release(self, request: Request) -> None:
        self.own.pop(request, None)

    def tree(self, request: Request, plan: Plan) -> TokenTree:
        """Return the result of a beam search with ``plan.width`` nodes per level."""
        nodes = [request.tokens[-1]]
        parents = [-1]
        depths = [0]
        path_probs = [1.0]
        level = [(0, request.tokens[-MAX_NGRAM:])]  # node, and the last tokens on the path to it
        for depth in range(1, plan.depth + 1):
            children = [
                (path_probs[node] * prob, node, [*path, token])
                for node, path in level
                for token, prob in self.predict(self.own[request], path, plan.width)
            ]
            level = []
            for path_prob, parent, path in sorted(children, key=lambda child: -child[0])[
                : plan.width
            ]:
                level.append((len(nodes), path[-MAX_NGRAM:]))
                nodes.append(path[-1])
                parents.append(parent)
                depths.append(depth)
                path_probs.append(path_prob)
        return TokenTree(np.array(nodes), np.array(parents), np.array(depths), np.array(path_probs))

    def predict(self, own: NgramCounts, path: list[int], number: int) -> list[tuple[int, float]]:
        """Return up to ``number`` next tokens with their probabilities."""
        for length in range(len(path), 0, -1):
            last = tuple(path[-length:])
            for known in (own.counts.get(last), self.files.counts.get(last)):
                if known:
                    total = known.total() + DISCOUNT
                    return [
                        (token, (count - DISCOUNT) / total)
                        for token, count in known.most_common(number)
                    ]
        return []


def main(folder: str = os.path.dirname(os.__file__), new_tokens: int = 64) -> None:
    tiny, draft, tokenizer = load_tiny_pair(torch.float32)
    model = inflate(tiny, SHAPES["0.1B"])
    files = sorted(Path(folder).rglob("*.py"))[:MAX_FILES]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    own = NgramDrafter([tokenizer(text, verbose=False).input_ids for text in texts])
    print(f"{len(own.files.counts)} n-grams from {len(files)} files")

    batch = tokenizer(tiny_prompts()[:2], return_tensors="pt", padding=True, padding_side="left")
    options = dict(max_new_tokens=new_tokens, do_sample=False)
    begun_s = time.perf_counter()
    plain = model.generate(**batch, **options)
    plain_ms = 1e3 * (time.perf_counter() - begun_s) / new_tokens

    table = Table("drafter", "tokens/step", "accepted", "ms/token", "same text")
    table.add_row("plain generate", "1.00", "", f"{plain_ms:.0f}", "")
    for name, gen in {
        "prompt lookup": SLOSpecGenerator(model),
        "n-grams": SLOSpecGenerator(model, drafter=own),
        "draft model": SLOSpecGenerator(model, draft),
    }.items():
        gen.generate(**batch, max_new_tokens=8)  # warm-up: step times and the drafter's calibration
        out = gen.generate(**batch, **options, return_dict_in_generate=True)
        drafted, accepted = (
            sum(row.drafted for row in out.slo),
            sum(row.accepted for row in out.slo),
        )
        length = sum(row.tokens - 1 for row in out.slo) / sum(row.steps for row in out.slo)
        tpots_s = [row.tpot_s for row in out.slo if row.tpot_s is not None]
        tpot_ms = 1e3 * sum(tpots_s) / max(len(tpots_s), 1)
        same = "yes" if torch.equal(out.sequences, plain) else "no"
        table.add_row(name, f"{length:.2f}", f"{accepted} of {drafted}", f"{tpot_ms:.0f}", same)
    Console(width=120).print(table)  # complete in a narrow terminal, too


if __name__ == "__main__":
    main(*sys.argv[1:2])
