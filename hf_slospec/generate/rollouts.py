"""``RolloutCallback`` and ``reuse_logprobs``: tree speculation for trainers that sample rollouts with
``generate`` or ``generate_batch``, such as TRL's.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import logging
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.generation.continuous_batching.requests import GenerationOutput

from hf_slospec.config import SLOSpecConfig
from hf_slospec.drafters.load_drafter import Source, load_drafter
from hf_slospec.drafters.past_answers import PastAnswers
from hf_slospec.errors import FallbackWarning, UnsupportedOptionError
from hf_slospec.generate.call import Decoder, Done
from hf_slospec.generate.continuous_batching import ScoredBatching
from hf_slospec.generate.enable import decoder_of, disable, enable
from hf_slospec.model.version import ModelVersion

logger = logging.getLogger(__name__)
FILE = "past_answers.json"  # file name in a checkpoint folder
# Training arguments of TRL with which the trainer calls no method that enable() replaces.
BYPASSES = ("use_vllm",)
# Method of TRL's trainers that computes the log probabilities of a batch, and how it names an
# argument that only the method of TRL 1.16 and later has.
SCORES = "_get_per_token_logps_and_entropies"
SCORES_OPTION = "compute_aux_loss"


class RolloutCallback(TrainerCallback):
    """Trainer callback that calls :func:`enable` on the model when training begins and
    :func:`disable` when it ends.

    Past answers, which the drafter looks up, are saved in checkpoint folders by the first process,
    and loaded when training resumes.
    """

    def __init__(
        self,
        drafter: Source = "suffix",
        *,
        past: PastAnswers | None = None,
        config: SLOSpecConfig | None = None,
        fallback: bool = False,
    ):
        """Prepare the callback for one training.

        Args:
            drafter: see :func:`load_drafter`.
            past: past answers from which drafts are looked up; None: start without any, with the
                default limits.
            config, fallback: see :func:`enable`.
        """
        self.drafter = drafter
        self.config = config
        self.fallback = fallback
        self.past = PastAnswers() if past is None else past
        # Committed tokens per row and decode step; one entry per epoch so far.
        self.tokens_per_step = list[float]()
        self._decoder: Decoder | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Start speculation, and warn if the trainer will decode by another library."""
        for name in BYPASSES:
            if getattr(args, name, False):
                warnings.warn(
                    f"rollouts are not speculated with {name}=True, as the trainer calls neither generate nor "
                    "generate_batch; set it to False",
                    FallbackWarning,
                    stacklevel=2,
                )
        if (saved := in_checkpoint(args, state, FILE)).exists():
            self.past.load(saved)
        method = load_drafter(self.drafter, model, share_texts=self.past)
        enable(model, drafter=method, config=self.config, always=True, fallback=self.fallback)
        self._decoder = decoder_of(model)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the number of tokens per decode step in this epoch's rollouts."""
        assert self._decoder is not None
        done = self._decoder.done
        self._decoder.done = Done()
        if (rate := done.tokens_per_step) is not None:
            self.tokens_per_step.append(rate)
            logger.info("rollouts: %.2f tokens per step and row", rate)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save past answers in the checkpoint folder; the first process does it."""
        if state.is_world_process_zero:
            self.past.save(in_checkpoint(args, state, FILE))

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Stop speculation: give the model its previous ``generate`` back."""
        disable(model)


def in_checkpoint(args: Any, state: Any, name: str) -> Path:
    """Return the path of a file in the checkpoint folder of a trainer's present step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / name


def reuse_logprobs(trainer: Any) -> ReusedLogprobs:
    """Let a TRL trainer take the log probabilities of its completions under the weights that
    sampled them ("old" ones) from verification, instead of computing them by another forward.

    The trainer still computes them itself for batches of which one is missing: completions of
    several turns with tools, or of a model that is not enabled.

    Args:
        trainer: TRL's ``GRPOTrainer`` or ``RLOOTrainer`` (TRL 1.16), with
            ``use_transformers_continuous_batching=True``.

    Returns:
        An object that counts the forwards that were left out.

    Raises:
        UnsupportedOptionError: the trainer computes no such log probabilities, or does not call
            ``generate_batch``.
    """
    return ReusedLogprobs(trainer)


class ReusedLogprobs:
    """Log probabilities of the completions that a trainer's model sampled last; see
    :func:`~hf_slospec.reuse_logprobs`.

    Attributes:
        num_skipped: number of forwards that the trainer left out.
    """

    def __init__(self, trainer: Any):
        compute = getattr(trainer, SCORES, None)
        if compute is None or SCORES_OPTION not in inspect.signature(compute).parameters:
            raise UnsupportedOptionError(
                f"{type(trainer).__name__} has no forward for old log probabilities that could be left out, as "
                "GRPOTrainer and RLOOTrainer of TRL 1.16 have"
            )
        batching = getattr(trainer, "continuous_batching_config", None)
        if batching is None:
            raise UnsupportedOptionError(
                "the trainer does not sample with generate_batch, which returns log probabilities; set "
                "use_transformers_continuous_batching=True in its config"
            )
        given = {one.name: getattr(batching, one.name) for one in dataclasses.fields(batching)}
        given |= {"temperature": float(trainer.temperature), "take": self._take}
        trainer.continuous_batching_config = ScoredBatching(**given)
        self.num_skipped = 0
        self._trainer = trainer
        self._compute = compute
        self._rows: dict[tuple[int, ...], list[float]] = {}  # by the tokens of a whole row
        self._version: ModelVersion | None = None  # of the model that sampled the rows
        self._weights = 0  # its counter then
        setattr(trainer, SCORES, self._logprobs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReusedLogprobs:
        """Return itself: stock ``generate_batch`` copies its settings, which refer to this."""
        return self

    def _take(self, outputs: Iterable[GenerationOutput], version: ModelVersion) -> None:
        """Keep the log probabilities of one call of ``generate_batch``, until the next one."""
        self._rows = {(*one.prompt_ids, *one.generated_tokens): one.logprobs for one in outputs}
        self._version = version
        self._weights = version.weights

    def _logprobs(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """Return what the trainer's own method returns for these arguments."""
        arguments = inspect.signature(self._compute).bind(*args, **kwargs).arguments
        wants_more = arguments.get("compute_entropy") or arguments.get(SCORES_OPTION)
        is_policy = arguments["model"] is self._trainer.model
        if is_policy and not wants_more and not torch.is_grad_enabled() and self._is_current():
            input_ids = arguments["input_ids"]
            found = self._found(input_ids, arguments["attention_mask"], arguments["logits_to_keep"])
            if found is not None:
                self.num_skipped += 1
                return torch.tensor(found, dtype=torch.float32, device=input_ids.device), None, None
        computed: tuple[Any, Any, Any] = self._compute(*args, **kwargs)
        return computed

    def _is_current(self) -> bool:
        """Return whether the weights and the adapters in use are those that sampled the rows."""
        if self._version is None:
            return False
        self._version.notice(structure=False)
        self._version.notice_writes()
        return not self._version.is_behind and self._version.weights == self._weights

    def _found(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, num_columns: int
    ) -> list[list[float]] | None:
        """Return the log probabilities of the last columns, 0 where they are masked; None if those
        of a row are missing.

        Args:
            input_ids, attention_mask: [batch, length] int64; completions begin at one column.
            num_columns: length of the longest completion.
        """
        table = list[list[float]]()
        for ids, mask in zip(input_ids.tolist(), attention_mask.bool().tolist(), strict=True):
            length = sum(mask[-num_columns:])
            logprobs = self._rows.get(tuple(itertools.compress(ids, mask))) if length else []
            if logprobs is None or len(logprobs) != length:
                return None
            table.append([*logprobs, *[0.0] * (num_columns - length)])
        return table
