"""The trainer callback that speculates rollouts."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_slospec import FallbackWarning, PastAnswers, RolloutCallback, SLOSpecConfig
from tests.support.toys.tiny_models import ragged_prompts, tiny_copy

CONFIG = SLOSpecConfig(policy="adaserve", token_budget=64, max_depth=3)


class Rollouts:
    """A trainer's calls of a callback, with a rollout per epoch."""

    def __init__(self, folder, callback, **settings):
        self.model = tiny_copy("llama")
        self.args = TrainingArguments(output_dir=str(folder), use_cpu=True)
        self.state = TrainerState(global_step=0)
        vars(self.args).update(settings)
        self.callback = callback

    def call(self, event):
        getattr(self.callback, event)(self.args, self.state, TrainerControl(), model=self.model)

    def epoch(self):
        torch.manual_seed(0)
        out = self.model.generate(**ragged_prompts(4), do_sample=True, max_new_tokens=24)
        self.state.global_step += 1
        self.call("on_epoch_end")
        return out


@pytest.mark.parametrize("drafter", ["lookup", "suffix"])
def test_rollouts_are_those_of_stock_in_fewer_steps(drafter, tmp_path):
    rollouts = Rollouts(tmp_path, RolloutCallback(drafter, config=CONFIG))
    torch.manual_seed(0)
    expected = rollouts.model.generate(**ragged_prompts(4), do_sample=True, max_new_tokens=24)
    rollouts.call("on_train_begin")
    assert all(torch.equal(rollouts.epoch(), expected) for _ in range(2))
    rollouts.call("on_train_end")
    assert "generate" not in vars(rollouts.model)
    first, second = rollouts.callback.tokens_per_step
    assert 1.0 <= first < second


def test_answers_go_with_checkpoints(tmp_path):
    rollouts = Rollouts(tmp_path, RolloutCallback("lookup", config=CONFIG))
    rollouts.call("on_train_begin")
    rollouts.epoch()
    (tmp_path / "checkpoint-1").mkdir()
    rollouts.call("on_save")
    resumed = Rollouts(
        tmp_path, RolloutCallback("lookup", past=PastAnswers(max_per_prompt=8), config=CONFIG)
    )
    resumed.state.global_step = 1
    resumed.call("on_train_begin")
    assert len(resumed.callback.past) == 4
    resumed.epoch()
    assert resumed.callback.tokens_per_step[0] > rollouts.callback.tokens_per_step[0]


@pytest.mark.parametrize("setting", [None, "use_vllm"])
def test_trainers_that_do_not_call_generate_are_warned_of(setting, tmp_path):
    rollouts = Rollouts(
        tmp_path, RolloutCallback("lookup"), **({} if setting is None else {setting: True})
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FallbackWarning)
        rollouts.call("on_train_begin")
    messages = [str(one.message) for one in caught if one.category is FallbackWarning]
    assert len(messages) == (setting is not None) and all(
        f"{setting}=True" in message for message in messages
    )
    rollouts.call("on_epoch_end")  # without a rollout
    assert rollouts.callback.tokens_per_step == []
