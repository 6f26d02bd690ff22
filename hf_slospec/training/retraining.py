"""Retraining of a head while its target changes, such as during reinforcement learning."""

from __future__ import annotations

import copy
import logging
import math
import random
from collections import deque
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, TrainerCallback

from hf_slospec.errors import InvalidInputError, InvalidTypeError, UnsupportedModelError
from hf_slospec.generate.call import Decoder
from hf_slospec.generate.enable import decoder_of
from hf_slospec.generate.rollouts import in_checkpoint
from hf_slospec.heads.dspark import DSparkHead
from hf_slospec.heads.eagle3 import Eagle3Head
from hf_slospec.heads.mtp import MtpHead, own_modules
from hf_slospec.model.properties import evaluating
from hf_slospec.request.request import Request
from hf_slospec.training.heads import Student
from hf_slospec.training.run import optimizers_of
from hf_slospec.training.teacher import Teacher
from hf_slospec.training.texts import MIN_LEN, MIN_NEW, TrainingText
from hf_slospec.training.unrolling import STRIDE, loss_of

logger = logging.getLogger(__name__)
FILE = "drafter.safetensors"  # file name in a checkpoint folder


def _can_be_trained(head: Any) -> bool:
    """Return whether a head drafts as it is trained: level by level, or a block from its first
    token on.
    """
    is_block = isinstance(head, DSparkHead) and not head.first_slot and not head.is_recurrent
    return is_block or type(head) in (Eagle3Head, MtpHead)


class HeadRetrainer(TrainerCallback):
    """Trains the head that drafts for an enabled model on the texts that the model has written.

    A head fits the weights that it was trained for; while these change, fewer of its proposals are
    accepted. The loss is that of ``train-drafter``: the cross-entropy to the distribution of the
    target's present weights. Outputs of the target do not change.

    As a callback of a trainer, behind :class:`~hf_slospec.RolloutCallback`, it trains after every
    optimizer step by which ``every`` texts have been written, and writes the head into the
    trainer's checkpoints. In a loop of your own, call :meth:`attach` once and :meth:`train`
    whenever no request is running.
    """

    def __init__(
        self,
        *,
        every: int = 64,
        batch: int = 8,
        levels: int = 4,
        seq_len: int = 512,
        rate: float = 0.1,
        seed: int = 0,
    ):
        """Prepare a training without a model.

        Args:
            every: number of new texts after which the callback trains. At most four times as many
                wait, the newest.
            batch: texts per training step.
            levels: levels of drafting that are trained; a DSpark head trains all of its block.
            seq_len: maximum tokens of a text; of longer ones, the last are taken.
            rate: factor of the learning rates that ``train-drafter`` begins with.
            seed: seed of the order of texts.

        Raises:
            InvalidInputError, InvalidTypeError: a value is out of range, or of another type.
        """
        minima = {"every": 1, "batch": 1, "levels": 1, "seq_len": MIN_LEN}
        given = {"every": every, "batch": batch, "levels": levels, "seq_len": seq_len}
        for name, value in given.items():
            if not isinstance(value, int):
                raise InvalidTypeError(f"{name} must be an int, got {type(value).__name__}")
            if value < minima[name]:
                raise InvalidInputError(f"{name} must be at least {minima[name]}, got {value}")
        if not isinstance(rate, (int, float)):
            raise InvalidTypeError(f"rate must be a float, got {type(rate).__name__}")
        if not 0 < rate < math.inf:
            raise InvalidInputError(f"rate must be above 0 and finite, got {rate}")
        self.every = every
        self.batch = batch
        self.levels = levels
        self.seq_len = seq_len
        self.rate = rate
        self.losses = list[float]()  # mean loss of every round of training
        self._random = random.Random(seed)
        self._texts = deque[TrainingText](maxlen=4 * every)
        self._num_steps = 0
        self._decoder: Decoder | None = None

    @torch.inference_mode(False)
    def attach(self, model: PreTrainedModel) -> None:
        """Begin to collect the texts of a model that :func:`~hf_slospec.enable` was called on; texts
        of a model that this was attached to before are forgotten.

        Raises:
            InvalidInputError: the model is not enabled, or another retrainer is attached to it.
            UnsupportedModelError: it does not draft with a head that can be trained.
        """
        decoder = decoder_of(model)
        if decoder is None:
            raise InvalidInputError(
                "the model is not enabled: call hf_slospec.enable(model, ...) before attach, and "
                "name RolloutCallback before HeadRetrainer in callbacks"
            )
        if decoder is not self._decoder and decoder.on_end is not None:
            raise InvalidInputError("another HeadRetrainer is attached to this model; use that one")
        head: Any = decoder.method.model
        if not _can_be_trained(head):
            raise UnsupportedModelError(
                f"the drafter {decoder.drafts!r} cannot be retrained; enable the model with an "
                "EAGLE-3 head, an MTP layer or a DSpark head, as train-drafter makes them"
            )
        if self._decoder is not None:
            self._decoder.on_end = None
        self._texts.clear()
        self._decoder = decoder
        self._model = model
        self._target = decoder.model
        self._head: Student = head
        self._used = [*own_modules(head, self._target).parameters()]
        if isinstance(head, DSparkHead):
            self.levels = head.block_size
        self._start()
        decoder.on_end = self._take

    def _start(self) -> None:
        """Begin to train a copy of the head, in fp32."""
        shared = {id(module): module for module in self._target.modules()}
        self._student = copy.deepcopy(self._head, shared)
        self._student.config._attn_implementation = "eager"
        self._module = own_modules(self._student, self._target).float()
        self._weights = [*self._module.requires_grad_(True).parameters()]
        self._optimizers = optimizers_of(self._module, self.rate)

    def _take(self, request: Request) -> None:
        """Keep the text of a request that has ended."""
        ids = list(request.tokens)
        excess = max(len(ids) - self.seq_len, 0)
        begin = max(request.prompt_len - excess, 1)
        is_long = len(ids) >= MIN_LEN and len(ids) - request.prompt_len >= MIN_NEW
        if is_long and request.params.is_text and request.error is None:
            self._texts.append(TrainingText(ids[excess:], begin))

    @property
    def num_waiting(self) -> int:
        """Number of texts since the last :meth:`train`."""
        return len(self._texts)

    @torch.inference_mode(False)
    def train(self) -> float | None:
        """Train once on every text since the last call, and let the drafter use the result.

        If the loss is not finite, the drafter stays as it is, with a warning, and the next call
        goes on from there.

        Returns:
            The mean loss; None if there was no text.

        Raises:
            InvalidInputError: :meth:`attach` was not called, or the model was enabled again since.
            UnsupportedModelError: the model's logits do not follow from its last hidden state by
                its output layer.
        """
        if self._decoder is None or decoder_of(self._model) is not self._decoder:
            raise InvalidInputError("call attach(model) after hf_slospec.enable(model, ...)")
        texts = [self._texts.popleft() for _ in range(len(self._texts))]
        if not texts:
            return None
        texts.sort(key=lambda text: len(text.ids))  # batches of similar lengths
        begins = [*range(0, len(texts), self.batch)]
        self._random.shuffle(begins)
        try:
            with evaluating(self._target):
                teacher = Teacher(self._target, self._student, texts, Path(), 0.0, self.levels)
                indices = range(len(texts))
                losses = [self._step(teacher, indices[i : i + self.batch]) for i in begins]
        except BaseException:
            self._texts.extendleft(texts)
            raise
        loss = sum(losses) / len(losses)
        self.losses.append(loss)
        if math.isfinite(loss):
            self._hand_over()
            logger.info("retrained on %d texts, loss %.3f", len(texts), loss)
        else:
            logger.warning("the head was not retrained, as its loss is %s; give a lower rate", loss)
            self._start()
        return loss

    def _step(self, teacher: Teacher, indices: range) -> float:
        rows = teacher.rows(indices)
        is_on = self._target.dtype != torch.float32
        with (
            torch.enable_grad(),
            torch.autocast(teacher.device.type, torch.bfloat16, enabled=is_on),
        ):
            loss = loss_of(self._student, rows, self.levels, self._num_steps % STRIDE)
        # The head shares modules with the target, whose gradients are the trainer's.
        loss.backward(inputs=self._weights)
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self._num_steps += 1
        return loss.item()

    @torch.no_grad()
    def _hand_over(self) -> None:
        """Copy the weights to the head that drafts."""
        for used, trained in zip(self._used, self._weights, strict=True):
            used.copy_(trained)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Start to collect the model's texts, and load the head of the checkpoint that training resumes from."""
        self.attach(model)
        if (path := in_checkpoint(args, state, FILE)).exists():
            self._module.load_state_dict(load_file(path))
            self._hand_over()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Train if enough texts are waiting."""
        if self.num_waiting >= self.every:
            self.train()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the head into the checkpoint folder; the first process does it."""
        if state.is_world_process_zero:
            save_file(self._module.state_dict(), in_checkpoint(args, state, FILE))
