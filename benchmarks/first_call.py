"""What the first call of a process takes longer than the second, with and without a kept profile.

    python benchmarks/first_call.py [--shape 0.6B | --target CHECKPOINT] [--repeats 3] [--json FILE]

Every measurement is a process of its own: it loads the saved pair, or a checkpoint that prompt
lookup drafts for, makes a generator and decodes the same text twice. The compiler's own cache
stays, as it is per machine. The time runs from the loaded models to the end of the first call; that
of the second call is subtracted. Loading is not counted. The import of the package is timed after
that of transformers' models, which loading needs anyway."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

NEW_TOKENS = 16
FIGURES = (
    "import_s",
    "generator_s",
    "first_s",
    "second_s",
    "startup_s",
    "startup_cpu_s",
    "loaded_gb",
    "peak_gb",
)


def measure(folder: Path) -> dict[str, float]:
    """Return the seconds of a first and a second call in this process; of all its threads where the
    name has cpu.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401  imports torch

    begun_s = time.perf_counter()
    import hf_slospec

    import_s = time.perf_counter() - begun_s
    folders = [folder / name for name in ("target", "draft") if (folder / name).exists()]
    target, draft = [
        *(AutoModelForCausalLM.from_pretrained(each, dtype="auto") for each in folders),
        None,
    ][:2]
    for model in filter(None, (target, draft)):
        for parameter in model.parameters():
            parameter.data = (
                parameter.data.clone()
            )  # the file is mapped, and reading it would count
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    inputs = tokenizer(hf_slospec.tiny_prompts()[0], return_tensors="pt")

    loaded_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    times = [time.perf_counter()]
    cpu_times = [time.process_time()]
    generator = hf_slospec.SLOSpecGenerator(
        target, draft, tokenizer, drafter=None if draft else "lookup"
    )
    generator_s = time.perf_counter() - times[0]
    for _ in range(2):
        generator.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        times.append(time.perf_counter())
        cpu_times.append(time.process_time())
    (begun_s, first_s, second_s) = times
    (begun_cpu_s, first_cpu_s, second_cpu_s) = cpu_times
    startup_s = (first_s - begun_s) - (second_s - first_s)
    startup_cpu_s = (first_cpu_s - begun_cpu_s) - (second_cpu_s - first_cpu_s)
    figures = (
        import_s,
        generator_s,
        first_s - begun_s,
        second_s - first_s,
        startup_s,
        startup_cpu_s,
    )
    figures += (loaded_gb, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
    return dict(zip(FIGURES, figures, strict=True))


def in_own_process(folder: Path, cache: Path) -> dict[str, float]:
    """Return what a new process measures that keeps profiles in ``cache``."""
    environment = os.environ | {"HF_ASSETS_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--measure", str(folder)]
    output = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    return figures


def compare(
    shape: str, target: str | None, dtype: str, repeats: int
) -> dict[str, dict[str, float]]:
    """Return the medians over ``repeats`` caches, each used by a process that finds it empty and by
    one after it.
    """
    from hf_slospec.server.loading import load_pair

    runs: dict[str, list[dict[str, float]]] = {"without profile": [], "with kept profile": []}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        pair = load_pair(target, None, shape, dtype, "cpu")
        models = (
            {"target": pair.target}
            if pair.draft is None
            else {"target": pair.target, "draft": pair.draft}
        )
        for name, model in models.items():
            model.save_pretrained(folder / name)
            pair.tokenizer.save_pretrained(folder / name)
        del pair, model, models
        for repeat in range(repeats):
            for name, own in runs.items():
                own.append(in_own_process(folder, folder / f"cache-{repeat}"))
                print(name, own[-1], flush=True)
    return {
        name: {key: round(median(run[key] for run in own), 2) for key in FIGURES}
        for name, own in runs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="0.6B")
    parser.add_argument("--target", help="a checkpoint in place of the embedded pair")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    medians = compare(arguments.shape, arguments.target, arguments.dtype, arguments.repeats)
    print(json.dumps(medians, indent=1))
    if arguments.json:
        from hf_slospec.cli.benchmark import provenance

        facts = provenance(
            shape=arguments.shape, target=arguments.target and Path(arguments.target).name, dtype=arguments.dtype,
            repeats=arguments.repeats, new_tokens=NEW_TOKENS,
        )  # fmt: skip
        arguments.json.write_text(
            json.dumps({"provenance": facts, "medians": medians}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
