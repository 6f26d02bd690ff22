"""Tiny random encoder-decoders, whose later decoder layers hardly count, and drafts of half the
decoder's layers.
"""

from __future__ import annotations

import copy
import functools

import torch
import transformers
from transformers import (
    AutoModelForSeq2SeqLM,
    WhisperConfig,
    WhisperForCausalLM,
    WhisperForConditionalGeneration,
)

from tests.support.breadth import quick_or
from tests.support.toys.tiny_models import POSITIONS, VOCAB, sharpened

SIZES = dict(
    vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=4, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=POSITIONS,
    bos_token_id=1, eos_token_id=2, pad_token_id=0, decoder_start_token_id=3, forced_eos_token_id=None,
    tie_word_embeddings=False,
)  # fmt: skip
T5 = dict(
    vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=4, num_decoder_layers=4, num_heads=4,
    eos_token_id=2, pad_token_id=0, decoder_start_token_id=3, relative_attention_num_buckets=8,
    relative_attention_max_distance=20, tie_word_embeddings=False,
)  # fmt: skip
TEXT_MODELS = {
    "Bart": SIZES,
    "MBart": SIZES,
    "Marian": SIZES,
    "Pegasus": SIZES,
    "T5": T5,
    "MT5": T5,
}
# frames of a segment; the encoder's outputs are half as many
MELS = 8
FRAMES = 40
EN = 60
DE = 61
TRANSCRIBE = 62
TRANSLATE = 63
PREVIOUS = 64
NO_TIMESTAMPS = 70
FAINT = 0.15  # share of what decoder layers of the second half would add


@functools.cache
def tiny_text_model(name, seed=0):
    """A model with a head that writes text, by the first part of its config's name."""
    config = getattr(transformers, f"{name}Config")(**TEXT_MODELS[name])
    return faint(sharpened(lambda: AutoModelForSeq2SeqLM.from_config(config), seed), encoder=8.0)


@functools.cache
def tiny_whisper(seed=0):
    """A multilingual Whisper with segments of FRAMES frames."""
    config = WhisperConfig(
        **{name: value for name, value in SIZES.items() if name != "max_position_embeddings"},
        max_source_positions=FRAMES // 2, max_target_positions=POSITIONS, num_mel_bins=MELS,
        suppress_tokens=None, begin_suppress_tokens=None, median_filter_width=3,
    )  # fmt: skip
    model = faint(sharpened(lambda: WhisperForConditionalGeneration(config), seed))
    settings = dict(
        no_timestamps_token_id=NO_TIMESTAMPS, lang_to_id={"<|en|>": EN, "<|de|>": DE}, is_multilingual=True,
        task_to_id={"transcribe": TRANSCRIBE, "translate": TRANSLATE}, prev_sot_token_id=PREVIOUS,
        max_length=quick_or(32, 64), suppress_tokens=[5, 6], begin_suppress_tokens=[2, 7],
        max_initial_timestamp_index=5,
    )  # fmt: skip
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


def faint(model, encoder=1.0):
    """Scale down what the second half of its layers adds, and multiply what all read of the
    encoder.
    """
    layers = decoder_layers(model)
    for name, parameter in layers.named_parameters():
        if "encoder_attn.out_proj.weight" in name or "EncDecAttention.o.weight" in name:
            parameter.data.mul_(encoder)
    for layer in layers[len(layers) // 2 :]:
        for name, parameter in layer.named_parameters():
            if name.split(".")[-2] in ("out_proj", "fc2", "o", "wo"):
                parameter.data.mul_(FAINT)
    return model


def decoder_layers(model):
    decoder = model.get_decoder()
    return decoder.block if hasattr(decoder, "block") else decoder.layers


def halved(model):
    """A draft with the same encoder and the first half of the decoder's layers."""
    draft = copy.deepcopy(model)
    decoder = draft.get_decoder()
    layers = decoder_layers(draft)
    setattr(decoder, "block" if hasattr(decoder, "block") else "layers", layers[: len(layers) // 2])
    for config in (draft.config, decoder.config):
        config.num_layers = config.decoder_layers = config.num_decoder_layers = len(layers) // 2
    return draft


def halved_decoder(model):
    """The same without an encoder, as distil-whisper is loaded for drafting."""
    half = halved(model)
    draft = WhisperForCausalLM(copy.deepcopy(half.config)).eval()
    draft.model.decoder.load_state_dict(half.model.decoder.state_dict())
    draft.proj_out.load_state_dict(half.proj_out.state_dict())
    return draft


def texts(batch, seed=0):
    """Texts of different lengths for an encoder, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 20, (batch,), generator=generator)
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    ids = torch.randint(4, VOCAB, mask.shape, generator=generator)
    return {"input_ids": ids * mask, "attention_mask": mask}


def audio(batch, frames=FRAMES, seed=0):
    """Random log-mel features."""
    return 30.0 * torch.randn(batch, MELS, frames, generator=torch.Generator().manual_seed(seed))
