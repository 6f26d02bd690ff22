"""GGUF files as targets: the weights of the file, and the tokenizer of the folder that it lies in."""

from __future__ import annotations

import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_slospec import load_tiny_pair
from hf_slospec.server.loading import load_pair
from tests.support.toys.tiny_models import SMALL, sharpened

HEADS = 4
KV_HEADS = 2
VOCAB = 2048
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write(model, path):
    """Write a Llama as llama.cpp's converter does, in fp32."""
    config = model.config
    file = gguf.GGUFWriter(path, "llama")
    file.add_block_count(config.num_hidden_layers)
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(HEADS)
    file.add_head_count_kv(KV_HEADS)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_rope_freq_base(10_000.0)
    file.add_rope_dimension_count(config.hidden_size // HEADS)
    file.add_vocab_size(VOCAB)
    for name, weight in model.state_dict().items():
        if name.startswith("model.layers."):
            number, _, own = (
                name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
            )
            name = f"blk.{number}.{NAMES[own]}.weight"
            if NAMES[own] in ("attn_q", "attn_k"):  # halves of rotated pairs become neighbours
                heads = HEADS if NAMES[own] == "attn_q" else KV_HEADS
                weight = (
                    weight.reshape(heads, 2, -1, weight.shape[1])
                    .transpose(1, 2)
                    .reshape(weight.shape)
                )
        else:
            name = {
                "model.embed_tokens.weight": "token_embd.weight",
                "model.norm.weight": "output_norm.weight",
            }.get(name, "output.weight")
        file.add_tensor(name, weight.contiguous().numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def test_a_target_is_read_from_a_file_beside_its_tokenizer(tmp_path):
    config = LlamaConfig(**SMALL | dict(num_key_value_heads=KV_HEADS, vocab_size=VOCAB))
    model = sharpened(lambda: LlamaForCausalLM(config), 0)
    tokenizer = load_tiny_pair()[2]
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    write(model, tmp_path / "model.gguf")
    found = load_pair(str(tmp_path / "model.gguf"), None, "tiny", "float32", "cpu")
    assert found.tokenizer.chat_template == tokenizer.chat_template and found.draft is None
    assert isinstance(found.target, LlamaForCausalLM) and found.target.dtype == torch.float32
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            found.target(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4
        )
