"""Compare the output of ordinary transformers scripts without and with speculation enabled for
their models.

    python examples/drop_in.py [SCRIPT ...]      # default: all of examples/transformers_scripts

The scripts do not import hf_slospec: ``from_pretrained`` is wrapped to call ``enable``, nothing
else changes."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoModelForCausalLM

import hf_slospec

SCRIPTS = sorted((Path(__file__).parent / "transformers_scripts").glob("*.py"))
CHAT_TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}# assistant: "


def save_pair(folder: Path) -> None:
    """Save the embedded target in fp32, with a chat template, to a folder that scripts can load."""
    target, _, tokenizer = hf_slospec.load_tiny_pair(torch.float32)
    tokenizer.chat_template = CHAT_TEMPLATE
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def every_model_enabled(speculated: list[int]) -> Iterator[None]:
    """Enable every model that is loaded inside of the context; ``speculated`` gets an entry per
    ``generate`` call.
    """
    load = AutoModelForCausalLM.from_pretrained
    _, draft, _ = hf_slospec.load_tiny_pair(torch.float32)

    def load_enabled(*args: object, **kwargs: object) -> object:
        model = hf_slospec.enable(load(*args, **kwargs), draft, always=True)
        decode = model.generate

        def generate(*args: object, **kwargs: object) -> object:
            speculated.append(1)
            return decode(*args, **kwargs)

        model.generate = generate
        return model

    with mock.patch.object(AutoModelForCausalLM, "from_pretrained", load_enabled):
        yield


def printed_by(script: Path, model: Path) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), mock.patch.object(sys, "argv", [str(script), str(model)]):
        runpy.run_path(str(script), run_name="__main__")
    return out.getvalue()


def is_unchanged(script: Path, model: Path) -> bool:
    """Return whether a script prints the same with its models enabled; raises if it never calls
    ``generate``.
    """
    plain = printed_by(script, model)
    speculated = list[int]()
    with every_model_enabled(speculated):
        ours = printed_by(script, model)
    if not speculated:
        raise RuntimeError(f"{script.name} did not call generate on a loaded model")
    return ours == plain


def main() -> int:
    scripts = [Path(name) for name in sys.argv[1:]] or SCRIPTS
    changed = 0
    with tempfile.TemporaryDirectory() as folder:
        save_pair(Path(folder))
        for script in scripts:
            same = is_unchanged(script, Path(folder))
            changed += not same
            print(f"{script.name:<32} {'unchanged' if same else 'CHANGED'}")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
