"""``SLOSpecGenerator``: a target, its draft and a tokenizer as one object."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_slospec.engine.config import SLOSpecConfig
from hf_slospec.engine.protocols import Drafter
from hf_slospec.hf import Decoder
from hf_slospec.targets import Targets

HUB_ACCESS = ("token", "cache_dir", "local_files_only", "force_download", "trust_remote_code")


class SLOSpecGenerator:
    """Speculated generation without touching ``model.generate``.

    Args:
        model: the target, a loaded transformers causal LM, or a PEFT model around one.
        assistant_model: a smaller causal LM with the same tokenizer, on the same device. Without one, and without a
            drafter, the request's own tokens draft (prompt lookup).
        tokenizer: of both models.
        config: how to speculate.
        drafter: an object of your own that proposes token trees, see :class:`Drafter`.
        fallback: as in :func:`enable`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        assistant_model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: SLOSpecConfig | None = None,
        *,
        drafter: Drafter | None = None,
        fallback: bool = False,
    ):
        self._decoder = Decoder(model, assistant_model, drafter=drafter, config=config, fallback=fallback)
        self.model, self.assistant_model, self.tokenizer = model, assistant_model, tokenizer
        self.config = self._decoder.config

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        assistant_model: str | None = None,
        *,
        config: SLOSpecConfig | None = None,
        drafter: Drafter | None = None,
        fallback: bool = False,
        dtype: torch.dtype | str = "auto",
        device_map: Any = None,
        **model_kwargs: Any,
    ) -> SLOSpecGenerator:
        """Load target, draft if one is named, and the target's tokenizer, from the Hub or from folders.

        ``dtype``, ``device_map`` and Hub access (``token``, ``cache_dir``, ...) hold for both models, further arguments
        for the target's ``from_pretrained``.
        """
        hub = {name: model_kwargs[name] for name in HUB_ACCESS if name in model_kwargs}
        revision = {"revision": model_kwargs["revision"]} if "revision" in model_kwargs else {}
        tokenizer = AutoTokenizer.from_pretrained(model, **hub, **revision)
        target = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, device_map=device_map, **model_kwargs)
        draft = None
        if assistant_model is not None:
            draft = AutoModelForCausalLM.from_pretrained(assistant_model, dtype=dtype, device_map=device_map, **hub)
        return cls(target, draft, tokenizer, config, drafter=drafter, fallback=fallback)

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        slo_tpot: Targets = None,
        fallback: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """``model.generate`` with tree speculation, with or without a target; same arguments and return types.

        Args:
            inputs: [batch, length] or [length] int64, or as ``input_ids``; left-padded with an ``attention_mask``.
            slo_tpot: seconds per output token for all rows, or a list with one entry (or None) per row.
            fallback: overrides the generator's for this call.
            kwargs: everything else ``generate`` takes. ``return_dict_in_generate=True`` adds ``slo``, one
                :class:`RequestMetrics` per row.
        """
        positional = {"inputs": inputs, "generation_config": generation_config}
        arguments = {"tokenizer": self.tokenizer, **kwargs} | {k: v for k, v in positional.items() if v is not None}
        return self._decoder.generate(slo_tpot, arguments, fallback)
