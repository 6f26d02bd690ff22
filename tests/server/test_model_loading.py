"""Options of models: which drafter they mean, and what is refused before any request."""

from __future__ import annotations

import json
import sys

import pytest

from hf_slospec import InvalidInputError, MissingExtraError, SLOSpecConfig
from hf_slospec.drafters.assistant import AssistantMethod
from hf_slospec.drafters.hybrid import HybridMethod
from hf_slospec.heads.suffix import SuffixMethod
from hf_slospec.server.loading import draft_method, load_generator, load_models
from hf_slospec.server.model_options import ModelOptions
from hf_slospec.tiny.embedded import FOLDER
from tests.support.toys.tiny_models import tiny_model
from tests.support.toys.tiny_tokenizers import byte_level

KINDS = {
    None: "assistant model",
    "assistant": "assistant model",
    "lookup": "prompt lookup",
    "mtp": "MTP layer",
    "lookup+mtp": "prompt lookup + MTP layer",
    "suffix+assistant": "suffix trees + assistant model",
}


@pytest.mark.parametrize("drafter", KINDS)
def test_names_mean_those_of_the_embedded_target(drafter):
    options = ModelOptions(drafter=drafter, dtype="float32")
    pair = load_models(options)
    method = draft_method(options, pair)
    assert method.kind == KINDS[drafter]
    assert not isinstance(method, AssistantMethod) or method.assistant is pair.draft


def test_a_target_alone_is_drafted_for_by_its_own_text(tmp_path):
    folder = str(FOLDER / "target")
    assert ModelOptions(target=folder).parts == ["lookup"] and ModelOptions(
        target=folder, assistant="org/draft"
    ).parts == ["assistant"]
    (file := tmp_path / "model.gguf").touch()
    assert ModelOptions(target=str(file)).name == "model.gguf"
    assert (
        ModelOptions(target=folder).name == "target"
        and ModelOptions(target="org/name").name == "org/name"
    )
    assert ModelOptions().parts == ["assistant"]


def test_texts_are_shared_only_on_demand():
    for shares in (False, True):
        options = ModelOptions(drafter="suffix+lookup", dtype="float32", share_texts=shares)
        method = draft_method(options, load_models(options))
        assert isinstance(method, HybridMethod) and isinstance(method.methods[0], SuffixMethod)
        assert (method.methods[0]._drafter.past is not None) is shares


def test_a_head_of_an_inflated_target():
    generator = load_generator(
        ModelOptions(drafter="mtp", size="0.1B", dtype="float32"), SLOSpecConfig(), "{{ messages }}"
    )
    assert generator.decoder.speculator.method.kind == "MTP layer"
    assert generator.tokenizer is not None and generator.tokenizer.chat_template == "{{ messages }}"


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "arctic_inference", None)
    options = ModelOptions(drafter="suffix", dtype="float32")
    with pytest.raises(
        MissingExtraError, match="the drafter suffix needs arctic_inference; install with: pip"
    ):
        draft_method(options, load_models(options))


def folder_of(path, chat_template=None, **generation):
    """A target with its tokenizer, these settings in generation_config.json and a chat template."""
    tiny_model("llama").save_pretrained(path)
    tokenizer = byte_level(101)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(path)
    file = path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | generation))
    return str(path)


def generator_of(target, chat_template=None):
    options = ModelOptions(target=target, drafter="lookup", dtype="float32")
    return load_generator(options, SLOSpecConfig(), chat_template)


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        (dict(num_beams=2), "beam search; set num_beams=1"),
        (dict(penalty_alpha=0.6, top_k=4), "contrastive"),
        (dict(cache_implementation="quantized"), "cache_implementation='quantized'"),
        (dict(do_sample=True, temperature=-1.0), "temperature"),
    ],
)
def test_a_generation_config_that_fails_every_request_fails_the_start(
    generation, message, tmp_path
):
    generator = generator_of(folder_of(tmp_path, **generation))
    with pytest.raises(
        InvalidInputError,
        match=f"generation config of LlamaForCausalLM fails every request: .*{message}",
    ):
        generator.start()


@pytest.mark.parametrize(
    "generation", [dict(max_length=12, min_new_tokens=5), dict(do_sample=True, top_k=5)]
)
def test_a_generation_config_that_requests_can_use_starts(generation, tmp_path):
    with generator_of(folder_of(tmp_path, **generation)) as generator:
        assert (
            len(
                generator.submit([3, 4, 5], max_new_tokens=6, eos_token_id=None)
                .result(60)
                .token_ids
            )
            == 6
        )


BROKEN = {
    "syntax": "{% for message in messages %}{{ message['content'] }",
    "unknown filter": "{{ messages | shout }}",
    "unknown type": "{{ messages[0]['content'] + 3 }}",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_chat_template_is_refused_before_any_request(kind, tmp_path):
    target = folder_of(tmp_path, BROKEN[kind])
    with pytest.raises(
        InvalidInputError, match=r"chat template of .* is broken: .*--chat-template"
    ):
        generator_of(target)
    assert generator_of(target, "{{ messages[0]['content'] }}").tokenizer is not None


def test_a_template_may_refuse_a_conversation(tmp_path):
    template = "{{ raise_exception('begin with a system message') }}"
    assert generator_of(folder_of(tmp_path, template)).tokenizer is not None
