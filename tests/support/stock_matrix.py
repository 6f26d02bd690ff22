"""Axes of the matrix that compares speculation with stock ``generate``: models, inputs, paths,
drafters, options.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import MaxTimeCriteria, SuppressTokensLogitsProcessor, TopKLogitsWarper

import hf_slospec
from hf_slospec import (
    SLOSpecConfig,
    SLOSpecGenerator,
    load_tiny_drafter,
    load_tiny_pair,
    tiny_prompts,
)
from hf_slospec.cpu.compile_job import CompileJob
from tests.heads.checkpoints import target_of, write
from tests.heads.published_blocks import CASES as PUBLISHED_BLOCKS
from tests.support.breadth import quick_or
from tests.support.cuda_tests import moved, on_cuda
from tests.support.forced_kernels import WORKING, force_kernel
from tests.support.paths import ROOT
from tests.support.served_pair import WAIT_S, Holds, answer
from tests.support.streamers import Recorder
from tests.support.toys import tiny_encoder_decoders as encoder_decoders
from tests.support.toys import tiny_gemma4
from tests.support.toys.feature_heads import FOLDERS, random_head
from tests.support.toys.tiny_configs import tiny_config
from tests.support.toys.tiny_image_models import IMAGE, prompts_with_images, tiny_image_model
from tests.support.toys.tiny_models import (
    FAMILIES,
    GROUPED,
    SMALL,
    VOCAB,
    WINDOW,
    assert_same_as_stock,
    ragged_prompts,
    sharpened,
    tiny_model,
)
from tests.support.toys.tiny_tokenizers import FOREIGN, byte_level, sentencepiece_like

SEED = 7
NEW_TOKENS = quick_or(12, 20)

# ---- models

LLAMA4 = GROUPED | dict(
    head_dim=8, attention_chunk_size=WINDOW, num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=48,
    no_rope_layers=[1, 0],
)  # fmt: skip
ROPE_SWITCH = 32  # length at which the frequencies change
LONGROPE = dict(
    rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=ROPE_SWITCH, factor=4.0,
    short_factor=[1.0, 1.0, 1.5, 2.0], long_factor=[1.0, 3.0, 9.0, 20.0],
)  # fmt: skip
DECODER = SMALL | dict(is_decoder=True)
# Class of the config and settings of models beside those of tiny_models.FAMILIES.
CONFIGS = {
    "bert": ("BertConfig", DECODER),
    "roberta": ("RobertaConfig", DECODER),
    "electra": ("ElectraConfig", DECODER | dict(embedding_size=32)),
    "roformer": ("RoFormerConfig", DECODER | dict(embedding_size=32, rotary_value=False)),
    "rembert": ("RemBertConfig", DECODER | dict(input_embedding_size=32, output_embedding_size=32)),
    "llama4-chunks": ("Llama4TextConfig", LLAMA4),
    "llama4-temperatures": ("Llama4TextConfig", LLAMA4 | dict(floor_scale=3, attn_scale=0.5)),
    "phimoe-window": (
        "PhimoeConfig", GROUPED | dict(sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2),
    ),
    "llama-longrope": ("LlamaConfig", GROUPED | dict(max_position_embeddings=128, rope_parameters=LONGROPE)),
    "llama-dynamic-rope": (
        "LlamaConfig",
        GROUPED | dict(
            max_position_embeddings=ROPE_SWITCH,
            rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=4.0),
        ),
    ),
    "phi3-longrope": (
        "Phi3Config",
        GROUPED | dict(
            max_position_embeddings=128, original_max_position_embeddings=ROPE_SWITCH, rope_parameters=LONGROPE
        ),
    ),
    "llama-tied": ("LlamaConfig", GROUPED | dict(tie_word_embeddings=True)),
    "llama-narrow": ("LlamaConfig", GROUPED | dict(vocab_size=VOCAB - 13)),
    "llama-tokens": ("LlamaConfig", GROUPED | dict(vocab_size=400, max_position_embeddings=512)),
    "llama-other-tokens": ("LlamaConfig", GROUPED | dict(vocab_size=2612, max_position_embeddings=512)),
}  # fmt: skip


def with_lora(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config).eval()


def quantised(name, model):
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, getattr(quantization, name)())
    return model


def steered(model):
    model.model.layers[1].register_forward_hook(lambda module, inputs, output: output * 1.5)
    return model


def padded_vocabulary(model):
    model.resize_token_embeddings(VOCAB + 27)
    return model


def with_few_outputs(model):
    model.lm_head = torch.nn.Linear(32, 90, bias=False)
    return model


# Family and what is done to a copy of its tiny model.
CHANGES = {
    "llama-training": ("llama", lambda model: model.train()),
    "llama-fp64": ("llama", lambda model: model.double()),
    "llama-bf16": ("llama", lambda model: model.bfloat16()),
    "llama-fp16": ("llama", lambda model: model.half()),
    "llama-int8": ("llama", functools.partial(quantised, "Int8WeightOnlyConfig")),
    "llama-int4": ("llama", functools.partial(quantised, "IntxWeightOnlyConfig")),
    "llama-fp8": ("llama", functools.partial(quantised, "Float8WeightOnlyConfig")),
    "llama-int8-activations": (
        "llama",
        functools.partial(quantised, "Int8DynamicActivationInt8WeightConfig"),
    ),
    "llama-lora": ("llama", with_lora),
    "llama-hook": ("llama", steered),
    "llama-128": ("llama", padded_vocabulary),
    "llama-few-outputs": ("llama", with_few_outputs),
    "gpt2-training": ("gpt2", lambda model: model.train()),
    "gpt2-offloaded": (
        "gpt2",
        lambda model: cpu_offload(model, execution_device=torch.device("cpu")),
    ),
}
GEMMA4 = {
    "gemma4": {},
    "gemma4-own": dict(variant="own"),
    "gemma4-unified": dict(unified=True),
}
COUNTS_PADDING = ("BartForCausalLM", "Llama4ForCausalLM", "llama4-chunks", "llama4-temperatures")


@functools.cache
def model_of(name, noise=0.0):
    """Return a tiny model by its name in a table or by its class; one with ``noise`` drafts for it."""
    if name in FAMILIES:
        return tiny_model(name, noise=noise)
    if name in CONFIGS:
        class_name, settings = CONFIGS[name]
        config = getattr(transformers, class_name)(**settings)
        return sharpened(lambda: AutoModelForCausalLM.from_config(config), 0, noise)
    if name in CHANGES:
        family, change = CHANGES[name]
        return (
            tiny_model(family, noise=noise) if noise else change(copy.deepcopy(tiny_model(family)))
        )
    if name == "embedded":
        return load_tiny_pair(torch.float32)[bool(noise)]
    if name == "llama-deep":
        return target_of("llama")
    if name in GEMMA4:
        make = tiny_gemma4.tiny_assistant if noise else tiny_gemma4.tiny_target
        return make(**GEMMA4[name])
    if name in encoder_decoders.TEXT_MODELS:
        model = encoder_decoders.tiny_text_model(name)
        return encoder_decoders.halved(model) if noise else model
    if name == "whisper-bf16":
        return encoder_decoders.halved_decoder(model_of("Whisper")).bfloat16()
    if name == "Whisper":
        return (
            encoder_decoders.halved_decoder(model_of(name))
            if noise
            else encoder_decoders.tiny_whisper()
        )
    kind = getattr(transformers, name)
    if name.endswith("ForConditionalGeneration"):
        return tiny_image_model(name, noise=noise)
    return sharpened(lambda: kind(tiny_config(kind.config_class)), 0, noise)


def forget_length(model):
    """Let stock forget the frequencies of longer texts, which dynamic RoPE keeps until a short one
    comes.
    """
    model(torch.tensor([[1]]))


# ---- inputs


def padded(texts):
    """Return token ids as a left-padded batch."""
    longest = max(map(len, texts))
    ids = torch.tensor([[0] * (longest - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    return {"input_ids": ids, "attention_mask": mask}


def random_texts(*lengths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def embedded_texts(*lengths):
    ids = load_tiny_pair()[2]("".join(tiny_prompts()))["input_ids"]
    return padded([ids[:length] for length in lengths])


def soft_prompts(model, batch, with_ids):
    """Return embeddings that are near those of tokens."""
    inputs = ragged_prompts(batch)
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    noise = torch.randn(embeds.shape, generator=torch.Generator().manual_seed(3))
    ids = inputs if with_ids else {"attention_mask": inputs["attention_mask"]}
    return ids | {"inputs_embeds": embeds + 0.05 * noise}


def with_gap(inputs):
    inputs["attention_mask"][0, -5:-2] = 0
    return inputs


def with_types(inputs):
    return inputs | {"token_type_ids": torch.zeros_like(inputs["input_ids"])}


def with_positions(inputs):
    return inputs | {"position_ids": (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)}


def repeated(inputs, num_rows=1, num_times=1):
    return {
        name: rows.repeat_interleave(num_rows, 0).repeat(1, num_times)
        for name, rows in inputs.items()
    }


def tokenized(*texts):
    inputs = byte_level(400)(list(texts), return_tensors="pt", padding=True, padding_side="left")
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


INPUTS = {
    "code": lambda model: embedded_texts(90, 30, 60),
    "code4": lambda model: embedded_texts(90, 30, 60, 45),
    "long": lambda model: embedded_texts(1030, 40),
    "longer": lambda model: embedded_texts(1100, 700),
    "embeds": lambda model: soft_prompts(model, 3, with_ids=False),
    "embeds+ids": lambda model: soft_prompts(model, 3, with_ids=True),
    "gap": lambda model: with_gap(ragged_prompts(2)),
    "types": lambda model: with_types(ragged_prompts(1)),
    "positions": lambda model: with_positions(ragged_prompts(3)),
    "nothing": lambda model: {},
    "token": lambda model: padded([[5]]),
    "equal-rows": lambda model: repeated(padded(random_texts(40, 90)), num_rows=2),
    "repetitive": lambda model: repeated(padded(random_texts(8, 8, 8)), num_times=3),
    "unwritable": lambda model: padded([[5, 99, 97, 6, 99, 97, 8, 99, 97]]),
    "large-ids": lambda model: padded([[120, 5, 127, 9, 110]]),
    "foreign": lambda model: tokenized(
        "class Stack:\n    def", FOREIGN, "x" + " " * 30, "return self.name"
    ),
    "images": lambda model: prompts_with_images(model, 1, (1, 2)),
    "some-images": lambda model: prompts_with_images(model, 2, (2, 0, 1)),
    "inputs": lambda model: {"inputs": encoder_decoders.texts(2)["input_ids"]},
    "encoded": lambda model: {
        "encoder_outputs": model.get_encoder()(**encoder_decoders.texts(2)),
        "attention_mask": encoder_decoders.texts(2)["attention_mask"],
    },
    "begun": lambda model: (
        encoder_decoders.texts(2)
        | {"decoder_input_ids": torch.tensor([[3, 9, 30, 7], [3, 50, 8, 4]])}
    ),
}


def inputs_of(name, model_name):
    """Return inputs by a name of INPUTS, as so many prompts, or as prompts of lengths with a comma
    between them.
    """
    model = model_of(model_name)
    if name in INPUTS:
        with torch.no_grad():
            return INPUTS[name](model)
    numbers = [int(number) for number in name.split(",") if number]
    if "," in name:
        return padded(random_texts(*numbers))
    (batch,) = numbers
    if model_name in encoder_decoders.TEXT_MODELS:
        return encoder_decoders.texts(batch)
    if model_name == "Whisper":
        return {"input_features": encoder_decoders.audio(batch)}
    if model_name in COUNTS_PADDING:
        return padded(random_texts(*[14] * batch))
    return dict(ragged_prompts(batch, seed=batch))


# ---- options


class Countdown(LogitsProcessor):
    """Counts its calls, and moves the scores by the count."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores.roll(self.calls % 5, dims=-1) + input_ids[:, -1:] % 3


class CountdownPerRow(Countdown):
    """Declares that it treats every row by itself."""

    per_row = True


class Widened(TopKLogitsWarper):
    """Subclass of a processor that ignores the sequence; it does not."""

    def __call__(self, input_ids, scores):
        return super().__call__(input_ids, scores) + (input_ids[:, -1:] % 7)


class RowBias(LogitsProcessor):
    """Tells rows apart by their index in the batch."""

    def __call__(self, input_ids, scores):
        return (
            scores
            + 6.0 * torch.randn(3, 101, generator=torch.Generator().manual_seed(1))[: len(scores)]
        )


class Drawing(LogitsProcessor):
    """Draws from the global generator."""

    def __call__(self, input_ids, scores):
        return scores + torch.rand_like(scores)


class InPlace(LogitsProcessor):
    per_row = True

    def __call__(self, input_ids, scores):
        scores[:, 5:60:2] = -torch.inf
        return scores


class Narrowing(LogitsProcessor):
    """Cuts the vocabulary and changes the dtype."""

    per_row = True

    def __call__(self, input_ids, scores):
        return scores[:, :50].bfloat16()


class StopAt(StoppingCriteria):
    """Stops a row at some tokens."""

    per_row = True

    def __init__(self, *tokens):
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids, scores, **_):
        return torch.isin(input_ids[:, -1], self.tokens)


class AnyRow(StoppingCriteria):
    """Stops all rows when one is at some tokens."""

    def __call__(self, input_ids, scores, **_):
        return bool(torch.isin(input_ids[:, -1], torch.arange(20, 36)).any())


class MaxCalls(StoppingCriteria):
    """Stops by the number of its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores, **_):
        self.calls += 1
        return torch.full((len(input_ids),), self.calls >= 10)


class SureEnough(StoppingCriteria):
    """Reads scores."""

    def __call__(self, input_ids, scores, **_):
        return scores[-1].softmax(-1).max(-1).values > 0.9


class Replacing(StoppingCriteria):
    """Replaces the last token at times."""

    per_row = True

    def __call__(self, input_ids, scores, **_):
        if input_ids.shape[1] % 3 == 0 or input_ids[0, -1] == 2:
            input_ids[:, -1] = (input_ids[:, -1] + 7) % 101
        return torch.zeros(len(input_ids), dtype=torch.bool)


class MultiTokenEOSCriteria(StoppingCriteria):
    """Ends all rows once each of them has had the string among its last tokens, as lm-eval's class
    of this name.
    """

    class Spelled:
        """Tokenizer that spells a token as a letter, so that a letter stands for several tokens."""

        def encode(self, text, add_special_tokens=True):
            return [ord(letter) - ord("a") for letter in text]

        def batch_decode(self, rows):
            return ["".join(chr(ord("a") + token % 9) for token in row) for row in rows.tolist()]

    def __init__(self, sequence, prompt_len, batch):
        self.sequence = sequence
        self.prompt_len = prompt_len
        self.done_tracker = [False] * batch
        self.tokenizer = self.Spelled()
        self.sequence_id_len = len(self.tokenizer.encode(sequence)) + 2

    def __call__(self, input_ids, scores, **_):
        texts = self.tokenizer.batch_decode(
            input_ids[:, self.prompt_len :][:, -self.sequence_id_len :]
        )
        self.done_tracker = [
            was or self.sequence in text for was, text in zip(self.done_tracker, texts, strict=True)
        ]
        return all(self.done_tracker)


def lm_eval_stops(*sequences):
    """Return criteria for the inputs "3"."""
    length = ragged_prompts(3, seed=3)["input_ids"].shape[1]
    return dict(
        stopping_criteria=[MultiTokenEOSCriteria(one, length, 3) for one in sequences],
        max_new_tokens=60,
    )


def allowed_by_row(row, tokens):
    return [(int(tokens[-1]) * factor + row) % 101 for factor in range(3, 30)]


def negative_prompt():
    """Return a negative prompt for a batch of three."""
    negative = ragged_prompts(3, seed=9)
    return dict(
        guidance_scale=1.6, negative_prompt_ids=negative["input_ids"],
        negative_prompt_attention_mask=negative["attention_mask"],
    )  # fmt: skip


def of_stop_strings():
    return dict(stop_strings=["self.", "):"], tokenizer=load_tiny_pair()[2], max_new_tokens=60)


SCORES = dict(output_scores=True, output_logits=True)
EOS = dict(eos_token_id=[2, 17, 40, 41, 42], pad_token_id=5, max_new_tokens=quick_or(24, 40))
OPTIONS = {
    "greedy": dict(do_sample=False),
    "sampled": dict(do_sample=True, temperature=0.8, top_k=30, top_p=0.95),
    "drawn": dict(do_sample=True),
    "cold": dict(temperature=0.4),
    "warm": dict(temperature=1.7, top_k=7),
    "top-p": dict(top_p=0.8),
    "min-p": dict(min_p=0.05),
    "typical": dict(typical_p=0.7),
    "epsilon": dict(epsilon_cutoff=0.02),
    "eta": dict(eta_cutoff=0.3),
    "top-h": dict(top_h=0.5),
    "renormalized": dict(renormalize_logits=True, top_k=20),
    "no-invalid": dict(remove_invalid_values=True),
    "sequences": dict(num_return_sequences=3),
    "repetition": dict(repetition_penalty=1.4),
    "encoder-repetition": dict(encoder_repetition_penalty=1.3),
    "ngrams": dict(no_repeat_ngram_size=2),
    "encoder-ngrams": dict(encoder_no_repeat_ngram_size=2),
    "bad-words": dict(bad_words_ids=[[5], [7, 8], [11, 12, 13]]),
    "min-length": dict(min_length=quick_or(25, 40)),
    "min-new": dict(min_new_tokens=8, eos_token_id=[2, 9, 30]),
    "forced-bos": dict(forced_bos_token_id=17),
    "forced-eos": dict(forced_eos_token_id=2),
    "suppressed": dict(suppress_tokens=[4, 5, 6]),
    # All that "llama-narrow" drafts
    "all-suppressed": dict(suppress_tokens=list(range(VOCAB - 13))),
    "no-placeholders": dict(suppress_tokens=[IMAGE]),
    "begin-suppressed": dict(begin_suppress_tokens=[1, 3, 50, 60]),
    "biased": dict(sequence_bias={(10,): 5.0, (11, 12): -4.0}),
    "decaying": dict(exponential_decay_length_penalty=(5, 1.3)),
    "guided": dict(guidance_scale=1.6),
    "negative": negative_prompt,
    "prefix": dict(prefix_allowed_tokens_fn=allowed_by_row),
    "watermark": dict(watermarking_config=WatermarkingConfig(bias=2.5)),
    "synthid": dict(
        watermarking_config=SynthIDTextWatermarkingConfig(ngram_len=3, keys=[11, 22, 33], context_history_size=16)
    ),
    **{
        name: dict(logits_processor=[processor])
        for name, processor in {
            "countdown": Countdown(),
            "countdown-per-row": CountdownPerRow(),
            "widened": Widened(5),
            "row-bias": RowBias(),
            "drawing": Drawing(),
            "in-place": InPlace(),
            "narrowing": Narrowing(),
            "of-transformers": SuppressTokensLogitsProcessor([7, 8]),
        }.items()
    },
    **{
        name: dict(stopping_criteria=criteria, max_new_tokens=quick_or(24, 40))
        for name, criteria in {
            "stop-at": [StopAt(*range(20, 36)), MaxTimeCriteria(1e9)],
            "plain-bool": [lambda input_ids, scores, **_: input_ids.shape[1] >= 26],
            "any-row": [AnyRow()],
            "max-calls": [MaxCalls()],
            "sure": [SureEnough()],
            "replacing": [Replacing()],
        }.items()
    },
    "lm-eval": lm_eval_stops("bc", "e"),
    "lm-eval-late": lm_eval_stops("d", "ia"),
    "stop-strings": of_stop_strings,
    "streamed": dict(streamer=Recorder()),
    "eos": EOS,
    "no-eos": dict(eos_token_id=None),
    "no-pad": EOS | dict(pad_token_id=None),
    "endless": EOS | dict(max_new_tokens=10**9),
    "one-token": dict(max_new_tokens=1),
    "two-tokens": dict(max_new_tokens=2),
    "max-length": dict(max_length=40, max_new_tokens=None),
    "many-tokens": dict(max_new_tokens=150, eos_token_id=None),
    "scores": SCORES,
    "no-dict": dict(return_dict_in_generate=False, output_attentions=True),
    "no-cache": dict(use_cache=False),
    "static-cache": dict(cache_implementation="static"),
    "last-logits": dict(logits_to_keep=1),
    "prefill-chunks": dict(prefill_chunk_size=4),
    "config": dict(
        generation_config=GenerationConfig(
            do_sample=True, top_k=9, max_new_tokens=NEW_TOKENS, eos_token_id=2, pad_token_id=0
        ),
        max_new_tokens=None,
    ),
    "no-start": dict(forced_bos_token_id=9, no_repeat_ngram_size=2, min_new_tokens=8),
    "language": dict(language="de", task="translate"),
    "languages": dict(language=["de", "en", "de"]),
    "timestamps": dict(return_timestamps=True),
    "segments": dict(return_timestamps=True, return_dict_in_generate=True, return_segments=True),
    "previous": dict(prompt_ids=torch.tensor([encoder_decoders.PREVIOUS, 20, 21, 22])),
    "warmer": dict(
        temperature=(0.0, 0.4, 0.8), logprob_threshold=-0.5, compression_ratio_threshold=0.9,
        no_speech_threshold=0.02, return_timestamps=True,
    ),
}  # fmt: skip


def options_of(names, model_name):
    """Return options by their names in OPTIONS, joined by +; later ones replace earlier ones."""
    is_speech = model_name == "Whisper"
    options = (
        dict(return_dict_in_generate=False)
        if is_speech
        else SCORES | dict(max_new_tokens=NEW_TOKENS)
    )
    for name in names.split("+"):
        options |= copy.deepcopy(make() if callable(make := OPTIONS[name]) else make)
    return {
        name: value
        for name, value in options.items()
        if value is not None or name.endswith("token_id")
    }


# ---- drafters


def other_tokens():
    return dict(
        assistant_model=model_of("llama-other-tokens"), tokenizer=byte_level(400),
        assistant_tokenizer=sentencepiece_like(2100),
    )  # fmt: skip


PUBLISHED_HEADS = {name.replace(" ", "-"): case for name, case in PUBLISHED_BLOCKS.items()}
Draft = Callable[
    [str, Path], dict[str, Any]
]  # name of the target, folder for checkpoints -> arguments
DRAFTERS = {
    "lookup": lambda name, folder: {},
    "lookup-argument": lambda name, folder: dict(
        prompt_lookup_num_tokens=4, max_matching_ngram_size=2
    ),
    "suffix": lambda name, folder: dict(drafter="suffix"),
    "lookup+suffix": lambda name, folder: dict(drafter="lookup+suffix"),
    "fair": lambda name, folder: dict(assistant_model=model_of(name, 0.03)),
    "useless": lambda name, folder: dict(assistant_model=model_of(name, 1.0)),
    "perfect": lambda name, folder: dict(assistant_model=model_of(name)),
    "lookup+fair": lambda name, folder: dict(drafter=["lookup", model_of(name, 0.03)]),
    "trained": lambda name, folder: dict(drafter=load_tiny_drafter("mtp", model_of(name))),
    "suffix+trained": lambda name, folder: dict(
        drafter=["suffix", load_tiny_drafter("mtp", model_of(name))]
    ),
    "other-tokens": lambda name, folder: other_tokens(),
    **{
        kind: lambda name, folder, kind=kind: dict(
            drafter=random_head(kind, folder, model_of(name))
        )
        for kind in FOLDERS
    },
    **{
        name: lambda _, folder, case=case: dict(
            drafter=write(folder / "head", case.config, case.saved(case.tensors))
        )
        for name, case in PUBLISHED_HEADS.items()
    },
}


def drafter_of(name, model_name, folder):
    """Return arguments for a drafter of DRAFTERS, or for another model as the draft model."""
    return (
        DRAFTERS[name](model_name, folder)
        if name in DRAFTERS
        else dict(assistant_model=model_of(name))
    )


# ---- paths


@contextmanager
def default_device():
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


class Finished:
    """A compilation that ran in this process."""

    def wait(self):
        """Return at once."""

    def poll(self):
        return 0


def compile_in_this_process(patch):
    patch.setattr(CompileJob, "start", lambda self: self.run() or Finished())


def force_prepacking(patch):
    if not WORKING:
        pytest.skip("no kernels for packed weights on this machine")
    force_kernel(patch, WORKING[0][0])


def constant(target, value):
    return lambda patch: patch.setattr(target, value)


ALWAYS = dict(
    policy="adaserve", check_invariants=True, token_budget=40, max_depth=quick_or(2, 4), kv_tokens=20_000,
    compile=False, prepack=False,
)  # fmt: skip


@dataclass(frozen=True)
class ForwardPath:
    """Settings of a generator, and what else makes its forwards take a path."""

    settings: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[pytest.MonkeyPatch], None] = lambda patch: None
    fixture: str | None = None  # that has to be in use
    around: Callable[[], Any] = nullcontext  # context of construction and call
    check: Callable[[SLOSpecGenerator], Any] = lambda generator: True
    drafts: bool = True  # in every step


FLASH = dict(attention="flash", policy="fixed", max_depth=3, max_width=2)
PATHS = {
    "eager": ForwardPath(),
    "4d-mask": ForwardPath(dict(attention="4d_mask")),
    "auto": ForwardPath(dict(policy="auto", prepack=None, compile=True), drafts=False),
    "sequoia": ForwardPath(dict(policy="sequoia"), drafts=False),
    "roots": ForwardPath(dict(policy="fixed", max_depth=0, max_width=1), drafts=False),
    "chain": ForwardPath(dict(policy="fixed", max_depth=4, max_width=1)),
    "wide": ForwardPath(dict(policy="fixed", max_depth=7, max_width=6)),
    "uncoupled": ForwardPath(dict(coupling=False)),
    "compiled": ForwardPath(
        dict(compile="wait"), compile_in_this_process,
        check=lambda generator: set(generator.stats().forwards.values()) == {"compiled"},
    ),
    "prepacked": ForwardPath(
        dict(prepack=True), force_prepacking,
        check=lambda generator: len(generator.decoder.speculator.target.packed.overrides.layers),
    ),
    "exact-bits": ForwardPath(dict(exact="bits")),
    "chunks": ForwardPath(prepare=constant("hf_slospec.scheduler.prefill.CHUNK", 5)),
    "growing": ForwardPath(prepare=constant("hf_slospec.model.sequences.FIRST_ROOM", 5)),
    "node-by-node": ForwardPath(prepare=constant("hf_slospec.model.sampling.MAX_BATCHED_LOGITS", 0)),
    "no-noise": ForwardPath(prepare=constant("hf_slospec.model.noise.MAX_NOISE_BYTES", 0)),
    "little-noise": ForwardPath(prepare=constant("hf_slospec.model.noise.MAX_NOISE_BYTES", 3 * 4 * VOCAB * 4)),
    "default-device": ForwardPath(around=default_device),
    "device-context": ForwardPath(around=lambda: torch.device("meta")),
    "captured": ForwardPath(FLASH, fixture="tapes"),
    "uncaptured": ForwardPath(FLASH | dict(cuda_graphs=False), fixture="tapes"),
    "cuda": ForwardPath(fixture="device"),
}  # fmt: skip


def config_of(name, request):
    """Prepare a path of PATHS, and return the settings for it."""
    path = PATHS[name]
    if path.fixture is not None:
        request.getfixturevalue(path.fixture)
    path.prepare(request.getfixturevalue("monkeypatch"))
    return SLOSpecConfig(**ALWAYS | path.settings)


# ---- entry points


@dataclass
class Case:
    """A row of the matrix, with everything made that a call needs."""

    model: Any
    draft: dict[str, Any]
    config: SLOSpecConfig
    path: ForwardPath
    inputs: dict[str, Any]
    make_options: Callable[[], dict[str, Any]]  # new objects for each call
    num_rows: int
    forget: Callable[[Any], None]  # what stock keeps of a call

    def generator(self):
        with self.path.around():
            return SLOSpecGenerator(self.model, config=self.config, **self.draft)

    def submit_options(self):
        """Return options of ``submit``, which returns tokens only."""
        return {name: value for name, value in self.make_options().items() if name not in SCORES}

    def compare(self, generate, **arguments):
        """Compare a call of ours with stock's."""

        def ours(**given):
            with self.path.around():
                return generate(**given, **arguments)

        self.forget(self.model)
        return assert_same_as_stock(self.model, ours, self.inputs, **self.make_options())


def by_generator(case):
    generator = case.generator()
    out = case.compare(generator.generate, slo_tpot=0.05)
    assert case.path.check(generator), generator.stats().forwards
    return out


def by_slo_per_row(case):
    targets = [(0.001, None, 10.0)[row % 3] for row in range(case.num_rows)]
    out = case.compare(case.generator().generate, slo_tpot=targets)
    copies = len(out.slo) // case.num_rows
    assert [row.tpot_slo_s for row in out.slo] == [
        target for target in targets for _ in range(copies)
    ]
    return out


@contextmanager
def enabled(case, **settings):
    yield hf_slospec.enable(case.model, config=case.config, **settings)
    hf_slospec.disable(case.model)


def by_enable(case):
    with enabled(case, **case.draft) as model:
        return case.compare(model.generate, slo_tpot=0.05)


def always(case):
    with enabled(case, always=True, **case.draft) as model:
        return case.compare(model.generate)


def per_call(case):
    """Pass the draft model with the call."""
    with enabled(case) as model:
        return case.compare(model.generate, slo_tpot=0.05, **case.draft)


def by_custom_generate(case):
    """Use the folder that is ready for the Hub, which the model remembers nothing of."""
    folder = str(ROOT / "examples" / "custom_generate")
    targets = [(1e-4, None, 1.0)[row % 3] for row in range(case.num_rows)]
    ours = dict(custom_generate=folder, trust_remote_code=True, slo_tpot=targets, **case.draft)
    for _ in range(2):  # the second call uses what the first one measured
        out = case.compare(case.model.generate, **ours)
        assert [row.tpot_slo_s for row in out.slo] == targets
    assert "generate" not in vars(case.model)
    return out


def texts_and_answers(case):
    """Return the rows without padding, and stock's new tokens of each alone."""
    rows = zip(case.inputs["input_ids"], case.inputs["attention_mask"], strict=True)
    texts = [row[mask.bool()] for row, mask in rows]
    return texts, answers_to(case, texts)


def answers_to(case, texts):
    answers = []
    for text in texts:
        case.forget(case.model)
        answers.append(answer(case.model, text, SEED, **case.submit_options()))
    return answers


def by_submit(case):
    """Submit all rows at once."""
    texts, answers = texts_and_answers(case)
    with case.generator() as generator, case.path.around():
        handles = [
            generator.submit(text, slo_tpot=0.05, seed=SEED, **case.submit_options())
            for text in texts
        ]
        assert [handle.result(WAIT_S).token_ids for handle in handles] == answers
        assert case.path.check(generator), generator.stats().forwards


def by_preemption(case):
    """Submit four rows for two places, the last two urgent; then cancel and resume one, and submit
    all again.
    """
    texts, answers = texts_and_answers(case)
    case.config = case.config.model_copy(update=dict(max_batch=2, prefill_chunk=16))
    with case.generator() as generator, case.path.around():

        def submit(text, **options):
            return generator.submit(text, seed=SEED, **case.submit_options(), **options)

        with Holds() as holds:
            spare = [submit(text, stopping_criteria=[holds]) for text in texts[:2]]
            assert holds.is_reached.wait(WAIT_S)
            urgent = [submit(text, slo_tpot=10.0, slo_ttft=100.0) for text in texts[2:]]
        assert [handle.result(WAIT_S).token_ids for handle in (*spare, *urgent)] == answers
        assert sum(handle.metrics.preempted for handle in spare) > 0
        cancelled = submit(texts[0])
        next(cancelled.tokens())
        cancelled.cancel()
        again = [submit(texts[0], resume=cancelled.progress), *map(submit, texts[1:])]
        assert [handle.result(WAIT_S).token_ids for handle in again] == answers
        assert generator.stats().kv_tokens == 0


def in_conversation(case):
    """Submit turns that begin with the turns before, whose K/V is reused; the last turn continues a
    handle.
    """
    (text, *_), (expected, *_) = texts_and_answers(case)
    question = torch.tensor([7, 8, 9, 10])
    with case.generator() as generator, case.path.around():
        options = case.submit_options() | {"seed": SEED}
        handle = generator.submit(text, **options)
        for turn in range(3):
            assert handle.result(WAIT_S).token_ids == expected
            assert (handle.metrics.reused > 0.5 * (len(text) - len(expected))) == (turn > 0)
            text = torch.cat((text, torch.tensor(expected), question))
            (expected,) = answers_to(case, [text])
            if turn == 1:
                handle = generator.submit(question, continues=handle, **options)
            else:
                handle = generator.submit(text, **options)
        assert handle.result(WAIT_S).token_ids == expected
        assert generator.stats().reused_tokens > 0


def in_threads(case):
    """Call generate in threads, while the batcher runs, another generator decodes and plain
    forwards run.
    """
    texts, answers = texts_and_answers(case)
    with torch.no_grad():
        logits = case.model(texts[0][None]).logits
    expected = type(case.model).generate(
        case.model, **case.inputs, return_dict_in_generate=False, **case.submit_options()
    )
    other = case.generator()
    with case.generator() as generator, ThreadPoolExecutor(4) as threads:

        def generate(ours):
            return torch.equal(ours.generate(**case.inputs, **case.submit_options()), expected)

        @torch.no_grad()
        def forward():
            return all(torch.equal(case.model(texts[0][None]).logits, logits) for _ in range(20))

        found = [threads.submit(generate, each) for each in (generator, generator, other)]
        found.append(threads.submit(forward))
        handles = [generator.submit(text, **case.submit_options()) for text in texts]
        assert [handle.result(WAIT_S).token_ids for handle in handles] == answers
        assert all(each.result(WAIT_S) for each in found)
    models = generator.decoder.speculator.models
    assert case.path.fixture or not any(model.kv_bytes for model in models)


class Interrupting(Recorder):
    """Raises at the sixth token."""

    def put(self, value):
        super().put(value)
        if len(self.puts) == 6:
            raise KeyboardInterrupt


def after_interrupt(case):
    """Interrupt a call, which holds no memory then, and call again."""
    generator = case.generator()
    with pytest.raises(KeyboardInterrupt):
        generator.generate(**case.inputs, **case.make_options() | dict(streamer=Interrupting()))
    memory = generator.decoder.speculator.memory(0)
    assert not any(model.kv_cache.num_held for model in generator.decoder.speculator.models)
    assert case.path.fixture or (memory.target_kv, memory.draft_kv, memory.features) == (0, 0, 0)
    return case.compare(generator.generate)


ENTRIES = {
    "generator": by_generator,
    "per-row": by_slo_per_row,
    "enable": by_enable,
    "always": always,
    "per-call": per_call,
    "custom_generate": by_custom_generate,
    "submit": by_submit,
    "preempted": by_preemption,
    "conversation": in_conversation,
    "threads": in_threads,
    "interrupted": after_interrupt,
}
DRAFTS_AT_TIMES = ("lookup", "suffix", "lookup+suffix")
# Options with which rows are decoded in step, or end with their first token.
DRAFTS_NOTHING = {
    *"countdown widened row-bias drawing any-row max-calls sure one-token two-tokens".split(),
    *("replacing", "all-suppressed"),
}


def check_equals_stock(row, request):
    """Run a row of the matrix: model, inputs, path, drafter, options, entry point."""
    model_name, inputs_name, path_name, drafter_name, option_names, entry = row.split()
    path = PATHS[path_name]
    patch = request.getfixturevalue("monkeypatch")
    folder = request.getfixturevalue("tmp_path")
    patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder / "modules"))
    model = model_of(model_name)
    inputs = inputs_of(inputs_name, model_name)
    draft = drafter_of(drafter_name, model_name, folder)
    config = config_of(path_name, request)
    if path.fixture == "device":
        model = on_cuda(model)
        inputs = moved(inputs)
        draft = {name: on_cuda(each) for name, each in draft.items()}
    num_rows = len(next(iter(inputs.values()), "1"))
    case = Case(
        model,
        draft,
        config,
        path,
        inputs,
        functools.partial(options_of, option_names, model_name),
        num_rows,
        forget_length if "rope" in model_name else lambda model: None,
    )
    out = ENTRIES[entry](case)
    is_drafted = path.drafts and drafter_name not in DRAFTS_AT_TIMES
    if path.fixture == "tapes":
        assert (request.getfixturevalue("tapes").num_replayed > 0) == (path_name == "captured")
    if is_drafted and not DRAFTS_NOTHING & {*option_names.split("+")} and getattr(out, "slo", None):
        assert sum(metrics.drafted for metrics in out.slo)
