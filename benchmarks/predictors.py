"""What predicting acceptance is worth on real texts (SmartSpec's figure 14): random, moving
average, `auto`, known.

    python -m benchmarks.predictors record --target build/checkpoints/SmolLM2-135M-Instruct --to
    chains.json python -m benchmarks.predictors replay --recording chains.json --json
    benchmarks/results/predictors.json

``record`` decodes Spec-Bench's questions token by token and keeps, for every drafter and every
token, the chain that it drafts there, with the probabilities that it gives, and how much of it the
text then agrees with. ``replay`` serves the texts in the simulator, at constant rates of arrival,
by policies that differ in how they predict acceptance."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers.utils import logging

from benchmarks.spec_bench import QUESTIONS, encoded_chats, questions_of
from benchmarks.uncertainty import LIMITS
from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.cli.benchmark import provenance
from hf_slospec.engine.interfaces import Plan, Policy, Selection
from hf_slospec.lab.hardware import HARDWARE, Hardware, lines
from hf_slospec.lab.models import SimulatedDrafter, VirtualClock
from hf_slospec.lab.simulation import Simulation
from hf_slospec.lab.systems import config_of
from hf_slospec.lab.texts import Library, SimulatedText
from hf_slospec.lab.workload import Job
from hf_slospec.request.request import Request
from hf_slospec.server.loading import load_pair
from hf_slospec.tree.tree import ROOT, TokenTree

DRAFTERS = ("lookup", "suffix")
MAX_PROMPT = 1024  # tokens
DEPTH = 8  # tokens of the longest chains
REQUEST_S = 50e-6  # drafting without a model, per request, on a host beside a GPU
HARDWARES = ("llama-7b-a100", "llama-70b-4xh100")
RATES = (2.0, 32.0)
PLAIN = "plain"
RANDOM = "random"
AVERAGE = "smartspec"
OURS = "auto"
ORACLE = "oracle"
CONSTANTS = {f"k={length}": dict(policy="fixed", max_depth=length) for length in (1, 3, DEPTH)}
POLICIES: dict[str, dict[str, Any]] = {
    PLAIN: dict(policy="none"),
    RANDOM: dict(policy="fixed", max_depth=DEPTH),
    AVERAGE: dict(policy="smartspec", max_depth=DEPTH),
    OURS: dict(policy="auto", max_depth=DEPTH),
    ORACLE: dict(policy="auto", max_depth=DEPTH),
    **CONSTANTS,
}
# tokens of simulated texts, and of chains that differ
RIGHT = 0
WRONG = 1
app = typer.Typer(help=__doc__, rich_markup_mode=None)


class Chains(BaseModel):
    """One text, and the chain that a drafter drafts at every token of it."""

    input_tokens: int
    path_probs: list[list[float]]  # by position in the text: of each token of the chain
    accepted: list[int]  # tokens of the chain that the text agrees with


class Recordings(BaseModel):
    """Texts with the chains of several drafters."""

    provenance: dict[str, Any]
    drafters: dict[str, list[Chains]]


class Recorder(Policy):
    """Policy that has chains drafted at every token, and verifies none of them."""

    def __init__(self) -> None:
        self.drafted: dict[
            tuple[int, ...], dict[int, tuple[list[int], list[float]]]
        ] = {}  # by prompt and position

    def plan(
        self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0
    ) -> Plan:
        return Plan(DEPTH, 1)

    def select(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan
    ) -> Selection:
        for request, tree in zip(requests, candidates, strict=True):
            drafted = self.drafted.setdefault(tuple(request.params.prompt), {})
            drafted[request.num_emitted] = most_probable_path(tree)
        return Selection.of_roots([tree.up_to(0) for tree in candidates])

    def chains(self, prompt: Sequence[int], output: Sequence[int]) -> Chains:
        """Return the chains of one text; there is none where its first token comes from the
        prefill.
        """
        drafted = self.drafted[tuple(prompt)]
        at = [drafted.get(position, ([], [])) for position in range(len(output))]
        return Chains(
            input_tokens=len(prompt),
            path_probs=[[round(prob, 4) for prob in probs] for _, probs in at],
            accepted=[
                agreeing(tokens, output[position:]) for position, (tokens, _) in enumerate(at)
            ],
        )


def most_probable_path(tree: TokenTree) -> tuple[list[int], list[float]]:
    """Return the tokens and path probabilities of the path of the most probable children; sums of
    drafters branch.
    """
    path = list[int]()
    node = ROOT
    while len(children := np.flatnonzero(tree.parents == node)):
        node = int(children[tree.path_probs[children].argmax()])
        path.append(node)
    return tree.tokens[path].tolist(), tree.path_probs[path].tolist()


def agreeing(tokens: Sequence[int], text: Sequence[int]) -> int:
    """Return how many tokens a chain and a text have in common at their beginnings."""
    pairs = zip(tokens, text, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def recorded(
    target: Any, drafter: str, prompts: Sequence[list[int]], new_tokens: int
) -> list[Chains]:
    """Return the target's greedy answers to prompts, and a drafter's chains along them."""
    recorder = Recorder()
    config = SLOSpecConfig(max_depth=DEPTH, max_width=1, compile=False)
    with SLOSpecGenerator(
        target, config=config, drafter=drafter, make_policy=lambda *_: recorder
    ) as generator:
        handles = [
            generator.submit(prompt, do_sample=False, max_new_tokens=new_tokens)
            for prompt in prompts
        ]
        waiting = tqdm(list(zip(prompts, handles, strict=True)), desc=drafter)
        return [recorder.chains(prompt, handle.result().token_ids) for prompt, handle in waiting]


@app.command()
def record(
    target: Annotated[str, typer.Option(help="A folder or a repository of the Hub.")],
    to: Annotated[Path, typer.Option(help="The file to write.")],
    per_task: Annotated[int, typer.Option(help="Questions per task.")] = 5,
    new_tokens: Annotated[int, typer.Option(help="Maximum length of an answer.")] = 128,
    drafters: Annotated[
        str, typer.Option(help="Comma-separated sources for load_drafter.")
    ] = ",".join(DRAFTERS),
) -> None:
    """Record what drafters propose at every token of the target's answers, in fp32."""
    logging.set_verbosity_error()
    pair = load_pair(target, None, "tiny", "float32", "cpu")
    prompts = []
    for question in questions_of(QUESTIONS, per_task):
        encoded = encoded_chats(
            pair.tokenizer, [question.turns[:1]], MAX_PROMPT, torch.device("cpu")
        )
        prompts.append(encoded["input_ids"][0].tolist())
    found = {name: recorded(pair.target, name, prompts, new_tokens) for name in drafters.split(",")}
    facts = provenance(
        target=Path(target).name, per_task=per_task, new_tokens=new_tokens, depth=DEPTH
    )
    to.write_text(
        Recordings(provenance=facts, drafters=found).model_dump_json() + "\n", encoding="utf-8"
    )


class RecordedDrafter(SimulatedDrafter):
    """Drafter that proposes the recorded chains; it has no model, and takes the host's time only."""

    def __init__(
        self,
        chains: Sequence[Chains],
        library: Library,
        hardware: Hardware,
        clock: VirtualClock,
        seed: int,
    ):
        super().__init__(library, hardware, clock, seed)
        self._chains = chains  # by index of the request

    def draft(self, requests: Sequence[Request], plan: Plan) -> Sequence[TokenTree]:
        """-> one chain per request"""
        self.clock.now_s += self.hardware.drafting_request_s * len(requests)
        return [self._chain(request, plan.levels_of(request)) for request in requests]

    def _chain(self, request: Request, length: int) -> TokenTree:
        chains = self._chains[request.index]
        position = request.num_emitted
        probs = chains.path_probs[position][:length]
        depths = np.arange(len(probs) + 1)
        is_wrong = depths > chains.accepted[position]
        tokens = np.where(is_wrong, WRONG, RIGHT)
        tokens[0] = request.tokens[-1]
        return TokenTree(tokens, depths - 1, depths, np.array([1.0, *probs]))


@dataclass(frozen=True)
class RandomLengths(Policy):
    """Policy that predicts the accepted length at random, for every request and step, and drafts so
    many tokens.
    """

    rng: np.random.Generator

    def plan(
        self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0
    ) -> Plan:
        lengths = self.rng.integers(DEPTH + 1, size=len(requests)).tolist()
        depths = {
            request: length for request, length in zip(requests, lengths, strict=True) if length
        }
        return Plan(max(lengths), 1, drafting=list(depths), depths=depths)

    def select(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan
    ) -> Selection:
        return Selection(candidates, [float(tree.num_nodes) for tree in candidates])


def latency_s(
    chains: Sequence[Chains], hardware: str, rate: float, policy: str, number: int, seed: int
) -> float:
    """Return the mean latency of requests whose texts are drawn from recorded ones.

    Args:
        chains: recorded texts.
        hardware: whose costs of the target are simulated.
        rate: requests per second, at equal distances.
        policy: one of POLICIES.
        number: of requests.
        seed: of the texts, and of random lengths.
    """
    rng = np.random.default_rng(seed)
    drawn = [chains[index] for index in rng.integers(len(chains), size=number)]
    jobs = [
        Job(index / rate, text.input_tokens, len(text.accepted)) for index, text in enumerate(drawn)
    ]
    texts = [
        SimulatedText(np.ones((len(text.accepted), 1)), np.full(len(text.accepted), RIGHT))
        for text in drawn
    ]
    simulation = Simulation(
        jobs,
        Library(texts),
        replace(
            HARDWARE[hardware],
            draft=lines((0.0, 0.0)),
            drafting_request_s=REQUEST_S,
            kv_tokens=10**6,
        ),
        config_of(json.dumps(POLICIES[policy] | LIMITS)),
        seed=seed,
        oracle=policy == ORACLE,
        make_policy=(lambda *_: RandomLengths(rng)) if policy == RANDOM else None,
        new_drafter=functools.partial(RecordedDrafter, drawn),
    )
    return float(
        np.mean([outcome.finish_s - outcome.arrival_s for outcome in simulation.run().outcomes])
    )


@app.command()
def replay(
    recording: Annotated[Path, typer.Option(help="A file of record.")],
    seeds: Annotated[int, typer.Option()] = 3,
    number: Annotated[int, typer.Option(help="Requests of one simulation.")] = 60,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Simulate all policies on the recorded texts of each drafter, machine and rate."""
    recordings = Recordings.model_validate_json(recording.read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = []
    for name, hardware, rate in tqdm(
        list(itertools.product(recordings.drafters, HARDWARES, RATES))
    ):
        chains = recordings.drafters[name]
        latencies = {
            policy: [
                latency_s(chains, hardware, rate, policy, number, seed) for seed in range(seeds)
            ]
            for policy in POLICIES
        }
        plain = float(np.mean(latencies[PLAIN]))
        speedups = {policy: plain / float(np.mean(own)) for policy, own in latencies.items()}
        best = max(CONSTANTS, key=lambda constant: speedups[constant])
        rows.append(
            dict(
                drafter=name,
                hardware=hardware,
                rate=rate,
                speedups=speedups,
                best=best,
                latencies_s=latencies,
            )
        )
    show(rows)
    if json_path is not None:
        facts = provenance(seeds=seeds, number=number, recorded=recordings.provenance)
        json_path.write_text(
            json.dumps({"provenance": facts, "results": rows}, indent=1) + "\n", encoding="utf-8"
        )


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the speed-ups over plain decoding."""
    names = [RANDOM, AVERAGE, OURS, ORACLE]
    table = Table("drafter", "machine", "requests/s", *names, "best constant")
    for row in rows:
        own = row["speedups"]
        cells = [f"{own[name]:.2f}" for name in names]
        best = row["best"]
        table.add_row(
            row["drafter"], row["hardware"], f"{row['rate']:g}", *cells, f"{own[best]:.2f} ({best})"
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    app()
