"""GGUF files of tiny models."""

from __future__ import annotations

import gguf
import numpy as np

from benchmarks.peers.to_gguf import interleaved


def write_gguf(model, path, kind):
    """Write a Llama or LFM2 model with its matrices quantised to a type such as "Q8_0"."""
    config = model.config
    arch = {"llama": "llama", "lfm2": "lfm2"}[config.model_type]
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch),
        config.num_hidden_layers,
    )
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    first = model.model.layers[0]
    mlp = getattr(first, "mlp", None) or first.feed_forward
    writer.add_feed_forward_length(next(mlp.children()).out_features)
    writer.add_head_count(config.num_attention_heads)
    num_kv_heads = config.num_key_value_heads
    if arch == "lfm2":
        kinds = config.layer_types
        num_kv_heads = [num_kv_heads * (kind == "full_attention") for kind in kinds]
        writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list([f"[{token}]" for token in range(config.vocab_size)])
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = tensor.float().numpy()
        if weight.ndim == 3:  # of a convolution
            weight = weight.squeeze(1)
        for part, num_heads in heads.items():
            if arch == "llama" and part in name:
                weight = interleaved(weight, num_heads)
        is_matrix = weight.ndim == 2 and weight.shape[1] % 32 == 0
        stored = gguf.GGMLQuantizationType[kind if is_matrix else "F32"]
        data = gguf.quants.quantize(np.ascontiguousarray(weight), stored)
        stem, _, suffix = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
