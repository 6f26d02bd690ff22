"""Drafters that are trained for some dozens of steps on the embedded target."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import DynamicCache, LlamaConfig, Qwen3Config
from typer.testing import CliRunner

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, load_drafter, load_tiny_pair, tiny_prompts
from hf_slospec.cli.app import app
from hf_slospec.cli.commands.train_drafter import writer
from hf_slospec.errors import InvalidInputError
from hf_slospec.heads.eagle3 import Eagle3Head
from hf_slospec.heads.loading import load_head
from hf_slospec.heads.mtp import own_modules
from hf_slospec.tiny.embedded import FOLDER
from hf_slospec.training import run
from hf_slospec.training.heads import new_head, write_head
from hf_slospec.training.options import TrainingOptions
from hf_slospec.training.run import train_drafter
from hf_slospec.training.teacher import Teacher
from hf_slospec.training.texts import TrainingText
from hf_slospec.training.unrolling import TextBatch, loss_of, unrolled, unrolled_blocks
from tests.heads import references
from tests.heads.checkpoints import target_of
from tests.heads.checkpoints import write as written
from tests.heads.published_blocks import BLOCK, CASES, HEAD_DIM, MASK
from tests.support.breadth import nightly_but, quick_or
from tests.support.toys.tiny_models import assert_same_as_stock

SHORT: dict[str, Any] = dict(
    texts=8, seq_len=96, write_batch=4, batch=4, steps=12, levels=3, eval_every=4, draft_vocab=256
)

WRITTEN: dict[
    str, list[list[int]]
] = {}  # texts of the embedded target, which most trainings ask for again


class Run(NamedTuple):
    options: TrainingOptions
    held_out: list[TrainingText] | None
    said: list[str]

    @property
    def weights(self):
        return (self.options.out / "model.safetensors").read_bytes()

    @property
    def evaluations(self):
        """All evaluations, that of the untrained head first."""
        (checkpoint,) = (self.options.out / run.FOLDER).glob("checkpoint-*")
        found: list[dict[str, float]] = json.loads((checkpoint / run.PROGRESS).read_text())[
            "evaluations"
        ]
        return found


def trained(out, dtype=torch.float32, **changes):
    target, _, tokenizer = load_tiny_pair(dtype)
    data = out.parent / "data.txt"
    if not data.exists():
        data.write_text("\n".join(tiny_prompts()))
    options = TrainingOptions(**SHORT | {"out": out, "data": data} | changes)
    said = list[str]()
    target.requires_grad_(False)
    write = writer(SLOSpecGenerator(target, tokenizer=tokenizer))

    def remembered(prompts, *given):
        """Write a batch of texts, or return what was written of equal prompts before, as it depends
        on nothing else.
        """
        key = repr((dtype, prompts, given))
        if key not in WRITTEN:
            WRITTEN[key] = write(prompts, *given)
        return copy.deepcopy(WRITTEN[key])

    return Run(options, train_drafter(options, target, tokenizer, remembered, said.append), said)


@pytest.fixture(scope="module", params=nightly_but(["eagle3", "mtp"], ["eagle3", "mtp", "dspark"]))
def learned(request, tmp_path_factory):
    """A head that has learned something."""
    size: dict[str, Any] = dict(steps=20, texts=24, batch=8, levels=2, eval_every=10)
    vocab = {"draft_vocab": None if request.param == "mtp" else 512}
    out = tmp_path_factory.mktemp("learned") / "head"
    return trained(out, kind=request.param, **size | vocab)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("short") / "head")


@pytest.fixture(scope="module")
def short_block(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("short") / "head", kind="dspark")


@pytest.mark.parametrize(
    "options", [dict(do_sample=False), dict(do_sample=True, top_k=0)], ids=["greedy", "sampled"]
)
def test_text_with_the_trained_head_is_that_of_generate(learned, options):
    target, _, tokenizer = load_tiny_pair()
    config = SLOSpecConfig(policy="fixed", max_depth=4, max_width=2, check_invariants=True)
    ours = SLOSpecGenerator(
        target, drafter=load_drafter(learned.options.out, target), config=config
    )
    inputs = tokenizer(
        tiny_prompts()[:2], return_tensors="pt", padding=True, return_token_type_ids=False
    )
    out = assert_same_as_stock(target, ours.generate, dict(inputs), max_new_tokens=24, **options)
    assert sum(metrics.accepted for metrics in out.slo) > 0


def test_training_raises_acceptance(learned):
    untrained, *_, last = (evaluation["tokens_per_step"] for evaluation in learned.evaluations)
    assert last > untrained + 0.03 and len(learned.evaluations) == 3
    _, half, whole = (evaluation["loss"] for evaluation in learned.evaluations)
    assert whole < half - 0.1
    assert learned.held_out and any("tokens per step" in line for line in learned.said)


def test_levels_are_unrolled_as_they_are_drafted():
    target, _, tokenizer = load_tiny_pair()
    head: Any = load_head(str(FOLDER / "eagle3"), target)
    head.config._attn_implementation = "eager"
    ids = torch.tensor([tokenizer(tiny_prompts()[0])["input_ids"][:24]])
    states = target(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[layer] for layer in head.feature_layers], dim=-1)
    levels = [
        (logits[0], positions.tolist())
        for logits, positions, _ in unrolled(head, ids, features, 3, 2, 5)
    ]
    assert [positions for _, positions in levels] == [
        [*range(1, 21)],
        [4, 9, 14, 19],
        [5, 10, 15, 20],
    ]
    for begin in (2, 7, 12, 17):
        cache = DynamicCache()
        hidden = head.combine(features[:, : begin + 1])
        first = 0
        for level, (logits, positions) in enumerate(levels):
            end = begin + 1 + level
            embeds, own = (
                head.embed_tokens(ids[:, first + 1 : end + 1]),
                torch.arange(first, end)[None],
            )
            inputs = torch.cat((embeds, hidden), dim=-1)
            out = head(inputs_embeds=inputs, position_ids=own, cache=cache).logits[:, -1:]
            expected, hidden = out.split(
                [out.shape[-1] - head.hidden_size, head.hidden_size], dim=-1
            )
            torch.testing.assert_close(
                logits[positions.index(end)], expected[0, 0], rtol=1e-4, atol=1e-4
            )
            first = end


@torch.no_grad()
def test_blocks_are_unrolled_as_the_reference_drafts_them(tmp_path):
    case = CASES["specforge"]
    target = target_of("llama")
    head: Any = load_head(written(tmp_path, case.config, case.tensors), target)
    head.config._attn_implementation = "eager"
    ids = torch.randint(3, MASK, (2, 20), generator=torch.Generator().manual_seed(1))
    states = target(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[layer] for layer in case.features], dim=-1)
    levels = list(unrolled_blocks(head, ids, features, BLOCK, 2, 5))
    assert [level.positions.tolist() for level in levels] == [
        [3 + k, 8 + k, 13 + k] for k in range(BLOCK)
    ]
    embed = target.get_input_embeddings().weight
    lm_head = target.get_output_embeddings().weight
    for row in range(2):
        for number, root in enumerate((3, 8, 13)):
            block = embed[[int(ids[row, root])] + [MASK] * (BLOCK - 1)]
            own = references.block_states(
                features[row, :root], block, case.tensors, case.layers, HEAD_DIM
            )
            for level, (logits, _, log_acceptance) in enumerate(levels):
                path = ids[row, root : root + level + 1].tolist()
                expected, confidence = references.dspark(
                    path, own[: level + 1], lm_head, case.tensors
                )
                torch.testing.assert_close(logits[row, number], expected, rtol=1e-4, atol=1e-4)
                assert log_acceptance is not None
                assert float(log_acceptance[row, number].exp()) == pytest.approx(
                    confidence, abs=1e-4
                )


def test_confidence_learns_the_share_of_accepted_tokens(tmp_path):
    """With all else fixed, its loss has its minimum where each confidence is the overlap of the
    distributions.
    """
    case = CASES["specforge"]
    target = target_of("llama")
    head: Any = load_head(written(tmp_path, case.config, case.tensors), target)
    head.config._attn_implementation = "eager"
    ids = torch.randint(3, MASK, (1, 12), generator=torch.Generator().manual_seed(1))
    features = torch.randn(1, 12, 2 * 32, generator=torch.Generator().manual_seed(2))
    probs = torch.randn(1, 12, 101, generator=torch.Generator().manual_seed(3)).mul(2).softmax(-1)
    counts = torch.zeros(1, 12, dtype=torch.bool)
    counts[0, 1] = True  # one level of one block counts
    rows = TextBatch(ids, counts, features, probs)
    head.requires_grad_(False)
    head.confidence_head.requires_grad_(True)
    optimizer = torch.optim.LBFGS(head.confidence_head.parameters(), max_iter=50)

    def loss():
        optimizer.zero_grad()
        found = loss_of(head, rows, BLOCK, 0)
        found.backward()
        return found

    optimizer.step(loss)
    level = next(unrolled_blocks(head, ids, features, BLOCK, 0, 5))
    overlap = torch.minimum(level.logits.softmax(-1), probs[:, level.positions]).sum(-1)[0, 0]
    assert level.log_acceptance is not None
    torch.testing.assert_close(level.log_acceptance[0, 0].exp(), overlap, rtol=1e-3, atol=1e-3)


class Clock:
    """Time that passes whenever it is read."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        self.now_s += 1.0
        return self.now_s


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("dspark", marks=pytest.mark.nightly)])
def test_interruptions_change_no_weight(kind, request, tmp_path, monkeypatch):
    """Time runs out again and again, a step fails behind a checkpoint, and a line of the texts is
    torn.
    """
    whole: Run = request.getfixturevalue("short" if kind == "eagle3" else "short_block")
    monkeypatch.setattr(run, "time", Clock())
    out = tmp_path / "head"
    runs = 0
    while trained(out, kind=kind, minutes=0.15).held_out is None:
        runs += 1
        path = out / run.FOLDER / "texts.jsonl"
        if runs == 1:
            path.write_text(path.read_text() + "[[[1, 2")
        if runs == 2:
            with monkeypatch.context() as patch:
                patch.setattr(run, "loss_of", interrupted(run.loss_of, 2))
                with pytest.raises(KeyboardInterrupt):
                    trained(out, kind=kind)
    assert runs >= 2
    assert Run(whole.options.model_copy(update={"out": out}), None, []).weights == whole.weights
    assert trained(out, kind=kind).held_out is not None  # nothing is left to do


def interrupted(function, after):
    calls = [0]

    def call(*arguments):
        calls[0] += 1
        if calls[0] > after:
            raise KeyboardInterrupt
        return function(*arguments)

    return call


def test_early_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "tokens_per_step", lambda *_: 1.5)
    done = trained(tmp_path / "head", patience=2, eval_every=1)
    lengths = [evaluation["tokens_per_step"] for evaluation in done.evaluations]
    assert done.held_out and lengths == [1.5] * 4  # untrained, the best, two that are no better


@pytest.mark.nightly
def test_a_drafter_in_bf16_with_states_on_a_disk(tmp_path):
    done = trained(
        tmp_path / "head", torch.bfloat16, features_gb=0.1, steps=4, **quick_or(dict(texts=4), {})
    )
    kept = (done.options.out / run.FOLDER / "kept.bin").read_bytes()
    assert kept == b"\1" * done.options.texts
    load_drafter(done.options.out, load_tiny_pair(torch.bfloat16)[0])


def test_states_are_kept_within_the_limit(tmp_path, monkeypatch):
    target, _, _ = load_tiny_pair()
    head = load_head(str(FOLDER / "eagle3"), target)
    own = [TrainingText(list(range(length, 2 * length)), 2) for length in (30, 40, 50)]
    plain = Teacher(target, head, own, tmp_path, 0.0, 3)
    bytes_per_text = 50 * 4 * target.config.hidden_size * 2
    teacher = Teacher(target, head, own, tmp_path, 2.5 * bytes_per_text / 1e9, 3)
    assert len(teacher.kept) == 2 and (tmp_path / "states.bin").stat().st_size == 2 * bytes_per_text
    forwards = list[int]()
    target.model.register_forward_pre_hook(
        lambda _, __, given: forwards.append(len(given["input_ids"])), with_kwargs=True
    )
    first = teacher.rows([2, 0, 1])
    second = teacher.rows([2, 0, 1])
    assert forwards == [1, 1, 1, 1]
    expected = plain.rows([2, 0, 1])
    assert torch.equal(first.features, second.features) and torch.equal(
        first.counts, expected.counts
    )
    for row, length in enumerate((50, 30, 40)):
        torch.testing.assert_close(
            first.features[row, :length], expected.features[row, :length], rtol=0.01, atol=0.01
        )
    assert first.counts.sum(1).tolist() == [48, 28, 38] and first.counts[1, :28].tolist() == [
        False,
        *[True] * 27,
    ]
    levels = list(unrolled(head, expected.ids, expected.features, 3))
    assert int(levels[0].positions[-1]) >= 48  # predicts the last token of the longest text
    (tmp_path / "full").mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(
        InvalidInputError, match=r"--features-gb 1 needs .* GB more, and .*full has 0.0 GB of room"
    ):
        Teacher(target, head, own, tmp_path / "full", 1.0, 3)


def test_the_folder_has_the_layout_of_speculators(short):
    config = json.loads((short.options.out / "config.json").read_text())
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    assert Path(config["speculators_config"]["verifier"]["name_or_path"]) == FOLDER / "target"
    (proposals,) = config["speculators_config"]["proposal_methods"]
    assert proposals["proposal_type"] == "greedy" and proposals["speculative_tokens"] == 3
    assert config["draft_vocab_size"] == 256 and config["eagle_aux_hidden_state_layer_ids"] == [
        2,
        4,
        5,
    ]
    layer = LlamaConfig(**config["transformer_layer_config"])
    assert (layer.num_hidden_layers, layer.hidden_size, layer.vocab_size) == (1, 256, 2048)
    tensors = load_file(short.options.out / "model.safetensors")
    names = {name for name in tensors if not name.startswith("layers.0.")}
    assert names == {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (256, 512)
    ids = torch.arange(256) + tensors["d2t"]
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], ids) and tensors["lm_head.weight"].shape == (
        256,
        256,
    )
    head = load_head(str(short.options.out), load_tiny_pair()[0])
    assert (
        isinstance(head, Eagle3Head)
        and head.target_ids is not None
        and torch.equal(head.target_ids, ids)
    )


def test_a_block_head_has_the_layout_of_speculators(short_block):
    config = json.loads((short_block.options.out / "config.json").read_text())
    assert config["architectures"] == ["DSparkDraftModel"]
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "dspark"
    (proposals,) = config["speculators_config"]["proposal_methods"]
    assert (
        proposals["speculative_tokens"] == config["block_size"] == 3
        and config["sample_from_anchor"] is True
    )
    assert config["draft_vocab_size"] == 256 and config["aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert (config["markov_rank"], config["markov_head_type"]) == (32, "vanilla")
    assert config["enable_confidence_head"] and config["confidence_head_with_markov"]
    layers = Qwen3Config(**config["transformer_layer_config"])
    assert (layers.num_hidden_layers, layers.hidden_size, layers.vocab_size) == (2, 256, 2048)
    assert not {"block_size", "markov_rank"} & config["transformer_layer_config"].keys()
    tensors = load_file(short_block.options.out / "model.safetensors")
    assert {name for name in tensors if not name.startswith("layers.")} == {
        "fc.weight", "hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t", "t2d",
        "markov_head.markov_w1.weight", "markov_head.markov_w2.weight",
        "confidence_head.proj.weight", "confidence_head.proj.bias",
    }  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("draft_vocab", [None, 0])
def test_a_written_block_head_is_loaded_as_it_was(tmp_path, draft_vocab):
    target, options = (
        load_tiny_pair()[0],
        options_of(tmp_path, kind="dspark", draft_vocab=draft_vocab),
    )
    counts = torch.arange(2048) % 1000
    counts[7] = counts[9] = -1
    head: Any = new_head(options, target, counts)
    for parameter in own_modules(head, target).parameters():
        parameter.copy_(torch.randn_like(parameter).bfloat16() / 8)
    write_head(head, target, options)
    loaded: Any = load_head(str(tmp_path), target)
    assert (
        loaded.mask_token_id == head.mask_token_id == 9
        and loaded.feature_layers == head.feature_layers
    )
    ids = torch.randint(2048, (2, 12))
    features = torch.randn(2, 12, 3 * 256)
    levels = [list(unrolled_blocks(each, ids, features, 3)) for each in (head, loaded)]
    for ours, theirs in zip(*levels, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)


def test_the_layout_of_sglang_is_the_same_head(short, tmp_path):
    target = load_tiny_pair()[0]
    head: Any = load_head(str(short.options.out), target)
    write_head(head, target, options_of(tmp_path, layout="sglang"))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["hidden_size"] == 256
    ours = head.state_dict()
    theirs = load_head(str(tmp_path), target).state_dict()
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def options_of(out, **changes):
    (out / run.FOLDER).mkdir()
    return TrainingOptions(**SHORT | {"out": out} | changes)


@pytest.mark.parametrize("layout", ["speculators", "sglang"])
def test_the_output_layer_may_be_the_targets(tmp_path, layout):
    target = load_tiny_pair()[0]
    options = options_of(tmp_path, layout=layout, draft_vocab=0)
    write_head(new_head(options, target, torch.ones(2048)), target, options)
    assert not {"lm_head.weight", "d2t", "t2d"} & load_file(tmp_path / "model.safetensors").keys()
    head: Any = load_head(str(tmp_path), target)
    assert head.lm_head is target.get_output_embeddings() and head.target_ids is None


def test_the_targets_embeddings_may_be_written_too(tmp_path):
    target = load_tiny_pair()[0]
    options = options_of(tmp_path, embeddings=True)
    write_head(new_head(options, target, torch.ones(2048)), target, options)
    head: Any = load_head(str(tmp_path), target)
    assert head.embed_tokens is not target.get_input_embeddings()
    assert torch.equal(head.embed_tokens.weight, target.get_input_embeddings().weight)


def test_folders_of_other_trainings_are_refused(short, tmp_path):
    out = short.options.out
    with pytest.raises(
        InvalidInputError, match=r"other settings: --seq-len \(96 and not 128\); give the same ones"
    ):
        trained(out, seq_len=128)
    with pytest.raises(
        InvalidInputError, match=r"other settings: the target \(its weights\), --dtype"
    ):
        trained(out, torch.bfloat16)
    (tmp_path / "file").touch()
    for other in (tmp_path, tmp_path / "file"):
        with pytest.raises(
            InvalidInputError, match="holds something other than a training; give a new folder"
        ):
            trained(other)
    with pytest.raises(InvalidInputError, match="--draft-vocab is for --kind eagle3"):
        trained(tmp_path / "head", kind="mtp")
    with pytest.raises(
        InvalidInputError, match="--layout sglang is for --kind eagle3; leave it out"
    ):
        trained(tmp_path / "head", kind="dspark", layout="sglang")
    with pytest.raises(InvalidInputError, match="--embeddings is for --kind eagle3; leave it out"):
        trained(tmp_path / "head", kind="dspark", embeddings=True)


def test_the_command_and_commands_that_use_its_drafter(tmp_path):
    out = tmp_path / "head"
    data = tmp_path / "own.txt"
    data.write_text("\n".join(tiny_prompts()))
    line = f"train-drafter --out {out} --data {data} --dtype float32 --texts 4 --seq-len 96 --steps 4 --batch 2"
    command = [*line.split(), "--write-batch", "4", "--eval-every", "4", "--levels", "3"]
    runner = CliRunner(env={"COLUMNS": "400"})
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    assert (
        json.loads(result.stdout)["drafter"] == str(out)
        and "tokens per step on held-out prompts" in result.stderr
    )
    made = "generate def --max-new-tokens 4 --dtype float32 --drafter".split()
    assert runner.invoke(app, [*made, str(out)]).exit_code == 0
    other = tmp_path / "other"
    other.mkdir()
    for file in (*(FOLDER / "draft").iterdir(), *(FOLDER / "tokenizer").iterdir()):
        (other / file.name).symlink_to(file)
    result = runner.invoke(app, [*command, "--target", str(other)])
    assert result.exit_code == 2 and "other settings: the target (its weights)" in result.output
    stopped = runner.invoke(
        app, [*command[:1], *command[3:], "--out", str(tmp_path / "late"), "--minutes", "1e-9"]
    )
    assert stopped.exit_code == 0 and "the same command goes on" in stopped.stderr
