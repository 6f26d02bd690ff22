"""Models whose layers attend by themselves, or count tokens by themselves, against stock
``generate``.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
import transformers

from hf_slospec import (
    SLOSpecGenerator,
    UnsupportedInputError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_slospec.config import SLOSpecConfig
from hf_slospec.model.probe import probe_layers
from hf_slospec.model.properties import CACHE_NAME, cache_option
from tests.support.against_stock import DRAFTS_ALWAYS, GREEDY, SAMPLED
from tests.support.breadth import nightly_but
from tests.support.toys.tiny_configs import tiny_config
from tests.support.toys.tiny_models import VOCAB, assert_same_as_stock, ragged_prompts, sharpened

OWN = ["BloomForCausalLM", "MptForCausalLM", "DeepseekV32ForCausalLM"]
INTERFACE = ["BartForCausalLM", "BioGptForCausalLM", "Llama4ForCausalLM"]
(INTERFACE if CACHE_NAME == "cache" else OWN).append("GPTJForCausalLM")  # since transformers 5.24
COUNTS_PADDING = ["BartForCausalLM", "Llama4ForCausalLM"]


@functools.cache
def model(name: str, noise: float = 0.0) -> Any:
    kind = getattr(transformers, name)
    return sharpened(lambda: kind(tiny_config(kind.config_class)), 0, noise)


def generator(name: str) -> SLOSpecGenerator:
    return SLOSpecGenerator(model(name), model(name, 0.03), config=DRAFTS_ALWAYS)


def equal_prompts() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (3, 14), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize(
    "sampling", nightly_but([SAMPLED], [GREEDY, SAMPLED]), ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("name", [*OWN, *INTERFACE])
def test_exact(name: str, sampling: dict[str, Any]) -> None:
    ours = generator(name)
    prompts = equal_prompts() if name in COUNTS_PADDING else ragged_prompts(3, seed=3)
    assert_same_as_stock(ours.model, ours.generate, prompts, **sampling | dict(max_new_tokens=16))


@pytest.mark.parametrize("name", [*OWN, *INTERFACE])
def test_the_probe_finds_out_how_to_attend(name: str) -> None:
    layers, states = probe_layers(model(name))
    assert not states
    assert {layer.is_own for layer in layers} == {name in OWN}
    assert any(layer.shape.index_key for layer in layers) == (name == "DeepseekV32ForCausalLM")
    assert any(layer.chunk for layer in layers) == (name == "Llama4ForCausalLM")


def test_index_keys_of_a_given_cache_are_kept() -> None:
    ours = generator("DeepseekV32ForCausalLM")
    prompts = equal_prompts()
    texts = []
    for generate in (functools.partial(type(ours.model).generate, ours.model), ours.generate):
        cache = transformers.DynamicCache(config=ours.model.config)
        first = generate(**prompts, **cache_option(cache), do_sample=False, max_new_tokens=6)
        more = torch.cat((first, prompts["input_ids"][:, :4]), dim=1)
        mask = torch.ones_like(more)
        texts.append(
            generate(
                more, attention_mask=mask, **cache_option(cache), do_sample=False, max_new_tokens=6
            )
        )
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", COUNTS_PADDING)
def test_padded_rows_of_models_that_count_padding_are_refused(name: str) -> None:
    ours = generator(name)
    with pytest.raises(
        UnsupportedInputError,
        match=rf"attention_mask masks .*{name} counts them .*one row at a time",
    ):
        ours.generate(**ragged_prompts(3, seed=3), do_sample=False, max_new_tokens=4)


def test_flash_is_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match="layers attend by themselves"):
        SLOSpecGenerator(model("BloomForCausalLM"), config=SLOSpecConfig(attention="flash"))


def test_plain_forwards_in_other_threads_while_packed_ones_run() -> None:
    ours = generator("BloomForCausalLM")
    prompts = ragged_prompts(3)
    with torch.no_grad():
        expected = ours.model(**prompts).logits
    done = threading.Event()
    wrong = list[int]()

    @torch.no_grad()
    def forward_on() -> None:
        count = 0
        while not done.is_set():
            if not torch.equal(ours.model(**prompts).logits, expected):
                wrong.append(count)
            count += 1

    thread = threading.Thread(target=forward_on)
    thread.start()
    try:
        ours.generate(**prompts, do_sample=False, max_new_tokens=16)
    finally:
        done.set()
        thread.join()
    assert not wrong


def test_windows_by_the_place_of_keys_are_refused() -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=r"GPTNeoForCausalLM cannot be packed: its buffer .*\.bias masks",
    ):
        SLOSpecGenerator(model("GPTNeoForCausalLM"))


def test_blocks_by_the_place_of_keys_are_refused() -> None:
    config = tiny_config(transformers.BigBirdConfig)
    config.attention_type = "block_sparse"
    with pytest.raises(
        UnsupportedModelError, match=r"BigBirdForCausalLM attends to blocks.*original_full"
    ):
        SLOSpecGenerator(transformers.BigBirdForCausalLM(config).eval())


def test_alibi_in_the_mask_is_refused() -> None:
    config = tiny_config(transformers.FalconConfig)
    config.alibi = True
    falcon = sharpened(lambda: transformers.FalconForCausalLM(config), 0)
    with pytest.raises(
        UnsupportedModelError, match="FalconForCausalLM cannot be packed: on a trial tree"
    ):
        SLOSpecGenerator(falcon)
