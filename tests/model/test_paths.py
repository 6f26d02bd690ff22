"""Which forward paths a model uses, and how many calls lie between the engine and the model."""

from __future__ import annotations

import traceback
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import hf_slospec
from hf_slospec import SLOSpecConfig, SLOSpecGenerator, UnsupportedOptionError
from hf_slospec.cpu.compiled import CompiledPath
from hf_slospec.cuda import captured
from hf_slospec.cuda.captured import CudaGraphPath
from hf_slospec.extras import load_entry_points
from hf_slospec.model import paths as registry
from hf_slospec.model.attention.forward import PackedForward
from hf_slospec.model.paths import Facts, ForwardPath, registered_paths, resolve_paths
from tests.support.packed import packed_model
from tests.support.toys.tiny_models import tiny_model

PACKAGE = Path(hf_slospec.__file__).parent
MAX_FRAMES = 6  # calls of our own functions, from the engine's verify step to the model's forward
GPU = torch.device("cuda", 0)
ON_CPU = Facts("LlamaForCausalLM")
ON_GPU = replace(ON_CPU, device=GPU, kv_devices=frozenset((GPU,)), has_static_attention=True)
FP16 = torch.float16
COMPILED = ("compiled", "eager")
GRAPHS = ("cuda_graphs", "eager")
EAGER = ("eager",)
ALL_FORMS = {  # facts under which forwards are neither compiled nor captured
    "some layers keep a state": dict(has_states=True),
    "it attends to an encoder's outputs": dict(attends_to_encoder=True),
    "its forward enables autocast": dict(autocast=torch.bfloat16),
}


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    """One with a compiler, and with CUDA graphs on CUDA devices."""
    monkeypatch.setattr("hf_slospec.cpu.operators.why_unsupported", lambda: None)
    monkeypatch.setattr(
        captured, "capturer_for", lambda device: object() if device.type == "cuda" else None
    )


@pytest.mark.parametrize(
    ("facts", "config", "paths", "settings"),
    [
        (ON_CPU, {}, COMPILED, dict(prepack=None, compile=True)),
        (ON_CPU, dict(compile="wait", prepack=True), COMPILED, dict(prepack=True, compile="wait")),
        (ON_CPU, dict(compile=False), EAGER, dict(compile=False)),
        (ON_CPU, dict(attention="4d_mask"), EAGER, {}),
        (replace(ON_CPU, varies_rope=True), {}, EAGER, {}),
        (replace(ON_CPU, has_latent_attention=True), {}, EAGER, {}),
        (replace(ON_CPU, has_own_attention=True), {}, EAGER, {}),
        (replace(ON_CPU, package="elsewhere"), {}, EAGER, {}),
        *((replace(ON_CPU, **facts), {}, EAGER, {}) for facts in ALL_FORMS.values()),
        *((replace(ON_GPU, **facts), {}, EAGER, {}) for facts in ALL_FORMS.values()),
        (replace(ON_CPU, autocast=FP16), {}, EAGER, dict(fused_layers=False, prepack=None)),
        (replace(ON_CPU, num_ranks=2), {}, EAGER, dict(prepack=False, compile=False)),
        (ON_GPU, {}, GRAPHS, dict(fused_layers=True, cuda_graphs=True)),
        (ON_GPU, dict(cuda_graphs=False), EAGER, dict(fused_layers=True)),
        (replace(ON_GPU, num_ranks=2), {}, EAGER, dict(fused_layers=False, cuda_graphs=False)),
        (replace(ON_GPU, has_static_attention=False), {}, EAGER, {}),
        (replace(ON_GPU, kv_devices=frozenset((GPU, ON_CPU.device))), {}, EAGER, {}),
        (replace(ON_GPU, varies_rope=True), {}, GRAPHS, {}),
        (ON_CPU, dict(exact="bits"), ("exact",), dict(prepack=False, compile=False)),
        (ON_CPU, dict(exact="self"), ("compiled", "exact"), dict(compile="wait")),
        (ON_CPU, dict(exact="self", compile=False), ("exact",), dict(compile=False)),
        (ON_CPU, dict(exact="self", attention="sdpa"), ("compiled", "exact"), {}),
        (ON_GPU, dict(exact="self"), ("exact",), dict(cuda_graphs=False, fused_layers=False)),
    ],
)
def test_paths_and_settings_follow_from_config_and_facts(facts, config, paths, settings):
    found = resolve_paths(SLOSpecConfig(**config), facts)
    assert found.paths == paths
    assert {name: getattr(found.config, name) for name in settings} == settings
    left_out = {"compiled", "cuda_graphs"}.difference(paths)
    assert left_out == found.why_not.keys() and all(found.why_not.values())


@pytest.mark.parametrize(
    ("facts", "config", "message"),
    [
        (replace(ON_CPU, num_ranks=2), dict(prepack=True), "prepack=True cannot be combined"),
        (replace(ON_CPU, num_ranks=2), dict(exact="self"), "split over processes"),
        (replace(ON_CPU, device=torch.device("mps")), dict(exact="self"), "neither on a CPU"),
        (ON_GPU, dict(exact="bits"), "'self' asks for less"),
        (replace(ON_GPU, is_plain=False), dict(exact="self"), "it has hooks, several devices"),
        (replace(ON_GPU, no_kernel="no Triton"), dict(exact="self"), r"available \(no Triton\)"),
        *(
            (replace(ON_CPU, **facts), dict(exact="bits"), reason)
            for reason, facts in ALL_FORMS.items()
        ),
        (replace(ON_CPU, varies_rope=True), dict(exact="bits"), "depend on the length"),
        (replace(ON_CPU, has_chunked_attention=True), dict(exact="bits"), "attend in chunks"),
        (replace(ON_CPU, has_latent_attention=True), dict(exact="bits"), "attend in chunks"),
        (replace(ON_CPU, has_fused_experts=True), dict(exact="bits"), "its experts multiply"),
        (ON_CPU, dict(exact="bits", attention="4d_mask"), "attention='4d_mask' has kernels"),
        (ON_CPU, dict(exact="bits", attention="triton"), "attention='triton' has kernels"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(facts, config, message):
    with pytest.raises(UnsupportedOptionError, match=message):
        resolve_paths(SLOSpecConfig(**config), facts)


class Recorded(ForwardPath):
    """A path of another distribution, which computes prompts by the eager path and nothing else."""

    name = "recorded"
    computed: ClassVar[list[int]] = []

    def __init__(self, context, eager):
        self.eager = eager

    def run(self, inputs):
        if not all(part.is_chain for part in inputs.parts):
            return None
        self.computed.append(inputs.batch.spans[-1].end)
        return self.eager.run(inputs)


def test_another_distribution_adds_a_path(monkeypatch):
    entry = EntryPoint("recorded", f"{__name__}:Recorded", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "_PATHS", dict(registry._PATHS))
    entries = {registry.ENTRY_POINTS: [entry]}
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries.get(group, []))
    load_entry_points.cache_clear()
    try:
        assert registered_paths() == [Recorded, CudaGraphPath, CompiledPath]
        packed = packed_model(tiny_model("llama"))
        assert [path.name for path in packed.paths] == ["recorded", "eager"]
        model = tiny_model("llama")
        ours = SLOSpecGenerator(model, drafter="lookup", config=SLOSpecConfig(compile=False))
        ids = torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4]])
        options: dict[str, Any] = dict(do_sample=False, max_new_tokens=8)
        assert torch.equal(ours.generate(ids, **options), model.generate(ids, **options))
        assert Recorded.computed
    finally:
        load_entry_points.cache_clear()


def test_few_calls_lie_between_the_engine_and_the_model(monkeypatch):
    stacks: list[list[str]] = []
    update = PackedForward.update

    def recorded(self, *arguments, **options):
        ours = [
            frame.name
            for frame in traceback.extract_stack()
            if Path(frame.filename).is_relative_to(PACKAGE)
        ]
        if "verify" in ours:
            stacks.append(ours[ours.index("verify") :])
        return update(self, *arguments, **options)

    ours = SLOSpecGenerator(tiny_model("llama"), config=SLOSpecConfig(policy="none", compile=False))
    inputs = torch.tensor([[3, 4, 5, 6]])
    ours.generate(inputs, max_new_tokens=1)  # with the trial
    monkeypatch.setattr(PackedForward, "update", recorded)
    ours.generate(inputs, max_new_tokens=3)
    assert stacks and all(len(stack) <= MAX_FRAMES for stack in stacks), stacks[0]
