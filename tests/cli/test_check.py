"""``hf_slospec check`` on the embedded pair: every verdict, and the options."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    RwkvConfig,
    RwkvForCausalLM,
)
from typer.testing import CliRunner

from hf_slospec import load_tiny_pair
from hf_slospec.cli import options as budget
from hf_slospec.cli.app import app
from hf_slospec.cli.check_prompts import BUILT_IN, image_inputs, read_prompts
from hf_slospec.cli.model_check import Comparison, Difference, ModelCheck, headline
from hf_slospec.model.sampling import StockSampler

RUN = CliRunner(env={"COLUMNS": "400"})
TEXTS = (
    "def main():\n",
    "import os\n\n\ndef read(path):\n    with open(path) as file:\n",
    "x = [1, 2, 3]\n",
)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.json"
    path.write_text(str(list(TEXTS)).replace("'", '"'))
    return str(path)


def check(*options):
    return RUN.invoke(
        app,
        [
            "check",
            *options,
            "--max-new-tokens",
            "8",
            "--config",
            '{"prepack": false}',
            "--seconds",
            "10000",
        ],
    )


def rows(result):
    """The report's table by the names of its rows."""
    lines = [
        line.strip("| ").split(" | ", 1)
        for line in result.stdout.splitlines()
        if line.startswith("| ")
    ]
    return {line[0]: line[1] for line in lines if len(line) == 2}


def test_the_embedded_pair_is_exact(prompts):
    result = check("--dtype", "float32", "--prompts", prompts)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("### hf_slospec check: exact\n")
    found = rows(result)
    for kind in ("greedy, one by one", "sampled, one by one", "greedy, batcher"):
        assert found[kind] == "exact, 3 of 3 outputs equal"
    assert found["greedy, left-padded batch of 4"] == "exact, 3 of 3 outputs equal"
    assert found["dtype"] == "float32" and found["drafter"] == "assistant model"
    assert found["K/V per token"] == "8.0 KiB, of the draft 1.0 KiB"


def test_a_folder_is_checked_by_prompt_lookup(tmp_path, prompts):
    target, _, tokenizer = load_tiny_pair(torch.float32)
    for part in (target, tokenizer):
        part.save_pretrained(tmp_path / "own")
    options = ["--prompts", prompts, "--max-new-tokens", "2"]  # the dtype is that of the checkpoint
    options += ["--seconds", "10000"]
    result = RUN.invoke(app, ["check", str(tmp_path / "own"), *options])
    assert result.exit_code == 0
    out = result.stdout
    assert out.startswith("### hf_slospec check: exact\n")
    assert "| drafter | prompt lookup |" in out and "| dtype | float32 |" in out


class Clock:
    """A clock that goes on only while something is compared."""

    def __init__(self, monkeypatch, output_s):
        self.now_s = 0.0
        monkeypatch.setattr(budget, "clock", lambda: self.now_s)
        for name in ("_examined", "_unexamined"):
            self._count(monkeypatch, ModelCheck, name, output_s)

    def _count(self, monkeypatch, owner, name, seconds):
        plain = getattr(owner, name)

        def counted(*given, **options):
            self.now_s += seconds
            return plain(*given, **options)

        monkeypatch.setattr(owner, name, counted)


def test_what_there_is_no_time_for_is_left_out_and_named(prompts, monkeypatch):
    """Of 100 s: 2 outputs of 12 s within 30 s, 2 more within 50 s, and both batches."""
    clock = Clock(monkeypatch, output_s=12.0)
    options = [
        "--dtype",
        "float32",
        "--prompts",
        prompts,
        "--max-new-tokens",
        "8",
        "--config",
        '{"prepack": false}',
    ]
    result = RUN.invoke(app, ["check", *options])
    assert result.exit_code == 0, result.output
    found = rows(result)
    assert found["new tokens"] == "at most 8 of every output"
    for name in ("greedy, one by one", "sampled, one by one"):
        assert found[name] == "exact, 2 of 2 outputs equal; 1 left out for lack of time"
    for name in ("greedy, left-padded batch of 4", "greedy, batcher"):
        assert found[name] == "exact, 3 of 3 outputs equal"
    assert clock.now_s == 72 and found["time"] == "72 s, with --seconds 100"
    assert "for about 100 s at most (--seconds)" in result.stderr  # before it begins
    assert "comparing: greedy, batcher (60 s)" in result.stderr


def test_a_wrong_token_is_found_where_it_is(prompts, monkeypatch):
    """The packed forward has negated logits at one place: behind five new tokens of the second
    prompt.
    """
    plain = StockSampler.choose
    prompt = load_tiny_pair()[2](TEXTS[1])["input_ids"]

    def wrong(self, requests, logits, trees):
        logits = logits.clone()
        begin = 0
        for request, tree in zip(requests, trees, strict=True):
            for node, depth in enumerate(tree.depths):
                if (
                    request.tokens[: len(prompt)] == prompt
                    and len(request.tokens) + depth == len(prompt) + 5
                ):
                    logits[begin + node].neg_()
            begin += tree.num_nodes
        return plain(self, requests, logits, trees)

    monkeypatch.setattr(StockSampler, "choose", wrong)
    result = check("--dtype", "float32", "--prompts", prompts)
    assert result.exit_code == 1, result.output
    assert result.stdout.startswith(
        "### hf_slospec check: WRONG: greedy, one by one, prompt 2, new token 5: "
    )
    assert rows(result)["greedy, one by one"].startswith(
        "WRONG, 2 of 3 outputs equal; prompt 2, new token 5: "
    )


def test_a_refused_model_is_no_error(tmp_path):
    RwkvForCausalLM(RwkvConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2)).save_pretrained(
        tmp_path
    )
    load_tiny_pair()[2].save_pretrained(tmp_path)
    result = check(str(tmp_path))
    assert result.exit_code == 0, result.output
    assert re.match("### hf_slospec check: refused: RwkvForCausalLM .*keeps states", result.stdout)
    assert rows(result)["model"].startswith(f"{tmp_path}: RwkvForCausalLM, ")


def test_pictures_are_compared(tmp_path, prompts):
    tokenizer = load_tiny_pair()[2]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    vision = dict(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**vision, patch_size=14),
        text_config=text,
        image_token_index=len(tokenizer) - 1,
        image_seq_length=4,
    )
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path)
    images = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    LlavaProcessor(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(tmp_path)
    one, two = image_inputs(str(tmp_path), torch.device("cpu"))
    assert (len(one["pixel_values"]), len(two["pixel_values"])) == (1, 2)
    assert not torch.equal(*two["pixel_values"])
    result = check(str(tmp_path), "--images", "--prompts", prompts)
    assert result.exit_code == 0, result.output
    assert rows(result)["greedy, with images"].startswith(("exact, 2 of 2", "refused: "))


def test_verdicts():
    def compared(*are_near_ties):
        return Comparison(
            "greedy", 3, 3, [Difference(near, f"prompt {near}") for near in are_near_ties]
        )

    refused = Comparison("sampled", 3, refused="for a reason")
    assert headline([compared(), refused]) == "exact"
    assert headline([compared(True), compared(None)]) == "near ties only"
    assert headline([compared(), compared(True, False), refused]) == "WRONG: greedy, prompt False"
    assert headline([refused]) == "refused: for a reason"
    assert str(compared(True, *[None] * 6)).endswith("prompt None; and 2 more")


def test_built_in_prompts_and_files_of_prompts(tmp_path):
    assert len(set(read_prompts(None))) == len(BUILT_IN) == 20
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo three\n", encoding="utf-8")
    assert read_prompts(path) == ["one", "two three"]


@pytest.mark.parametrize("content", ["", "{", "[]", "[1]", '[""]', '{"a": 1}', "[" * 100_000])
def test_bad_files_of_prompts(tmp_path, content):
    path = tmp_path / "prompts.json"
    path.write_text(content)
    result = check("./nowhere", "--prompts", str(path))  # before anything is loaded
    assert result.exit_code == 2, result.output
    assert f"--prompts {path}" in result.output
