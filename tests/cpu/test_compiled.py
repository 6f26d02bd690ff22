"""Compiled forwards: the same tokens as stock ``generate``, and eager forwards wherever they cannot
be used.
"""

from __future__ import annotations

import fcntl
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_slospec
from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.cpu import compile_job, compiled
from hf_slospec.cpu.compile_job import CompileJob
from hf_slospec.cpu.twin import GraphDescription
from hf_slospec.model import machine as threads
from hf_slospec.model.eager import EagerPath
from hf_slospec.model.machine import kept_file
from hf_slospec.model.tree_mask import chain
from tests.support.packed import packed_model
from tests.support.toys.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="forwards are compiled with g++"
)
FEATURES = (0, 1, 2)  # hidden states; all tests of features need one package
OPTIONS: dict[str, Any] = dict(max_new_tokens=24, pad_token_id=0)
START = CompileJob.start


class Finished:
    """A compilation that ran in this process."""

    def wait(self):
        pass

    def poll(self):
        return 0


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch):
    """Spare the time of importing torch in another process."""

    def start(self):
        self.run()
        return Finished()

    monkeypatch.setattr(CompileJob, "start", start)


@pytest.fixture
def model():
    """Yield a model that the test may change."""
    tiny_model.cache_clear()
    yield tiny_model("llama")
    tiny_model.cache_clear()


def rows():
    ids = torch.randint(3, 100, (3, 14), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :5], mask[2, :9] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def generated(generate, **options):
    """Return a greedy and a sampled batch."""
    greedy = generate(**rows(), **OPTIONS, do_sample=False, **options)
    torch.manual_seed(5)
    sampled = generate(**rows(), **OPTIONS, do_sample=True, top_k=30, **options)
    return [greedy.tolist(), sampled.tolist()]


def generator(model, compile="wait"):
    return SLOSpecGenerator(model, drafter="lookup", config=SLOSpecConfig(compile=compile))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_lora_is_compiled_as_it_is_at_first(model):
    peft = pytest.importorskip("peft")
    modules = ["q_proj", "v_proj", "down_proj"]
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False)
    ).eval()
    for name, weight in adapted.named_parameters():
        if "lora_" in name and "q_proj" not in name:  # adapters in both dtypes, in one graph
            weight.data = weight.bfloat16()
    ours = generator(adapted)
    expected = generated(adapted.generate)
    assert generated(ours.generate) == expected and ours.stats().forwards == {"target": "compiled"}
    with adapted.disable_adapter():
        plain = generated(adapted.generate)
        assert generated(ours.generate) == plain != expected
        assert "changed" in ours.stats().forwards["target"]
    assert generated(ours.generate) == expected and ours.stats().forwards == {"target": "compiled"}
    for weight in adapted.parameters():
        if weight.requires_grad:
            weight.data.mul_(-1.5)
    assert generated(ours.generate) == generated(adapted.generate) != expected


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_lora_of_other_kinds_is_not_compiled(model):
    peft = pytest.importorskip("peft")
    options = dict(r=4, target_modules=["q_proj"], init_lora_weights=False, use_dora=True)
    ours = generator(adapted := peft.get_peft_model(model, peft.LoraConfig(**options)).eval())
    assert generated(ours.generate) == generated(adapted.generate)
    assert "modules were changed" in ours.stats().forwards["target"]


@pytest.mark.nightly
def test_hidden_states_for_a_drafter(model):
    packed = packed_model(model, compile="wait")
    outputs = []
    for each in (packed, packed_model(model)):
        cache = each.kv_cache
        with cache.temporary([9]) as (sequence,):
            parts = [chain(each, sequence, list(range(3, 12)))]
            no_rows = torch.tensor([], dtype=torch.int64)  # as for a chunk of a prompt
            assert each.forward(cache.pool, parts, no_rows).shape == (0, 101)
            outputs.append(each.outputs(cache.pool, parts, torch.tensor([8]), FEATURES))
    assert packed.status(FEATURES) == packed.status() == "compiled"
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits)
    torch.testing.assert_close(outputs[0].features, outputs[1].features)


def test_models_in_bf16_are_compiled(model):
    model.bfloat16()
    packed = packed_model(model, compile="wait")
    generator(model).generate(**rows(), **OPTIONS)
    assert packed.status() == "compiled"


def test_the_switch_between_two_steps(monkeypatch, model):
    """Eager forwards serve until the package is loaded, by a thread."""
    loads = []
    load = compiled._Package._load
    monkeypatch.setattr(compiled._Package, "_load", lambda self: loads.append(self) or load(self))
    started = list[CompileJob]()
    interface = CompileJob.interface
    monkeypatch.setattr(
        CompileJob, "interface", property(lambda self: interface.fget(self) if started else None)
    )
    monkeypatch.setattr(
        CompileJob, "start", lambda self: started.append(self) or self.run() or Finished()
    )
    expected = generated(model.generate)
    ours = generator(model, compile=True)
    assert generated(ours.generate) == expected
    assert ours.stats().forwards == {"target": "eager: not compiled yet"}
    monkeypatch.setattr(compiled, "START_S", 0.0)
    monkeypatch.setattr(compiled, "POLL_S", 0.0)
    ours.generate(**rows(), **OPTIONS)
    (package,) = loads
    package._thread.join()
    assert generated(ours.generate) == expected
    assert ours.stats().forwards == {"target": "compiled"}


def test_changed_modules_are_computed_eagerly(model):
    ours = generator(model)
    generated(ours.generate)
    plain = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = torch.nn.Sequential(plain, torch.nn.Tanh())
    assert generated(ours.generate) == generated(model.generate)
    assert ours.stats().forwards == {"target": "eager: the model was changed since it was compiled"}
    model.model.layers[0].mlp.up_proj = plain
    assert generated(ours.generate) == generated(model.generate)
    assert ours.stats().forwards == {"target": "compiled"}
    with model.model.norm.register_forward_hook(lambda module, inputs, output: output * 2):
        assert generated(ours.generate) == generated(model.generate)
        assert ours.stats().forwards["target"].startswith("eager: hooks")
    assert generated(ours.generate) == generated(model.generate)
    assert ours.stats().forwards == {"target": "compiled"}


def test_a_model_in_a_trainer_is_compiled(model):
    """In training mode, and with the hook that gradient checkpointing needs."""
    ours = generator(model)
    model.train()
    model.enable_input_require_grads()
    assert generated(ours.generate) == generated(model.generate)
    assert ours.stats().forwards == {"target": "compiled"}


def test_eager_forwards_leave_a_core_to_the_compiler(monkeypatch, model):
    class Running(Finished):
        def poll(self):
            return None

    monkeypatch.setattr(CompileJob, "start", lambda self: Running())
    monkeypatch.setattr(
        GraphDescription, "identity", lambda self: {"key": id(model)}
    )  # nobody has compiled it
    monkeypatch.setattr(compiled, "START_S", 0.0)
    monkeypatch.setattr(threads, "available_cores", lambda: torch.get_num_threads())
    ours = generator(model, compile=True)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        seen = list[int]()
        run = EagerPath.run
        monkeypatch.setattr(
            EagerPath, "run", lambda *own: seen.append(torch.get_num_threads()) or run(*own)
        )
        assert generated(ours.generate) == generated(model.generate)
        assert ours.stats().forwards == {"target": "eager: compiling"}
        assert set(seen) == {2} and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_setting_that_the_graph_lacks_is_found_by_comparison(model, caplog):
    """The graph is that of a new model of the class and config; this one computes something else."""
    ours = generator(model)
    generated(ours.generate)
    for layer in model.model.layers:
        layer.self_attn.scaling *= 3
    assert generated(ours.generate) == generated(model.generate)
    assert ours.stats().forwards["target"].startswith("eager: its logits differ")
    assert "is no longer computed by compiled forwards: its logits differ" in caplog.text


@pytest.mark.parametrize(("share", "path"), [(0.3, "compiled"), (0.7, "eager")])
def test_few_tokens_may_differ_by_rounding_in_bf16(monkeypatch, model, share, path):
    def errors(ours, _):
        return torch.linspace(0, 1, len(ours)).ge(1 - share).double() / 2

    monkeypatch.setattr(compiled, "relative_error", errors)
    ours = generator(model.bfloat16())
    generated(ours.generate)
    assert ours.stats().forwards["target"].startswith(path)


@pytest.mark.nightly
@pytest.mark.parametrize(("share", "path"), [(0.3, "compiled"), (0.9, "eager")])
def test_forwards_that_seldom_differ_by_rounding_stay_compiled(monkeypatch, model, share, path):
    draws = random.Random(1)
    monkeypatch.setattr(
        compiled, "relative_error", lambda ours, _: torch.tensor([float(draws.random() < share)])
    )
    ours = generator(model.bfloat16())
    generated(ours.generate)
    assert ours.stats().forwards["target"].startswith(path)


def test_failures_are_kept_and_told(monkeypatch, model):
    attempts = []

    def fail(description):
        attempts.append(description)
        raise ValueError("it cannot be traced")

    monkeypatch.setattr(compile_job, "export_graph", fail)
    monkeypatch.setattr(GraphDescription, "identity", lambda self: {"key": "another"})
    for _ in range(2):
        ours = generator(model)
        assert generated(ours.generate) == generated(model.generate)
        assert ours.stats().forwards == {"target": "eager: ValueError: it cannot be traced"}
    assert len(attempts) == 1


def test_one_compiler_runs_at_a_time(monkeypatch, model):
    """A package that another process compiles is loaded once it is there."""
    generator(model)  # compiles, unless another test has done so
    hf_slospec.disable(model)
    is_there = []
    interface = CompileJob.interface
    monkeypatch.setattr(
        CompileJob, "interface", property(lambda self: interface.fget(self) if is_there else None)
    )
    monkeypatch.setattr(CompileJob, "start", START)
    monkeypatch.setattr(compiled, "START_S", 0.0)
    monkeypatch.setattr(compiled, "POLL_S", 0.0)
    with open(kept_file("compiled", "", "").parent / "compiler.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ours = generator(model, compile=True)
        assert generated(ours.generate) == generated(model.generate)
        assert ours.stats().forwards == {"target": "eager: another compiler runs"}
        is_there.append(True)
        assert generated(ours.generate) == generated(model.generate)
    assert ours.stats().forwards["target"] in ("eager: loading", "compiled")


class Endless(CompileJob):
    """A compilation that does not end by itself."""

    def run(self):
        subprocess.run(["sleep", "3600"])


def test_a_compiler_ends_with_the_process_that_started_it(tmp_path):
    """Its lock is free again then."""
    code = (
        "import torch, sys, time; from pathlib import Path; import tests.cpu.test_compiled as test\n"
        "from hf_slospec.cpu.twin import GraphDescription\n"
        "model = test.tiny_model('llama')\n"
        "described = GraphDescription.of(model, (), (), False)\n"
        f"job = test.Endless(described, Path({str(tmp_path / 'a' / 'b.pt2')!r}), 1, 0)\n"
        "print(job.start().pid, job.start(), flush=True); time.sleep(3600)"
    )
    (tmp_path / "a").mkdir()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        compiler, second = parent.stdout.readline().split()
        assert second == b"None"
        parent.send_signal(signal.SIGKILL)
    with open(tmp_path / "compiler.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for the compiler's end
    while Path(f"/proc/{int(compiler)}").exists():
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (dict(compile=False), "compile=False"),
        (dict(attention="4d_mask"), "attention='4d_mask' calls the model's own attention"),
    ],
)
def test_settings_without_compiled_forwards(model, settings, reason):
    config = SLOSpecConfig(**{"compile": "wait"} | settings)
    ours = SLOSpecGenerator(model, drafter="lookup", config=config)
    assert ours.stats().forwards == {"target": f"eager: {reason}"}
    hf_slospec.disable(model)


@pytest.mark.nightly
def test_another_process_compiles(monkeypatch):
    monkeypatch.undo()
    model = tiny_model("gpt2")  # weights as [inputs, outputs]
    ours = generator(model)
    assert generated(ours.generate) == generated(model.generate)
    assert ours.stats().forwards == {"target": "compiled"}
