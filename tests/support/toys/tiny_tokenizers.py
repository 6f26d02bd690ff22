"""Tokenizers trained on a little text: byte-level and sentencepiece-like ones, and one with other
ids.
"""

from __future__ import annotations

import functools
import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hf_slospec import tiny_prompts

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
FOREIGN = "naïve café, 你好 世界 日本語の文 👩‍🚀🎉🏳️‍🌈 Ġħ ▁x\n"


@functools.cache
def byte_level(vocab_size, num_texts=8, eos="<|endoftext|>"):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=alphabet,
        special_tokens=[eos, "<|user|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([*tiny_prompts()[:num_texts], FOREIGN], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        additional_special_tokens=["<|user|>"],
        pad_token=eos,
    )


@functools.cache
def sentencepiece_like(vocab_size):
    """Spaces as ▁, one of them before every text, rare characters as bytes, and <s> before prompts,
    as Llama 2 has.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "<s>", "</s>"],
        show_progress=False,
        limit_alphabet=400,
    )
    tokenizer.train_from_iterator([*tiny_prompts()[:8], FOREIGN], trainer)
    whole = json.loads(tokenizer.to_str())
    vocab = whole["model"]["vocab"]
    vocab |= {token: len(vocab) + byte for byte, token in enumerate(BYTE_TOKENS)}
    tokenizer = Tokenizer.from_str(json.dumps(whole))
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="</s>",
    )


def with_other_ids(tokenizer, ids):
    """The same tokenizer, but token ``i`` has the id ``ids[i]``."""
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    whole["model"]["vocab"] = {
        token: ids[number] for token, number in whole["model"]["vocab"].items()
    }
    for added in whole["added_tokens"]:
        added["id"] = ids[added["id"]]
    whole["added_tokens"].sort(key=lambda added: added["id"])
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(whole)), **dict(tokenizer.special_tokens_map)
    )
