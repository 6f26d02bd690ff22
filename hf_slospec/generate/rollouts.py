"""Rollouts of trainers that sample with ``generate``, such as TRL's: speculated while training
runs.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from hf_slospec.config import SLOSpecConfig
from hf_slospec.drafters.load_drafter import Source, load_drafter
from hf_slospec.drafters.past_answers import PastAnswers
from hf_slospec.errors import FallbackWarning
from hf_slospec.generate.call import Decoder
from hf_slospec.generate.enable import decoder_of, disable, enable

logger = logging.getLogger(__name__)
FILE = "past_answers.json"  # in the folder of a checkpoint
# Settings with which TRL does not call generate.
BYPASSES = ("use_vllm", "use_transformers_continuous_batching")


class RolloutCallback(TrainerCallback):
    """Trainer callback that enables the model from the beginning to the end of training.

    Past answers are saved in the folders of checkpoints, those of the first process, and loaded
    when training resumes."""

    def __init__(
        self,
        drafter: Source = "suffix",
        *,
        past: PastAnswers | None = None,
        config: SLOSpecConfig | None = None,
        fallback: bool = False,
    ):
        """Prepare for a training.

        Args:
            drafter: as :func:`load_drafter` takes it.
            past: answers to draft from; None: new ones, within the default bounds.
            config, fallback: as :func:`enable` takes them.
        """
        self.drafter = drafter
        self.config = config
        self.fallback = fallback
        self.past = PastAnswers() if past is None else past
        self.tokens_per_step = list[
            float
        ]()  # committed tokens per row and verify step, in each epoch so far
        self._decoder: Decoder | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Start to speculate, and warn if the trainer will not call the model's ``generate``."""
        for name in BYPASSES:
            if getattr(args, name, False):
                warnings.warn(
                    f"rollouts are not speculated with {name}=True, as the trainer does not call generate; set it to "
                    "False",
                    FallbackWarning,
                    stacklevel=2,
                )
        if (saved := self._path(args, state)).exists():
            self.past.load(saved)
        method = load_drafter(self.drafter, model, share_texts=self.past)
        enable(model, drafter=method, config=self.config, always=True, fallback=self.fallback)
        self._decoder = decoder_of(model)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the tokens per step of the epoch's rollouts."""
        assert self._decoder is not None
        tokens = self._decoder.num_tokens
        steps = self._decoder.num_steps
        self._decoder.num_tokens = self._decoder.num_steps = 0
        if steps:
            self.tokens_per_step.append(tokens / steps)
            logger.info("rollouts: %.2f tokens per step and row", tokens / steps)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save past answers in the checkpoint's folder."""
        if state.is_world_process_zero:
            self.past.save(self._path(args, state))

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Give the model its stock ``generate`` back."""
        disable(model)

    @staticmethod
    def _path(args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE
