"""The trainer callback that speculates rollouts, and log probabilities for trainers."""

from __future__ import annotations

import contextlib
import shutil
import threading
import warnings

import pytest
import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import hf_slospec
from hf_slospec import (
    FallbackWarning,
    PastAnswers,
    RolloutCallback,
    SLOSpecConfig,
    SLOSpecGenerator,
    UnsupportedOptionError,
)
from tests.support.stock_matrix import padded, random_texts
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


def test_batches_draft_from_the_answers_of_earlier_epochs(tmp_path):
    rollouts = Rollouts(tmp_path, RolloutCallback("suffix", config=CONFIG))
    rollouts.call("on_train_begin")
    sampled = GenerationConfig(do_sample=True, max_new_tokens=24)
    answers = []
    for _ in range(2):
        torch.manual_seed(0)
        outputs = rollouts.model.generate_batch(random_texts(40, 9) * 2, sampled)
        answers.append([output.generated_tokens for output in outputs.values()])
        rollouts.call("on_epoch_end")
    first, second = rollouts.callback.tokens_per_step
    assert answers[0] == answers[1] and second > max(2.0, first)
    assert len(rollouts.callback.past) == 8


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


class Trainer:
    """The parts of TRL's GRPOTrainer and RLOOTrainer that sample and compute log probabilities."""

    temperature = 0.7

    def __init__(self, model):
        self.model = model
        self.lock = threading.RLock()  # cannot be copied, as parts of TRL's
        self.continuous_batching_config = ContinuousBatchingConfig(seed=1)
        self.num_forwards = 0

    def rollout(self, *rows_of_2, **settings):
        """Sample 2 completions per prompt.  -> the arguments of the next method"""
        self.prompts = [row for row in rows_of_2 for _ in range(2)]
        config = GenerationConfig(
            max_new_tokens=9, do_sample=True, temperature=self.temperature, top_p=0.8, **settings
        )
        outputs = self.model.generate_batch(
            self.prompts, config, continuous_batching_config=self.continuous_batching_config
        )
        completions = [output.generated_tokens for output in outputs.values()]
        left = padded(self.prompts)
        right = padded([row[::-1] for row in completions])
        ids = torch.cat([left["input_ids"], right["input_ids"].flip(1)], 1)
        mask = torch.cat([left["attention_mask"], right["attention_mask"].flip(1)], 1)
        return self.model, ids, mask, right["input_ids"].shape[1]

    def _get_per_token_logps_and_entropies(
        self,
        model,
        input_ids,
        attention_mask,
        logits_to_keep,
        batch_size=None,
        compute_entropy=False,
        compute_aux_loss=False,
    ):
        self.num_forwards += 1
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits
        logps = (logits[:, -logits_to_keep - 1 : -1] / self.temperature).log_softmax(-1)
        logps = logps.gather(-1, input_ids[:, -logits_to_keep:, None])[..., 0]
        return logps * attention_mask[:, -logits_to_keep:], None, None


def trainer_of(model=None, **settings):
    model = tiny_copy("llama") if model is None else model
    hf_slospec.enable(model, config=CONFIG, **settings)
    trainer = Trainer(model)
    return trainer, hf_slospec.reuse_logprobs(trainer)


@torch.no_grad()
def test_old_logprobs_come_from_verification_whatever_tokens_were_left_out():
    trainer, reused = trainer_of()
    for prompts in (random_texts(5, 40), random_texts(41, 7)):
        arguments = trainer.rollout(*prompts, repetition_penalty=1.3)
        logps, *others = trainer._get_per_token_logps_and_entropies(*arguments, batch_size=2)
        assert trainer.num_forwards == 0 and others == [None, None]
        expected, *_ = reused._compute(*arguments)
        torch.testing.assert_close(logps, expected, atol=1e-4, rtol=0.0)
        trainer.num_forwards = 0
    assert reused.num_skipped == 2
    model, ids, mask, length = arguments
    mask[1, -length:] = 0  # a completion that mask_truncated_completions leaves out
    logps, *_ = trainer._get_per_token_logps_and_entropies(model, ids, mask, length)
    assert not logps[1].any() and logps[0].all() and reused.num_skipped == 3


@pytest.mark.parametrize(
    "change",
    ["gradients", "entropy", "weights", "optimizer", "other model", "other tokens", "disabled"],
)
def test_old_logprobs_are_computed_where_verification_has_others(change):
    trainer, reused = trainer_of()
    if change == "disabled":
        hf_slospec.disable(trainer.model)
        little = dict(num_blocks=16, page_size=16, max_batch_tokens=64)
        for name, value in little.items():
            setattr(trainer.continuous_batching_config, name, value)
    arguments = list(trainer.rollout(*random_texts(20)))
    options = {}
    if change == "entropy":
        options["compute_entropy"] = True
    elif change == "weights":
        with torch.no_grad():
            trainer.model.lm_head.weight.mul_(1.5)
    elif change == "optimizer":
        optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        trainer.model(torch.tensor([[5, 6]]), labels=torch.tensor([[5, 6]])).loss.backward()
        optimizer.step()
    elif change == "other model":
        arguments[0] = tiny_copy("llama")
    elif change == "other tokens":
        arguments[1][0, -1] += 1
    with contextlib.nullcontext() if change == "gradients" else torch.no_grad():
        logps, *_ = trainer._get_per_token_logps_and_entropies(*arguments, **options)
    assert (trainer.num_forwards, reused.num_skipped) == (1, 0)
    assert logps.requires_grad == (change == "gradients")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@torch.no_grad()
def test_the_pass_of_the_reference_model_is_made_with_adapters_off():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    trainer, reused = trainer_of(peft.get_peft_model(tiny_copy("llama"), lora))
    arguments = trainer.rollout(*random_texts(20))
    old, *_ = trainer._get_per_token_logps_and_entropies(*arguments)
    assert (trainer.num_forwards, reused.num_skipped) == (0, 1)
    with trainer.model.disable_adapter():
        reference, *_ = trainer._get_per_token_logps_and_entropies(*arguments)
    assert trainer.num_forwards == 1 and (old - reference).abs().max() > 1e-3


def test_trainers_without_such_a_pass_are_refused_by_name():
    trainer, _ = trainer_of()
    trainer.continuous_batching_config = None
    with pytest.raises(UnsupportedOptionError, match="use_transformers_continuous_batching=True"):
        hf_slospec.reuse_logprobs(Trainer.__new__(Trainer))
    with pytest.raises(UnsupportedOptionError, match="object has no forward for old"):
        hf_slospec.reuse_logprobs(object())


def exact_logprobs(model, config, *prompts):
    """Return a rollout's sequences without padding, and the log probabilities of new tokens."""
    hf_slospec.enable(model, drafter="lookup", config=config)
    trainer = Trainer(model)
    reused = hf_slospec.reuse_logprobs(trainer)
    _, ids, mask, length = arguments = trainer.rollout(*prompts)
    with torch.no_grad():
        logps, *_ = trainer._get_per_token_logps_and_entropies(*arguments)
    assert reused.num_skipped == 1
    kept = mask.bool()
    return [
        (row[its].tolist(), own[its[-length:]].tolist())
        for row, its, own in zip(ids, kept, logps, strict=True)
    ]


DRAFTING = dict(policy="fixed", max_depth=4, max_width=3)


@pytest.mark.nightly
def test_exact_bits_give_the_logprobs_of_stock_decoding_to_the_bit():
    model = tiny_copy("llama").to(torch.bfloat16)
    prompts = [random_texts(20)[0] * 2, random_texts(6)[0]]
    config = SLOSpecConfig(exact="bits", **DRAFTING)
    for n, (row, logprobs) in enumerate(exact_logprobs(model, config, *prompts)):
        torch.manual_seed(1 + n)
        out = model.generate(
            torch.tensor([prompts[n // 2]]), max_new_tokens=9, do_sample=True, top_p=0.8,
            temperature=Trainer.temperature, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        assert row == out.sequences[0].tolist()
        logits = torch.cat(out.logits).float() / Trainer.temperature
        new = row[-len(logits) :]
        assert logprobs == logits.log_softmax(-1)[range(len(new)), new].tolist()


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_exact_self_gives_the_logprobs_of_a_forward_of_the_whole_row_to_the_bit(monkeypatch):
    monkeypatch.setattr(Trainer, "temperature", 1.0)
    model = tiny_copy("llama").to(torch.bfloat16)
    config = SLOSpecConfig(exact="self", compile="wait", **DRAFTING)
    rows = exact_logprobs(model, config, random_texts(20)[0] * 2, random_texts(6)[0])
    with SLOSpecGenerator(model, config=config) as generator:
        for row, logprobs in rows:
            whole = generator.prompt_logprobs(row)[-len(logprobs) :]
            assert logprobs == [one.logprob for one in whole]  # KL 0
