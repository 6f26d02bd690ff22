"""Policies of other packages: registered by entry points, imported when a name or an option needs
them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint

import pytest

from hf_slospec import InvalidInputError
from hf_slospec.policies.fixed import FixedPolicy
from hf_slospec.policies.registry import ENTRY_POINTS, NamedPolicy, policy_named, register
from tests.support.paths import ROOT

MODULE = """
from pydantic import Field

from hf_slospec import Plan, Selection
from hf_slospec.policies.registry import NamedPolicy, PolicyOptions, register


class TwinOptions(PolicyOptions):
    twins: int = Field(2, ge=1)


class TwinPolicy(NamedPolicy):
    name, options = "twins", TwinOptions

    @classmethod
    def max_nodes(cls, config):
        return 2

    def plan(self, requests, begun_s, num_prefill_tokens=0):
        return Plan(1, self.config.options_of(TwinOptions).twins)

    def select(self, requests, candidates, plan):
        return Selection.of_roots(candidates)


register(TwinPolicy)
"""


def printed(folder, code):
    """Run code in a new process that finds the packages in the folder; return the lines that it
    prints.
    """
    path = os.pathsep.join([str(folder), str(ROOT)])
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout.splitlines()


@pytest.fixture
def installed(tmp_path):
    """A folder with an installed package whose entry point is a module with a policy."""
    (tmp_path / "twin_policies.py").write_text(MODULE)
    metadata = tmp_path / "twin_policies-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: twin_policies\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\ntwins = twin_policies\n")
    return tmp_path


def test_a_policy_of_another_package_is_imported_once_a_name_or_an_option_needs_it(installed):
    code = """
import sys
from hf_slospec.config import SLOSpecConfig
from hf_slospec.policies import max_nodes_per_request, new_policy
SLOSpecConfig(), SLOSpecConfig(policy="adaserve", max_depth=3)
print("twin_policies" in sys.modules, "hf_slospec.lab" in sys.modules)
config = SLOSpecConfig(policy="twins", twins=3)
print(config.policy_options, max_nodes_per_request(config))
print(type(new_policy(config, None)).__name__, "twin_policies" in sys.modules)
from hf_slospec.errors import InvalidInputError
for fields in ({"twins": 3}, {"policy": "triplets"}):
    try:
        SLOSpecConfig(**fields)
    except InvalidInputError as error:
        print(error)
"""
    *found, of_option, of_name = printed(installed, code)
    assert found == ["False False", "twins=3 2", "TwinPolicy True"]
    assert "twins is a setting of policy 'twins', not of 'auto'" in of_option
    assert (
        "there is no policy 'triplets'; choose among 'auto', 'adaserve', 'fixed', 'none'" in of_name
    )
    assert "'twins'" in of_name


def test_the_lab_is_an_entry_point_that_registers_its_policies():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        ENTRY_POINTS
    ]
    assert [
        EntryPoint(name, module, ENTRY_POINTS).load().__name__ for name, module in declared.items()
    ] == ["hf_slospec.lab"]
    assert policy_named("turbospec").__module__ == "hf_slospec.lab.policies.smartspec_variants"


def test_a_name_is_registered_once():
    register(FixedPolicy)  # the same again

    class Other(NamedPolicy):
        name = "fixed"

    with pytest.raises(
        InvalidInputError, match=r"'fixed' is hf_slospec.policies.fixed.FixedPolicy already"
    ):
        register(Other)
    assert policy_named("fixed") is FixedPolicy
