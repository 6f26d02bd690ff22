"""``hf_slospec train-drafter``: a drafter for a user's own target."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from hf_slospec.cli.options import option, usage_errors, with_options
from hf_slospec.drafters.training.options import TrainingOptions
from hf_slospec.serving.log_level import only_errors_logged
from hf_slospec.serving.options import ModelOptions

if TYPE_CHECKING:
    from hf_slospec.drafters.training.texts import Text, Write
    from hf_slospec.serving.generator import SLOSpecGenerator

MODEL = ("target", "dtype", "device", "allow_missing")  # fields of ModelOptions


@with_options(
    *(option(ModelOptions, field) for field in MODEL),
    *(option(TrainingOptions, field) for field in TrainingOptions.model_fields),
)
def train_drafter(given: dict[str, Any]) -> None:
    """Train a drafter for a target, from texts of yours or from texts that the target writes.

    The folder --out is one for --drafter of the other commands. The same command goes on where it was interrupted.

    Example:  hf_slospec train-drafter --target org/target --out org-target-eagle3 --minutes 120
    """
    from hf_slospec.drafters.training.run import FOLDER, train_drafter
    from hf_slospec.serving.loading import load_models, size_and_place

    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    with usage_errors(), only_errors_logged():
        models = ModelOptions(**{field: given.pop(field) for field in MODEL})
        options = TrainingOptions(**given)
        target, _, tokenizer = load_models(models)
        console.print(f"{models.name}: {size_and_place(target)}")
        write = writer(_generator(target, tokenizer))
        held_out = train_drafter(options, target, tokenizer, write, console.print)
        if held_out is None:
            console.print(f"stopped after {options.minutes:g} minutes; the same command goes on")
            return
        length = chain_length(target, tokenizer, options, held_out)
    console.print(f"{options.out}: {length:.2f} tokens per step on held-out prompts, greedy chains of {options.levels}")
    console.print(f"use it by --drafter {options.out}; {options.out / FOLDER} may be deleted")
    typer.echo(json.dumps({"drafter": str(options.out), "tokens_per_step": round(length, 3)}))


def _generator(target: Any, tokenizer: Any, **options: Any) -> SLOSpecGenerator:
    from hf_slospec.serving.generator import SLOSpecGenerator

    return SLOSpecGenerator(target, tokenizer=tokenizer, **options)


def writer(generator: SLOSpecGenerator) -> Write:
    """Return a function that continues prompts in a batch, each up to its end of text."""
    import torch

    ends: Any = generator.model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else {*(ends or ())}

    def write(prompts: Sequence[list[int]], max_new_tokens: int, is_greedy: bool, seed: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        ids = torch.zeros_like(mask)
        ids[mask.bool()] = torch.tensor([token for prompt in prompts for token in prompt])
        sampling: dict[str, Any] = {} if is_greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(seed)
        device = generator.model.device
        out = generator.generate(
            ids.to(device), attention_mask=mask.to(device), max_new_tokens=max_new_tokens, do_sample=not is_greedy,
            **sampling,
        )  # fmt: skip
        rows: list[list[int]] = out[:, longest:].tolist()
        return [row[: next((place + 1 for place, token in enumerate(row) if token in ends), None)] for row in rows]

    return write


def chain_length(target: Any, tokenizer: Any, options: TrainingOptions, held_out: Sequence[Text]) -> float:
    """Return the tokens per step of greedy chains of the trained drafter, loaded from its folder, behind prompts."""
    import torch

    from hf_slospec.config import SLOSpecConfig

    chains = SLOSpecConfig(policy="fixed", max_depth=options.levels, max_width=1)
    generator = _generator(target, tokenizer, drafter=options.out, config=chains)
    num_tokens = num_steps = 0
    for text in held_out:
        prompt = torch.tensor([text.ids[: text.begin]], device=target.device)
        new = len(text.ids) - text.begin
        out = generator.generate(prompt, max_new_tokens=new, do_sample=False, return_dict_in_generate=True)
        num_tokens, num_steps = num_tokens + out.slo[0].tokens - 1, num_steps + out.slo[0].steps
    return num_tokens / max(1, num_steps)
