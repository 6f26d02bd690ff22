"""A drafter of one's own: n-grams learnt from a folder of your files, and from each request's own text.

    python examples/custom_drafter.py [FOLDER]      # of Python files; the standard library's if none is named

Anything with ``draft`` and ``release`` can draft, here without any model. What it proposes changes the speed and never
the text: the same prompts are decoded with it, with prompt lookup and with the embedded draft model. Runs on the
embedded pair, its target inflated to about 0.1 B parameters; nothing is downloaded.
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
from hf_slospec.tiny.inflate import SHAPES, inflate

MOST_FILES = 60
LONGEST = 4  # tokens that a guess is based on
DISCOUNT = 0.5  # what was seen once is believed half


class Followers:
    """How often which token came after which last few."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        self.num_learnt = 0

    def learn(self, tokens: list[int]) -> None:
        """Take in what is new in a text that grows."""
        for place in range(max(self.num_learnt, 1), len(tokens)):
            for length in range(1, min(LONGEST, place) + 1):
                self.counts[tuple(tokens[place - length : place])][tokens[place]] += 1
        self.num_learnt = len(tokens)


class NgramDrafter:
    """Expects a text to go on as it did before, or else as your files do; the longest n-gram that is known decides."""

    def __init__(self, texts: Sequence[list[int]]):
        self.files = Followers()
        for tokens in texts:
            self.files.num_learnt = 0
            self.files.learn(tokens)
        self.own: dict[Request, Followers] = defaultdict(Followers)

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        for request in requests:
            self.own[request].learn(request.tokens)
        return [self.tree(request, plan) for request in requests]

    def release(self, request: Request) -> None:
        self.own.pop(request, None)

    def tree(self, request: Request, plan: Plan) -> TokenTree:
        """A beam search: on each level the ``plan.width`` most probable continuations of the level before."""
        nodes, parents, depths, path_probs = [request.tokens[-1]], [-1], [0], [1.0]
        level = [(0, request.tokens[-LONGEST:])]  # node, and the last tokens on the path to it
        for depth in range(1, plan.depth + 1):
            children = [
                (path_probs[node] * prob, node, [*path, token])
                for node, path in level
                for token, prob in self.guesses(self.own[request], path, plan.width)
            ]
            level = []
            for path_prob, parent, path in sorted(children, key=lambda child: -child[0])[: plan.width]:
                level.append((len(nodes), path[-LONGEST:]))
                nodes.append(path[-1])
                parents.append(parent)
                depths.append(depth)
                path_probs.append(path_prob)
        return TokenTree(np.array(nodes), np.array(parents), np.array(depths), np.array(path_probs))

    def guesses(self, own: Followers, path: list[int], number: int) -> list[tuple[int, float]]:
        """Likely next tokens and how probable they are."""
        for length in range(len(path), 0, -1):
            last = tuple(path[-length:])
            for known in (own.counts.get(last), self.files.counts.get(last)):
                if known:
                    total = known.total() + DISCOUNT
                    return [(token, (count - DISCOUNT) / total) for token, count in known.most_common(number)]
        return []


def main(folder: str = os.path.dirname(os.__file__), new_tokens: int = 64) -> None:
    tiny, draft, tokenizer = load_tiny_pair(torch.float32)
    model = inflate(tiny, SHAPES["0.1B"])
    files = sorted(Path(folder).rglob("*.py"))[:MOST_FILES]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    own = NgramDrafter([tokenizer(text, verbose=False).input_ids for text in texts])
    print(f"{len(own.files.counts)} n-grams from {len(files)} files")

    batch = tokenizer(tiny_prompts()[:2], return_tensors="pt", padding=True, padding_side="left")
    options = dict(max_new_tokens=new_tokens, do_sample=False)
    begun_s = time.perf_counter()
    plain = model.generate(**batch, **options)
    plain_ms = 1e3 * (time.perf_counter() - begun_s) / new_tokens

    shown = Table("drafter", "tokens/step", "accepted", "ms/token", "same text")
    shown.add_row("plain generate", "1.00", "", f"{plain_ms:.0f}", "")
    for name, gen in {
        "prompt lookup": SLOSpecGenerator(model),
        "n-grams": SLOSpecGenerator(model, drafter=own),
        "draft model": SLOSpecGenerator(model, draft),
    }.items():
        gen.generate(**batch, max_new_tokens=8)  # warm-up: step times, and how far to trust this drafter
        out = gen.generate(**batch, **options, return_dict_in_generate=True)
        drafted, accepted = (sum(getattr(row, what) for row in out.slo) for what in ("drafted", "accepted"))
        length = sum(row.tokens - 1 for row in out.slo) / sum(row.steps for row in out.slo)
        tpot_ms = 1e3 * sum(row.tpot_s for row in out.slo) / len(out.slo)
        same = "yes" if torch.equal(out.sequences, plain) else "no"
        shown.add_row(name, f"{length:.2f}", f"{accepted} of {drafted}", f"{tpot_ms:.0f}", same)
    Console().print(shown)


if __name__ == "__main__":
    main(*sys.argv[1:2])
