"""Tables of calls that are refused: the call, the type of the error, and words of its message."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import CompileConfig, DynamicCache, EncoderDecoderCache

from hf_slospec import (
    IncompatibleDraftError,
    InvalidInputError,
    InvalidTypeError,
    SLOSpecConfig,
    SLOSpecGenerator,
    UnsupportedInputError,
    UnsupportedModelError,
    UnsupportedOptionError,
    disable,
    divergence_report,
    enable,
    load_drafter,
    load_tiny_pair,
)
from hf_slospec.model.properties import CACHE_NAME, cache_option
from tests.support.against_stock import generator
from tests.support.toys.tiny_encoder_decoders import audio, texts, tiny_text_model, tiny_whisper
from tests.support.toys.tiny_models import ragged_prompts, tiny_model
from tests.support.toys.tiny_tokenizers import byte_level


def generated(*inputs, ours=None, **arguments):
    """Return a call of generate, with a batch of two rows unless inputs are given."""
    prompts = {} if inputs or "input_ids" in arguments else ragged_prompts(2)
    options = dict(do_sample=False, max_new_tokens=6)
    return lambda: (ours() if ours else generator()).generate(
        *inputs, **prompts | options | arguments
    )


def enabled(**arguments):
    return lambda: enable(**{"model": tiny_model("llama")} | arguments)


def reported(inputs=None, speculated=None, **options):
    given = ragged_prompts(2) if inputs is None else inputs
    return lambda: divergence_report(speculated or generator(), given, max_new_tokens=4, **options)


def spoiled(_, scores):
    return scores * float("nan")


spoiled.per_row = True


def with_bytes():
    return SLOSpecGenerator(tiny_model("llama"), tokenizer=byte_level(101))


def whisper(config=None):
    return SLOSpecGenerator(tiny_whisper(), config=config)


LLAMA = tiny_model("llama")
PADDED = {name: tensor.flip(1) for name, tensor in ragged_prompts(2).items()}
EMPTY_ROW = ragged_prompts(2)["attention_mask"] * torch.tensor([[0], [1]])
IDS = torch.randint(3, 101, (2, 15))
BY_TEXT = [[{"slo_tpot": 0.1, "until": "x"}, {"slo_tpot": None}]]
DECODER = dict(decoder_input_ids=torch.tensor([[0, 3, 5]]), decoder_attention_mask=torch.tensor([[0, 1, 1]]),
               decoder_start_token_id=0, max_new_tokens=6)  # fmt: skip
BART_CACHE = cache_option(EncoderDecoderCache([])) | dict(max_new_tokens=6)
PROMPTS = [
    (generated(**PADDED), InvalidInputError, "pad on the left"),
    (generated(torch.empty(1, 0, dtype=torch.int64)), InvalidInputError, "empty"),
    (generated(attention_mask=EMPTY_ROW), InvalidInputError, r"row 0 .* empty"),
    (generated(torch.tensor([[5, 101]])), InvalidInputError, "tokenizer"),
    (generated(IDS, attention_mask=torch.ones(2, 3)), InvalidInputError, "attention_mask has shape"),
    (generated(IDS, attention_mask=torch.ones(3, 15)), InvalidInputError, "attention_mask has shape"),
    (generated(IDS[None]), InvalidInputError, r"\[batch, length\] or \[length\]"),
    (generated(torch.ones(2, 4)), InvalidTypeError, "int64, got torch.float32"),
    (generated(IDS.to(torch.uint8)), InvalidTypeError, "int64, got torch.uint8"),
    (generated(ragged_prompts(1)), InvalidTypeError, r"generate\(\*\*inputs\)"),
    (generated(inputs_embeds=torch.zeros(2, 32)), InvalidInputError, "inputs_embeds"),
    (generated(inputs_embeds=torch.zeros(2, 3, 32)), UnsupportedOptionError, "inputs_embeds"),
    (lambda: generator().generate(inputs_embeds=torch.zeros(1, 4, 5)), InvalidInputError, "embeddings have 32"),
    (generated(max_new_tokens=150, ours=lambda: SLOSpecGenerator(tiny_model("gpt2"))), InvalidInputError,
     r"max_new_tokens=150 .* 160 positions"),
    (generated(**cache_option(object())), InvalidTypeError, CACHE_NAME),
    (generated(token_type_ids=torch.zeros(2, 15)), ValueError, "token_type_ids"),
]  # fmt: skip
UNSUPPORTED = [
    ("beam", dict(num_beams=2)),
    ("beam", dict(num_beams=2, do_sample=True)),
    ("contrastive", dict(penalty_alpha=0.6, top_k=4)),
    ("custom_generate", dict(custom_generate="org/repo")),
    ("output_attentions", dict(output_attentions=True, return_dict_in_generate=True)),
    ("output_hidden_states", dict(output_hidden_states=True, return_dict_in_generate=True)),
    ("cache_implementation", dict(cache_implementation="quantized")),
    ("token_healing", dict(token_healing=True)),
    ("synced_gpus", dict(synced_gpus=True)),
    ("compile_config", dict(compile_config=CompileConfig())),
    ("use_cache", cache_option(DynamicCache()) | dict(use_cache=False)),
]
OPTIONS = [
    *((generated(**options), UnsupportedOptionError, name) for name, options in UNSUPPORTED),
    (generated(max_new_tokenz=4), ValueError, "max_new_tokenz"),
    (generated(prompt_lookup_num_tokens=0), InvalidInputError, "prompt_lookup_num_tokens"),
    (generated(fallback=1), InvalidTypeError, "^fallback must be"),
    (generated(do_sample=True, logits_processor=[spoiled]), RuntimeError, "inf or nan"),  # as stock
    *((generated(slo_tpot=slo), InvalidInputError, "slo_tpot")
      for slo in ([0.1], [0.1, 0.2, 0.3], 0, 10**400, torch.empty(2, device="meta"))),
    *((generated(slo_tpot=slo), InvalidTypeError, "slo_tpot") for slo in ("0.1", [0.1, "fast"])),
    *((generated(slo_tpot=BY_TEXT * 2, tokenizer=wrong), InvalidTypeError, "tokenizer must be a loaded tokenizer")
      for wrong in ("org/name", 3)),
    *((generated(stop_strings=strings, ours=with_bytes), InvalidInputError, "stop_strings must be strings")
      for strings in (True, [None], [1.5], ["\ud800"])),
]  # fmt: skip
MODELS = [
    *((enabled(model=bad), InvalidTypeError, "^model must be") for bad in (7, "gpt2", torch.nn.Linear(2, 2))),
    *((lambda bad=bad: SLOSpecGenerator(LLAMA, bad), InvalidTypeError, "^assistant_model must be")
      for bad in (7, torch.nn.Linear(2, 2))),
    (lambda: SLOSpecGenerator(LLAMA, "gpt2"), InvalidInputError, "^gpt2 is neither .* drafters known by name are"),
    *((enabled(**{name: "no"}), InvalidTypeError, f"^{name} must be True or False, got 'no'")
      for name in ("always", "fallback")),
    (lambda: SLOSpecGenerator(LLAMA, fallback=None), InvalidTypeError, "^fallback must be"),
    (enabled(config={"max_depth": 3}), InvalidTypeError, "config"),
    (lambda: enable(load_tiny_pair()[0], LLAMA), IncompatibleDraftError, "vocabulary"),
    (lambda: enable(LLAMA, copy.deepcopy(LLAMA).to("meta")), IncompatibleDraftError, r"assistant_model.to\('cpu'\)"),
    *((lambda wrong=wrong: SLOSpecGenerator(LLAMA, tokenizer=wrong), InvalidTypeError,
       "tokenizer must be a loaded tokenizer") for wrong in ("org/name", 3)),
    (lambda: load_drafter("lookup", LLAMA, assistant_tokenizer=3), InvalidTypeError,
     "assistant_tokenizer must be a loaded tokenizer"),
    (lambda: SLOSpecGenerator(LLAMA, processor=3), InvalidTypeError, "processor must be a loaded processor"),
    (lambda: SLOSpecGenerator(LLAMA, make_policy="auto"), InvalidTypeError, "make_policy"),
    (generated(ours=lambda: SLOSpecGenerator(LLAMA, make_policy=lambda config, costs: None)), InvalidTypeError,
     "make_policy must return a policy with a method 'plan'"),
    (lambda: SLOSpecGenerator(tiny_model("mixtral"), config=SLOSpecConfig(exact="bits")), UnsupportedOptionError,
     r'exact="bits" is not available for Mixtral.*experts'),
    (lambda: SLOSpecGenerator(LLAMA, config=SLOSpecConfig(exact="self", attention="4d_mask")), UnsupportedOptionError,
     "attention='4d_mask'"),
]  # fmt: skip
REPORTS = [
    (reported(do_sample=True), UnsupportedOptionError, "do_sample=False"),
    (reported(do_sample=False, max_time=1.0), UnsupportedOptionError, "max_time"),
    *((reported(num_beams=2, fallback=fallback), UnsupportedOptionError, "beam") for fallback in (False, True)),
    (reported(ragged_prompts(2)["input_ids"]), InvalidTypeError, "mapping"),
    (reported({"inputs_embeds": torch.zeros(2, 9, 32)}), UnsupportedOptionError, "input_ids"),
    (reported(speculated="llama"), InvalidTypeError, "speculated must be a loaded transformers model"),
    (reported(speculated=LLAMA), InvalidInputError, r"hf_slospec\.enable"),
    (lambda: reported(speculated=disable(enable(copy.deepcopy(LLAMA))))(), InvalidInputError, r"hf_slospec\.enable"),
    (lambda: divergence_report(whisper(), {"input_features": audio(1)}), UnsupportedModelError,
     "divergence_report takes decoder-only models"),
]  # fmt: skip
ENCODERS = [
    (lambda: whisper().generate(audio(2), num_beams=2), UnsupportedOptionError, "beam search"),
    (lambda: whisper().generate(audio(2), slo_tpot=[0.1, 0.2]), UnsupportedOptionError,
     "slo_tpot must be one for all rows of Whisper"),
    (lambda: whisper().start(), UnsupportedModelError, "the batcher takes decoder-only models, and Whisper"),
    (lambda: SLOSpecGenerator(LLAMA, tiny_text_model("Bart")), IncompatibleDraftError,
     "is an encoder-decoder, and LlamaForCausalLM has no encoder"),
    (lambda: SLOSpecGenerator(tiny_whisper(), tiny_text_model("Bart")), IncompatibleDraftError,
     "takes input_ids and that of the target input_features"),
    (lambda: whisper(SLOSpecConfig(exact="self")), UnsupportedOptionError, "it attends to an encoder"),
    (lambda: SLOSpecGenerator(tiny_text_model("Bart")).generate(**texts(1), **DECODER),
     UnsupportedInputError, "counts them as text"),
    (lambda: SLOSpecGenerator(tiny_text_model("Bart")).generate(**texts(1), **BART_CACHE),
     UnsupportedOptionError, CACHE_NAME),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "words"), [*PROMPTS, *OPTIONS, *MODELS, *REPORTS, *ENCODERS]
)
def test_refused_calls_say_what_is_wrong(call, error, words):
    with pytest.raises(error, match=words):
        call()
    assert "generate" not in vars(LLAMA)
