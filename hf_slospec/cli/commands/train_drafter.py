"""``hf_slospec train-drafter``: a drafter for a user's own target."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from hf_slospec.cli.activity import activity
from hf_slospec.cli.options import option, usage_errors, with_options
from hf_slospec.server.model_options import ModelOptions, only_errors_logged
from hf_slospec.training.options import TrainingOptions

if TYPE_CHECKING:
    from hf_slospec.batcher.generator import SLOSpecGenerator
    from hf_slospec.training.run import Show
    from hf_slospec.training.texts import TrainingText, Write

MODEL = ("target", "dtype", "device", "allow_missing")  # fields of ModelOptions


@with_options(
    *(option(ModelOptions, field) for field in MODEL),
    *(option(TrainingOptions, field) for field in TrainingOptions.model_fields),
)
def train_drafter(fields: dict[str, Any]) -> None:
    """Train a drafter for a target, from texts of yours or from texts that the target writes.

    The folder --out is one for --drafter of the other commands. The same command goes on where it
    was interrupted.

    Example:  hf_slospec train-drafter --target org/target --out org-target-eagle3 --minutes 120
    """
    from hf_slospec.model.machine import native_dtypes
    from hf_slospec.server.loading import load_models, size_and_place
    from hf_slospec.training.run import FOLDER, train_drafter

    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    with usage_errors(), only_errors_logged(), activity("loading", console) as shown:
        models = ModelOptions(**{field: fields.pop(field) for field in MODEL})
        options = TrainingOptions(**fields)
        target, _, tokenizer = load_models(models)
        if (
            models.dtype == "fast"
            and target.device.type == "cpu"
            and not native_dtypes()[target.dtype]
        ):
            target = (
                target.float()
            )  # bf16 is fast here only with packed weights, which cannot be trained on
        console.print(f"{models.name}: {size_and_place(target)}")
        write = writer(_generator(target, tokenizer), shown.detail)
        held_out = train_drafter(options, target, tokenizer, write, console.print, shown)
        if held_out is None:
            console.print(f"stopped after {options.minutes:g} minutes; the same command goes on")
            return
        shown("measuring the drafter on the held-out prompts")
        length = chain_length(target, tokenizer, options, held_out)
    console.print(
        f"{options.out}: {length:.2f} tokens per step on held-out prompts, greedy chains of {options.levels}"
    )
    console.print(f"use it by --drafter {options.out}; {options.out / FOLDER} may be deleted")
    typer.echo(json.dumps({"drafter": str(options.out), "tokens_per_step": round(length, 3)}))


def _generator(target: Any, tokenizer: Any, **options: Any) -> SLOSpecGenerator:
    from hf_slospec.batcher.generator import SLOSpecGenerator

    return SLOSpecGenerator(target, tokenizer=tokenizer, **options)


class _Counter:
    """Streamer that shows how many tokens of a batch are written."""

    def __init__(self, show: Show, batch: int, max_new_tokens: int):
        self._show = show
        self._number = -1  # the prompts come first
        self._of = f"of at most {max_new_tokens} tokens of a batch of {batch} written"

    def put(self, value: Any) -> None:
        self._number += 1
        self._show(f"{self._number} {self._of}")

    def end(self) -> None:
        self._show("")


def writer(generator: SLOSpecGenerator, show: Show = lambda text: None) -> Write:
    """Return a function that lets the model continue a batch of prompts, each to its end.

    Args:
        generator: of the target.
        show: called with the number of tokens written.
    """
    import torch

    from hf_slospec.generate.rows import model_end_tokens, until_end

    ends = model_end_tokens(generator.model.generation_config)

    def write(
        prompts: Sequence[list[int]], max_new_tokens: int, is_greedy: bool, seed: int
    ) -> list[list[int]]:
        sampling: dict[str, Any] = (
            {} if is_greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        )
        torch.manual_seed(seed)
        out = _continued(
            generator, prompts, max_new_tokens=max_new_tokens, do_sample=not is_greedy,
            streamer=_Counter(show, len(prompts), max_new_tokens), **sampling,
        )  # fmt: skip
        rows: list[list[int]] = out.sequences[:, max(map(len, prompts)) :].tolist()
        return [until_end(row, ends) for row in rows]

    return write


def chain_length(
    target: Any, tokenizer: Any, options: TrainingOptions, held_out: Sequence[TrainingText]
) -> float:
    """Load the trained drafter from its folder, and return its tokens per step with greedy chains
    on the held-out prompts.
    """
    from hf_slospec.config import SLOSpecConfig

    chains = SLOSpecConfig(policy="fixed", max_depth=options.levels, max_width=1)
    generator = _generator(target, tokenizer, drafter=options.out, config=chains)
    prompts = [text.ids[: text.begin] for text in held_out]
    new = max(len(text.ids) - text.begin for text in held_out)
    rows = _continued(generator, prompts, max_new_tokens=new, do_sample=False).slo
    return float(sum(row.tokens - 1 for row in rows) / max(1, sum(row.steps for row in rows)))


def _continued(generator: SLOSpecGenerator, prompts: Sequence[list[int]], **options: Any) -> Any:
    """Return the output of ``generate`` for prompts of different lengths, padded on the left."""
    import torch

    longest = max(map(len, prompts))
    device = generator.model.device
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    ids = torch.zeros_like(mask)
    ids[mask.bool()] = torch.tensor([token for prompt in prompts for token in prompt])
    return generator.generate(
        ids.to(device), attention_mask=mask.to(device), return_dict_in_generate=True, **options
    )
