"""Two processes over gloo that share a tensor-parallel model, and what each of them found."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from hf_slospec import SLOSpecConfig, SLOSpecError, SLOSpecGenerator
from hf_slospec.generate.speculator import MEASURE_S
from tests.support.breadth import quick_or
from tests.support.toys.tiny_models import ragged_prompts

NUM_RANKS = 2
CONFIG = SLOSpecConfig(policy="adaserve", token_budget=24, max_depth=3, check_invariants=True)  # drafts at any cost
PROMPTS = ragged_prompts(3)
IDS = PROMPTS["input_ids"]
NEW_TOKENS = quick_or(8, 12)
SLOW = 5.0  # times as much time as on the first rank passes on the others, by their clocks
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": dict(do_sample=False),
    "sampled": dict(do_sample=True, temperature=0.8, top_k=20, num_return_sequences=2),
}
TIMEOUT = datetime.timedelta(minutes=5)  # after which a rank that waits for another fails


def generated(model: Any, options: dict[str, Any], **kwargs: Any) -> Any:
    """Return what a ``generate`` returns for the prompts, always with the same noise."""
    torch.manual_seed(1)
    return model.generate(**PROMPTS, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, **options, **kwargs)


def run(folder: Path) -> list[dict[str, Any]]:
    """Return what each rank found with the models ``target`` and ``draft`` in a folder."""
    with patch.dict(os.environ, CUDA_VISIBLE_DEVICES="", WORLD_SIZE=str(NUM_RANKS)):
        multiprocessing.spawn(_work, (folder,), nprocs=NUM_RANKS)
    return [torch.load(folder / f"rank{rank}") for rank in range(NUM_RANKS)]


def _work(rank: int, folder: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    MEASURE_S.update(target=0.2, draft=0.1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_RANKS, timeout=TIMEOUT)
    own_s = time.perf_counter
    with patch.object(time, "perf_counter", lambda: own_s() * (SLOW if rank else 1.0)):
        torch.save(_found(rank, folder), folder / f"rank{rank}")
    dist.destroy_process_group()


def _found(rank: int, folder: Path) -> dict[str, Any]:
    def load(name: str, is_split: bool = True) -> PreTrainedModel:
        split = {"distributed_config": DistributedConfig(tp_size=NUM_RANKS)} if is_split else {}
        return AutoModelForCausalLM.from_pretrained(folder / name, **split)

    by_draft = SLOSpecGenerator.from_pretrained(
        str(folder / "target"),
        str(folder / "draft"),
        config=CONFIG,
        distributed_config=DistributedConfig(tp_size=NUM_RANKS),
    )
    target, whole_draft = by_draft.model, by_draft.assistant_model
    ways: dict[str, dict[str, Any]] = {
        "draft": {},
        "split draft": {"assistant_model": load("draft")},
        "lookup": {"prompt_lookup_num_tokens": 3},
    }
    found: dict[str, Any] = {"stock": {}, "ours": {}, "steps": {}}
    for kind, options in OPTIONS.items():
        found["stock"][kind] = generated(target, options).sequences
        for way, own in ways.items():
            out = generated(by_draft, options | own, slo_tpot=0.1)
            found["ours"][kind, way], found["steps"][kind, way] = out.sequences, _shapes(out)
    out = generated(SLOSpecGenerator(target, whole_draft), OPTIONS["greedy"], slo_tpot=[0.001, None, 0.1])
    found["ours"]["greedy", "auto"], found["steps"]["greedy", "auto"] = out.sequences, _shapes(out)
    embeds = target.get_input_embeddings()(IDS[1:2])
    options = dict(inputs_embeds=embeds, max_new_tokens=NEW_TOKENS, do_sample=False)
    found["embeds"] = target.generate(**options), by_draft.generate(**options)
    one = dict(max_new_tokens=8, do_sample=True, slo_tpot=1.0)
    found["errors"] = {
        "prompts": _error(lambda: by_draft.generate(IDS[rank + 1 :][:1], **one)),
        "seeds": _error(lambda: [torch.manual_seed(rank), by_draft.generate(IDS[1:2], **one)]),
        "max_time": _error(lambda: by_draft.generate(IDS[1:2], max_time=9.0, **one)),
        "batcher": _error(by_draft.start),
        "prepack": _error(lambda: SLOSpecGenerator(target, config=SLOSpecConfig(prepack=True))),
        "features": _error(lambda: SLOSpecGenerator(target, drafter=Reader())),
        "split draft only": _error(lambda: SLOSpecGenerator(whole_draft, load("draft"))),
        "FSDP": _error(lambda: SLOSpecGenerator(fully_shard(load("draft", is_split=False)))),
    }
    found["after errors"] = generated(by_draft, OPTIONS["greedy"]).sequences
    return found


def _shapes(out: Any) -> list[Any]:
    """Return what was decided in each step."""
    return [(step.depth, step.width, step.predicted_s, [own.nodes for own in step.requests]) for step in out.steps]


class Reader:
    """Drafter that reads hidden states of the target."""

    feature_layers = (1,)

    def draft(self, requests: Any, plan: Any) -> Any:
        raise AssertionError("it is refused before")

    release = draft


def _error(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the class and the message of the error that a call raises."""
    try:
        call()
    except SLOSpecError as error:
        return type(error).__name__, str(error)
    return "none", ""
