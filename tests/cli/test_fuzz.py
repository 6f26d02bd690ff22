"""Command lines of any kind; ``scripts/fuzz.py`` tries more of them.

Commands stop where their work begins, but for ``generate`` and ``simulate``, which do little.
"""

from __future__ import annotations

import copy
import inspect
import os
from pathlib import Path
from typing import get_args

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner

from benchmarks import gpu as checking
from hf_slospec.cli import benchmark, profiling
from hf_slospec.cli.app import app
from hf_slospec.tiny.embedded import load_tiny_pair
from tests.support.fuzzing import fuzzed

RUN = CliRunner(env={"COLUMNS": "200"})
FILES = {
    "text.txt": b"def main():\n",
    "empty": b"",
    "bytes": bytes(range(256)),
    "deep.json": b"[" * 100_000,
    "list.json": b'["a", "b"]',
    "odd.json": b'{"a": [1, {"b": null}]}',
    "number.json": b"9" * 5000,
    "keys.json": b'{"k": {"default_tpot": 0.1}}',
    "latency.json": b'{"target": {"tokens": [1], "ms": [20]}, "draft": {"tokens": [1], "ms": [0]}}',
    "trace.csv": b"arrival_s,input_tokens,output_tokens\n0,5,4\n",
}
CONFIGS = {  # for folders that claim to be models
    "model0": b"{}",
    "model1": b"[1]",
    "model2": b"[" * 10_000,
    "model3": b'{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": "x"}',
    "model4": b'{"model_type": "llama", "vocab_size": 5}',
    "model5": b'{"speculators_model_type": "eagle3"}',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    own = tmp_path_factory.mktemp("fuzz")
    before = Path.cwd()
    os.chdir(own)
    with pytest.MonkeyPatch.context() as patch:
        _stop_before_work(patch)
        yield own
    os.chdir(before)


def _stop_before_work(patch):
    import uvicorn

    import hf_slospec.cli.model_check as check_module
    import hf_slospec.demo.serve as demo
    import hf_slospec.server.loading as load
    import hf_slospec.training.run as training

    def stop(*_, **__):
        raise typer.Exit(0)

    places = [
        (load, "inflate"), (benchmark.Bench, "__init__"), (profiling, "profile"),
        (checking, "check"), (check_module, "ModelCheck"), (uvicorn.Server, "run"), (training, "collect"),
    ]  # fmt: skip
    for where, name in places:
        patch.setattr(where, name, stop)
    pair = load_tiny_pair("float32")
    patch.setattr(load, "load_tiny_pair", lambda dtype: copy.deepcopy(pair))
    patch.setattr(demo, "prepare", stop)


def _write_files(folder):
    """Bring the folder into the state in which every command finds it."""
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".safetensors":
            path.unlink()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    for name, content in CONFIGS.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_bytes(content)
    save_file({"a": torch.zeros(1)}, folder / "model1" / "model.safetensors")
    save_file({"a": torch.zeros(1)}, folder / "model2" / "model.safetensors")
    save_file({"a": torch.zeros(1)}, folder / "model3" / "model.safetensors")
    (folder / "model4" / "model.safetensors").write_bytes(b"x")


paths = st.sampled_from(
    [
        *FILES,
        "model0",
        "missing",
        "deep/new",
        "/dev/null/x",
        "",
        ".",
        "..",
        "\udcff",
        "a" * 300,
        "new.png",
        "-",
    ]
)
models = st.sampled_from([*CONFIGS, "text.txt", "missing", "", "a" * 300])
words = st.text(max_size=5) | st.sampled_from(
    (
        "",
        "x",
        "-1",
        "0",
        "nan",
        "inf",
        "1e400",
        "1e-300",
        str(10**30),
        "9" * 5000,
        "\udcff",
        "[/red]",
        "{}",
        "[]",
        "--",
    )
)
whole = st.integers(0, 9).map(str)
real = st.floats(0, 2).map(str)
configs = st.sampled_from(
    (
        "{}", '{"max_depth": 4}', '{"max_depht": 4}', '{"policy": "none"}', "[]", "{" * 2000, "[" * 100_000,
        '{"a":' * 50_000, '{"max_depth": ' + "9" * 5000 + "}", '{"kv_tokens": 1}', '{"max_depth": 1000000000000}',
        '{"prefill_chunk": 100000000000000}', '{"max_width": 64}', '{"policy": "sequoia", "max_depth": 30}',
    )
)  # fmt: skip
VALUES = {  # for options whose type says too little
    "target": models,
    "assistant": models,
    "drafter": models
    | st.sampled_from(("lookup", "suffix", "mtp", "eagle3", "lookup+mtp", "mtp+x", "+")),
    "size": st.sampled_from(("tiny", "0.1B", "8B", "x")),
    "dtype": st.sampled_from(("fast", "auto", "float32", "bfloat16", "float64")),
    "device": st.sampled_from(
        ("cpu", "cuda", "meta", "mps", "cuda:9", "cpu:3", "xpu", "privateuseone", "")
    ),
    "config": configs,
    "exact": st.sampled_from(("bits", "self", "x")),
    "json": paths,
    "host": st.sampled_from(("127.0.0.1", "0.0.0.0", "x")),
    "kind": st.sampled_from(("eagle3", "mtp", "x")),
    "seq-len": st.sampled_from(("96", "1")),
    "system": configs.map("auto ".__add__)
    | st.sampled_from(("auto", "vllm", "x", "oracle", "{}", "auto {")),
    "hardware": paths | st.sampled_from(("llama-8b-h100", "x")),
    "mix": st.sampled_from(("adaserve", "coder", "x")),
    "arrivals": st.sampled_from(("poisson", "gamma", "on-off", "x")),
    "metric": st.sampled_from(("tpot", "x")),
    "router": st.sampled_from(("round-robin", "x", "guarantees")),
}
BY_TYPE = {int: whole, float: real, Path: paths, bool: None}
NOT_HERE = (("serve", "replicas"), ("profile", "compile"))  # start Ray, and a compiler


def options_of(command):
    """Return the values of each option of a command; None for one that takes no value."""
    found = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        kind, *info = get_args(parameter.annotation) or (None,)
        if info and isinstance(info[0], typer.models.OptionInfo):
            first = info[
                0
            ].default  # the option's name, where it is given; Annotated has no default
            flag = (first if isinstance(first, str) else name.replace("_", "-")).removeprefix("--")
            kind = next((each for each in get_args(kind) if each is not type(None)), kind)
            found[flag] = VALUES.get(flag, BY_TYPE.get(kind, words))
    return found


COMMANDS = {
    (name := str(info.callback.__name__).replace("_", "-")): {
        option: values
        for option, values in options_of(info.callback).items()
        if (name, option) not in NOT_HERE
    }
    for info in app.registered_commands
    if info.callback is not None
}
FIRST = {
    "generate": ["--max-new-tokens", "3", "--dtype", "float32"],
    "bench": ["--config", '{"compile": false}'],
    "profile": ["--no-compile"],
    "simulate": ["--system", "vllm"],
}


@st.composite
def command_lines(draw):
    command = draw(st.sampled_from(sorted(COMMANDS)))
    line = [command, *FIRST.get(command, [])]
    for name in draw(st.lists(st.sampled_from(sorted(COMMANDS[command])), max_size=4)):
        values = COMMANDS[command][name]
        line.append(f"--{name}")
        if values is not None:
            line.append(draw(words if draw(st.integers(0, 5)) == 5 else values))
    if command == "simulate" and "--trace" not in line:
        line += ["--number", "3"]
    return line + draw(st.lists(words, max_size=1)) if command in ("generate", "check") else line


@fuzzed(14)
@given(line=command_lines())
def test_every_command_works_or_says_what_is_wrong(folder, line):
    _write_files(folder)
    result = RUN.invoke(app, line, input="x")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 1, 2, 3)
    assert result.exit_code == 0 or result.output.strip()
    assert "Traceback" not in result.output
