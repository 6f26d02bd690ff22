"""Accuracy of the simulator: the real batcher on this machine compared with its simulation.

    python -m benchmarks.fidelity --json benchmarks/results/fidelity-cpu-2core.json

Profiles the embedded pair, serves Poisson loads with the real batcher, records the draft's
probabilities for the outputs, and simulates the same arrivals and texts with the profile. The
profile is corrected by measured steps, because the speed of a shared machine drifts and the
batcher's thread has its own OpenMP threads: once by the steps of a warm-up just before, and once by
those of the same run, which leaves the errors of the simulator itself."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from benchmarks.serving import CLASSES, SYSTEMS, load_of, plain_token_s, tiny_texts
from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.cli.benchmark import provenance
from hf_slospec.cli.profiling import profile
from hf_slospec.engine.events import StepEvent
from hf_slospec.engine.latency_curves import ForwardCost, LatencyCurve
from hf_slospec.lab.hardware import Hardware, HardwareFile
from hf_slospec.lab.simulation import Simulation
from hf_slospec.lab.texts import NUM_CHILDREN, Library, RecordedText, Recording
from hf_slospec.lab.workload import Job
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.server.loading import load_models
from hf_slospec.server.model_options import ModelOptions


class RecordedGenerator:
    """A generator with a record of its steps."""

    def __init__(self, generator: SLOSpecGenerator):
        self.generator = generator
        self.steps = list[StepEvent]()
        telemetry = generator._service.telemetry
        on_step = telemetry.on_step

        def kept(step: StepEvent) -> None:
            self.steps.append(step)
            on_step(step)

        telemetry.on_step = kept  # type: ignore[method-assign]  # there is no public hook

    def corrected(self, hardware: Hardware) -> Hardware:
        """Return the profile corrected by the durations of the recorded steps."""
        decoding = [step for step in self.steps if not step.is_prefill]
        host_s = mean(step.phases.select_s + step.phases.host_s for step in decoding)
        target = hardware.target
        draft = hardware.draft
        verify = [
            s.phases.verify_s / float(target(s.nodes + s.prefill_tokens, s.num_decoding))
            for s in decoding
        ]
        levels = [
            s.phases.draft_s / (s.depth * float(draft(s.num_decoding * s.width, s.num_decoding)))
            for s in decoding
            if s.phases.draft_s and s.depth
        ]
        draft_factor = median(levels) if levels else 1.0
        return replace(
            hardware,
            target=scaled(target, median(verify)),
            draft=scaled(draft, draft_factor),
            host_s=host_s,
        )


def scaled(cost: ForwardCost, factor: float) -> ForwardCost:
    """Return a cost with all durations multiplied by ``factor``."""
    curve = LatencyCurve(
        cost.curve.num_tokens, tuple(factor * seconds for seconds in cost.curve.seconds)
    )
    return ForwardCost(curve, factor * cost.per_request_s, factor * cost.per_key_s)


@torch.no_grad()
def recorded(draft: PreTrainedModel, tokens: list[int], prompt_len: int) -> RecordedText:
    """Return one output: the draft's most probable tokens per position, and which one the target
    chose.

    Args:
        draft: forwarded once over the whole text.
        tokens: the prompt followed by the target's output, at least one token each.
        prompt_len: number of prompt tokens.
    """
    ids = torch.tensor(tokens, device=draft.device)
    logits = (
        draft(input_ids=ids[None, :-1]).logits[0, prompt_len - 1 :].float()
    )  # [output_len, vocab]
    top = logits.softmax(-1).topk(min(NUM_CHILDREN, logits.shape[-1]), dim=-1)
    is_chosen = top.indices == ids[prompt_len:, None]
    ranks = torch.where(is_chosen.any(-1), is_chosen.int().argmax(-1), top.indices.shape[-1])
    probs = [[round(p, 5) for p in row] for row in top.values.clamp(max=1.0).tolist()]
    return RecordedText(input_tokens=prompt_len, child_probs=probs, ranks=ranks.tolist())


def served(
    generator: SLOSpecGenerator, load: list[dict[str, Any]], draft: Any
) -> tuple[list[Any], list[RecordedText]]:
    """Serve a load.  -> metrics of every request, and its text with the draft's probabilities"""
    with generator:
        begun_s = time.perf_counter()
        handles = []
        for job in load:
            time.sleep(max(job["at_s"] - (time.perf_counter() - begun_s), 0.0))
            options = dict(max_new_tokens=job["new"], do_sample=False, **job["options"])
            handles.append(generator.submit(job["ids"], **options, **job["targets"]))
        results = [handle.result() for handle in handles]
    texts = [
        recorded(draft, [*job["ids"], *result.token_ids], len(job["ids"]))
        for job, result in zip(load, results, strict=True)
    ]
    return [result.metrics for result in results], texts


def replayed(
    load: list[dict[str, Any]], texts: list[RecordedText], hardware: Hardware, config: SLOSpecConfig
) -> Any:
    """Simulate the load."""
    jobs = [
        Job(
            job["at_s"], len(job["ids"]), job["new"], job["targets"]["slo_tpot"], job["targets"]["slo_ttft"],
            job["name"], is_sampled=False,
        )
        for job in load
    ]  # fmt: skip
    return Simulation(jobs, Library([text.text() for text in texts]), hardware, config).run()


def figures(rows: Any) -> dict[str, float]:
    """Return mean figures of metrics or outcomes, which have the same field names."""
    rows = list(rows)
    return {
        "tpot_ms": 1e3 * mean(row.tpot_s for row in rows if row.tpot_s is not None),
        "ttft_ms": 1e3 * mean(row.ttft_s for row in rows),
        "attained": mean(bool(row.attained) for row in rows),
        "steps": mean(row.steps for row in rows),
    }


def main(
    size: Annotated[str, typer.Option()] = "0.3B",
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    number: Annotated[int, typer.Option(help="Requests of each load.")] = 60,
    pressures: Annotated[
        str, typer.Option(help="Loads as shares of the throughput of plain decoding at batch 8.")
    ] = "0.4,0.7",
    systems: Annotated[str, typer.Option()] = ",".join(SYSTEMS),
    seconds: Annotated[float, typer.Option(help="Duration of the profiling of each model.")] = 20.0,
    record_path: Annotated[
        Path | None,
        typer.Option("--record", help="Write the texts of all runs for `simulate --recording`."),
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure and simulate every system under every load."""
    logging.disable(logging.WARNING)
    target, draft, tokenizer = load_models(ModelOptions(size=size, dtype=dtype))
    prompts = tiny_texts(tokenizer)
    fits = {
        name: profile(PackedModel(model), seconds, keep=True)["fit"]
        for name, model in (("target", target), ("draft", draft))
    }
    table = Table(title=f"{size} {dtype}: real / simulated")
    for heading in (
        "load",
        "system",
        "corrected by",
        "TPOT ms",
        "error",
        "attained",
        "error",
        "TTFT ms",
        "steps",
    ):
        table.add_column(heading, justify="right")
    results = []
    token_s = 0.0
    recording = list[RecordedText]()
    for name in systems.split(","):
        config = SLOSpecConfig(**SYSTEMS[name])
        watched = RecordedGenerator(SLOSpecGenerator(target, draft, tokenizer, config))
        with watched.generator:
            plain_token_s(watched.generator, prompts)  # the first steps of a process are slower
            measured_s = plain_token_s(watched.generator, prompts)
        token_s = token_s or measured_s
        for pressure in map(float, pressures.split(",")):
            rate = pressure * 8 / (token_s * 40)  # outputs have 40 tokens on average
            watched.steps.clear()
            served(
                watched.generator, load_of(10**6, "poisson", rate, 16, token_s, prompts), draft
            )  # warm-up
            fitted = HardwareFile.model_validate(fits).hardware()
            before = watched.corrected(fitted)
            load = load_of(0, "poisson", rate, number, token_s, prompts)
            watched.steps.clear()
            metrics, texts = served(watched.generator, load, draft)
            recording += texts
            real = figures(metrics)
            record: dict[str, Any] = {"system": name, "pressure": pressure, "real": real}
            for corrected_by, hardware in (("warm-up", before), ("run", watched.corrected(fitted))):
                simulated = figures(replayed(load, texts, hardware, config).outcomes)
                errors = {
                    key: simulated[key] / real[key] - 1.0 for key in ("tpot_ms", "ttft_ms", "steps")
                }
                errors["attained"] = simulated["attained"] - real["attained"]
                record[corrected_by] = {"simulated": simulated, "error": errors}
                pairs = {
                    key: f"{real[key]:.1f} / {simulated[key]:.1f}"
                    for key in ("tpot_ms", "ttft_ms", "steps")
                }
                attained = f"{real['attained']:.0%} / {simulated['attained']:.0%}"
                table.add_row(
                    f"{pressure:g}", name, corrected_by, pairs["tpot_ms"], f"{errors['tpot_ms']:+.1%}", attained,
                    f"{100 * errors['attained']:+.0f} points", pairs["ttft_ms"], pairs["steps"],
                )  # fmt: skip
            results.append(record)
    Console(width=130).print(table)
    facts = provenance(size=size, dtype=dtype, number=number, classes=CLASSES, seconds=seconds)
    if record_path is not None:
        Recording(provenance=facts, texts=recording).write(record_path)
    if json_path is not None:
        json_path.write_text(json.dumps({"provenance": facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
