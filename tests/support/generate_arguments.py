"""Arguments of ``generate`` for fuzz tests, and the comparison of what stock and ours do with them."""

from __future__ import annotations

import copy
import functools
import traceback
import warnings
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
)

from hf_slospec import SLOSpecError, SLOStage
from hf_slospec.model.properties import CACHE_NAME, cache_option
from tests.support.fuzzing import HUGE
from tests.support.toys.tiny_models import VOCAB, ragged_prompts, tiny_model
from tests.support.toys.tiny_tokenizers import byte_level

SEED = 7
DRAFTING = ("assistant_model", "prompt_lookup_num_tokens")
# Speculation keeps K/V in a cache of its own, so it takes an implementation that needs a GPU.
WITHOUT_EFFECT = (
    *("disable_compile", "num_assistant_tokens", "max_matching_ngram_size"),
    "cache_implementation",
)
STOCK = GenerationMixin.generate.__wrapped__.__code__.co_filename


class Ends(StoppingCriteria):
    """Ends a text after some tokens, whatever the length limits say."""

    per_row = True

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **_):
        return torch.full(
            (len(input_ids),), input_ids.shape[1] >= self.length, device=input_ids.device
        )


class Shifts(LogitsProcessor):
    """Moves all scores by one token."""

    per_row = True

    def __call__(self, input_ids, scores):
        return scores.roll(1, -1)


class Returns(LogitsProcessor):
    """Returns something else than scores."""

    per_row = True

    def __init__(self, found):
        self.found = found

    def __call__(self, input_ids, scores):
        return self.found


class OwnError(Exception):
    """Raised by functions of the caller."""


def fails(*_, **__):
    raise OwnError("of the caller's own")


def returns_none(*_, **__):
    pass


class Collects:
    """A streamer that keeps what it gets."""

    def __init__(self):
        self.got = []

    def put(self, value):
        self.got.append(value.tolist())

    def end(self):
        self.got.append(None)


tokens = st.integers(0, VOCAB - 1)
ids = st.lists(tokens, min_size=1, max_size=3)
small = st.integers(0, 12)
share = st.floats(0, 1)
flags = st.booleans()
huge = st.sampled_from(HUGE)

VALID = dict(
    max_new_tokens=st.one_of(small, small.map(np.int64), huge),
    max_length=st.one_of(st.integers(0, 40), huge),
    min_new_tokens=st.one_of(small, huge),
    min_length=st.one_of(st.integers(0, 40), huge),
    max_time=st.sampled_from((0.0, 1e3, 1e9)),
    stop_strings=st.one_of(st.text(min_size=1, max_size=2), st.lists(st.sampled_from(["e", " ", "\n", "Ġ", "ab"]))),
    tokenizer=st.sampled_from([byte_level(300)]),
    do_sample=flags,
    use_cache=flags,
    num_beams=st.integers(0, 3),
    num_beam_groups=st.integers(1, 2),
    early_stopping=flags,
    length_penalty=st.floats(-2, 2),
    diversity_penalty=st.floats(0, 1),
    temperature=st.one_of(st.floats(1e-3, 10), st.sampled_from((1e-300, 1e-7, 1e30))),
    top_k=st.one_of(small, huge),
    top_p=share,
    top_h=share,
    min_p=share,
    typical_p=share,
    epsilon_cutoff=share,
    eta_cutoff=share,
    repetition_penalty=st.floats(0.1, 5),
    encoder_repetition_penalty=st.floats(0.1, 5),
    no_repeat_ngram_size=st.integers(0, 4),
    encoder_no_repeat_ngram_size=st.integers(0, 4),
    bad_words_ids=st.lists(ids, min_size=1, max_size=3),
    sequence_bias=st.lists(st.tuples(ids, st.floats(-10, 10)).map(list), min_size=1, max_size=3),
    suppress_tokens=ids,
    begin_suppress_tokens=ids,
    forced_bos_token_id=tokens,
    forced_eos_token_id=st.one_of(tokens, ids),
    exponential_decay_length_penalty=st.tuples(small, st.floats(0.5, 2)),
    renormalize_logits=flags,
    remove_invalid_values=flags,
    guidance_scale=st.floats(0.5, 2),
    negative_prompt_ids=st.sampled_from([torch.tensor([[5, 6]])]),
    watermarking_config=st.sampled_from([WatermarkingConfig(), {"greenlist_ratio": 0.5}]),
    eos_token_id=st.one_of(tokens, ids, st.just(-1), st.just(VOCAB), ids.map(torch.tensor)),
    pad_token_id=st.one_of(tokens, st.just(-1), st.just(VOCAB)),
    bos_token_id=tokens,
    decoder_start_token_id=tokens,
    num_return_sequences=st.integers(0, 3),
    return_dict_in_generate=flags,
    output_scores=flags,
    output_logits=flags,
    output_attentions=flags,
    output_hidden_states=flags,
    logits_to_keep=st.integers(0, 2),
    cache_implementation=st.sampled_from(("static", "dynamic", "quantized", "paged", "offloaded", "hybrid", "x")),
    cache_config=st.just({"backend": "quanto"}),
    **cache_option(st.sampled_from(("dynamic", "static", "filled"))),  # made by `ready`
    position_ids=st.sampled_from([torch.arange(12)[None], torch.zeros(1, 3, dtype=torch.int64)]),
    logits_processor=st.sampled_from(
        [LogitsProcessorList([Shifts()]), LogitsProcessorList([fails]), [Shifts()],
         LogitsProcessorList([Returns(None)]), LogitsProcessorList([Returns(torch.zeros(1, 5))])]
    ),
    stopping_criteria=st.sampled_from(
        [StoppingCriteriaList([Ends(20)]), [Ends(20)], StoppingCriteriaList([fails]),
         StoppingCriteriaList([returns_none])]
    ),
    prefix_allowed_tokens_fn=st.sampled_from([lambda row, text: [3, 4, 5], lambda row, text: [], fails]),
    streamer=st.sampled_from([Collects(), fails]),
    assistant_model=st.sampled_from([tiny_model("llama"), tiny_model("gpt2")]),
    prompt_lookup_num_tokens=st.one_of(st.integers(-1, 5), huge),
    max_matching_ngram_size=st.one_of(st.integers(-1, 5), huge),
    num_assistant_tokens=st.integers(0, 5),
    penalty_alpha=share,
    dola_layers=st.just("high"),
    low_memory=flags,
    token_healing=flags,
    synced_gpus=flags,
    custom_generate=st.sampled_from([fails, "x"]),
    trust_remote_code=flags,
    disable_compile=flags,
    compile_config=st.nothing() | st.just(None),
    generation_config=st.builds(
        GenerationConfig, max_new_tokens=st.integers(1, 12), do_sample=flags,
        slo_tpot=st.sampled_from([None, 0.1, "x", [0.1]]), eos_token_id=tokens, pad_token_id=st.just(0),
    ),
    token_type_ids=st.sampled_from([torch.zeros(1, 12, dtype=torch.int64)]),
    labels=st.sampled_from([torch.zeros(1, 12, dtype=torch.int64)]),
    max_new_token=small,
    use_model_defaults=flags,
)  # fmt: skip

seconds = st.one_of(
    st.floats(1e-9, 1e3), st.sampled_from((1, 1e-9, 1e-300, 1e300, np.float32(0.5), 0.0, -1.0))
)
stage = st.fixed_dictionaries(
    {"slo_tpot": st.one_of(st.none(), seconds)},
    optional={
        "until": st.sampled_from(["e", "", " x", "\n"]),
        "tokens": st.one_of(st.integers(-1, 4), huge),
    },
)
stages = st.lists(stage, min_size=1, max_size=3)
row_slo = st.one_of(st.none(), seconds, stages)
SLO = st.one_of(
    row_slo,
    st.lists(row_slo, max_size=3),
    st.lists(seconds, min_size=1, max_size=3).map(np.array),
    st.lists(seconds, min_size=1, max_size=3).map(
        lambda own: torch.tensor([float(one) for one in own])
    ),
    st.just([SLOStage(slo_tpot=0.1, tokens=2), SLOStage(slo_tpot=None)]),
)


@st.composite
def prompts(draw):
    """Draw the tensors of a prompt: most often left-padded ones with their mask."""
    inputs = ragged_prompts(draw(st.integers(1, 3)), seed=draw(st.integers(0, 3)))
    input_ids = inputs["input_ids"]
    mask = inputs["attention_mask"]
    embeds = tiny_model("llama").get_input_embeddings()(input_ids).detach()
    others = [
        {"input_ids": input_ids},
        {"inputs": input_ids},
        {"inputs": input_ids[0], "attention_mask": mask[0]},
        {"inputs": input_ids, "input_ids": input_ids},
        {"input_ids": input_ids[0]},
        {"input_ids": input_ids[None]},
        {"input_ids": input_ids.int()},
        {"input_ids": input_ids.to(torch.uint8)},
        {"input_ids": input_ids.float()},
        {"input_ids": input_ids.bool()},
        {"input_ids": input_ids.tolist()},
        {"input_ids": input_ids[:, :0]},
        {"input_ids": input_ids[:0]},
        {"input_ids": input_ids + VOCAB},
        {"input_ids": input_ids - VOCAB},
        {"input_ids": input_ids.to("meta")},
        {"input_ids": input_ids, "attention_mask": mask[:, 1:]},
        {"input_ids": input_ids, "attention_mask": mask.flip(1)},
        {"input_ids": input_ids, "attention_mask": mask.bool()},
        {"input_ids": input_ids, "attention_mask": mask.float() * 0.5},
        {"input_ids": input_ids, "attention_mask": torch.zeros_like(mask)},
        {"input_ids": input_ids, "attention_mask": mask * 7 - 3},
        {"input_ids": input_ids, "attention_mask": mask[:, None, None]},
        {"input_ids": input_ids, "attention_mask": mask.tolist()},
        {"input_ids": input_ids, "attention_mask": (torch.arange(mask.shape[1]) % 3 > 0).long().expand_as(mask)},
        {"inputs_embeds": embeds},
        {"inputs_embeds": embeds, "attention_mask": mask},
        {"inputs_embeds": embeds, "input_ids": input_ids},
        {"inputs_embeds": embeds[..., :5]},
        {"inputs_embeds": embeds.double()},
        {"inputs_embeds": embeds[0]},
        {"inputs_embeds": embeds * torch.nan},
        {},
    ]  # fmt: skip
    return draw(st.sampled_from(others)) if draw(st.integers(0, 3)) == 3 else inputs


def ready(arguments):
    """Return arguments for one call: own copies of what calls change, and an end for texts without
    one.
    """
    found = {
        name: value if name in ("assistant_model", "tokenizer") else copy.deepcopy(value)
        for name, value in arguments.items()
    }
    cache = found.get(CACHE_NAME)
    config = tiny_model("llama").config
    if cache == "dynamic":
        found[CACHE_NAME] = DynamicCache(config=config)
    elif cache == "static":
        found[CACHE_NAME] = StaticCache(config=config, max_cache_len=64)
    elif cache == "filled":
        found[CACHE_NAME] = tiny_model("llama")(torch.tensor([[5, 6, 7]]))[CACHE_NAME]
    found.setdefault("stopping_criteria", StoppingCriteriaList([Ends(45)]))
    for name in ("max_new_tokens", "max_length"):
        if "stopping_criteria" in arguments and type(found.get(name)) is int and found[name] > 100:
            del found[name]
    return found


def called(call, arguments, seed=SEED):
    """Return the result of a call, or its exception."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call(**ready(arguments))
        except Exception as error:  # noqa: BLE001  to be compared
            return error


def check_like_stock(ours: Any, model: Any, arguments: dict[str, Any], seed: int = SEED) -> None:
    """Raise unless ours is an error of the package, or else what stock ``generate`` returns or
    raises.

    Args:
        ours: tokens or an exception.
        arguments: those of stock, drafting aside.
    """
    if isinstance(ours, SLOSpecError):
        return
    stock = called(functools.partial(type(model).generate, model), _as_batch(arguments), seed)
    if isinstance(ours, Exception):
        is_same = type(ours) is type(stock) and (
            str(ours) == str(stock) or "inf or nan" in str(ours)
        )
        if is_same or (isinstance(stock, Exception) and _is_raised_by_stock(ours)):
            return
        raise ours
    if isinstance(stock, Exception):
        without = {name: value for name, value in arguments.items() if name not in WITHOUT_EFFECT}
        stock = called(functools.partial(type(model).generate, model), _as_batch(without), seed)
    if isinstance(stock, Exception):
        raise AssertionError(f"stock refuses what is accepted: {stock!r}") from stock
    own, theirs = (getattr(found, "sequences", found) for found in (ours, stock))
    assert torch.equal(own, theirs), (own, theirs)


def _as_batch(arguments):
    """Return arguments without drafting, and with a prompt of one dimension as a batch of one."""
    found = {name: value for name, value in arguments.items() if name not in DRAFTING}
    for name in ("inputs", "input_ids"):
        if isinstance(ids := found.get(name), torch.Tensor) and ids.ndim == 1:
            own = {name, "attention_mask"} & set(found)
            found |= {key: found[key][None] for key in own if isinstance(found[key], torch.Tensor)}
    return found


def _is_raised_by_stock(error):
    """Return whether an error comes out of stock ``generate``, which prepares calls; it may stop
    for another reason.
    """
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(code.co_name == "generate" and code.co_filename == STOCK for code in codes)
