"""Extras: what they need, and the commands that install them, in messages and in documents."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import tomllib

import pytest

from hf_slospec import MissingExtraError, extras
from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINE = re.compile(r"pip install (.+\[\w+\].*)")
PAGES = [
    path
    for folder in ("", "docs", "docs/notebooks", "demo", "examples", "examples/serving", "scripts")
    for path in sorted((ROOT / folder).iterdir())
    if path.suffix in (".md", ".py", "") and path.is_file()
]


def modules_of(extra):
    """Return the modules of an extra's requirements, under the names that they are imported by."""
    found = set[str]()
    for requirement in PROJECT["optional-dependencies"][extra]:
        name, own = re.fullmatch(r"([\w-]+)(?:\[(\w+)\])?.*", requirement).groups()  # type: ignore[union-attr]
        found |= modules_of(own) if name == "hf_slospec" else {name.replace("-", "_")}
    return found


def test_all_modules_of_all_extras_are_known():
    assert {extra: set(modules) for extra, modules in extras.MODULES.items()} == {
        extra: modules_of(extra) for extra in PROJECT["optional-dependencies"]
    }


class Installed:
    """A distribution as ``importlib.metadata`` returns it."""

    requires = (
        "torch>=2.6", "fastapi>=0.115 ; extra == 'serve'", 'uvicorn>=0.30; extra == "serve"',
        "hf_slospec[serve]; extra == 'ray'", "ray[serve]<3,>=2.60; extra == 'ray'",
    )  # fmt: skip

    def __init__(self, record):
        self.record = record

    def read_text(self, name):
        assert name == "direct_url.json"
        return None if self.record is None else json.dumps(self.record)


@pytest.mark.parametrize(
    ("record", "command"),
    [
        (None, 'pip install "hf_slospec[ray]"'),
        ({"url": "{folder}", "dir_info": {"editable": True}}, 'pip install -e "{path}[ray]"'),
        ({"url": "{folder}", "dir_info": {}}, 'pip install "{path}[ray]"'),
        ({"url": "{folder}/own.whl", "archive_info": {}}, 'pip install "{path}/own.whl[ray]"'),
        (
            {"url": "{folder}/gone.whl", "archive_info": {}},
            'pip install "ray[serve]<3,>=2.60" "fastapi>=0.115" "uvicorn>=0.30"',
        ),
        (
            {"url": "https://a.org/own.whl", "archive_info": {}},
            'pip install "hf_slospec[ray] @ https://a.org/own.whl"',
        ),
        (
            {"url": "https://a.org/own", "vcs_info": {"vcs": "git", "commit_id": "f00"}},
            'pip install "hf_slospec[ray] @ git+https://a.org/own@f00"',
        ),
    ],
)
def test_the_command_fits_what_is_installed(record, command, tmp_path, monkeypatch):
    folder = tmp_path / "a clone"
    folder.mkdir()
    (folder / "own.whl").touch()
    if record is not None:
        record = record | {"url": record["url"].replace("{folder}", folder.as_uri())}
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: Installed(record))
    assert extras.install_command("ray") == command.replace("{path}", str(folder))


def test_the_command_from_a_clone_that_is_not_installed(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert extras.install_command("plot") == f'pip install -e "{ROOT}[plot]"'


def test_what_is_missing_is_named_in_one_line(monkeypatch):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("openai", "uvicorn") else name
    )
    extras.need("plot", "--plot")
    with pytest.raises(
        MissingExtraError,
        match=r'^the server needs openai, uvicorn; install with: pip install .+"$',
    ):
        extras.need("serve", "the server")
    with pytest.raises(ImportError):
        extras.need("ray", "--replicas")


def test_documents_install_extras_from_the_clone():
    """The package is on no index, so a line must not name it as if it were."""
    lines = [
        (path.name, line)
        for path in PAGES
        for line in LINE.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(lines) > 5
    for name, line in lines:
        extra = re.search(r"(\S*)\[(\w+)\]", line)
        assert extra is not None and extra[1].strip("\"'") == ".", (name, line)
        assert extra[2] in PROJECT["optional-dependencies"], (name, line)
