"""Retraining of a head while its target is trained."""

from __future__ import annotations

import copy
from operator import sub
from pathlib import Path

import pytest
import torch
from transformers import (
    GenerationConfig,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.modeling_layers import MtpModel

import hf_slospec
from hf_slospec import (
    HeadRetrainer,
    InvalidInputError,
    InvalidTypeError,
    SLOSpecConfig,
    UnsupportedModelError,
)
from hf_slospec.drafters.head import HeadMethod
from hf_slospec.generate.call import Done
from hf_slospec.generate.enable import decoder_of
from hf_slospec.heads.mtp import ShippedMtpHead, own_modules
from hf_slospec.model.properties import CACHE_NAME
from hf_slospec.training.teacher import Teacher
from tests.heads.checkpoints import target_of
from tests.heads.checkpoints import write as write_head
from tests.heads.published_blocks import CASES as BLOCK_HEADS
from tests.heads.test_wider_eagle3 import PEAGLE

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


def test_texts_that_the_model_did_not_read_as_tokens_are_left_out():
    model, prompts = enabled()
    retrainer = HeadRetrainer()
    retrainer.attach(model)
    ids = torch.tensor([prompts[0]])
    embeds = model.get_input_embeddings()(ids)
    model.generate(inputs_embeds=embeds + 0.1, max_new_tokens=24)
    cache = model(ids[:, :-1])[CACHE_NAME]
    model.generate(
        ids[:, -1:], **{CACHE_NAME: cache}, attention_mask=torch.ones_like(ids), max_new_tokens=24
    )
    assert retrainer.num_waiting == 0
    model.generate(ids, max_new_tokens=24)
    assert retrainer.num_waiting == 1


def test_a_round_that_fails_loses_nothing(monkeypatch, caplog):
    model, prompts = enabled()
    weights = copy.deepcopy(own_modules(decoder_of(model).method.model, model).state_dict())
    retrainer = HeadRetrainer(batch=2)
    retrainer.attach(model)
    write(model, prompts[:4])
    with monkeypatch.context() as patched:
        patched.setattr("hf_slospec.training.retraining.loss_of", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            retrainer.train()
    assert retrainer.num_waiting == 4
    with monkeypatch.context() as patched, caplog.at_level("WARNING"):
        patched.setattr(
            "hf_slospec.training.retraining.loss_of",
            lambda head, *_: (
                sum(weight.sum() for weight in own_modules(head, model).parameters()) * torch.nan
            ),
        )
        retrainer.train()
    assert "loss is nan" in caplog.text
    used = own_modules(decoder_of(model).method.model, model).state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in used.items())
    write(model, prompts[:4])
    with torch.inference_mode():
        assert retrainer.train() > 0
    assert not all(torch.equal(weight, weights[name]) for name, weight in used.items())


def test_a_retrainer_follows_one_model_and_says_when_it_lost_it():
    model, prompts = enabled()
    retrainer = HeadRetrainer()
    with pytest.raises(InvalidInputError, match="call attach"):
        retrainer.train()
    retrainer.attach(model)
    with pytest.raises(InvalidInputError, match="another HeadRetrainer"):
        HeadRetrainer().attach(model)
    write(model, prompts[:2])
    other, _ = enabled()
    retrainer.attach(other)
    write(model, prompts[:2])
    assert retrainer.num_waiting == 0  # of the first model
    write(other, prompts[:2])
    assert retrainer.num_waiting == 2
    hf_slospec.enable(other, drafter=hf_slospec.load_tiny_drafter("mtp", other), always=True)
    with pytest.raises(InvalidInputError, match="call attach"):
        retrainer.train()
    retrainer.attach(other)
    assert retrainer.train() is None


@pytest.mark.filterwarnings("ignore:Model has `tie_word", "ignore:.*is_gradient_checkpointing")
def test_teachers_take_the_output_layer_as_it_is():
    """An output layer with an adapter is more than its weight, and autocast rounds the target."""
    peft = pytest.importorskip("peft")
    model, prompts = enabled()
    retrainer = HeadRetrainer()
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["lm_head"], init_lora_weights=False)
    )
    retrainer.attach(model)
    write(model, prompts[:8])
    texts = list(retrainer._texts)
    teacher = Teacher(model, retrainer._student, texts, Path(), 0.0, 2)
    rows = teacher.rows([0])
    expected = adapted(rows.ids[:, : len(texts[0].ids)]).logits[..., teacher.rows_of_output]
    torch.testing.assert_close(
        rows.probs[:, : len(texts[0].ids)], expected.softmax(-1), rtol=1e-3, atol=1e-5
    )
    forward = model.forward
    model.forward = torch.autocast("cpu", torch.bfloat16)(forward)
    assert retrainer.train() > 0


def test_heads_that_draft_otherwise_than_they_are_trained_are_refused(tmp_path):
    target = copy.deepcopy(target_of("llama"))
    block = BLOCK_HEADS["speculators dspark from the first mask"]
    for name, case in {
        "block": (block.config, block.tensors),
        "peagle": PEAGLE["speculators"][:2],
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        drafter = hf_slospec.load_drafter(write_head(folder, *case), target)
        hf_slospec.enable(target, drafter=drafter)
        with pytest.raises(UnsupportedModelError, match="cannot be retrained"):
            HeadRetrainer().attach(target)
    target = copy.deepcopy(target_of("glm4-moe")).requires_grad_(False)
    head = ShippedMtpHead(target, MtpModel(target, 1))
    for weight in head.mtp.layers.parameters():
        torch.nn.init.constant_(weight, 0.01)
    hf_slospec.enable(target, drafter=HeadMethod(head.eval()))
    with pytest.raises(UnsupportedModelError, match="cannot be retrained"):
        HeadRetrainer().attach(target)
    assert not any(weight.requires_grad for weight in target.parameters())


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
    for setting in ({"every": "a"}, {"batch": None}, {"every": 1.5}, {"rate": "x"}):
        with pytest.raises(InvalidTypeError, match=next(iter(setting))):
            HeadRetrainer(**setting)
