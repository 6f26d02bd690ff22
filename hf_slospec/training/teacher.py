"""The target as a teacher: its hidden states and probabilities for training texts, computed or read
from disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from hf_slospec.errors import InvalidInputError, UnsupportedModelError
from hf_slospec.heads.checkpoint import hidden_size_of, num_layers_of
from hf_slospec.heads.dflash import DFlashHead
from hf_slospec.heads.mtp import DraftHead
from hf_slospec.model.properties import input_device
from hf_slospec.training.texts import TrainingText
from hf_slospec.training.unrolling import TextBatch

KEPT_DTYPE = torch.bfloat16  # dtype in which hidden states are stored on disk


class Teacher:
    """Provides batches of texts with the target's hidden states that a head reads and the
    probabilities that it learns.

    The hidden states of the first texts are kept on disk, as many as fit into the limit. Kept
    states are computed for one text at a time, so that they do not depend on the batch in which a
    text first occurs, and thus not on interruptions of the training.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        head: DraftHead | DFlashHead,
        texts: Sequence[TrainingText],
        folder: Path,
        limit_gb: float,
        spare: int,
    ):
        """Create a teacher, and its files if states are kept on disk.

        Args:
            target: the target model.
            head: the head that is trained.
            texts: the texts, whose indices :meth:`rows` takes.
            folder: folder of the files with states.
            limit_gb: maximum size of the states on disk, in GB; 0: none are kept.
            spare: columns of padding after the longest text of a batch, for draft levels that
                extend beyond its end.

        Raises:
            InvalidInputError: the disk has less room than the limit.
            UnsupportedModelError: the target's logits do not follow from its last hidden state by
                its output layer.
        """
        self.target = target
        self.texts = texts
        self.device = input_device(target)
        self.spare = spare
        self.layers = tuple(dict.fromkeys((*head.feature_layers, num_layers_of(target))))
        self.num_features = len(head.feature_layers) * hidden_size_of(target)
        self.output: Any = target.get_output_embeddings()
        self.rows_of_output = slice(None) if head.target_ids is None else head.target_ids
        self.weight = None  # [draft_vocab, hidden]; None: the layer has more than a weight
        if type(self.output) is torch.nn.Linear:
            self.weight = self.output.weight[self.rows_of_output]
            bias = self.output.bias
            self.bias = None if bias is None else bias[self.rows_of_output]
        self.softcap = getattr(target.config.get_text_config(), "final_logit_softcapping", None)
        self._check()
        shape = max(len(text.ids) for text in texts), len(self.layers) * hidden_size_of(target)
        num_kept = min(
            len(texts), int(limit_gb * 1e9) // (shape[0] * shape[1] * KEPT_DTYPE.itemsize)
        )
        self.kept = torch.empty(0)
        self.is_kept = torch.empty(0)
        if num_kept:
            path = folder / "states.bin"
            num_values = num_kept * shape[0] * shape[1]
            missing = num_values * KEPT_DTYPE.itemsize - (
                path.stat().st_blocks * 512 if path.exists() else 0
            )
            if missing > (free := shutil.disk_usage(folder).free):
                raise InvalidInputError(
                    f"--features-gb {limit_gb:g} needs {missing / 1e9:.1f} GB more, and {folder} "
                    f"has {free / 1e9:.1f} "
                    "GB of room; give less, or another --out"
                )
            kept = torch.from_file(str(path), shared=True, size=num_values, dtype=KEPT_DTYPE)
            self.kept = kept.view(num_kept, *shape)  # [num_kept, max_len, states]
            self.is_kept = torch.from_file(
                str(folder / "kept.bin"), shared=True, size=num_kept, dtype=torch.uint8
            )

    @torch.no_grad()
    def rows(self, indices: Sequence[int], with_probs: bool = True) -> TextBatch:
        """Return the texts at these indices as a batch, if wanted with target probabilities."""
        texts = [self.texts[index] for index in indices]
        lengths = torch.tensor([len(text.ids) for text in texts])[:, None]
        begins = torch.tensor([text.begin for text in texts])[:, None]
        ids = torch.zeros(len(texts), int(lengths.max()) + self.spare, dtype=torch.int64)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text.ids)] = torch.tensor(text.ids)
        following = torch.arange(1, ids.shape[1] + 1)
        counts = ((following >= begins) & (following < lengths)).to(self.device)
        states = self._states(indices, ids)
        last = states[..., -hidden_size_of(self.target) :]
        probs = self._logits(last).float().softmax(-1) if with_probs else None
        return TextBatch(
            ids.to(self.device), counts, states[..., : self.num_features].float(), probs
        )

    def _states(self, indices: Sequence[int], ids: torch.Tensor) -> torch.Tensor:
        """Return the target's hidden states at :attr:`layers`, concatenated.  -> [batch, length,
        states]
        """
        if not any(index < len(self.kept) for index in indices):
            return self._computed(ids)
        result = torch.zeros(
            *ids.shape, self.kept.shape[-1], dtype=self.target.dtype, device=self.device
        )
        computed = [row for row, index in enumerate(indices) if index >= len(self.kept)]
        if computed:
            result[computed] = self._computed(ids[computed])
        for row, index in enumerate(indices):
            if index < len(self.kept):
                length = len(self.texts[index].ids)
                if not self.is_kept[index]:
                    self.kept[index, :length] = self._computed(ids[row : row + 1, :length])[0].to(
                        "cpu", KEPT_DTYPE
                    )
                    self.is_kept[index] = 1
                result[row, :length] = self.kept[index, :length].to(result)
        return result

    def _computed(self, ids: torch.Tensor) -> torch.Tensor:
        decoder: Any = self.target.get_decoder()
        outputs = decoder(
            input_ids=ids.to(self.device), use_cache=False, output_hidden_states=list(self.layers)
        )
        return torch.cat(
            [outputs.hidden_states[layer].to(self.device) for layer in self.layers], dim=-1
        )

    def _logits(self, last: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor
        if self.weight is None:
            logits = self.output(last)[..., self.rows_of_output]
        else:
            logits = F.linear(last, self.weight, self.bias)
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits

    @torch.no_grad()
    def _check(self) -> None:
        """Raise UnsupportedModelError if logits computed from the last hidden state differ from
        those of the target's forward.
        """
        ids = torch.tensor([self.texts[0].ids[:8]], device=self.device)
        # Both from one forward, as a trainer may wrap that of the target in autocast.
        last = self.layers[-1]
        outputs = self.target(input_ids=ids, use_cache=False, output_hidden_states=[last])
        expected = outputs.logits[..., self.rows_of_output].float()
        computed = self._logits(outputs.hidden_states[last].to(self.target.dtype)).float()
        if computed.shape != expected.shape or not torch.allclose(
            computed, expected, rtol=0.05, atol=0.05
        ):
            raise UnsupportedModelError(
                f"the logits of {type(self.target).__name__} are not those of its last hidden "
                "state by its output layer, which training needs; give another target"
            )
