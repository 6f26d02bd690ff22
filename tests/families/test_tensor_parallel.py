"""A tensor-parallel target decodes as stock ``generate`` does, in two processes; what cannot work
is refused.
"""

from __future__ import annotations

import copy
import re

import pytest
import torch
from transformers.distributed import DistributedConfig

from hf_slospec import UnsupportedModelError, enable, load_tiny_pair
from hf_slospec.model.ranks import ranks_of
from tests.support import tensor_parallel
from tests.support.tensor_parallel import NEW_TOKENS, OPTIONS, TEXTS, generated, other_norm
from tests.support.toys.tiny_models import tiny_model

SEED = 3  # gives a target whose texts are not all one token


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of the processes found."""
    folder = tmp_path_factory.mktemp("models")
    tiny_model("llama", SEED).save_pretrained(folder / "target")
    tiny_model("llama", SEED, noise=0.02).save_pretrained(folder / "draft")
    load_tiny_pair()[2].save_pretrained(folder / "target")
    return tensor_parallel.run(folder)


@pytest.mark.parametrize("kind", OPTIONS)
def test_all_processes_decode_as_stock_and_as_one_process(kind, found):
    alone = generated(tiny_model("llama", SEED), OPTIONS[kind]).sequences
    for own in found:
        assert torch.equal(own["stock"][kind], alone)
        ours = {way: sequences for (its, way), sequences in own["ours"].items() if its == kind}
        assert {"draft", "split draft", "lookup"} <= set(ours)
        assert all(torch.equal(sequences, alone) for sequences in ours.values())


def test_processes_whose_clocks_differ_take_the_same_decisions(found):
    first, second = (own["steps"] for own in found)
    assert first == second
    for call in (("greedy", "draft"), ("sampled", "draft"), ("greedy", "split draft")):
        assert any(max(nodes) > 1 for *_, nodes in first[call])  # trees, not roots alone


def test_a_prompt_of_embeddings(found):
    assert all(torch.equal(*own["embeds"]) for own in found)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        ("prompts", "InvalidInputError", "the 2 processes .* do not decode the same tokens"),
        ("seeds", "InvalidInputError", r"same prompts, options and seed \(torch.manual_seed\)"),
        (
            "max_time",
            "UnsupportedOptionError",
            "max_time cannot be combined .* limit the output by max_new_tokens",
        ),
        (
            "batcher with a split draft",
            "UnsupportedOptionError",
            "drafts in the first process alone",
        ),
        (
            "prepack",
            "UnsupportedOptionError",
            "prepack=True cannot be combined with a tensor-parallel model",
        ),
        ("features", "UnsupportedOptionError", "'drafter of your own', which read hidden states"),
        (
            "split draft only",
            "IncompatibleDraftError",
            r"over the processes \[0, 1\], and the target over none",
        ),
        ("FSDP", "UnsupportedModelError", "by other means than transformers' tensor parallelism"),
    ],
)
def test_what_cannot_work_is_refused_in_all_processes(call, error, said, found):
    for own in found:
        kind, message = own["errors"][call]
        assert kind == error and re.search(said, message), message


def test_calls_after_an_error_are_exact(found):
    assert all(torch.equal(own["after errors"], own["stock"]["greedy"]) for own in found)


@pytest.mark.parametrize("batcher", ["batcher", "small batcher"])
def test_the_first_process_submits_what_all_compute(batcher, found):
    model = tiny_model("llama", SEED)
    got = found[0][batcher]
    greedy = [_alone(model, text) for text in TEXTS]
    assert got["greedy"] == [*greedy, greedy[2]]
    assert got["sampled"] == _alone(model, TEXTS[2], seed=5)
    assert got["continued"] == _alone(model, [*TEXTS[0], *greedy[0], 7, 8])
    (logits,) = model(torch.tensor([TEXTS[2]])).logits
    logprobs = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(TEXTS[2][1:])[:, None])[:, 0]
    assert got["prompt logprobs"][0] is None
    assert torch.allclose(torch.tensor(got["prompt logprobs"][1:]), logprobs, atol=1e-4)
    assert (got["cancelled"], got["failed"]) == ("cancelled", "a processor that fails")
    assert (got["preempted"] > 0) == (batcher == "small batcher")


def test_generate_and_submits_elsewhere_are_refused_while_the_batcher_runs(found):
    first, second = (own["batcher"] for own in found)
    assert (
        second["submit"][0] == "NotRunningError"
        and "takes requests in its first process" in second["submit"][1]
    )
    assert first["submit"][0] == "InvalidInputError"  # the request itself is wrong
    for own in (first, second):
        assert (
            own["generate"][0] == "UnsupportedOptionError"
            and "stop() the batcher first" in own["generate"][1]
        )
        assert (
            own["other batcher"][0] == "InvalidInputError"
            and "cannot follow another" in own["other batcher"][1]
        )
        assert (
            own["new generator"][0] == "InvalidInputError"
            and "stop() it, and start() it" in own["new generator"][1]
        )
    assert (
        first["guidance"][0] == "UnsupportedOptionError"
        and "such as guidance_scale" in first["guidance"][1]
    )
    for own in found:
        assert torch.equal(own["after batchers"], own["stock"]["greedy"])


def test_changed_modules_are_refused_until_the_batcher_is_restarted(found):
    assert "has to be tried, as it is new or was changed" in found[0]["hooked"]["refused"]
    assert found[0]["hooked"]["restarted"] == "none"


def test_the_first_process_decides_for_all_which_k_v_is_of_old_weights(found):
    model = copy.deepcopy(tiny_model("llama", SEED))
    expected = [_alone(model, TEXTS[0] * 3)[:4]]
    with torch.no_grad():
        model.model.norm.weight.mul_(other_norm(model.model.norm.weight))
    expected.append(_alone(model, TEXTS[0] * 3)[:4])
    assert found[0]["changed weights"] == expected and expected[0] != expected[1]


def test_processes_that_hold_other_k_v_end_the_batcher_which_starts_again(found):
    first, second = (own["parted"] for own in found)
    assert "no longer hold the same K/V" in first["submit"] and first["stop"] == "none"
    assert re.search(
        "has K/V of .* and this one of 0; change weights in all processes", second["stop"]
    )
    assert first["again"] == _alone(tiny_model("llama", SEED), TEXTS[0])[:4]


def _alone(model, text, seed=None):
    """Return the new tokens of stock ``generate`` in one process."""
    torch.manual_seed(seed or 0)
    ids = torch.tensor([text])
    out = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=seed is not None)
    tokens: list[int] = out[0, len(text) :].tolist()
    return tokens


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        (dict(pp_size=2), "pipeline parallelism"),
        (dict(fsdp_size=2), "FSDP"),
        (dict(dp_replicate_size=2), "data parallelism"),
        (dict(ep_size=2, tp_size=2), "expert parallelism"),
    ],
)
def test_other_ways_to_split_a_model_are_refused_by_name(sizes, name):
    model = copy.deepcopy(tiny_model("llama"))
    model.config.distributed_config = DistributedConfig(**sizes)
    with pytest.raises(UnsupportedModelError, match=f"by {name}, and only tensor parallelism"):
        enable(model)


def test_one_process_has_times_of_its_own():
    ranks = ranks_of(tiny_model("llama"))
    assert ranks.number == 1 and ranks.first("its own") == "its own"
    assert ranks.clock() <= ranks.clock()
