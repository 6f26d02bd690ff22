"""The public surface: enable and disable, inputs and outputs, streaming, errors, recovery."""

from __future__ import annotations

import copy
import io
import itertools
import json
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    T5Config,
    T5ForConditionalGeneration,
    WatermarkingConfig,
)
from transformers.generation import BaseStreamer

import hf_slospec
from hf_slospec import (
    IncompatibleDraftError,
    InvalidInputError,
    InvalidTypeError,
    SLOSpecConfig,
    SLOSpecError,
    SLOSpecGenerator,
    SLOStage,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from tests.tiny_models import assert_same_as_stock, ragged_prompts, tiny_model

OPTIONS: dict[str, Any] = dict(do_sample=False, max_new_tokens=20)


@pytest.fixture
def model() -> Any:
    enabled = hf_slospec.enable(tiny_model("llama"), tiny_model("llama", noise=0.03))
    yield enabled
    hf_slospec.disable(enabled)


def test_without_target_generate_is_stock(model: Any) -> None:
    inputs = ragged_prompts(2)
    out = model.generate(**inputs, **OPTIONS, return_dict_in_generate=True)
    assert not hasattr(out, "slo")
    assert torch.equal(out.sequences, type(model).generate(model, **inputs, **OPTIONS))


def test_always_speculates_without_target() -> None:
    model = hf_slospec.enable(tiny_model("llama"), tiny_model("llama"), always=True)
    try:
        out = model.generate(**ragged_prompts(2), **OPTIONS, return_dict_in_generate=True)
        assert [metrics.tpot_slo_s for metrics in out.slo] == [None, None]
    finally:
        hf_slospec.disable(model)


def test_disable_restores_everything() -> None:
    model = tiny_model("qwen2")
    before = dict(model.__dict__), model.config.to_dict(), model.config._attn_implementation
    hf_slospec.enable(model, tiny_model("qwen2"))
    hf_slospec.enable(model, tiny_model("qwen2", seed=1))  # again: replaces the draft
    model.generate(**ragged_prompts(1), **OPTIONS, slo_tpot=0.1)
    hf_slospec.disable(model)
    hf_slospec.disable(model)
    assert (dict(model.__dict__), model.config.to_dict(), model.config._attn_implementation) == before
    with pytest.raises(ValueError, match="slo_tpot"):
        model.generate(**ragged_prompts(1), **OPTIONS, slo_tpot=0.1)


def test_disable_restores_a_generate_of_the_instance() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    model.generate = lambda *args, **kwargs: "custom"
    hf_slospec.enable(model, tiny_model("llama"))
    assert model.generate(**ragged_prompts(1)) == "custom"
    assert model.generate(**ragged_prompts(1), **OPTIONS, slo_tpot=0.1).shape[0] == 1
    hf_slospec.disable(model)
    assert model.generate() == "custom"


def test_plain_forwards_are_untouched_while_enabled(model: Any) -> None:
    inputs = ragged_prompts(3)
    hf_slospec.disable(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        hf_slospec.enable(model, tiny_model("llama"))
        model.generate(**inputs, **OPTIONS, slo_tpot=0.1)
        assert torch.equal(model(**inputs).logits, expected)


def test_enabled_model_can_be_copied_and_pickled() -> None:
    # One of its own: where hidden states were asked for, transformers leaves hooks that cannot be pickled.
    model: Any = hf_slospec.enable(tiny_model.__wrapped__("llama"), tiny_model("llama", noise=0.03))
    inputs = ragged_prompts(2)
    expected = type(model).generate(model, **inputs, **OPTIONS)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other.generate(**inputs, **OPTIONS), expected)
        with pytest.raises(ValueError, match="slo_tpot"):
            other.generate(**inputs, **OPTIONS, slo_tpot=0.1)


def test_output_has_hf_fields_and_per_row_metrics(model: Any) -> None:
    out = model.generate(**ragged_prompts(3), **OPTIONS, slo_tpot=[1e-6, None, 100.0], return_dict_in_generate=True)
    assert out.sequences.shape[0] == 3
    assert out.scores is None
    assert [metrics.tpot_slo_s for metrics in out.slo] == [1e-6, None, 100.0]
    assert [metrics.attained for metrics in out.slo] == [False, None, True]
    for metrics in out.slo:
        assert metrics.tokens == 1 + metrics.steps + metrics.accepted
        assert metrics.tpot_s > 0
        assert metrics.ttft_s > 0
        assert metrics.acceptance_length == pytest.approx((metrics.tokens - 1) / metrics.steps)
        assert metrics.expected_tokens >= metrics.steps  # one token comes in any case
        assert metrics.phases.total_s > 0.0
        assert metrics.worst_tpot_s is None or metrics.worst_tpot_s > 0.0
    assert [metrics.slack_s is None for metrics in out.slo] == [False, True, False]
    assert out.slo[0].slack_s < 0.0 < out.slo[2].slack_s


def test_output_tells_what_happened_in_every_step(model: Any, tmp_path: Any) -> None:
    inputs = ragged_prompts(3)
    out = model.generate(**inputs, **OPTIONS, slo_tpot=[0.5, None, 0.1], return_dict_in_generate=True)
    assert [step.is_prefill for step in out.steps] == [True] + [False] * (len(out.steps) - 1)
    for row, metrics in enumerate(out.slo):
        parts = [part for step in out.steps for part in step.requests if part.index == row]
        assert {part.tpot_slo_s for part in parts} == {metrics.tpot_slo_s}
        assert sum(part.committed for part in parts) == metrics.tokens
        assert sum(part.nodes - 1 for part in parts) == metrics.drafted
        assert len(parts) == metrics.steps + 1
    for step, later in itertools.pairwise(out.steps):
        assert step.begun_s + step.phases.total_s <= later.begun_s + 1e-6
    hf_slospec.write_chrome_trace(out.steps, tmp_path / "trace.json")
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > 4 * len(out.steps)


@pytest.mark.parametrize("as_list", [list, tuple, np.array, torch.tensor])
def test_targets_may_be_any_sequence(model: Any, as_list: Any) -> None:
    out = model.generate(**ragged_prompts(2), **OPTIONS, slo_tpot=as_list([0.5, 0.25]), return_dict_in_generate=True)
    assert [metrics.tpot_slo_s for metrics in out.slo] == [0.5, 0.25]


def test_target_from_generation_config(model: Any, tmp_path: Any) -> None:
    GenerationConfig(slo_tpot=0.25, max_new_tokens=8, eos_token_id=2, pad_token_id=0).save_pretrained(tmp_path)
    config = GenerationConfig.from_pretrained(tmp_path)
    out = model.generate(**ragged_prompts(1), generation_config=config, return_dict_in_generate=True)
    assert out.slo[0].tpot_slo_s == 0.25


STAGES: list[Any] = [
    {"slo_tpot": 1e-6, "until": " = name\n"},
    {"slo_tpot": 50.0, "tokens": 4},
    {"slo_tpot": 60.0},
]


@pytest.fixture(scope="module")
def pair() -> Any:
    target, draft, tokenizer = hf_slospec.load_tiny_pair()
    return SLOSpecGenerator(target, draft, tokenizer), dict(tokenizer(["def __init__(self"], return_tensors="pt"))


def stages_by_token(out: Any, row: int) -> list[float | None]:
    """The target in force as each of a row's tokens was committed."""
    parts = [part for step in out.steps for part in step.requests if part.index == row]
    return [part.tpot_slo_s for part in parts for _ in range(part.committed)]


def test_stages_end_by_text_and_by_tokens(pair: Any) -> None:
    generator, inputs = pair
    options: dict[str, Any] = dict(do_sample=False, max_new_tokens=60, return_dict_in_generate=True)
    stages = [SLOStage(**stage) for stage in STAGES]
    out = assert_same_as_stock(
        generator.model, lambda **k: generator.generate(**k, slo_tpot=[stages]), inputs, **options
    )
    new_tokens = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    texts = [generator.tokenizer.decode(new_tokens[:end]) for end in range(1, len(new_tokens) + 1)]
    first = next(end for end, text in enumerate(texts, 1) if " = name\n" in text)
    assert first < len(new_tokens) - 20
    targets = stages_by_token(out, 0)
    assert targets[:first] == [1e-6] * first
    changes = [new for old, new in itertools.pairwise(targets) if new != old]
    assert changes == [50.0, 60.0]
    assert targets.count(50.0) >= 4
    assert (out.slo[0].tpot_slo_s, out.slo[0].attained) == (60.0, False)  # nothing writes a token per microsecond
    relaxed = [SLOStage(slo_tpot=50.0, until=" = name\n"), SLOStage(slo_tpot=50.0)]
    out = generator.generate(**inputs, **options, slo_tpot=relaxed)  # for all rows
    assert out.slo[0].attained is True


def test_stages_by_text_need_a_tokenizer(model: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"until.*tokenizer"):
        model.generate(**ragged_prompts(1), **OPTIONS, slo_tpot=STAGES)
    out = model.generate(**ragged_prompts(2), **OPTIONS, slo_tpot=[STAGES[1:], None], return_dict_in_generate=True)
    assert [metrics.tpot_slo_s for metrics in out.slo] == [60.0, None]


def test_stages_from_a_saved_generation_config(pair: Any, tmp_path: Any) -> None:
    generator, inputs = pair
    options: dict[str, Any] = dict(do_sample=False, max_new_tokens=60, eos_token_id=0, pad_token_id=1)
    GenerationConfig(**options, slo_tpot=STAGES, return_dict_in_generate=True).save_pretrained(tmp_path)
    config = GenerationConfig.from_pretrained(tmp_path)
    out = generator.generate(**inputs, generation_config=config)
    assert list(dict.fromkeys(stages_by_token(out, 0))) == [1e-6, 50.0, 60.0]


def test_one_dimensional_ids_and_positional_inputs(model: Any) -> None:
    ids = ragged_prompts(1)["input_ids"]
    expected = type(model).generate(model, ids, **OPTIONS)
    assert torch.equal(model.generate(ids[0], **OPTIONS, slo_tpot=0.1), expected)
    assert torch.equal(model.generate(ids, **OPTIONS, slo_tpot=0.1), expected)
    assert torch.equal(
        model.generate(inputs=ids, attention_mask=torch.ones_like(ids), **OPTIONS, slo_tpot=0.1), expected
    )


def test_max_length_and_one_new_token(model: Any) -> None:
    inputs = ragged_prompts(2)
    length = inputs["input_ids"].shape[1]
    assert_same_as_stock(model, _with_target(model), inputs, do_sample=False, max_length=length + 5)
    out = assert_same_as_stock(model, _with_target(model), inputs, do_sample=False, max_new_tokens=1)
    assert [metrics.tpot_s for metrics in out.slo] == [None, None]


def test_several_sequences_per_prompt_take_their_prompts_target(model: Any) -> None:
    options = dict(do_sample=True, max_new_tokens=12, num_return_sequences=3)
    out = assert_same_as_stock(
        model, lambda **k: model.generate(**k, slo_tpot=[0.5, None]), ragged_prompts(2), **options
    )
    assert [metrics.tpot_slo_s for metrics in out.slo] == [0.5] * 3 + [None] * 3


class Recorder(BaseStreamer):
    """Notes everything a streamer is given."""

    def __init__(self) -> None:
        self.puts: list[list[Any]] = []
        self.num_ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.num_ends += 1


@pytest.mark.parametrize("batch", [1, 4])
def test_streamer_sees_what_stock_streams(model: Any, batch: int) -> None:
    inputs, stock, ours = ragged_prompts(batch), Recorder(), Recorder()
    type(model).generate(model, **inputs, do_sample=False, max_new_tokens=50, streamer=stock)
    model.generate(**inputs, do_sample=False, max_new_tokens=50, streamer=ours, slo_tpot=0.1)
    assert ours.puts == stock.puts
    assert ours.num_ends == stock.num_ends == 1


class StopAfter(StoppingCriteria):
    """Stops a row once it holds a token."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token


def test_custom_criteria_are_checked_per_token(model: Any) -> None:
    inputs = ragged_prompts(1, seed=5)
    plain = type(model).generate(model, **inputs, do_sample=False, max_new_tokens=30, eos_token_id=None)
    token = int(plain[0, inputs["input_ids"].shape[1] + 11])
    assert_same_as_stock(
        model, _with_target(model), inputs, do_sample=False, max_new_tokens=30, stopping_criteria=[StopAfter(token)]
    )


@pytest.mark.parametrize("as_config", [False, True])
def test_stop_strings_end_at_the_token_that_completes_them(as_config: bool) -> None:
    target, draft, tokenizer = hf_slospec.load_tiny_pair()
    inputs = dict(tokenizer(["def __init__(self"], return_tensors="pt"))
    options: dict[str, Any] = dict(do_sample=False, max_new_tokens=60, stop_strings=["self.", "):"])
    if as_config:
        options = dict(generation_config=GenerationConfig(**options, eos_token_id=0, pad_token_id=1))
    expected = target.generate(**inputs, **options, tokenizer=tokenizer)
    assert inputs["input_ids"].shape[1] < expected.shape[1] < inputs["input_ids"].shape[1] + 60
    generator = SLOSpecGenerator(target, draft, tokenizer)
    assert torch.equal(generator.generate(**inputs, **options, slo_tpot=0.1), expected)
    with pytest.raises(ValueError, match="tokenizer"):
        hf_slospec.enable(target, draft).generate(**inputs, **options, slo_tpot=0.1)


def test_prefix_constraint_sees_its_own_row(model: Any) -> None:
    def allowed(row: int, _: torch.Tensor) -> list[int]:
        return list(range(10 + 20 * row, 30 + 20 * row))

    assert_same_as_stock(model, _with_target(model), ragged_prompts(3), **OPTIONS, prefix_allowed_tokens_fn=allowed)


def _with_target(model: Any) -> Any:
    return lambda **kwargs: model.generate(**kwargs, slo_tpot=0.05)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("bad", [0, -0.1, math.nan, math.inf, [0.1, -1.0], [0.1], [0.1, 0.2, 0.3]])
def test_impossible_targets(model: Any, bad: Any) -> None:
    with pytest.raises(InvalidInputError, match="slo_tpot"):
        model.generate(**ragged_prompts(2), **OPTIONS, slo_tpot=bad)


@pytest.mark.parametrize("bad", ["0.1", True, [0.1, "fast"], {"a": 1}])
def test_targets_of_wrong_type(model: Any, bad: Any) -> None:
    with pytest.raises(InvalidTypeError, match="slo_tpot"):
        model.generate(**ragged_prompts(2), **OPTIONS, slo_tpot=bad)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (dict(num_beams=2), "beam"),
        (dict(num_beams=2, do_sample=True), "beam"),
        (dict(penalty_alpha=0.6, top_k=4), "contrastive"),
        (dict(custom_generate="org/repo"), "custom_generate"),
    ],
)
def test_options_that_cannot_be_speculated(model: Any, options: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=name):
        model.generate(**ragged_prompts(2), **{**OPTIONS, **options}, slo_tpot=0.1)


def test_unknown_argument_is_still_a_typo(model: Any) -> None:
    with pytest.raises(ValueError, match="max_new_tokenz"):
        model.generate(**ragged_prompts(2), max_new_tokenz=4, slo_tpot=0.1)


def test_right_padding(model: Any) -> None:
    inputs = {name: tensor.flip(1) for name, tensor in ragged_prompts(2).items()}
    with pytest.raises(InvalidInputError, match="pad on the left"):
        model.generate(**inputs, **OPTIONS, slo_tpot=0.1)


def test_empty_prompts(model: Any) -> None:
    with pytest.raises(InvalidInputError, match="empty"):
        model.generate(torch.empty(1, 0, dtype=torch.int64), **OPTIONS, slo_tpot=0.1)
    inputs = ragged_prompts(2)
    inputs["attention_mask"][0] = 0
    with pytest.raises(InvalidInputError, match=r"row 0 .* empty"):
        model.generate(**inputs, **OPTIONS, slo_tpot=0.1)


def test_longer_than_a_position_table(model: Any) -> None:
    learned = SLOSpecGenerator(tiny_model("gpt2"))
    with pytest.raises(InvalidInputError, match=r"max_new_tokens=150 .* 160 positions"):
        learned.generate(**ragged_prompts(2), max_new_tokens=150)
    rotary = dict(do_sample=False, max_new_tokens=150, eos_token_id=None)  # has no table to fall off
    assert_same_as_stock(model, _with_target(model), ragged_prompts(1), **rotary)


def test_token_ids_of_another_vocabulary(model: Any) -> None:
    with pytest.raises(InvalidInputError, match="tokenizer"):
        model.generate(torch.tensor([[5, 101]]), **OPTIONS, slo_tpot=0.1)


def test_draft_with_another_vocabulary() -> None:
    target, _, _ = hf_slospec.load_tiny_pair()
    with pytest.raises(IncompatibleDraftError, match="vocabulary"):
        hf_slospec.enable(target, tiny_model("llama"))
    assert "generate" not in target.__dict__


def test_draft_on_another_device() -> None:
    with pytest.raises(IncompatibleDraftError, match=r"assistant_model.to\('cpu'\)"):
        hf_slospec.enable(tiny_model("llama"), copy.deepcopy(tiny_model("llama")).to("meta"))


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: MambaForCausalLM(MambaConfig(vocab_size=101, hidden_size=32, num_hidden_layers=2)), "recurrent"),
        (
            lambda: BloomForCausalLM(BloomConfig(vocab_size=101, hidden_size=32, n_layer=2, n_head=4)),
            "attention interface",
        ),
        (
            lambda: FalconForCausalLM(
                FalconConfig(vocab_size=101, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
            ),
            "attention interface",
        ),
        (
            lambda: T5ForConditionalGeneration(
                T5Config(vocab_size=101, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
            ),
            "encoder-decoder",
        ),
    ],
)
def test_models_that_cannot_hold_a_tree(build: Any, why: str) -> None:
    model = build()
    with pytest.raises(UnsupportedModelError, match=f"{type(model).__name__} .*{why}"):
        hf_slospec.enable(model, tiny_model("llama"))


@pytest.mark.parametrize("bad", [7, "gpt2", torch.nn.Linear(2, 2)])
def test_models_of_wrong_type(bad: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"^model must be"):
        hf_slospec.enable(bad, tiny_model("llama"))
    with pytest.raises(InvalidTypeError, match=r"^assistant_model must be"):
        SLOSpecGenerator(tiny_model("llama"), bad)


def test_config_is_frozen_and_strict() -> None:
    with pytest.raises(ValueError, match="max_depht"):
        SLOSpecConfig(max_depht=3)
    with pytest.raises(ValueError, match="frozen"):
        SLOSpecConfig().max_depth = 3
    with pytest.raises(InvalidTypeError, match="config"):
        hf_slospec.enable(tiny_model("llama"), tiny_model("llama"), config={"max_depth": 3})
    assert all(field.description for field in SLOSpecConfig.model_fields.values())


def test_every_error_is_an_slospec_error_and_a_builtin() -> None:
    for error in (InvalidInputError, UnsupportedModelError, UnsupportedOptionError, IncompatibleDraftError):
        assert issubclass(error, SLOSpecError) and issubclass(error, ValueError)
    assert issubclass(InvalidTypeError, SLOSpecError) and issubclass(InvalidTypeError, TypeError)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_interrupted_run_leaves_the_model_usable(model: Any, interruption: type[BaseException]) -> None:
    class Interrupting(Recorder):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.puts) == 6:
                raise interruption

    inputs = ragged_prompts(1, seed=5)
    expected = type(model).generate(model, **inputs, **OPTIONS)
    with pytest.raises(interruption):
        model.generate(**inputs, **OPTIONS, slo_tpot=0.1, streamer=Interrupting())
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model.generate(**inputs, **OPTIONS), expected)
    assert torch.equal(model.generate(**inputs, **OPTIONS, slo_tpot=0.1), expected)


# ---------------------------------------------------------------- found by review


def test_criteria_may_return_a_plain_bool(model: Any) -> None:
    out = model.generate(
        **ragged_prompts(1), max_new_tokens=20, do_sample=False, slo_tpot=0.1,
        stopping_criteria=[lambda input_ids, scores, **_: input_ids.shape[1] >= 26],
    )  # fmt: skip
    assert out.shape[1] <= 26


def test_stateful_processor_keeps_its_state_per_row(model: Any) -> None:
    watermark = WatermarkingConfig(bias=2.5)
    synth = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[11, 22, 33], context_history_size=16)
    for config in (watermark, synth):
        assert_same_as_stock(
            model, _with_target(model), ragged_prompts(3), do_sample=True, max_new_tokens=16, watermarking_config=config
        )


def test_another_draft_for_one_call(model: Any) -> None:
    inputs = ragged_prompts(2)
    expected = type(model).generate(model, **inputs, **OPTIONS)
    for _ in range(2):
        assert torch.equal(
            model.generate(**inputs, **OPTIONS, slo_tpot=0.1, assistant_model=tiny_model("llama")), expected
        )
    with pytest.raises(InvalidTypeError, match="assistant_model"):
        model.generate(**inputs, **OPTIONS, slo_tpot=0.1, assistant_model="gpt2")
    generator = SLOSpecGenerator(model, tiny_model("llama"))
    assert torch.equal(generator.generate(**inputs, **OPTIONS, assistant_model=tiny_model("qwen2")), expected)


def test_model_may_be_cast_after_enabling() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    generator = SLOSpecGenerator(model, copy.deepcopy(tiny_model("llama")))
    generator.generate(**ragged_prompts(1), **OPTIONS)
    model.double()
    assert_same_as_stock(model, generator.generate, ragged_prompts(1), **OPTIONS)


@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        (dict(attention_mask=torch.ones(2, 3)), InvalidInputError, "attention_mask has shape"),
        (dict(attention_mask=torch.ones(3, 15)), InvalidInputError, "attention_mask has shape"),
    ],
)
def test_arguments_named_in_their_errors(model: Any, arguments: Any, error: Any, name: str) -> None:
    with pytest.raises(error, match=name):
        model.generate(torch.randint(3, 101, (2, 15)), **OPTIONS, slo_tpot=0.1, **arguments)


def test_tokenizer_output_passed_whole(model: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"generate\(\*\*inputs\)"):
        model.generate(ragged_prompts(1), **OPTIONS, slo_tpot=0.1)


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
@pytest.mark.parametrize(
    "options",
    [{}, dict(do_sample=True), dict(do_sample=True, repetition_penalty=1.2)],
    ids=["greedy", "sampled", "seen"],
)
@pytest.mark.parametrize("chunk", [5, 16])  # all prompts are longer, or some
def test_prompts_longer_than_a_chunk(
    chunk: int, options: dict[str, Any], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_slospec.engine.scheduling.static_batch.CHUNK", chunk)
    model = tiny_model(family)
    generator = SLOSpecGenerator(model, tiny_model(family, noise=0.03), config=SLOSpecConfig(policy="adaserve"))
    assert_same_as_stock(model, generator.generate, ragged_prompts(4), **OPTIONS | options)


@pytest.mark.parametrize(("kind", "max_new_tokens"), [("longrope", 30), ("dynamic", 30)])
def test_rope_that_follows_the_longest_text(kind: str, max_new_tokens: int) -> None:
    rope: dict[str, Any] = dict(rope_type=kind, rope_theta=1e4, factor=4.0, original_max_position_embeddings=32)
    if kind == "longrope":
        rope |= dict(short_factor=[1.0] * 4, long_factor=[2.0] * 4)
    config = LlamaConfig(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, rope_parameters=rope,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    generator = SLOSpecGenerator(model, model)
    with pytest.raises(UnsupportedOptionError, match=kind):
        generator.generate(**ragged_prompts(2), do_sample=False, max_new_tokens=max_new_tokens)
    assert_same_as_stock(model, generator.generate, ragged_prompts(2), do_sample=False, max_new_tokens=6)


def test_models_with_attention_of_their_own() -> None:
    config = DogeConfig(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="Doge"):
        SLOSpecGenerator(DogeForCausalLM(config).eval())


def test_from_pretrained_reads_folders(tmp_path: Any) -> None:
    target, draft, tokenizer = hf_slospec.load_tiny_pair()
    for name, part in (("target", target), ("draft", draft)):
        part.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    generator = SLOSpecGenerator.from_pretrained(
        str(tmp_path / "target"), assistant_model=str(tmp_path / "draft"), dtype="auto", device_map="auto"
    )
    inputs = generator.tokenizer(["import os\n"], return_tensors="pt")
    assert_same_as_stock(generator.model, generator.generate, dict(inputs), **OPTIONS)


@pytest.mark.parametrize("kept", [1, 3])
def test_rows_far_behind_have_their_noise_drawn_again(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    monkeypatch.setattr("hf_slospec.models.sampling.MAX_CACHED_POSITIONS", kept)
    model = tiny_model("llama")
    config = SLOSpecConfig(policy="adaserve", token_budget=12)
    generator = SLOSpecGenerator(model, tiny_model("llama", noise=0.01), config=config)
    assert_same_as_stock(
        model, lambda **k: generator.generate(**k, slo_tpot=[1e-6, None, None, None]), ragged_prompts(4),
        do_sample=True, temperature=0.3, max_new_tokens=60,
    )  # fmt: skip
