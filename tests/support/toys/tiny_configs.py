"""Configs of tiny models of any causal-LM class, by rule and by exception."""

from __future__ import annotations

import contextlib
import dataclasses

from tests.support.toys.tiny_models import POSITIONS, VOCAB, WINDOW

# Values for every config field of one of these names, whichever config has it.
SIZES = {
    name: value
    for value, names in {
        VOCAB: "vocab_size vocab_size_per_layer_input unpadded_vocab_size decoder_vocab_size",
        POSITIONS: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions model_max_length",
        WINDOW: "sliding_window sliding_window_size local_attention window_size attention_chunk_size",
        32: "hidden_size n_embd d_model word_embed_proj_dim embedding_size embedding_dim emb_dim input_embedding_size "
        "output_embedding_size lru_width backbone_hidden_size attention_hidden_size",
        48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dff d_inner dim_ff n_inner "
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
        "dense_intermediate_size prefix_dense_intermediate_size intermediate_size_mlp feed_forward_size "
        "moe_shared_expert_intermediate_size",
        2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
        "num_encoder_layers num_key_value_heads kv_n_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok "
        "num_experts_per_token moe_topk moe_top_k moe_k top_k_experts eos_token_id index_n_heads index_topk_blocks "
        "max_window_layers altup_num_inputs hc_mult",
        4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads hc_lowrank "
        "attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads num_experts "
        "num_local_experts n_routed_experts moe_num_experts kv_channels rotary_dim qk_rope_head_dim qk_nope_head_dim "
        "laurel_rank hidden_size_per_layer_input index_block_size gated_norm_rank adapter_rank",
        8: "head_dim attention_head_size d_head dim_head v_head_dim q_lora_rank kv_lora_rank swa_head_dim d_rel "
        "index_head_dim query_pre_attn_scalar mamba_d_head mamba_d_state mamba_chunk_size mamba_n_heads o_lora_rank "
        "linear_head_dim linear_key_head_dim linear_value_head_dim",
        64: "index_topk",  # longer than texts of the tests, as longer ones are refused
        1: "bos_token_id n_group topk_group num_expert_group n_shared_experts num_shared_experts num_dense_layers "
        "moe_num_shared_experts first_k_dense_replace",
        0: "pad_token_id num_kv_shared_layers",
    }.items()
    for name in names.split()
} | {"is_decoder": True, "use_sliding_window": True, "tie_word_embeddings": False}  # fmt: skip

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HYBRID = {"layers_block_type": ["linear_attention", "hybrid"], "num_hidden_layers": 2}
SHARED = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
}
# What the rule above does not do, by the name of the config.
SPECIAL = {
    "BigBirdConfig": dict(attention_type="original_full"),
    "BigBirdPegasusConfig": dict(attention_type="original_full"),
    "BambaConfig": dict(attn_layer_indices=[1]),
    "BltConfig": dict(encoder_hash_byte_group_vocab=256),
    "CohereCompassTextConfig": dict(
        rope_parameters={"full_attention": ROPE, "sliding_attention": ROPE}
    ),
    "DbrxConfig": dict(attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}),
    "FalconH1Config": dict(mamba_d_ssm=64),
    "GPTNeoXConfig": dict(is_decoder=False),  # its default, and causal all the same
    "GPTNeoConfig": dict(attention_types=[[["global", "local"], 1]]),
    "Gemma3nTextConfig": SHARED,
    "Gemma4TextConfig": SHARED,
    "Gemma4UnifiedTextConfig": SHARED,
    "GraniteMoeHybridConfig": dict(
        layer_types=["linear_attention", "full_attention"], num_hidden_layers=2
    ),
    "JambaConfig": dict(
        attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1
    ),
    "Lfm2Config": dict(layer_types=["conv", "full_attention"]),
    "Lfm2MoeConfig": dict(layer_types=["conv", "full_attention"]),
    "Llama4TextConfig": dict(
        no_rope_layers=[1, 0], floor_scale=4
    ),  # a temperature that depends on positions
    "Mamba2Config": dict(num_heads=8),
    "MiniMaxConfig": dict(layer_types=["linear_attention", "full_attention"], num_hidden_layers=2),
    "MiniMaxM3VLTextConfig": dict(layer_types=["full_attention", "minimax_m3_sparse"]),
    "Qwen4ExpTextConfig": dict(
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=4,
        indexer_compress_ratio=2,
    ),
    "RecurrentGemmaConfig": dict(num_hidden_layers=3),
    "ReformerConfig": dict(
        axial_pos_embds_dim=(16, 16), axial_pos_shape=(16, 10), attn_layers=["local", "local"]
    ),
    "XmodConfig": dict(default_language="en_XX"),
    "Zamba2Config": HYBRID,
    "ZambaConfig": HYBRID | dict(attention_hidden_size=64, attention_head_dim=16),
    "ZayaConfig": dict(
        num_experts_per_tok=1, layer_types=["hybrid_sliding", "hybrid"], num_hidden_layers=2
    ),
    "xLSTMConfig": dict(hidden_size=128, embedding_dim=128),
}


def tiny_config(config_class):
    """A config of a tiny model with one layer of every kind its default has, and a sliding one if
    it knows windows.
    """
    fields = {field.name for field in dataclasses.fields(config_class)}
    settings = {name: value for name, value in SIZES.items() if name in fields}
    if (
        "qk_rope_head_dim" in fields
    ):  # latent attention: all heads have K, and the rotary embedding its own size
        settings |= {"head_dim": 4} if "head_dim" in fields else {}
        settings |= {"num_key_value_heads": 4} if "num_key_value_heads" in fields else {}
    special = SPECIAL.get(config_class.__name__, {})
    with contextlib.suppress(
        ValueError
    ):  # some defaults contradict themselves; they need a special case
        default = config_class()
        for name in config_class.sub_configs:
            if name in fields and name not in special and getattr(default, name, None) is not None:
                settings[name] = tiny_config(type(getattr(default, name)))
        if kinds := getattr(default, "layer_types", None):
            knows_windows = "sliding_window" in fields and "full_attention" in kinds
            known = dict.fromkeys([*kinds, *(["sliding_attention"] if knows_windows else [])])
            layers = sorted(
                known, key="full_attention".__eq__
            )  # some insist on full attention in the last layer
            settings |= (
                {"layer_types": layers * (2 if len(layers) == 1 else 1)}
                if "layer_types" in fields
                else {}
            )
            settings["num_hidden_layers"] = max(len(layers), 2)
        if kinds := getattr(default, "mlp_layer_types", None):
            distinct = list(dict.fromkeys(kinds))
            count = settings["num_hidden_layers"]
            settings["mlp_layer_types"] = (distinct * count)[:count]
    return config_class(**settings | special)
