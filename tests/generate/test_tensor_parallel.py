"""A tensor-parallel target decodes as stock ``generate`` does, in two processes; what cannot work is refused."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from transformers.distributed import DistributedConfig

from hf_slospec import UnsupportedModelError, enable, load_tiny_pair
from hf_slospec.models.inspection.ranks import Ranks
from tests.support import tensor_parallel
from tests.support.tensor_parallel import OPTIONS, generated
from tests.support.toys.tiny_models import tiny_model

SEED = 3  # gives a target whose texts are not all one token


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the processes found."""
    folder = tmp_path_factory.mktemp("models")
    tiny_model("llama", SEED).save_pretrained(folder / "target")
    tiny_model("llama", SEED, noise=0.02).save_pretrained(folder / "draft")
    load_tiny_pair()[2].save_pretrained(folder / "target")
    return tensor_parallel.run(folder)


@pytest.mark.parametrize("kind", OPTIONS)
def test_all_processes_decode_as_stock_and_as_one_process(kind: str, found: list[dict[str, Any]]) -> None:
    alone = generated(tiny_model("llama", SEED), OPTIONS[kind]).sequences
    for own in found:
        assert torch.equal(own["stock"][kind], alone)
        ours = {way: sequences for (its, way), sequences in own["ours"].items() if its == kind}
        assert {"draft", "split draft", "lookup"} <= set(ours)
        assert all(torch.equal(sequences, alone) for sequences in ours.values())


def test_processes_whose_clocks_differ_take_the_same_decisions(found: list[dict[str, Any]]) -> None:
    first, second = (own["steps"] for own in found)
    assert first == second
    for call in (("greedy", "draft"), ("sampled", "draft"), ("greedy", "split draft")):
        assert any(max(nodes) > 1 for *_, nodes in first[call])  # trees, not roots alone


def test_a_prompt_of_embeddings(found: list[dict[str, Any]]) -> None:
    assert all(torch.equal(*own["embeds"]) for own in found)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        ("prompts", "InvalidInputError", "the 2 processes .* do not decode the same tokens"),
        ("seeds", "InvalidInputError", r"same prompts, options and seed \(torch.manual_seed\)"),
        ("max_time", "UnsupportedOptionError", "max_time cannot be combined .* limit the output by max_new_tokens"),
        ("batcher", "UnsupportedModelError", "the batcher cannot run a tensor-parallel model"),
        ("prepack", "UnsupportedOptionError", "prepack=True cannot be combined with a tensor-parallel model"),
        ("features", "UnsupportedOptionError", "'drafter of your own', which read hidden states"),
        ("split draft only", "IncompatibleDraftError", r"over the processes \[0, 1\], and the target over none"),
        ("FSDP", "UnsupportedModelError", "by other means than transformers' tensor parallelism"),
    ],
)
def test_what_cannot_work_is_refused_in_all_processes(
    call: str, error: str, said: str, found: list[dict[str, Any]]
) -> None:
    for own in found:
        kind, message = own["errors"][call]
        assert kind == error and re.search(said, message), message


def test_calls_after_an_error_are_exact(found: list[dict[str, Any]]) -> None:
    assert all(torch.equal(own["after errors"], own["stock"]["greedy"]) for own in found)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        (dict(pp_size=2), "pipeline parallelism"),
        (dict(fsdp_size=2), "FSDP"),
        (dict(dp_replicate_size=2), "data parallelism"),
        (dict(ep_size=2, tp_size=2), "expert parallelism"),
    ],
)
def test_other_ways_to_split_a_model_are_refused_by_name(sizes: dict[str, int], name: str) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    model.config.distributed_config = DistributedConfig(**sizes)
    with pytest.raises(UnsupportedModelError, match=f"by {name}, and only tensor parallelism"):
        enable(model)


def test_one_process_has_times_of_its_own() -> None:
    ranks = Ranks(tiny_model("llama"))
    assert ranks.number == 1 and ranks.first("its own") == "its own"
    assert ranks.clock() <= ranks.clock()
