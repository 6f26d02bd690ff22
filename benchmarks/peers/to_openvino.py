"""Write OpenVINO models of the checkpoints: ``python to_openvino.py MODELS TYPE...``, in OpenVINO's environment.

OpenVINO stores equal constants once. Matrices of zeros, which inflated layers have, would then be read from the cache.
The export is therefore made from a copy that has distinct values of about 1e-20 in their place.
The last line of the output is JSON: the number of filled matrices and the sizes of the files.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import openvino
import torch
from openvino_tokenizers import convert_tokenizer
from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig, OVWeightQuantizationConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.bfloat16, "int4": torch.bfloat16}
COMPRESSION = {  # by NNCF; 64 divides the widths of small models, which the default of 128 does not
    "int8": OVWeightQuantizationConfig(bits=8, sym=False),
    "int4": OVWeightQuantizationConfig(bits=4, sym=False, group_size=64),
}


@torch.no_grad()
def fill_zeros(model: torch.nn.Module) -> int:
    """Fill matrices of zeros with values of about 1e-20; -> their number."""
    generator, filled = torch.Generator().manual_seed(1), 0
    for parameter in model.parameters():
        if parameter.ndim == 2 and not parameter.any():
            parameter.normal_(0.0, 1e-20, generator=generator)
            filled += 1
    return filled


def main() -> None:
    models, *kinds = Path(sys.argv[1]), *sys.argv[2:]
    facts: dict[str, object] = {}
    for name in ("target", "draft"):
        if not (models / f"{name}-bf16").exists():
            continue
        tokenizer = AutoTokenizer.from_pretrained(models / f"{name}-bf16")
        converted = convert_tokenizer(tokenizer, with_detokenizer=True)
        model = AutoModelForCausalLM.from_pretrained(models / f"{name}-bf16", dtype=torch.bfloat16)
        facts[f"{name}: matrices of zeros filled"] = fill_zeros(model)
        for kind in kinds:
            copy, out = models / f"filled-{name}-{kind}", models / f"ov-{name}-{kind}"
            model.to(DTYPES[kind]).save_pretrained(copy)
            tokenizer.save_pretrained(copy)
            options: dict[str, Any] = {
                "task": "text-generation-with-past",
                "library_name": "transformers",
                "stateful": True,
            }
            if kind in COMPRESSION:
                options["ov_config"] = OVConfig(quantization_config=COMPRESSION[kind])
            main_export(model_name_or_path=str(copy), output=out, convert_tokenizer=False, **options)
            for part, ir in zip(("tokenizer", "detokenizer"), converted, strict=True):
                openvino.save_model(ir, out / f"openvino_{part}.xml")
            shutil.rmtree(copy)
            facts[f"{out.name} MB"] = round((out / "openvino_model.bin").stat().st_size / 1e6)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
