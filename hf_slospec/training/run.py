"""Training of a drafter: texts, optimizer steps, evaluations, and checkpoints to resume from."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, get_wsd_schedule

from hf_slospec.errors import InvalidInputError
from hf_slospec.heads.mtp import own_modules
from hf_slospec.model.checksum import digest
from hf_slospec.model.properties import vocab_size
from hf_slospec.training.heads import Student, new_head, write_head
from hf_slospec.training.options import WITHOUT_EFFECT, TrainingOptions
from hf_slospec.training.teacher import Teacher
from hf_slospec.training.texts import (
    TrainingText,
    Write,
    batches,
    collect,
    is_excluded,
    own_texts,
    read_data,
    read_excluded,
)
from hf_slospec.training.unrolling import STRIDE, loss_of, tokens_per_step

# Coefficients of powers 1, 3 and 5 in the Newton-Schulz iteration that orthogonalizes a matrix
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
EPS = 1e-7


class Muon(torch.optim.Optimizer):
    """Muon (https://kellerjordan.github.io/posts/muon/), as in torch 2.9, whose checkpoints it
    can load.

    ``torch.optim.Muon`` computes in bf16 on all devices, which takes many times as long as f32 on
    CPUs without bf16 instructions. This class computes in bf16 on GPUs only.
    """

    def __init__(
        self, matrices: Iterable[torch.Tensor], lr: float, weight_decay: float, momentum: float
    ):
        """Create an optimizer of matrices: parameters with two dimensions."""
        super().__init__(matrices, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters from their gradients, with Nesterov momentum."""
        assert closure is None
        for group in self.param_groups:
            lr = float(group["lr"])
            momentum = group["momentum"]
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                average = self.state[matrix].setdefault(
                    "momentum_buffer", torch.zeros_like(matrix.grad)
                )
                average.lerp_(matrix.grad, 1 - momentum)
                dtype = torch.bfloat16 if matrix.is_cuda else torch.float32
                update = orthogonalized(matrix.grad.lerp(average, momentum), dtype)
                rows, columns = matrix.shape
                matrix.mul_(1 - lr * group["weight_decay"])
                matrix.add_(update, alpha=-lr * max(1.0, rows / columns) ** 0.5)


def orthogonalized(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a matrix of this dtype with the same singular vectors, and singular values of about 1.
    [rows, columns]
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_tall else matrix
    wide = wide.to(dtype)
    wide = wide / wide.norm().clamp(min=EPS)
    for _ in range(NUM_ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if is_tall else wide


FOLDER = "training"
SETTINGS = "settings.json"
CHECKPOINT = "checkpoint-"
PROGRESS = "progress.json"
PER_TOKEN = ("lm_head.", "markov_head.")  # weights with a row per vocabulary entry
# Learning rates of Muon (matrices) and AdamW (other parameters)
MATRICES_RATE = 0.02
OTHERS_RATE = 3e-3
# Shares of the steps in which learning rates rise at the beginning and fall at the end
WARM_UP = 0.05
DECAY = 0.4
SMOOTHING = 0.95  # Weight of earlier steps in the loss that is shown.

Show = Callable[[str], None]


@dataclass
class TrainingProgress:
    """Progress of a training, which is stored in every checkpoint."""

    step: int = 0
    loss: float = 0.0  # smoothed
    best: float = 0.0  # tokens per step of the best head, which was written
    num_worse: int = 0  # evaluations since the best one
    seconds: float = 0.0
    evaluations: list[dict[str, float]] = field(default_factory=list)


def train_drafter(
    options: TrainingOptions,
    target: PreTrainedModel,
    tokenizer: Any,
    write: Write,
    show: Show,
    progress: Show = lambda text: None,
) -> list[TrainingText] | None:
    """Train a drafter, or resume its training.

    Args:
        options: all settings.
        target: the model to draft for, without gradients.
        tokenizer: the target's tokenizer.
        write: lets the target continue prompts.
        show: prints a line.
        progress: replaces the line that says what is being done.

    Returns:
        The held-out texts if the training is finished; None if ``options.minutes`` have passed.

    Raises:
        InvalidInputError: the folder holds something other than this training, or the texts cannot
            be used.
        UnsupportedModelError: a drafter of this kind cannot be trained for the target.
    """
    begun_s = time.monotonic()
    limit_s = 60 * (options.minutes or float("inf"))

    def is_late() -> bool:
        return time.monotonic() - begun_s >= limit_s

    excluded = read_excluded(options.exclude)
    source = (
        own_texts(tokenizer, write, options.write_batch)
        if options.data is None
        else read_data(options.data, tokenizer, options.seq_len, options.seed, options.write_batch)
    )
    folder = options.out / FOLDER
    _begin(folder, options, target)

    def is_wanted(ids: list[int]) -> bool:
        return not is_excluded(tokenizer.decode(ids), excluded)

    eta = _Remaining(options.texts)
    texts = collect(
        folder / "texts.jsonl",
        source,
        write,
        is_wanted,
        options,
        is_late,
        lambda number: progress(f"{number} of {options.texts} texts{eta(number)}"),
    )
    if texts is None:
        return None
    held_out, training = texts
    show(
        f"{len(training)} texts of {sum(len(text.ids) for text in training)} tokens, "
        f"{len(held_out)} held out"
    )
    counts = torch.bincount(
        torch.tensor([token for text in training for token in text.ids]),
        minlength=vocab_size(target),
    )
    head = new_head(options, target, counts)
    trainer = Trainer(options, target, head, training, held_out, show, progress)
    return held_out if trainer.run(is_late) else None


class _Remaining:
    """Estimate of the time until a number of things are done."""

    def __init__(self, total: int):
        self._total = total
        self._first: int | None = None
        self._begun_s = 0.0

    def __call__(self, number: int) -> str:
        """Return ", about N min more" from the second call with another number on, else ""."""
        now_s = time.monotonic()
        if self._first is None:
            self._first = number
            self._begun_s = now_s
        if number <= self._first:
            return ""
        minutes = (now_s - self._begun_s) / (number - self._first) * (self._total - number) / 60
        return f", about {minutes:.0f} min more" if minutes >= 1 else ", less than a minute more"


def _begin(folder: Path, options: TrainingOptions, target: PreTrainedModel) -> None:
    """Create the folder of a new training, or raise InvalidInputError if the training in it has
    other settings or another target.
    """
    files = [options.data] if options.data else []
    files += options.exclude
    settings = options.model_dump(mode="json", exclude=WITHOUT_EFFECT) | {
        "files": [hashlib.sha256(path.read_bytes()).hexdigest() for path in files],
        "target": hashlib.sha256(repr(digest(target.parameters())).encode()).hexdigest(),
        "dtype": str(target.dtype),
    }
    path = folder / SETTINGS
    out = options.out
    try:
        if not path.exists():
            if out.exists() and (not out.is_dir() or any(out.iterdir())):
                raise InvalidInputError(
                    f"{out} holds something other than a training; give a new folder with --out"
                )
            folder.mkdir(parents=True)
            path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"--out {out} cannot be used: {error}; give another folder"
        ) from error
    names = {"files": "the content of --data or --exclude", "target": "the target (its weights)"}
    changed = [
        names.get(name) or f"--{name.replace('_', '-')} ({saved.get(name)} and not {value})"
        for name, value in settings.items()
        if saved.get(name) != value
    ]
    if changed:
        raise InvalidInputError(
            f"{out} holds a training with other settings: {', '.join(changed)}; give the same "
            "ones to go on, or another --out"
        )


def optimizers_of(module: torch.nn.Module, scale: float = 1.0) -> tuple[Muon, torch.optim.AdamW]:
    """Return the optimizers of a head's own parameters: AdamW for vectors and weights with a row
    per vocabulary entry, Muon for all other matrices.

    Args:
        module: the head's :func:`own_modules`.
        scale: factor of the learning rates.
    """
    matrices = list[torch.nn.Parameter]()
    vectors = list[torch.nn.Parameter]()
    for name, parameter in module.named_parameters():
        is_matrix = parameter.ndim == 2 and min(parameter.shape) > 1
        is_muons = is_matrix and not name.startswith(PER_TOKEN)
        (matrices if is_muons else vectors).append(parameter)
    return (
        Muon(matrices, lr=scale * MATRICES_RATE, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(vectors, lr=scale * OTHERS_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    )


class Trainer:
    """Trains a head with :func:`optimizers_of`.

    Learning rates rise, stay constant, and fall to zero. Random choices depend only on seed and
    step, so that an interrupted and resumed run gives the same weights.
    """

    def __init__(
        self,
        options: TrainingOptions,
        target: PreTrainedModel,
        head: Student,
        training: Sequence[TrainingText],
        held_out: Sequence[TrainingText],
        show: Show,
        show_progress: Show,
    ):
        self.options = options
        self.target = target
        self.head = head
        self.show = show
        self.show_progress = show_progress
        self.folder = options.out / FOLDER
        self.teacher = Teacher(
            target, head, training, self.folder, options.features_gb, options.levels
        )
        self.examiner = Teacher(target, head, held_out, self.folder, 0.0, options.levels)
        # Mean number of tokens per batch that enter the loss
        self.num_counted = (
            options.batch * sum(len(text.ids) - text.begin for text in training) / len(training)
        )
        self.batch_of = batches(options.seed, [len(text.ids) for text in training], options.batch)
        module = own_modules(head, target)
        optimizers = optimizers_of(module)
        warm_up = int(WARM_UP * options.steps)
        decay = int(DECAY * options.steps)
        schedules = [
            get_wsd_schedule(optimizer, warm_up, decay, options.steps, decay_type="linear")
            for optimizer in optimizers
        ]
        self.accelerator = Accelerator(
            cpu=self.teacher.device.type == "cpu", device_placement=False
        )
        self.module, *rest = self.accelerator.prepare(module, *optimizers, *schedules)
        self.optimizers = rest[:2]
        self.schedules = rest[2:]
        self.progress = TrainingProgress()

    def run(self, is_late: Callable[[], bool]) -> bool:
        """Train until the training is finished; return False if ``is_late`` stopped it before."""
        self._resume()
        progress = self.progress
        options = self.options
        if not progress.evaluations:
            self._evaluate()
        begun_s = time.monotonic() - progress.seconds
        eta = _Remaining(options.steps)
        while not self._is_finished:
            self.show_progress(
                f"step {progress.step} of at most {options.steps}{eta(progress.step)}, "
                f"loss {progress.loss:.3f}, "
                f"{progress.evaluations[-1]['tokens_per_step']:.2f} tokens per step"
            )
            if is_late():
                self._save()
                return False
            loss = self._step()
            progress.step += 1
            progress.loss = (
                SMOOTHING * progress.loss + (1 - SMOOTHING) * loss if progress.step > 1 else loss
            )
            progress.seconds = time.monotonic() - begun_s
            if progress.step % options.eval_every == 0 or progress.step == options.steps:
                self.show_progress(f"evaluating after step {progress.step}")
                self._evaluate()
                self._save()
        return True

    @property
    def _is_finished(self) -> bool:
        patience = self.options.patience
        return self.progress.step >= self.options.steps or 0 < patience <= self.progress.num_worse

    def _step(self) -> float:
        """Train on one batch; return the loss."""
        step = self.progress.step
        rows = self.teacher.rows(self.batch_of(step))
        with self._autocast():
            loss = loss_of(self.head, rows, self.options.levels, step % STRIDE)
        # All tokens weigh the same: a batch of shorter texts, which has fewer, counts less.
        self.accelerator.backward(loss * (rows.counts.sum() / self.num_counted))
        self.accelerator.clip_grad_norm_(self.module.parameters(), 1.0)
        for stepping in (*self.optimizers, *self.schedules):
            stepping.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return loss.item()

    def _evaluate(self) -> None:
        """Measure the tokens per step on held-out texts; write the head if it is the best so far.

        The head before the first step is measured, but never written.
        """
        progress = self.progress
        options = self.options
        size = self.options.batch
        indices = range(len(self.examiner.texts))
        batches = [
            self.examiner.rows(indices[begin : begin + size], with_probs=False)
            for begin in indices[::size]
        ]
        with self._autocast():
            accepted = tokens_per_step(self.head, batches, options.levels)
        evaluation = {
            "step": progress.step,
            "loss": round(progress.loss, 4),
            "tokens_per_step": round(accepted, 4),
        }
        progress.evaluations.append(evaluation)
        self.show(
            ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in evaluation.items())
        )
        if not progress.step:
            return
        progress.num_worse += 1
        if accepted > progress.best:
            progress.best = accepted
            progress.num_worse = 0
            write_head(self.head, self.target, options)

    def _autocast(self) -> Any:
        is_on = self.target.dtype != torch.float32
        return torch.autocast(self.teacher.device.type, torch.bfloat16, enabled=is_on)

    def _save(self) -> None:
        """Write a checkpoint, then delete older ones; an interruption leaves a complete one."""
        name = self.folder / f"{CHECKPOINT}{self.progress.step:08d}"
        partial = self.folder / "partial"
        if name in (older := self._checkpoints()):
            return
        shutil.rmtree(partial, ignore_errors=True)
        self.accelerator.save_state(str(partial))
        (partial / PROGRESS).write_text(json.dumps(asdict(self.progress)), encoding="utf-8")
        partial.rename(name)
        for folder in older:
            shutil.rmtree(folder)

    def _resume(self) -> None:
        if checkpoints := self._checkpoints():
            self.accelerator.load_state(str(checkpoints[-1]))
            self.progress = TrainingProgress(
                **json.loads((checkpoints[-1] / PROGRESS).read_text(encoding="utf-8"))
            )
            self.show(f"going on after step {self.progress.step}")

    def _checkpoints(self) -> list[Path]:
        return sorted(self.folder.glob(f"{CHECKPOINT}*"))
