"""Detection of layers that quantise activations, whose outputs depend on the rounding of a whole forward."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from hf_slospec.models.inspection.properties import cannot_be_packed

# Attributes by which weights of torchao, and layers of transformers and compressed-tensors, quantise their inputs.
QUANTISING = re.compile("act(ivation)?_quant.*|input_quant_func|activation_scheme|input_activations")
# Classes that always do: those of torch's dynamic quantisation, and LLM.int8 of bitsandbytes.
QUANTISED_MODULES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
LLM_INT8 = "Linear8bitLt"


def check_activations(model: nn.Module) -> None:
    """Raise UnsupportedModelError if a layer quantises activations.

    Their scales may be those of all tokens of a forward. Where each token has its own, an error of the last bit, as any
    other number of tokens causes, still moves some activations to the next integer, an error of a percent.
    """
    for name, module in model.named_modules():
        holders = [module, getattr(module, "quantization_scheme", None), *module._parameters.values()]
        found = next((type(holder).__name__ for holder in holders if _quantises(holder)), None)
        if found is not None:
            raise cannot_be_packed(
                model,
                f"{name} quantises activations ({found}), so that logits depend on which tokens a forward has; "
                "quantise weights only, pass fallback=True, or call generate without slo_tpot",
            )


def _quantises(holder: Any) -> bool:
    kind = type(holder)
    if kind.__module__.startswith(QUANTISED_MODULES) or kind.__name__ == LLM_INT8:
        return True
    return any(
        QUANTISING.fullmatch(name) for name, value in getattr(holder, "__dict__", {}).items() if value is not None
    )
