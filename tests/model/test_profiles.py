"""Profiles in the cache: kept, found again, never trusted beyond the model and machine they were
taken on.
"""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.latency_curves import ForwardCost, LatencyCurve
from hf_slospec.generate.speculator import CheckedModel
from hf_slospec.model import measure as profiles
from hf_slospec.model.measure import identity, load_profile, save_profile
from hf_slospec.model.packed_model import PackedModel
from tests.support.fuzzing import fuzzed
from tests.support.packed import packed_model
from tests.support.toys.tiny_models import tiny_model

COST = ForwardCost(
    LatencyCurve((1, 4, 16), (0.001, 0.0015, 0.1)), per_request_s=1e-5, per_key_s=1e-8
)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    folder = tmp_path / "assets"
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(folder))
    return folder


@pytest.fixture
def packed():
    return PackedModel(tiny_model("llama"))


def files(cache):
    return [path for path in cache.rglob("*") if path.is_file() and "profiles" in path.parts]


def rewrite(cache, **changes):
    (path,) = files(cache)
    profile = json.loads(path.read_text())
    parts = profile, profile["cost"], profile["cost"]["curve"]
    for name, value in changes.items():
        next(part for part in parts if name in part)[name] = value
    path.write_text(json.dumps(profile))


def test_a_saved_profile_is_found_again(cache, packed):
    assert load_profile(packed) is None
    save_profile(packed, COST)
    assert load_profile(packed) == COST
    assert load_profile(PackedModel(copy.deepcopy(tiny_model("llama")))) == COST  # an equal model
    (path,) = files(cache)  # nothing partial is left
    assert "LlamaForCausalLM" in str(path)
    newer = ForwardCost(LatencyCurve((1,), (5.0,)))
    save_profile(packed, newer)
    assert load_profile(packed) == newer


numbers = st.integers(-1, 5) | st.floats() | st.sampled_from((10**400, 1e308, 5e-324, 2**63))
odd_json = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=5,
)
field = st.sampled_from(("of", "num_tokens", "seconds", "per_request_s", "per_key_s"))
lists = st.lists(st.integers(-1, 600) | st.integers(), max_size=4) | st.lists(
    st.floats(), max_size=4
)


@fuzzed(60)
@given(
    changes=st.dictionaries(field, odd_json | lists | lists.map(sorted) | numbers, max_size=3),
    raw=st.none()
    | st.binary(max_size=20)
    | st.sampled_from((b"[" * 100_000, b"9" * 5000, b"\xff\xfe")),
)
def test_files_of_any_content_are_profiles_or_are_measured_again(
    cache: Path, packed: PackedModel, changes: dict[str, Any], raw: bytes | None
) -> None:
    save_profile(packed, COST)
    rewrite(cache, **changes)
    if raw is not None:
        files(cache)[0].write_bytes(raw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cost = load_profile(packed)
    if cost is None:
        assert changes or raw is not None
        return
    seconds = cost(np.array([1, 3, 64, 10**5]), 4, 1000)
    assert np.isfinite(seconds).all() and (seconds > 0.0).all() and (np.diff(seconds) >= 0.0).all()


def test_other_models_and_settings_have_profiles_of_their_own(packed):
    save_profile(packed, COST)
    others = [
        PackedModel(tiny_model("qwen2")),
        PackedModel(tiny_model("mistral")),
        PackedModel(copy.deepcopy(tiny_model("llama")).double()),
        packed_model(tiny_model("llama"), "4d_mask"),
    ]
    assert [load_profile(other) for other in others] == [None] * 4


@pytest.mark.parametrize("key", ["version", "threads", "torch", "host", "device", "modules"])
def test_a_profile_of_another_machine_is_not_used(cache, packed, monkeypatch, key):
    save_profile(packed, COST)
    with monkeypatch.context() as other:
        other.setattr(profiles, "identity", lambda packed: identity(packed) | {key: "another"})
        assert load_profile(packed) is None
    rewrite(cache, of=identity(packed) | {key: "another"})  # under the right name all the same
    assert load_profile(packed) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 1}', b"\xff\xfe\x00"])
def test_a_corrupt_profile_is_dropped_with_a_warning(cache, packed, content):
    save_profile(packed, COST)
    (path,) = files(cache)
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=r"\.json is not a profile .* measured again"):
        assert load_profile(packed) is None
    assert not path.exists()
    save_profile(packed, COST)
    assert load_profile(packed) == COST


def refuse(*_, **__):
    raise PermissionError("read-only file system")


@pytest.mark.parametrize("method", ["mkdir", "write_text"])
def test_a_folder_that_cannot_be_used_only_warns(packed, monkeypatch, method):
    with monkeypatch.context() as read_only:
        read_only.setattr(Path, method, refuse)
        assert load_profile(packed) is None
        with pytest.warns(UserWarning, match="could not be saved"):
            save_profile(packed, COST)
    assert load_profile(packed) is None


def test_a_model_is_measured_once_and_again_after_its_profile_was_lost(cache, monkeypatch):
    calls = []

    class Measured:
        def fit(self):
            return COST

    def measure(packed, limit_s):
        calls.append(limit_s)
        return Measured()

    monkeypatch.setattr("hf_slospec.model.checked_model.measure", measure)

    def cost():
        return CheckedModel(tiny_model("llama"), SLOSpecConfig(), 1.5).cost

    assert cost() == cost() == COST
    assert calls == [1.5]
    (path,) = files(cache)
    path.write_text("gone bad")
    with pytest.warns(UserWarning, match="measured again"):
        assert cost() == COST
    assert cost() == COST
    assert calls == [1.5, 1.5]
