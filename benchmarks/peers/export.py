"""Write a published checkpoint, or the embedded pair with its target inflated, for all engines.

    python -m benchmarks.peers.export FOLDER [--target CHECKPOINT | --shape 0.6B] [--only gguf openvino]
        [--head HEAD]

``FOLDER/models``, or ``FOLDER/models-NAME`` with ``--target``, gets checkpoints in bf16 and fp32
with the same values, GGUF files, OpenVINO models, and for the pair the token ids of the held-out
prompts. ``install.py`` must have made the environments of llama.cpp and OpenVINO. A checkpoint must
be of the class Llama; its tokenizer may be any. ``HEAD`` is an EAGLE-3 head for it in SGLang's layout, as
``hf_slospec train-drafter --layout sglang --draft-vocab 8192`` writes it."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hf_slospec import load_tiny_pair, tiny_prompts
from hf_slospec.server.loading import load_pair
from hf_slospec.tiny.inflate import inflate
from hf_slospec.tiny.shapes import SHAPES

PROMPT_TOKENS = 64  # all prompts are as long, so that no engine pads
HERE = Path(__file__).parent
CONVERTERS = {
    "gguf": ("llama", "to_gguf.py"),
    "openvino": ("ov", "to_openvino.py"),
}  # environment and script
PAIR_TYPES = {"gguf": ("f32", "f16", "bf16"), "openvino": ("fp32", "bf16")}
CHECKPOINT_TYPES = {
    "gguf": ("f16", "bf16", "Q8_0", "Q4_0", "Q4_K_M"),
    "openvino": ("bf16", "int8", "int4"),
}
EAGLE3 = "LlamaForCausalLMEagle3"  # class of heads in SGLang's layout
ROPE_TYPES = ("default", "linear", "llama3")  # those whose frequencies are constants


def models_folder(folder: Path, target: str | None) -> Path:
    """Return the folder of the models of a checkpoint, or of the pair."""
    return folder / ("models" if target is None else f"models-{Path(target).name}")


def save(models: Path, tokenizer: Any, **by_name: Any) -> dict[str, object]:
    """Save models in bf16, and with the same values in fp32, each as one file; -> their numbers of
    parameters.
    """
    for dtype, short in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        for name, model in by_name.items():
            model.to(dtype).save_pretrained(models / f"{name}-{short}", max_shard_size="1TB")
            tokenizer.save_pretrained(models / f"{name}-{short}")
    return {f"{name}_parameters": model.num_parameters() for name, model in by_name.items()}


def rope_factors(model: Any) -> list[float]:
    """Return by what every rotary frequency of a Llama is divided.

    Raises:
        SystemExit: the model is no Llama, or its frequencies depend on the text.
    """
    config = model.config
    rotary = model.base_model.rotary_emb
    rope = config.rope_parameters
    if (
        config.model_type != "llama"
        or rope["rope_type"] not in ROPE_TYPES
        or rotary.attention_scaling != 1.0
    ):
        raise SystemExit(
            f"neither llama.cpp's file nor this script can express {config.model_type}, rope {rope}"
        )
    exponents = torch.arange(0, config.head_dim, 2, device="cpu") / config.head_dim
    factors: list[float] = (rope["rope_theta"] ** -exponents / rotary.inv_freq.float()).tolist()
    return factors


def write_checkpoint(models: Path, target: str, head: Path | None) -> dict[str, object]:
    """Save a checkpoint, and its EAGLE-3 head if there is one; -> facts about them."""
    model, _, tokenizer = load_pair(target, None, "tiny", "bfloat16", "cpu")
    factors = rope_factors(model)
    facts = {"target": Path(target).name} | save(models, tokenizer, target=model)
    if max(abs(factor - 1) for factor in factors) > 1e-5:
        (models / "target-fp32" / "rope_factors.json").write_text(json.dumps(factors))
    return facts if head is None else facts | write_head(models, head, model)


def write_head(models: Path, head: Path, target: Any) -> dict[str, object]:
    """Save an EAGLE-3 head with the embeddings of its target, which it shares and OpenVINO's exporter
    expects in the file; -> facts about it.

    Raises:
        SystemExit: it has another layout, or no vocabulary of its own.
    """
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(head / "model.safetensors")
    if config["architectures"] != [EAGLE3] or not config.get("draft_vocab_size"):
        raise SystemExit(
            f"{head} cannot be exported: it must have the class {EAGLE3} and a vocabulary of its own; train it with "
            "--layout sglang --draft-vocab 8192"
        )
    embeddings = target.get_input_embeddings().weight.detach().to(torch.bfloat16).contiguous()
    tensors = {"embed_tokens.weight": embeddings} | tensors
    folder = models / "head"
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return {"head": head.name, "head_parameters": sum(one.numel() for one in tensors.values())}


def write_pair(models: Path, shape: str) -> dict[str, object]:
    """Save the embedded pair and its prompts; -> facts about them."""
    tiny, draft, tokenizer = load_tiny_pair(torch.bfloat16)
    target = inflate(tiny, SHAPES[shape])
    facts = {"shape": shape} | save(models, tokenizer, target=target, draft=draft)
    prompts = [
        tokenizer(text, truncation=True, max_length=PROMPT_TOKENS)["input_ids"]
        for text in tiny_prompts()
    ]
    prompts = [ids for ids in prompts if len(ids) == PROMPT_TOKENS]
    (models / "prompts.json").write_text(json.dumps(prompts))
    return facts | {"prompts": len(prompts), "prompt_tokens": PROMPT_TOKENS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--target", help="a folder or a repository of the Hub; default: the embedded pair"
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.6B")
    parser.add_argument("--head", type=Path, help="with --target: its EAGLE-3 head")
    parser.add_argument("--only", nargs="+", choices=CONVERTERS, default=list(CONVERTERS))
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    models = models_folder(folder, arguments.target)
    models.mkdir(parents=True, exist_ok=True)
    if arguments.target is None:
        facts = write_pair(models, arguments.shape)
        types = PAIR_TYPES
    else:
        facts = write_checkpoint(models, arguments.target, arguments.head)
        types = CHECKPOINT_TYPES
    tools = {"gguf": [folder / "build" / "bin" / "llama-quantize"], "openvino": []}
    for name in arguments.only:
        environment, script = CONVERTERS[name]
        command = [
            folder / environment / "bin" / "python",
            HERE / script,
            models,
            *tools[name],
            *types[name],
        ]
        converted = subprocess.run(
            [str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True
        )
        facts[name] = json.loads(converted.stdout.splitlines()[-1])
        print(name, facts[name], flush=True)
    (models / "export.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
