"""Write GGUF files of the fp32 checkpoints: ``python to_gguf.py MODELS QUANTIZE TYPE...``, in
llama.cpp's environment.

Types of llama.cpp's own are written by its tool QUANTIZE from the bf16 file. The files have no real
vocabulary: token 7 is the text "[7]", none is special, and texts end where a request says. The last
line of the output is JSON: for every file, the number of weights whose value the type changes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, LlamaFileType
from safetensors.numpy import load_file

TYPES = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of a weight of a transformers Llama."""
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.weight"
    return f"{NAMES[stem]}.weight"


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of a query or key projection from halves, which transformers rotates, to
    llama.cpp's pairs.
    """
    rows, columns = weight.shape
    return (
        weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
        .swapaxes(1, 2)
        .reshape(rows, columns)
    )


def convert(checkpoint: Path, kind: str, file: Path) -> int:
    """Write one file; -> the number of weights whose value the type changes."""
    config = json.loads((checkpoint / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    quantization, file_type = TYPES[kind]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name(checkpoint.name)
    writer.add_file_type(file_type)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("rwkv")  # the only kind that needs no special tokens
    writer.add_token_list([f"[{token}]" for token in range(config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    factors = checkpoint / "rope_factors.json"
    if factors.exists():
        writer.add_tensor(
            "rope_freqs.weight", np.array(json.loads(factors.read_text()), dtype=np.float32)
        )
    changed = 0
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        for part, num_heads in heads.items():
            if part in name:
                weight = interleaved(weight, num_heads)
        stored = GGMLQuantizationType.F32 if weight.ndim == 1 else quantization
        data = gguf.quants.quantize(np.ascontiguousarray(weight), stored)
        changed += int((gguf.quants.dequantize(data, stored) != weight).sum())
        writer.add_tensor(gguf_name(name), data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return changed


def main() -> None:
    models, quantize, *kinds = Path(sys.argv[1]), *sys.argv[2:]
    changed = {}
    for name in ("target", "draft"):
        for kind in kinds if (models / f"{name}-fp32").exists() else ():
            file = models / f"{name}-{kind}.gguf"
            if kind in TYPES:
                changed[f"{name}-{kind}"] = convert(models / f"{name}-fp32", kind, file)
            else:
                command = [quantize, models / f"{name}-bf16.gguf", file, kind]
                subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)
    print(json.dumps({"weights_changed_by_the_type": changed}))


if __name__ == "__main__":
    main()
