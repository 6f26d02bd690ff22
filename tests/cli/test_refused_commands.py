"""Table of commands that are refused before any work: command line, and words of the error."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from transformers import LlamaConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_slospec.cli.app import app
from hf_slospec.lab import comparison
from hf_slospec.tiny.embedded import FOLDER

REFUSED = [
    ("bench --target ./nowhere", "--target ./nowhere: there is no folder ./nowhere"),
    ("bench --target org/name", "--target org/name: org/name is neither a folder nor a repository"),
    ("bench --size 7T", "--size"),
    ("bench --batch 0", "--batch"),
    ("bench --config '{\"max_depht\": 1}'", "max_depht: Extra inputs are not permitted  "),
    ("bench --dtype float7", "--dtype"),
    ("bench --device abacus", "--device abacus"),
    ("bench --target ./nowhere --assistant ./nowhere", "--target ./nowhere"),
    ("bench --target ./nowhere --drafter lookup", "--target ./nowhere: "),
    ("bench --target a --drafter lookup+assistant", "'assistant' is the embedded draft"),
    ("bench --target a --assistant b --drafter suffix", "--drafter suffix+b"),
    ("bench --assistant b", "--target"),
    ("bench --drafter ./nowhere", "--drafter ./nowhere"),
    ("bench --drafter mtp+assistant", "--drafter mtp+assistant"),
    ("generate ''", "empty"),
    ("generate --file nowhere.txt", "nowhere.txt"),
    ("generate TEXT --file nowhere.txt", "not both"),
    ("generate TEXT --slo-tpot -1", "--slo-tpot"),
    ("generate TEXT --top-p 2", "--top-p"),
    ("generate TEXT --max-new-tokens 0", "--max-new-tokens"),
    ("generate TEXT --size 7T", "--size"),
    ("generate TEXT --chat", "chat template"),
    ("generate TEXT --json /dev/null/r.json", "cannot be written"),
    ("generate TEXT --json .", "is a folder"),
    ("generate TEXT --device meta", "no data"),
    ("generate TEXT --device privateuseone", "--device privateuseone"),
    ("check ./nowhere", "./nowhere"),
    ("check --prompts nowhere.txt", "--prompts nowhere.txt"),
    ("check --assistant b", "--assistant"),
    ("check a --assistant b --drafter lookup", "--drafter"),
    ("check --dtype float7", "--dtype"),
    ("check --images", "--images"),
    ("check --config '{'", "--config"),
    ("check --drafter ./nowhere", "--drafter ./nowhere"),
    ("check --max-new-tokens 5000", "--max-new-tokens"),
    ("simulate --system vlm", "known are: auto"),
    ("simulate --system 'auto {\"max_depht\": 1}'", "max_depht"),
    ("simulate --system 'auto {\"kv_tokens\": 10}'", "tokens of K/V"),
    ("simulate --metric x", "tpot, adaserve, slos-serve"),
    ("simulate --mix x", "chatbot"),
    ("simulate --arrivals x", "poisson"),
    ("simulate --arrivals gamma --variation 0", "variation"),
    ("simulate --hardware x", "llama-7b-h100"),
    ("simulate --number 0", "--number"),
    ("simulate --rate nan", "rate"),
    ("simulate --rate 1e-300", "1e-300"),
    ("simulate --seed -1", "--seed"),
    ("simulate --replicas 0", "--replicas"),
    ("simulate --replicas 2 --router x", "known are: guarantees"),
    ("simulate --router round-robin", "--router has no effect with --replicas 1"),
    ("simulate --acceptance 1", "acceptance"),
    ("simulate --spread nan", "spread"),
    ("simulate --trace none.csv", "none.csv"),
    ("simulate --recording none.json", "none.json"),
    ("simulate --recording none.json --spread 2", "--spread has no effect with --recording"),
    ("simulate --trace none.csv --mix coder", "--mix has no effect with --trace"),
    ("simulate --base-tpot 0.1", "--base-tpot has no effect with no --trace"),
    ("simulate --variation 2", "--variation has no effect with --arrivals poisson"),
    ("simulate --plot p.xyz", ".png"),
    ("simulate --csv .", "is a folder"),
    ("simulate --json /dev/null/r.json", "cannot be written"),
    ("serve --host 0.0.0.0", "--no-api-key"),
    ("serve --chat-template /no/such/file", "--chat-template"),
    ("serve --default-slo-tpot -1", "--default-slo-tpot: Input"),
    ("serve --target ./nowhere", "--target ./nowhere: there is no folder ./nowhere"),
    ("serve --target pickled --drafter lookup", "need --allow-pickle"),
    ("serve --share-texts", "--drafter suffix"),
    ("serve --images", "--target"),
    (
        "serve --images --replicas 2 --target ./nowhere --drafter lookup",
        "--images: replicas take no",
    ),
    ("serve --share-texts --drafter lookup+mtp", "--drafter suffix"),
    ("serve --drafter pickled", "safetensors"),
    ("serve --metrics-prefix 'no name'", "--metrics-prefix: String"),
    ("serve --request-limits '{\"prompts\": 0}'", "--request-limits: prompts"),
    ("serve --request-limits '{\"prompt\": 3}'", "--request-limits: prompt"),
    ("serve --api-key-file keys.json", "--api-key-file keys.json: key.strictest_tpot: Input"),
    ("serve --api-key ''", "--api-key: a key is empty"),
    ("serve --port 0", "--port: Input"),
    ("serve --guarantee 95", "--guarantee: guarantee: Input"),
    ('serve --guarantee 0.9 --config \'{"admission": "edf"}\'', "guarantee needs admission 'slo'"),
    ("serve --response-template template.json", "--response-template"),
    ("serve --special-tokens forbid", "--special-tokens: Input"),
    ("serve --lowest-priority 1", "--lowest-priority"),
    ("serve --tensor-parallel-size 2", "--tensor-parallel-size goes with --target, and without"),
    (
        "serve --tensor-parallel-size 2 --target pickled --replicas 1",
        "--tensor-parallel-size: a replica is one process",
    ),
    (
        "serve --tensor-parallel-size 2 --target pickled",
        "torchrun --nproc-per-node 2 -m hf_slospec",
    ),
    ("demo --size 7T", "--size"),
    ("generate TEXT --drafter " + "9" * 5000, "--drafter"),
    ("generate 'x\udcff' --max-new-tokens 12 --dtype float32", "the tokenizer refused the prompt"),
    ("simulate --system 'auto " + '{"a":' * 50_000 + "'", "recursion"),
    ('simulate --system \'auto {"max_depth": ' + "9" * 5000 + "}'", "digits"),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's, when it is imported
@pytest.mark.parametrize(("command", "words"), REFUSED, ids=lambda value: value[:60])
def test_refused_commands_name_the_option(command, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparison.Simulation, "run", lambda *_, **__: pytest.fail("it was run"))
    Path("keys.json").write_text('{"key": {"strictest_tpot": -1}}')
    Path("template.json").write_text('{"fields": 3}')
    Path("pickled").mkdir()
    Path("pickled/pytorch_model.bin").write_bytes(b"")
    LlamaConfig().save_pretrained("pickled")
    PreTrainedTokenizerFast.from_pretrained(FOLDER / "tokenizer").save_pretrained("pickled")
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, shlex.split(command))
    assert result.exit_code == 2, result.output
    assert words in result.output


@pytest.mark.parametrize("command", ["bench --json", "profile --json", "simulate --csv"])
def test_output_files_are_checked_before_any_work(command, tmp_path):
    for file in ("/dev/null/r", str(tmp_path / ("a" * 300))):
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*command.split(), file])
        assert result.exit_code == 2 and "cannot be written" in result.output
    assert not list(tmp_path.iterdir())
