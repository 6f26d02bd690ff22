"""``RolloutCallback``: tree speculation for trainers that sample rollouts with ``generate``, such
as TRL's.
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
from hf_slospec.generate.call import Decoder, Done
from hf_slospec.generate.enable import decoder_of, disable, enable

logger = logging.getLogger(__name__)
FILE = "past_answers.json"  # file name in a checkpoint folder
# Training arguments of TRL with which the trainer calls no method that enable() replaces.
BYPASSES = ("use_vllm",)


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
        if (saved := self._path(args, state)).exists():
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
            self.past.save(self._path(args, state))

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Stop speculation: give the model its previous ``generate`` back."""
        disable(model)

    @staticmethod
    def _path(args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE
