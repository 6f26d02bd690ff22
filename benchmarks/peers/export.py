"""Write the embedded pair, its target inflated, for transformers, vLLM, llama.cpp and OpenVINO.

    python benchmarks/peers/export.py FOLDER [--shape 0.6B] [--only gguf openvino]

``FOLDER/models`` gets checkpoints in bf16 and fp32 with the same values, GGUF files, OpenVINO models, and the token ids
of the held-out prompts. ``install.py`` must have made the environments of llama.cpp and OpenVINO.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import torch

from hf_slospec import load_tiny_pair, tiny_prompts
from hf_slospec.tiny.inflate import inflate
from hf_slospec.tiny.shapes import SHAPES

PROMPT_TOKENS = 64  # all prompts are as long, so that no engine pads
HERE = Path(__file__).parent
CONVERTERS = {"gguf": ("llama", "to_gguf.py"), "openvino": ("ov", "to_openvino.py")}  # environment and script


def write_checkpoints(models: Path, shape: str) -> dict[str, object]:
    """Save both models in bf16, and with the same values in fp32; -> facts about them."""
    tiny, draft, tokenizer = load_tiny_pair(torch.bfloat16)
    target = inflate(tiny, SHAPES[shape])
    pair = {"target": target, "draft": draft}
    facts = {"shape": shape} | {f"{name}_parameters": model.num_parameters() for name, model in pair.items()}
    for dtype, short in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        for name, model in pair.items():
            model.to(dtype).save_pretrained(models / f"{name}-{short}")
            tokenizer.save_pretrained(models / f"{name}-{short}")
    prompts = [tokenizer(text, truncation=True, max_length=PROMPT_TOKENS)["input_ids"] for text in tiny_prompts()]
    prompts = [ids for ids in prompts if len(ids) == PROMPT_TOKENS]
    (models / "prompts.json").write_text(json.dumps(prompts))
    return facts | {"prompts": len(prompts), "prompt_tokens": PROMPT_TOKENS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="0.6B")
    parser.add_argument("--only", nargs="+", choices=CONVERTERS, default=list(CONVERTERS))
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    models = folder / "models"
    models.mkdir(parents=True, exist_ok=True)
    facts = write_checkpoints(models, arguments.shape)
    for name in arguments.only:
        environment, script = CONVERTERS[name]
        command = [folder / environment / "bin" / "python", HERE / script, models]
        converted = subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True)
        facts[name] = json.loads(converted.stdout.splitlines()[-1])
        print(name, facts[name], flush=True)
    (models / "export.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
