"""Cost of verifying with a mixture of experts, where more tokens read more experts.

    python benchmarks/experts.py [--experts 16] [--top-k 2] [--intermediate 2816] [--json FILE]

The embedded target becomes a Mixtral whose experts are all its MLP, inflated, and whose router is
random: texts and acceptance stay those of the target, and tokens are routed to different experts.
Measured are the number of experts that n successive tokens of a text are routed to, forwards of
equal and of different tokens beside forwards of that text, and `auto` beside no drafts and a
constant depth, all interleaved."""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, load_tiny_pair
from hf_slospec.cli.benchmark import provenance
from hf_slospec.model.measure import Forwards, Size
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.properties import evaluating
from hf_slospec.tiny.inflate import inflate
from hf_slospec.tiny.shapes import Shape

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 32)
PROMPTS = (
    "import os\nimport sys\n\n\ndef main():\n    ",
    "class Reader:\n    def __init__(self, stream):\n        ",
    "def test_open(self):\n    with open(filename) as f:\n        ",
    "    for name in sorted(names):\n        if name.startswith('_'):\n            ",
)
POLICIES = {
    "none": dict(policy="none"),
    "auto": dict(policy="auto"),
    "depth 4": dict(policy="fixed", max_depth=4, max_width=1),
}


@torch.no_grad()
def with_experts(model: Any, num_experts: int, top_k: int, seed: int = 0) -> MixtralForCausalLM:
    """Return a Mixtral with the outputs of a Llama, whose MLPs are copied into all experts."""
    old = model.config
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads rms_norm_eps"
    names += " num_key_value_heads head_dim vocab_size max_position_embeddings tie_word_embeddings"
    names += " rope_parameters bos_token_id eos_token_id pad_token_id hidden_act"
    config = MixtralConfig(
        **{name: getattr(old, name) for name in names.split()},
        num_local_experts=num_experts,
        num_experts_per_tok=top_k,
        sliding_window=None,
    )
    made: Any = MixtralForCausalLM._from_config(config, dtype=model.dtype).eval()
    own = model.state_dict()
    torch.manual_seed(seed)
    for name, parameter in made.named_parameters():
        prefix = name.rpartition("mlp.")[0] + "mlp."
        if name.endswith("gate_up_proj"):
            halves = own[f"{prefix}gate_proj.weight"], own[f"{prefix}up_proj.weight"]
            parameter.copy_(torch.cat(halves).expand_as(parameter))
        elif name.endswith("experts.down_proj"):
            parameter.copy_(own[f"{prefix}down_proj.weight"].expand_as(parameter))
        elif name.endswith("mlp.gate.weight"):
            parameter.normal_()
        else:
            parameter.copy_(own[name])
    made.generation_config = model.generation_config
    return made


class SameTokens(Forwards):
    """Forwards whose tokens are all equal."""

    def token_ids(self, number: int) -> list[int]:
        return [0] * number


class TextTokens(Forwards):
    """Forwards of successive tokens of a text, from another place each time."""

    text: list[int]
    place = 0

    def token_ids(self, number: int) -> list[int]:
        self.place = (self.place + 37) % (len(self.text) - number)
        return self.text[self.place : self.place + number]


def routed(model: Any, text: list[int]) -> dict[int, float]:
    """Return the mean number of experts per layer that n successive tokens are routed to, by n."""
    chosen = list[torch.Tensor]()
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, out: chosen.append(out[2]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([text]))
    for hook in hooks:
        hook.remove()
    return {
        size: sum(
            len(indices[first : first + size].unique())
            for indices in chosen
            for first in range(0, len(text) - size, size)
        )
        / (len(chosen) * len(range(0, len(text) - size, size)))
        for size in SIZES
    }


def forward_ms(model: Any, text: list[int], rounds: int) -> dict[str, dict[int, float]]:
    """Return the median milliseconds of forwards, by kind of tokens and by their number."""
    packed = PackedModel(model, SLOSpecConfig(compile=False))
    of_text = TextTokens(packed)
    of_text.text = text
    kinds = {"equal": SameTokens(packed), "different": Forwards(packed), "text": of_text}
    seconds = defaultdict[tuple[str, int], list[float]](list)
    with evaluating(model):
        for round_ in range(rounds + 1):
            for size in SIZES:
                for kind, forwards in kinds.items():
                    taken_s = forwards(Size(size))
                    if round_:  # the first has one-off costs
                        seconds[kind, size].append(taken_s)
    return {
        kind: {size: round(1e3 * median(seconds[kind, size]), 2) for size in SIZES}
        for kind in kinds
    }


def generate(
    target: Any, draft: Any, tokenizer: Any, batch: int, new_tokens: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Return the seconds of calls and what they drafted, by policy.

    CPU seconds count, as those of the wall clock also contain other processes. Calls of the first
    round, which follow the profile alone, are reported apart.
    """
    tokenizer.padding_side = "left"
    inputs = tokenizer(list(PROMPTS[:batch]), return_tensors="pt", padding=True)
    options: dict[str, Any] = dict(
        max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
    )
    made = {
        name: SLOSpecGenerator(target, draft, config=SLOSpecConfig(compile=False, **settings))
        for name, settings in POLICIES.items()
    }
    for generator in made.values():  # measures, where there is no profile, and does not draft
        generator.generate(**inputs, **options | dict(max_new_tokens=2, min_new_tokens=2))
    seconds = defaultdict[str, list[float]](list)
    wall = defaultdict[str, list[float]](list)
    nodes = defaultdict[str, list[float]](list)
    for _ in range(rounds):
        for name, generator in made.items():
            started = time.process_time(), time.perf_counter()
            out = generator.generate(**inputs, **options, return_dict_in_generate=True)
            seconds[name].append(time.process_time() - started[0])
            wall[name].append(time.perf_counter() - started[1])
            nodes[name].append(sum(step.nodes for step in out.steps) / len(out.steps) / batch)
    ratios = {
        name: [a / b for a, b in zip(seconds[name], seconds["none"], strict=True)] for name in made
    }
    return {
        name: {
            "cpu_ms_per_token": round(1e3 * median(seconds[name]) / new_tokens, 2),
            "wall_ms_per_token": round(1e3 * median(wall[name]) / new_tokens, 2),
            "nodes_per_row_and_step": [round(each, 2) for each in nodes[name]],
            "first_of_none": round(ratios[name][0], 3),
            "of_none": round(median(ratios[name][1:]), 3),
        }
        for name in made
    }


def main() -> None:
    """Measure, print a table, and write the results as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("experts", 16), ("top-k", 2), ("intermediate", 2816)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("new-tokens", 96), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tiny, draft, tokenizer = load_tiny_pair(torch.bfloat16)
    shape = Shape(tiny.config.hidden_size, options.intermediate, tiny.config.num_hidden_layers)
    target = with_experts(inflate(tiny, shape), options.experts, options.top_k)
    text = tokenizer(Path(__file__).read_text(encoding="utf-8"))["input_ids"][:1024]
    share = options.top_k / options.experts
    results: dict[str, Any] = {
        "experts": vars(options) | {"json": None},
        "expected": {n: round(options.experts * (1 - (1 - share) ** n), 2) for n in SIZES},
        "routed": {n: round(number, 2) for n, number in routed(target, text).items()},
        "forward_ms": forward_ms(target, text, options.rounds),
    }
    print(
        f"{'tokens':>10} {'experts':>8} {'expected':>8}",
        *map("{:>10}".format, results["forward_ms"]),
    )
    for n in SIZES:
        columns = (f"{each[n]:>10}" for each in results["forward_ms"].values())
        print(f"{n:>10} {results['routed'][n]:>8} {results['expected'][n]:>8}", *columns)
    results["generate"] = {}
    for batch in (1, 4):
        found = generate(target, draft, tokenizer, batch, options.new_tokens, options.rounds)
        results["generate"][batch] = found
        for name, row in found.items():
            print(f"batch {batch}, {name:8}", row)
    if options.json is not None:
        results["provenance"] = provenance()
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
