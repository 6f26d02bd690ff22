"""Two processes over gloo that share a tensor-parallel model, and what each of them found."""

from __future__ import annotations

import datetime
import os
import time
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from hf_slospec import SLOSpecConfig, SLOSpecError, SLOSpecGenerator, weights_changed
from hf_slospec.generate.speculator import MEASURE_S
from tests.support.breadth import quick_or
from tests.support.toys.tiny_models import ragged_prompts, ragged_texts

NUM_RANKS = 2
CONFIG = SLOSpecConfig(
    policy="adaserve", token_budget=24, max_depth=3, check_invariants=True
)  # drafts at any cost
PROMPTS = ragged_prompts(3)
TEXTS = ragged_texts(3)
IDS = PROMPTS["input_ids"]
NEW_TOKENS = quick_or(8, 12)
SLOW = 5.0  # times as much time as on the first rank passes on the others, by their clocks
# Requests wait, and are preempted.
SMALL = CONFIG.model_copy(update={"kv_tokens": 96, "max_batch": 1, "admission": "priority"})
SLOS = 0.001, None, 9.0
OPTIONS = {
    "greedy": dict(do_sample=False),
    "sampled": dict(do_sample=True, temperature=0.8, top_k=20, num_return_sequences=2),
}
TIMEOUT = datetime.timedelta(minutes=5)  # after which a rank that waits for another fails


def generated(model, options, **kwargs):
    """Return what a ``generate`` returns for the prompts, always with the same noise."""
    torch.manual_seed(1)
    return model.generate(
        **PROMPTS, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, **options, **kwargs
    )


def run(folder):
    """Return what each rank found with the models ``target`` and ``draft`` in a folder."""
    with patch.dict(os.environ, CUDA_VISIBLE_DEVICES="", WORLD_SIZE=str(NUM_RANKS)):
        # Both are forked from one process that has imported torch.
        multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
        multiprocessing.start_processes(
            _work, (folder,), nprocs=NUM_RANKS, start_method="forkserver"
        )
    return [torch.load(folder / f"rank{rank}") for rank in range(NUM_RANKS)]


def _work(rank, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    MEASURE_S.update(target=0.2, draft=0.1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=NUM_RANKS, timeout=TIMEOUT
    )
    own_s = time.perf_counter
    with patch.object(time, "perf_counter", lambda: own_s() * (SLOW if rank else 1.0)):
        torch.save(_found(rank, folder), folder / f"rank{rank}")
    dist.destroy_process_group()


def _found(rank, folder):
    def load(name, is_split=True):
        split = {"distributed_config": DistributedConfig(tp_size=NUM_RANKS)} if is_split else {}
        return AutoModelForCausalLM.from_pretrained(folder / name, **split)

    by_draft = SLOSpecGenerator.from_pretrained(
        str(folder / "target"),
        str(folder / "draft"),
        config=CONFIG,
        distributed_config=DistributedConfig(tp_size=NUM_RANKS),
    )
    target = by_draft.model
    whole_draft = by_draft.assistant_model
    ways = {
        "draft": {},
        "split draft": {"assistant_model": load("draft")},
        "lookup": {"prompt_lookup_num_tokens": 3},
    }
    found = {"stock": {}, "ours": {}, "steps": {}}
    for kind, options in OPTIONS.items():
        found["stock"][kind] = generated(target, options).sequences
        for way, own in ways.items():
            out = generated(by_draft, options | own, slo_tpot=0.1)
            found["ours"][kind, way], found["steps"][kind, way] = out.sequences, _shapes(out)
    out = generated(
        SLOSpecGenerator(target, whole_draft), OPTIONS["greedy"], slo_tpot=[0.001, None, 0.1]
    )
    found["ours"]["greedy", "auto"], found["steps"]["greedy", "auto"] = out.sequences, _shapes(out)
    embeds = target.get_input_embeddings()(IDS[1:2])
    options = dict(inputs_embeds=embeds, max_new_tokens=NEW_TOKENS, do_sample=False)
    found["embeds"] = target.generate(**options), by_draft.generate(**options)
    one = dict(max_new_tokens=8, do_sample=True, slo_tpot=1.0)
    found["errors"] = {
        "prompts": _error(lambda: by_draft.generate(IDS[rank + 1 :][:1], **one)),
        "seeds": _error(lambda: [torch.manual_seed(rank), by_draft.generate(IDS[1:2], **one)]),
        "max_time": _error(lambda: by_draft.generate(IDS[1:2], max_time=9.0, **one)),
        "batcher with a split draft": _error(SLOSpecGenerator(target, load("draft")).start),
        "prepack": _error(lambda: SLOSpecGenerator(target, config=SLOSpecConfig(prepack=True))),
        "features": _error(lambda: SLOSpecGenerator(target, drafter=Reader())),
        "split draft only": _error(lambda: SLOSpecGenerator(whole_draft, load("draft"))),
        "FSDP": _error(lambda: SLOSpecGenerator(fully_shard(load("draft", is_split=False)))),
    }
    found["after errors"] = generated(by_draft, OPTIONS["greedy"]).sequences
    found["batcher"] = _batched(rank, by_draft)
    found["small batcher"] = _batched(rank, SLOSpecGenerator(target, whole_draft, config=SMALL))
    found["changed weights"] = _changed(rank, folder, by_draft)
    found["parted"] = _parted(rank, folder, by_draft)
    found["hooked"] = _hooked(rank, by_draft)
    found["after batchers"] = generated(by_draft, OPTIONS["greedy"], slo_tpot=0.1).sequences
    return found


def _batched(rank, generator):
    """Return what the first process gets of its batcher, and what is refused in each."""
    found = {}
    generator.start().stop()
    other = SLOSpecGenerator(generator.model)
    with generator:
        found["other batcher"] = _error(other.start)
        found["new generator"] = _error(lambda: SLOSpecGenerator(generator.model, fallback=True))
        found["submit"] = _error(lambda: generator.submit([] if rank == 0 else TEXTS[0]))
        found["generate"] = _error(lambda: generated(generator, OPTIONS["greedy"]))
        if rank == 0:
            found["guidance"] = _error(lambda: generator.submit(TEXTS[0], guidance_scale=1.5))
            found |= _answers(generator)
    return found


def _hooked(rank, generator):
    """Return how a request ends after a hook was added to the model of a batcher, and after its
    restart.
    """
    found = {}
    hooks = []
    options = dict(max_new_tokens=4, do_sample=False)
    for attempt in ("refused", "restarted"):
        with generator:
            if not hooks:
                hooks.append(generator.model.model.layers[0].register_forward_hook(lambda *_: None))
            if rank == 0:
                found[attempt] = _message(lambda: generator.submit(TEXTS[0], **options).result(60))
    hooks[0].remove()
    return found


def _answers(generator):
    """Return the tokens of requests that come, are cancelled, fail and go on beside each other."""
    options = dict(max_new_tokens=NEW_TOKENS, do_sample=False)
    first = generator.submit(TEXTS[0], slo_tpot=SLOS[0], priority=1, **options)
    next(first.tokens())
    cancelled = generator.submit(TEXTS[0], max_new_tokens=40, do_sample=False)
    further = zip(TEXTS[1:], SLOS[1:], strict=True)
    greedy = [first, *(generator.submit(text, slo_tpot=slo, **options) for text, slo in further)]
    failing = generator.submit(TEXTS[1], logits_processor=[_fail], **options)
    sampled = generator.submit(
        TEXTS[2], seed=5, do_sample=True, max_new_tokens=NEW_TOKENS, max_time=99.0
    )
    cancelled.cancel()
    read = generator.submit(TEXTS[2], prompt_logprobs=2, **options)
    tokens = [handle.result(60).token_ids for handle in (*greedy, read)]
    continuing = generator.submit([7, 8], continues=greedy[0], **options)
    return {
        "greedy": tokens,
        "sampled": sampled.result(60).token_ids,
        "prompt logprobs": [entry and entry.logprob for entry in read.prompt_logprobs],
        "continued": continuing.result(60).token_ids,
        "preempted": sum(handle.metrics.preempted for handle in (*greedy, read, sampled)),
        "cancelled": cancelled.finish_reason,
        "failed": _message(lambda: failing.result(60)),
    }


def _changed(rank, folder, generator):
    """Return the tokens of one prompt with two states of the weights, which the first process alone
    is told of.
    """
    norm = generator.model.model.norm.weight
    before = norm.detach().clone()
    has_answered = folder / "answered"
    has_changed = folder / "changed"
    found = []
    options = dict(max_new_tokens=4, do_sample=False)
    with generator:
        if rank == 0:
            found.append(generator.submit(TEXTS[0] * 3, **options).result(60).token_ids)
            has_answered.touch()
        while not has_answered.exists() or (rank == 0 and not has_changed.exists()):
            time.sleep(0.01)
        with torch.no_grad():
            norm.mul_(other_norm(before))
        has_changed.touch()
        if rank == 0:
            weights_changed()
            found.append(generator.submit(TEXTS[0] * 3, **options).result(60).token_ids)
    with torch.no_grad():
        norm.copy_(before)
    return found


def other_norm(norm):
    """Return factors of a norm's weights with which a model writes other texts."""
    return torch.linspace(-1.0, 1.0, norm.numel(), dtype=norm.dtype)


def _parted(rank, folder, generator):
    """Return how the batcher ends after a process lost K/V that the others have, and a request
    after its restart.
    """
    has_parted, options, found = (
        folder / "parted",
        dict(max_new_tokens=4, do_sample=False),
        {},
    )
    generator.start()
    if rank == 0:
        generator.submit(TEXTS[0] * 3, **options).result(60)
        has_parted.touch()
        while has_parted.exists():
            time.sleep(0.01)
        found["submit"] = _message(lambda: generator.submit(TEXTS[0] * 3, **options).result(60))
    else:
        while not has_parted.exists():
            time.sleep(0.01)
        sequences = generator._service._engine().target.sequences
        while not sequences.num_kept:  # the last order may be under way
            time.sleep(0.01)
        sequences._keep_at_most(0)
        has_parted.unlink()
    found["stop"] = _message(generator.stop)
    with generator:
        if rank == 0:
            found["again"] = generator.submit(TEXTS[0], **options).result(60).token_ids
    return found


def _fail(input_ids, scores):
    raise RuntimeError("a processor that fails")


def _message(call):
    """Return the message of the error that a call raises."""
    return _error(call)[1] or "none"


def _shapes(out):
    """Return what was decided in each step."""
    return [
        (step.depth, step.width, step.predicted_s, [own.nodes for own in step.requests])
        for step in out.steps
    ]


class Reader:
    """Drafter that reads hidden states of the target."""

    feature_layers = (1,)

    def draft(self, requests, plan):
        raise AssertionError("it is refused before")

    release = draft


def _error(call):
    """Return the class and the message of the error that a call raises."""
    try:
        call()
    except (SLOSpecError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "none", ""
