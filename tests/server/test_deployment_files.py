"""The files of examples/serving name metrics, options and paths that there are."""

from __future__ import annotations

import configparser
import importlib
import json
import re
import shlex
import warnings
from collections import defaultdict

import pytest
import typer
import yaml

from hf_slospec.cli.app import app
from hf_slospec.server.serve import DRAIN_S
from tests.support.paths import ROOT

FOLDER = ROOT / "examples" / "serving"
PAGE = ROOT / "docs" / "server.md"
METRIC = re.compile(r"\bhf_slospec:\w+")
PREFIX = ["-m", "hf_slospec", "serve"]


SERVE_CONFIGS = {
    "ray.yaml": lambda data: data,
    "kuberay.yaml": lambda data: yaml.safe_load(data["spec"]["serveConfigV2"]),
}


def options_of(command):
    """Parse a command line that starts the server, and return its options; those of variables are
    left out.
    """
    assert command[0].split("/")[-1] == "python" and command[1:4] == PREFIX
    serve = typer.main.get_command(app).commands["serve"]
    arguments = [argument for argument in command[4:] if not argument.startswith("$")]
    known = {name for parameter in serve.params for name in parameter.opts}
    assert {argument for argument in arguments if argument.startswith("--")} <= known
    return serve.make_context("serve", arguments).params


def instructions():
    """The instructions of the Containerfile by name, without their comments."""
    text = (FOLDER / "Containerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = defaultdict(list)
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        name, _, rest = line.partition(" ")
        found[name].append(rest)
    return found


def test_the_dashboard_and_the_page_name_metrics_that_there_are(generator):
    generator.submit("def main():", max_new_tokens=4, slo_tpot=1e3).result(60.0)
    families = generator.collector().collect()
    known = {sample.name for family in families for sample in family.samples}
    for path in (FOLDER / "grafana-dashboard.json", PAGE):
        named = set(METRIC.findall(path.read_text(encoding="utf-8")))
        assert named and named <= known


def test_the_unit_starts_the_server_and_lets_requests_finish():
    unit = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    unit.optionxform = str
    unit.read(FOLDER / "hf_slospec.service", encoding="utf-8")
    service = unit["Service"]
    options = options_of(shlex.split(service["ExecStart"]))
    assert options["host"] == "127.0.0.1"
    assert service["User"] not in ("", "root") and service["EnvironmentFile"]
    assert service["Restart"] == "on-failure"
    assert int(service["TimeoutStopSec"]) > DRAIN_S
    assert f"HF_HOME=/var/cache/{service['CacheDirectory']}" in service["Environment"].split()


def test_the_image_starts_the_server_on_the_port_that_it_shows():
    own = instructions()
    (entry,) = own["ENTRYPOINT"]
    (given,) = own["CMD"]
    (port,) = own["EXPOSE"]
    options = options_of([*json.loads(entry), *json.loads(given)])
    assert (options["host"], options["port"]) == ("0.0.0.0", int(port))
    assert own["USER"] and own["USER"][-1] not in ("root", "0")
    assert any('".[serve]"' in line for line in own["RUN"]) and "TORCH_INDEX=" in own["ARG"]
    sources = [name for line in own["COPY"] for name in line.split()[:-1]]
    assert sources and all((ROOT / name).exists() for name in sources)


@pytest.mark.parametrize("name", SERVE_CONFIGS)
def test_configs_of_serve_name_the_application_and_options_that_there_are(name):
    data = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    (application,) = SERVE_CONFIGS[name](data)["applications"]
    module, attribute = application["import_path"].split(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        assert callable(getattr(importlib.import_module(module), attribute))
        options = importlib.import_module(f"{module}.options").ReplicaOptions.of(
            application["args"]
        )
        config = importlib.import_module("ray.serve.schema").ServeApplicationSchema.model_validate(
            application
        )
    assert options.max_replicas == 8 and config.import_path == application["import_path"]
