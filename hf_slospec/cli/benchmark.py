"""Timing of ``generate`` calls that take turns in one process, for ``bench``, ``check`` and
benchmarks.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

import hf_slospec
from hf_slospec.batcher.generator import SLOSpecGenerator
from hf_slospec.config import SLOSpecConfig
from hf_slospec.cpu.compile_job import no_compiler
from hf_slospec.drafters.assistant import AssistantMethod
from hf_slospec.drafters.methods import DraftMethod
from hf_slospec.forks import cached_property
from hf_slospec.model.machine import cpu_info, native_dtypes
from hf_slospec.model.transfer import synchronize

OURS = "hf_slospec"
WITHOUT_DRAFTS = "hf_slospec, no drafts"
PLAIN = "generate"
ASSISTED = "assisted, defaults"

ISA_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
)

# Encoded prompts -> sequences, or an output that has them
GenerateCall = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class Method:
    name: str
    batch: int
    run: GenerateCall
    # Makes a context manager that is entered before the timing
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


@dataclass(frozen=True)
class Sample:
    seconds: float
    sequences: torch.Tensor  # [batch, length] int64
    slo: Any  # metrics per row; None for stock
    steps: Any  # step events; None for stock


class Bench:
    """Benchmark that runs every method once per repeat, so that drift of the machine affects all
    methods equally.

    Args:
        prompt_tokens: prompts are truncated to this many tokens.
        new_tokens: new tokens of every row.
        sampling: options of every ``generate`` call, such as ``do_sample`` and ``temperature``;
            None: greedy.
        draft: the draft model; None: assisted generation is not timed.
        method: draft method of hf_slospec; None: it drafts with ``draft``.
        add_special_tokens: add the tokenizer's special tokens to the prompts.
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
        sampling: dict[str, Any] | None = None,
        method: DraftMethod | None = None,
        add_special_tokens: bool = True,
    ):
        self.target = target
        self.draft = draft
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.prompt_tokens = prompt_tokens
        self.add_special_tokens = add_special_tokens
        self.new_tokens = new_tokens
        self.config = config or SLOSpecConfig()
        self.sampling = {"do_sample": False} if sampling is None else {"do_sample": True} | sampling
        self.method = AssistantMethod(draft) if method is None else method
        for model in {target, draft} - {None}:
            model.generation_config.eos_token_id = None  # every row gets exactly new_tokens

    def methods(self, batches: Sequence[int]) -> list[Method]:
        """Return all methods; at batch 1 they include assisted generation and stock's prompt
        lookup.
        """
        methods = []
        for batch in batches:
            plain, *ours = self.gain_methods(batch)
            methods.append(plain)
            if batch == 1:
                if self.draft is not None:
                    methods.append(Method(ASSISTED, 1, self.stock(assistant_model=self.draft)))
                methods.append(
                    Method("prompt lookup, 10", 1, self.stock(prompt_lookup_num_tokens=10))
                )
            methods += ours
        return methods

    def gain_methods(self, batch: int) -> list[Method]:
        """Return stock ``generate``, and ours without drafts and with them."""
        return [
            Method(PLAIN, batch, self.stock()),
            Method(WITHOUT_DRAFTS, batch, self._of(self.generator_without_drafts)),
            Method(OURS, batch, self._of(self.generator)),
        ]

    @cached_property
    def generator(self) -> SLOSpecGenerator:
        """Our generator with the benchmark's config and draft method."""
        return self.new_generator(self.config)

    @cached_property
    def generator_without_drafts(self) -> SLOSpecGenerator:
        """Our generator with the same config, but a policy that drafts nothing."""
        return self.new_generator(self.config.model_copy(update={"policy": "none"}))

    def run(
        self, methods: list[Method], repeats: int, show: Callable[[str], None] = lambda text: None
    ) -> dict[tuple[str, int], list[Sample]]:
        """Time every method ``repeats`` times, after a call of each as warm-up, while no compiler
        of this package runs on this machine.

        Args:
            methods: in the order in which they take turns.
            repeats: timed calls of each method, each with other prompts.
            show: called with what is being done.

        Returns:
            Samples by name and batch size.
        """
        samples: dict[tuple[str, int], list[Sample]] = {
            (method.name, method.batch): [] for method in methods
        }
        for method in methods:  # warm-up, in which hf_slospec also measures its step costs
            show(f"warming up: {method.name} at batch {method.batch}")
            self.time(method, 0)
        show("waiting for a compiler of another process")
        with no_compiler():
            for repeat in range(repeats):
                for method in methods:
                    show(f"run {repeat + 1} of {repeats}: {method.name} at batch {method.batch}")
                    samples[method.name, method.batch].append(self.time(method, repeat))
        return samples

    def _inputs(self, batch: int, repeat: int) -> dict[str, Any]:
        texts = [self.prompts[(repeat * batch + row) % len(self.prompts)] for row in range(batch)]
        return encoded(
            self.tokenizer, texts, self.prompt_tokens, self.target.device, self.add_special_tokens
        )

    def time(self, method: Method, repeat: int) -> Sample:
        """Time one call with the repeat's prompts."""
        inputs = self._inputs(method.batch, repeat)
        torch.manual_seed(repeat)  # all methods that draw as stock does sample the same text
        with method.around():
            synchronize(self.target.device)
            started_s = time.perf_counter()
            output: Any = method.run(inputs)
            synchronize(self.target.device)
            seconds = time.perf_counter() - started_s
        sequences = getattr(output, "sequences", output)
        return Sample(
            seconds, sequences, getattr(output, "slo", None), getattr(output, "steps", None)
        )

    def stock(self, **options: Any) -> GenerateCall:
        return self._of(self.target, **options)

    def ours(self, config: SLOSpecConfig | None, method: DraftMethod | None = None) -> GenerateCall:
        """Return a call of the ``generate`` of :meth:`new_generator`."""
        return self._of(self.new_generator(config, method))

    def new_generator(
        self, config: SLOSpecConfig | None, method: DraftMethod | None = None
    ) -> SLOSpecGenerator:
        """Return a generator with this config and draft method; None: the benchmark's draft method.

        Forwards are compiled first, as a compiler in the background would slow all methods.
        """
        config = config or SLOSpecConfig()
        if config.compile:
            config = config.model_copy(update={"compile": "wait"})
        return SLOSpecGenerator(
            self.target, None, self.tokenizer, config, drafter=method or self.method
        )

    def _of(self, model: Any, **options: Any) -> GenerateCall:
        """Return a call of the ``generate`` of a model or generator."""
        if isinstance(model, SLOSpecGenerator):
            options["return_dict_in_generate"] = True
        return lambda inputs: model.generate(
            **inputs, **self.sampling, max_new_tokens=self.new_tokens, **options
        )


def encoded(
    tokenizer: Any,
    texts: list[str],
    max_len: int,
    device: torch.device,
    add_special_tokens: bool = True,
) -> dict[str, Any]:
    """Return prompts as inputs of ``generate``, truncated to ``max_len`` tokens and padded on the
    left.
    """
    options = {"padding": True, "padding_side": "left", "truncation": True, "max_length": max_len}
    options["add_special_tokens"] = add_special_tokens
    inputs = tokenizer(texts, return_tensors="pt", **options).to(device)
    inputs.pop("token_type_ids", None)
    return dict(inputs)


def summarize(
    samples: dict[tuple[str, int], list[Sample]], new_tokens: int
) -> list[dict[str, Any]]:
    """Return speed-up, speed, acceptance length and equality per method and batch size.

    Speed-ups over stock ``generate`` are medians of the ratios within a repeat.
    """
    rows = []
    for (name, batch), timed in samples.items():
        pairs = list(zip(samples[PLAIN, batch], timed, strict=True))
        ratios = [plain.seconds / sample.seconds for plain, sample in pairs]
        equal = [
            torch.equal(*rows)
            for plain, sample in pairs
            for rows in zip(plain.sequences, sample.sequences, strict=True)
        ]
        median_s = statistics.median(sample.seconds for sample in timed)
        lengths = [m.acceptance_length for s in timed if s.slo for m in s.slo if m.steps]
        rows.append(
            {
                "batch": batch,
                "name": name,
                "speedup_vs_generate": round(statistics.median(ratios), 3),
                "speedup_per_repeat": [round(ratio, 3) for ratio in ratios],
                "tokens_per_s": round(batch * new_tokens / median_s, 2),
                "ms_per_token_and_row": round(1e3 * median_s / new_tokens, 2),
                "acceptance_length": round(statistics.mean(lengths), 3) if lengths else None,
                "rows_equal_to_generate": f"{sum(equal)}/{len(equal)}",
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
        "native_dtypes": [
            str(dtype).removeprefix("torch.") for dtype, native in native_dtypes().items() if native
        ],
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        **facts,
    }


def _isa() -> str:
    """Return the instruction set of torch's kernels, and whether environment variables restrict it."""
    is_restricted = any(name in os.environ for name in ISA_VARIABLES)
    return torch.backends.cpu.get_cpu_capability() + (
        " (restricted by environment)" if is_restricted else ""
    )


def _commit() -> str | None:
    """Return the commit of the checkout that is running, with ``-dirty`` if files were changed;
    None if installed.
    """
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
