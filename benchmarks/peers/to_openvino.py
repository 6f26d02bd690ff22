"""Write OpenVINO models of the checkpoints: ``python to_openvino.py MODELS TYPE...``, in OpenVINO's
environment.

OpenVINO stores equal constants once. Matrices of zeros, which inflated layers have, would then be
read from the cache. The export is therefore made from a copy that has distinct values of about
1e-20 in their place. The last line of the output is JSON: the number of filled matrices and the
sizes of the files."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import nncf
import openvino
import torch
from openvino_tokenizers import convert_tokenizer
from optimum.exporters.openvino import main_export
from transformers import AutoModelForCausalLM, AutoTokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# From bf16; 64 divides the widths of small models, which the default of 128 does not
COMPRESSION = {
    "int8": {"mode": nncf.CompressWeightsMode.INT8_ASYM},
    "int4": {"mode": nncf.CompressWeightsMode.INT4_ASYM, "group_size": 64},
}


@torch.no_grad()
def fill_zeros(model: torch.nn.Module) -> int:
    """Fill matrices of zeros with values of about 1e-20; -> their number."""
    generator = torch.Generator().manual_seed(1)
    filled = 0
    for parameter in model.parameters():
        if parameter.ndim == 2 and not parameter.any():
            parameter.normal_(0.0, 1e-20, generator=generator)
            filled += 1
    return filled


def export(model: Any, tokenizer: Any, converted: tuple[openvino.Model, ...], out: Path) -> None:
    """Write a model with its tokenizer and detokenizer; the exporter wants a saved checkpoint."""
    copy = out.with_name(f"filled-{out.name}")
    model.save_pretrained(copy)
    tokenizer.save_pretrained(copy)
    options = {
        "task": "text-generation-with-past",
        "library_name": "transformers",
        "stateful": True,
    }
    main_export(model_name_or_path=str(copy), output=out, convert_tokenizer=False, **options)
    for part, ir in zip(("tokenizer", "detokenizer"), converted, strict=True):
        openvino.save_model(ir, out / f"openvino_{part}.xml")
    shutil.rmtree(copy)


def export_head(models: Path) -> None:
    """Write the EAGLE-3 head of the checkpoint; it uses the target's tokenizer."""
    out = models / "ov-head"
    main_export(
        model_name_or_path=str(models / "head"),
        output=out,
        task="text-generation-with-past",
        library_name="transformers",
        stateful=True,
        trust_remote_code=True,  # the exporter's own class of such heads
        convert_tokenizer=False,
    )
    for file in (models / "ov-target-bf16").glob("*token*"):
        shutil.copy2(file, out / file.name)


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
            out = models / f"ov-{name}-{kind}"
            if kind in COMPRESSION:
                plain = models / f"ov-{name}-bf16"
                shutil.copytree(
                    plain,
                    out,
                    ignore=shutil.ignore_patterns("openvino_model.*"),
                    dirs_exist_ok=True,
                )
                read = openvino.Core().read_model(plain / "openvino_model.xml")
                openvino.save_model(
                    nncf.compress_weights(read, **COMPRESSION[kind]), out / "openvino_model.xml"
                )
            else:
                export(model.to(DTYPES[kind]), tokenizer, converted, out)
            facts[f"{out.name} MB"] = round((out / "openvino_model.bin").stat().st_size / 1e6)
    if (models / "head").exists():
        export_head(models)
        facts["ov-head MB"] = round(
            (models / "ov-head" / "openvino_model.bin").stat().st_size / 1e6
        )
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
