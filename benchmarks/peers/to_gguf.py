"""Write GGUF files of the fp32 checkpoints: ``python to_gguf.py MODELS``, in llama.cpp's environment.

The last line of the output is JSON: for every file, the number of weights whose value the type changes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

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
    """Reorder the rows of a query or key projection from halves, which transformers rotates, to llama.cpp's pairs."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def add_vocabulary(writer: gguf.GGUFWriter, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    """Add the tokens, with an end-of-text token that llama.cpp does not recognise: every text gets its full length."""
    texts = {index: text for text, index in tokenizer["model"]["vocab"].items()}
    special = {token["id"] for token in tokenizer["added_tokens"]}
    size = range(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"[special {i}]" if i in special else texts.get(i, f"[unused {i}]") for i in size])
    kinds = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([kinds[0] if i in special or i not in texts else kinds[1] for i in size])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["pad_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)


def convert(checkpoint: Path, kind: str, file: Path) -> int:
    """Write one file; -> the number of weights whose value the type changes."""
    config = json.loads((checkpoint / "config.json").read_text())
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
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
    add_vocabulary(writer, config, tokenizer)
    changed = 0
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if name == "lm_head.weight":  # tied to the embedding
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
    models = Path(sys.argv[1])
    changed = {}
    for name in ("target", "draft"):
        for kind in TYPES:
            changed[f"{name}-{kind}"] = convert(models / f"{name}-fp32", kind, models / f"{name}-{kind}.gguf")
    print(json.dumps({"weights_changed_by_the_type": changed}))


if __name__ == "__main__":
    main()
