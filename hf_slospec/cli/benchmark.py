"""Speed of stock ``generate``, assisted generation, prompt lookup and hf_slospec, interleaved in one process."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

import hf_slospec
from hf_slospec.cli.draft_recording import recorded
from hf_slospec.config import SLOSpecConfig
from hf_slospec.drafters.assistant import AssistantMethod
from hf_slospec.drafters.methods import DraftMethod
from hf_slospec.lab.texts import RecordedText
from hf_slospec.models.device.device_calls import synchronize
from hf_slospec.models.device.machine import cpu_info, native_dtypes
from hf_slospec.serving.generator import SLOSpecGenerator

OURS = "hf_slospec"
PREPACK_OFF = "hf_slospec, prepack off"  # CPU only: neither packed weights nor compiled forwards
NO_DRAFTS = "hf_slospec, no drafts"  # packed weights, compiled forwards and CUDA graphs alone
UNCOUPLED = "hf_slospec, uncoupled"  # sampled text only
PLAIN = "generate"
ASSISTED = "assisted, defaults"

ISA_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")

GenerateCall = Callable[[dict[str, Any]], Any]  # encoded prompts -> sequences, or an output that has them


@dataclass(frozen=True)
class Method:
    """A decoding method at one batch size."""

    name: str
    batch: int
    run: GenerateCall
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext  # entered before timing
    is_ours: bool = False


@dataclass(frozen=True)
class Sample:
    """One timed call."""

    seconds: float
    # Seconds of them in the models' forwards, of hf_slospec in drafting and verifying; None if they were not timed
    forward_s: float | None
    sequences: torch.Tensor  # [batch, length] int64
    slo: Any  # metrics per row; None for stock
    steps: Any  # step events; None for stock


class Bench:
    """Benchmark that runs every method once per repeat, so that drift of the machine affects all methods equally.

    Args:
        prompt_tokens: prompts are truncated to this many tokens.
        new_tokens: new tokens of every row.
        times_forwards: wait for the GPU before and after every forward, which prevents overlap with the host.
        sampling: options of every ``generate`` call, such as ``do_sample`` and ``temperature``; None: greedy.
        draft: the model of assisted generation, which is left out without one.
        method: the draft method of hf_slospec; None: by the draft.
    """

    def __init__(
        self,
        target: Any,
        draft: Any,
        tokenizer: PreTrainedTokenizerBase,
        prompts: list[str],
        prompt_tokens: int,
        new_tokens: int,
        config: SLOSpecConfig | None = None,
        times_forwards: bool = True,
        sampling: dict[str, Any] | None = None,
        method: DraftMethod | None = None,
    ):
        self.target, self.draft, self.tokenizer, self.prompts = target, draft, tokenizer, prompts
        self.prompt_tokens, self.new_tokens = prompt_tokens, new_tokens
        self.config, self.times_forwards = config or SLOSpecConfig(), times_forwards
        self.sampling = {"do_sample": False} if sampling is None else {"do_sample": True} | sampling
        self.method = AssistantMethod(draft) if method is None else method
        self.timed = {model for model in (target, draft, self.method.model) if model is not None}
        for model in {target, draft} - {None}:
            model.generation_config.eos_token_id = None  # every row gets exactly new_tokens

    def methods(self, batches: list[int], constants: list[int]) -> list[Method]:
        """Return all methods; at batch 1 they include assisted generation with ``constants`` of assistant tokens."""
        methods, ours = [], {OURS: self.ours(self.config)}
        plain = SLOSpecConfig(policy="none", prepack=self.config.prepack, compile=self.config.compile)
        ours[NO_DRAFTS] = self.ours(plain)
        if self.target.device.type == "cpu":
            ours[PREPACK_OFF] = self.ours(self.config.model_copy(update={"prepack": False, "compile": False}))
        if self.sampling["do_sample"]:
            ours[UNCOUPLED] = self.ours(self.config.model_copy(update={"coupling": False}))
        for batch in batches:
            methods.append(Method(PLAIN, batch, self.stock()))
            if batch == 1:
                if self.draft is not None:
                    methods.append(Method(ASSISTED, 1, self._assisted(None)))
                    methods += [Method(f"assisted, {k} constant", 1, self._assisted(k)) for k in constants]
                methods.append(Method("prompt lookup, 10", 1, self.stock(prompt_lookup_num_tokens=10)))
            methods += [Method(name, batch, run, is_ours=True) for name, run in ours.items()]
        return methods

    def run(
        self, methods: list[Method], repeats: int, allows: Callable[[float], bool] = lambda seconds: True
    ) -> dict[tuple[str, int], list[Sample]]:
        """Time every method ``repeats`` times, or fewer if ``allows`` refuses a further repeat of so many seconds.

        Returns:
            Samples by name and batch size.
        """
        samples: dict[tuple[str, int], list[Sample]] = {(method.name, method.batch): [] for method in methods}
        for method in methods:  # warm-up, in which hf_slospec also measures its step costs
            if method.name in (PLAIN, OURS, NO_DRAFTS, PREPACK_OFF, UNCOUPLED, ASSISTED):
                self.time(method, 0)
        with tqdm(total=repeats * len(methods), desc="bench", disable=not sys.stderr.isatty()) as bar:
            for repeat in range(repeats):
                if repeat and not allows(sum(timed[-1].seconds for timed in samples.values())):
                    break
                for method in methods:
                    samples[method.name, method.batch].append(self.time(method, repeat))
                    bar.update()
        return samples

    def _inputs(self, batch: int, repeat: int) -> dict[str, Any]:
        texts = [self.prompts[(repeat * batch + row) % len(self.prompts)] for row in range(batch)]
        return encoded(self.tokenizer, texts, self.prompt_tokens, self.target.device)

    def record(self, samples: dict[tuple[str, int], list[Sample]]) -> list[RecordedText]:
        """Return the outputs of hf_slospec with the draft's probabilities."""
        texts = []
        for (name, batch), timed in samples.items():
            if name != OURS:
                continue
            for repeat, sample in enumerate(timed):
                mask = self._inputs(batch, repeat)["attention_mask"]
                for row, sequence in zip(mask, sample.sequences, strict=True):
                    prompt_len = int(row.sum())
                    texts.append(recorded(self.draft, sequence[len(row) - prompt_len :].tolist(), prompt_len))
        return texts

    def time(self, method: Method, repeat: int) -> Sample:
        """Time one call with the repeat's prompts."""
        inputs = self._inputs(method.batch, repeat)
        torch.manual_seed(repeat)  # all methods that draw as stock does sample the same text
        is_hooked = self.times_forwards and not method.is_ours  # a model with hooks is not compiled
        timing = forward_time(*self.timed) if is_hooked else contextlib.nullcontext()
        with method.around(), timing as spent:
            synchronize(self.target.device)
            started_s = time.perf_counter()
            output: Any = method.run(inputs)
            synchronize(self.target.device)
            seconds = time.perf_counter() - started_s
        steps = getattr(output, "steps", None)
        if self.times_forwards and steps is not None:
            spent = [sum(step.phases.draft_s + step.phases.verify_s for step in steps)]
        sequences, slo = getattr(output, "sequences", output), getattr(output, "slo", None)
        return Sample(seconds, spent[0] if spent else None, sequences, slo, steps)

    def stock(self, **options: Any) -> GenerateCall:
        """Return stock ``generate`` with further options."""

        def run(inputs: dict[str, Any]) -> Any:
            return self.target.generate(**inputs, **self.sampling, max_new_tokens=self.new_tokens, **options)

        return run

    def _assisted(self, constant: int | None) -> GenerateCall:
        run = self.stock(assistant_model=self.draft)
        if constant is None:
            return run

        def run_constant(inputs: dict[str, Any]) -> Any:
            with constant_draft(self.draft, constant):
                return run(inputs)

        return run_constant

    def ours(self, config: SLOSpecConfig | None, method: DraftMethod | None = None, waits: bool = True) -> GenerateCall:
        """Return ``generate`` of an SLOSpecGenerator with this config, and another draft method if one is given.

        With ``waits``, forwards are compiled first: a compiler that ran beside the methods would slow them all.
        """
        config = config or SLOSpecConfig()
        if config.compile and waits:
            config = config.model_copy(update={"compile": "wait"})
        generator = SLOSpecGenerator(self.target, None, self.tokenizer, config, drafter=method or self.method)

        def run(inputs: dict[str, Any]) -> Any:
            return generator.generate(
                **inputs, **self.sampling, max_new_tokens=self.new_tokens, return_dict_in_generate=True
            )

        return run


@contextlib.contextmanager
def constant_draft(draft: Any, num_tokens: int) -> Iterator[None]:
    """Let assisted generation draft this many tokens in every step, inside this context."""
    settings = {
        "num_assistant_tokens": num_tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    config = draft.generation_config
    stock = {name: getattr(config, name) for name in settings}
    config.update(**settings)
    try:
        yield
    finally:
        config.update(**stock)


def encoded(
    tokenizer: Any, texts: list[str], max_len: int, device: torch.device, add_special_tokens: bool = True
) -> dict[str, Any]:
    """Return prompts as inputs of ``generate``, truncated to ``max_len`` tokens and padded on the left."""
    options = {"padding": True, "padding_side": "left", "truncation": True, "max_length": max_len}
    options["add_special_tokens"] = add_special_tokens
    inputs = tokenizer(texts, return_tensors="pt", **options).to(device)
    inputs.pop("token_type_ids", None)
    return dict(inputs)


@contextlib.contextmanager
def forward_time(*models: torch.nn.Module) -> Iterator[list[float]]:
    """Yield a list of one element: the seconds spent in the models' forwards inside the context."""
    spent, started = [0.0], [0.0]

    def before(module: torch.nn.Module, *_: Any) -> None:
        synchronize(next(module.parameters()).device)
        started[0] = time.perf_counter()

    def after(module: torch.nn.Module, *_: Any) -> None:
        synchronize(next(module.parameters()).device)
        spent[0] += time.perf_counter() - started[0]

    hooks = [model.register_forward_pre_hook(before) for model in models]
    hooks += [model.register_forward_hook(after) for model in models]
    try:
        yield spent
    finally:
        for hook in hooks:
            hook.remove()


def summarize(samples: dict[tuple[str, int], list[Sample]], new_tokens: int) -> list[dict[str, Any]]:
    """Return figures per method and batch size.

    Speed-ups are medians of the ratios within a repeat; None where stock ``generate`` was not run.
    """
    rows = []
    for (name, batch), timed in samples.items():
        plain = samples.get((PLAIN, batch), timed)
        ratios = [p.seconds / s.seconds for p, s in zip(plain, timed, strict=True)]
        pairs = [pair for p, s in zip(plain, timed, strict=True) for pair in zip(p.sequences, s.sequences, strict=True)]
        equal = [torch.equal(stock, ours) for stock, ours in pairs]
        is_compared = (PLAIN, batch) in samples
        shares = [1 - s.forward_s / s.seconds for s in timed if s.forward_s is not None]
        lengths = [m.acceptance_length for s in timed if s.slo for m in s.slo if m.steps]
        rows.append(
            {
                "batch": batch,
                "name": name,
                "speedup_vs_generate": round(statistics.median(ratios), 3) if is_compared else None,
                "speedup_per_repeat": [round(ratio, 3) for ratio in ratios] if is_compared else None,
                "tokens_per_s": round(batch * new_tokens / statistics.median(s.seconds for s in timed), 2),
                "ms_per_token_and_row": round(1e3 * statistics.median(s.seconds for s in timed) / new_tokens, 2),
                "host_share": round(statistics.median(shares), 4) if shares else None,
                "acceptance_length": round(statistics.mean(lengths), 3) if lengths else None,
                "rows_equal_to_generate": f"{sum(equal)}/{len(equal)}" if is_compared else None,
            }
        )
    return rows


def provenance(**facts: Any) -> dict[str, Any]:
    """Return the facts that reproduce a result: versions, hardware, date and ``facts``."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": f"{os.cpu_count()} x {cpu_info('model name') or platform.processor()}",
        "isa": _isa(),
        "native_dtypes": [str(dtype).removeprefix("torch.") for dtype, native in native_dtypes().items() if native],
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        **facts,
    }


def _isa() -> str:
    """Return the instruction set of torch's kernels, and whether environment variables restrict it."""
    is_restricted = any(name in os.environ for name in ISA_VARIABLES)
    return torch.backends.cpu.get_cpu_capability() + (" (restricted by environment)" if is_restricted else "")


def _commit() -> str | None:
    """Return the commit of the checkout that is running, with ``-dirty`` if files were changed; None if installed."""
    root = Path(hf_slospec.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()
