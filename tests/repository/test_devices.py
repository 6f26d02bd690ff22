"""Tensors that calls make are on a device that the code names, whatever the caller's default device
is.
"""

from __future__ import annotations

import ast
from pathlib import Path

from torch.utils._device import _device_constructors

from tests.support.paths import ROOT

MAKERS = {function.__name__ for function in _device_constructors()}
# Modules of models, whose weights are made on the default device as those of torch's modules are;
# and training, inflation and commands, which run apart from a caller's code.
ON_DEFAULT_DEVICE = ("heads", "training", "tiny", "cli", "demo")


def without_device(source):
    """Yield the lines on which a tensor is made on the default device."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in MAKERS
        ):
            is_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if is_torch and not {"device", "out", None} & {
                keyword.arg for keyword in node.keywords
            }:
                yield node.lineno


def test_tensors_are_made_on_named_devices():
    package = ROOT / "hf_slospec"
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted(package.rglob("*.py"))
        if not path.relative_to(package).as_posix().startswith(ON_DEFAULT_DEVICE)
        for line in without_device(Path(path).read_text())
    ]
    assert not found, f"without device=: {found}"


def test_the_check_finds_what_it_should():
    assert list(
        without_device(
            "torch.zeros(3)\ntorch.zeros(3, device='cpu')\nnumpy.zeros(3)\ntorch.cat([])"
        )
    ) == [1]
