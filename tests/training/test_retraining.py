"""Retraining of a head while its target is trained."""

from __future__ import annotations

import copy
from operator import sub

import pytest
import torch
from transformers import (
    GenerationConfig,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import hf_slospec
from hf_slospec import HeadRetrainer, InvalidInputError, SLOSpecConfig, UnsupportedModelError
from hf_slospec.generate.call import Done
from hf_slospec.generate.enable import decoder_of
from hf_slospec.heads.mtp import own_modules

CONFIG = SLOSpecConfig(policy="fixed", max_depth=4, max_width=1, compile=False)
SAMPLED = GenerationConfig(max_new_tokens=24, do_sample=True, temperature=1.0, top_k=0)
GREEDY = GenerationConfig(max_new_tokens=24, do_sample=False)


def enabled(kind="eagle3", dtype=torch.float32):
    """Return the embedded target and prompts as ids; the target drafts with a head that knows
    nothing: its weights are random.
    """
    model, _, tokenizer = map(copy.deepcopy, hf_slospec.load_tiny_pair())
    model.to(dtype).requires_grad_(False)
    drafter = hf_slospec.load_tiny_drafter(kind, model)
    torch.manual_seed(0)
    for weight in own_modules(drafter.head, model).parameters():
        if weight.ndim > 1:
            weight.data.normal_(std=0.02)
    hf_slospec.enable(model, drafter=drafter, config=CONFIG, always=True)
    texts = hf_slospec.tiny_prompts()[:16]
    return model, tokenizer([text[:60] for text in texts])["input_ids"]


def write(model, prompts, config=SAMPLED):
    """Let the model answer the prompts; return the answers."""
    outputs = model.generate_batch(prompts, config)
    return [output.generated_tokens for output in outputs.values()]


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_head_learns_from_what_the_model_writes_and_answers_stay(kind):
    model, prompts = enabled(kind)
    retrainer = HeadRetrainer(rate=1.0, batch=4, levels=2)
    retrainer.attach(model)
    decoder = decoder_of(model)
    answers = []
    lengths = []
    for _ in range(6):
        first = decoder.done
        answers.append(write(model, prompts[:8], GREEDY))
        lengths.append(Done(*map(sub, decoder.done, first)).tokens_per_step)
        assert retrainer.num_waiting == 8
        retrainer.train()
        assert retrainer.num_waiting == 0
    assert answers == answers[:1] * 6
    assert lengths[0] < 1.1 and lengths[-1] > lengths[0] + 0.2
    assert retrainer.losses[-1] < 0.8 * retrainer.losses[0]


def test_gradients_of_the_target_are_left_alone():
    model, prompts = enabled()
    retrainer = HeadRetrainer()
    retrainer.attach(model)
    write(model, prompts)
    model.requires_grad_(True).train()
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    weights = copy.deepcopy(model.state_dict())
    retrainer.train()
    assert model.training
    assert all(bool((weight.grad == 1).all()) for weight in model.parameters())
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


def test_a_head_in_bf16_is_trained_in_fp32_and_drafts_in_bf16():
    model, prompts = enabled(dtype=torch.bfloat16)
    head = decoder_of(model).method.model
    retrainer = HeadRetrainer(rate=1e-3)  # steps that bf16 would round away
    retrainer.attach(model)
    write(model, prompts)
    retrainer.train()
    for used, trained in zip(
        own_modules(head, model).parameters(), retrainer._weights, strict=True
    ):
        assert used.dtype == torch.bfloat16 and trained.dtype == torch.float32
        assert torch.equal(used, trained.to(torch.bfloat16))


class Training:
    """A trainer's calls of the callbacks."""

    def __init__(self, folder, retrainer):
        self.model, self.prompts = enabled()
        self.callback = retrainer
        self.args = TrainingArguments(output_dir=str(folder), use_cpu=True)
        self.state = TrainerState(global_step=0)

    def call(self, event):
        getattr(self.callback, event)(self.args, self.state, TrainerControl(), model=self.model)


def test_the_callback_trains_when_enough_texts_wait_and_resumes(tmp_path):
    training = Training(tmp_path, HeadRetrainer(every=32, rate=1.0))
    training.call("on_train_begin")
    for _ in range(3):
        write(training.model, training.prompts)
        training.call("on_step_end")
    assert len(training.callback.losses) == 1 and training.callback.num_waiting == 16
    training.state.global_step = 3
    (tmp_path / "checkpoint-3").mkdir()
    training.call("on_save")

    resumed = Training(tmp_path, HeadRetrainer())
    resumed.state.global_step = 3
    resumed.call("on_train_begin")
    for one in (training, resumed):
        one.head = own_modules(decoder_of(one.model).method.model, one.model)
    expected = training.head.state_dict()
    assert all(torch.equal(w, expected[name]) for name, w in resumed.head.state_dict().items())


def test_only_texts_that_can_be_learned_from_are_kept():
    model, prompts = enabled()
    retrainer = HeadRetrainer(every=2, seq_len=30)
    retrainer.attach(model)
    assert retrainer.train() is None
    write(model, prompts)
    assert retrainer.num_waiting == 8  # the newest
    assert all(len(text.ids) == 30 and text.begin == 6 for text in retrainer._texts)
    model.generate(torch.tensor([prompts[0]]), max_new_tokens=2)
    assert retrainer.num_waiting == 8
    model.generate(torch.tensor([prompts[0]]), max_new_tokens=12)
    assert retrainer._texts[-1].begin == len(prompts[0])


def test_what_cannot_be_retrained_is_refused_by_name():
    model, draft, _ = map(copy.deepcopy, hf_slospec.load_tiny_pair())
    with pytest.raises(InvalidInputError, match="is not enabled"):
        HeadRetrainer().attach(model)
    hf_slospec.enable(model, draft)
    with pytest.raises(UnsupportedModelError, match="cannot be retrained"):
        HeadRetrainer().attach(model)
    for setting in ({"every": 0}, {"batch": 0}, {"levels": 0}, {"seq_len": 8}, {"rate": 0.0}):
        with pytest.raises(InvalidInputError, match=next(iter(setting))):
            HeadRetrainer(**setting)
