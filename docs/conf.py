"""Sphinx settings: ``make docs`` builds the site into build/docs, and fails on any warning."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import sphinx.pycode.parser
from pydantic import BaseModel
from sphinx.util.inspect import TypeAliasForwardRef
from sphinx.util.typing import stringify_annotation

import hf_slospec

sys.path.insert(0, str(Path(__file__).parents[1]))  # wherever the build was started

from docs import modules

project = "hf_slospec"
author = "The hf_slospec developers"
version = release = hf_slospec.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["notebooks/*.ipynb"]  # made of the pages here
html_theme = "furo"
html_title = f"hf_slospec {version}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]

# Pages are read on GitHub too, so they are plain Markdown; links to files outside of docs/ become
# downloads.
myst_heading_anchors = 3

# Notebooks run in every build but the quick one; what raises fails it.
nb_execution_mode = "off" if "QUICK_DOCS" in os.environ else "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_output_stderr = "remove"  # progress bars
os.environ["PYTHONSTARTUP"] = str(Path(__file__).with_name("kernel_startup.py"))

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "undoc-members": True}
autodoc_preserve_defaults = True
ALIASES = (
    *(
        "IntArray",
        "FloatArray",
        "BoolArray",
        "Count",
        "StepTime",
        "ShapeTime",
        "TreeTime",
        "OnReplaced",
    ),
    *("SLOTpot", "SLOOrder", "NewPolicy", "Prompt", "IsOver"),
)
autodoc_type_aliases = {name: name for name in ALIASES}  # shown as they are written,
TypeAliasForwardRef.__repr__ = lambda alias: alias.name  # within other types too
napoleon_numpy_docstring = False

# Nothing is fetched while building, so other projects' classes and our own aliases of them are no
# links.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|transformers|numpy|npt|np|pydantic|annotated_types)\b.*"),
    ("py:.*", r"(collections|concurrent|os|pathlib|queue|threading|weakref)\b.*"),
    (
        "py:class",
        r"FieldInfo|Ge|MinLen|NoneType|Strict",
    ),  # pydantic's, in annotations within unions
    ("py:.*", rf"{'|'.join(ALIASES)}|PolicySettings|SuffixDecodingDraft"),
    (
        "py:.*",
        r"hf_slospec\.(batcher\.stats\.Collector|generate\.call\.Done|"
        r"request\.params\.(Grammar|PromptReader)|"
        r"scheduler\.load\.ReplicaLoad|drafters\.(registry\.AssistantKind|past_answers\..*))",
    ),
    ("py:class", r"Checkpoint|Head"),  # names in annotations of private types
]

# The package describes fields in comments beside them, "# seconds"; autodoc reads "#: seconds"
# only.
sphinx.pycode.parser.comment_re = re.compile(r"^\s*#:? ?(.*)\r?\n?$")

_as_written: dict[str, list[str]] = {}


def describe_fields(
    app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """List the fields of pydantic models, which describe them where they declare them."""
    if what == "class" and issubclass(thing, BaseModel):
        for field, info in thing.model_fields.items():
            lines += [
                "",
                f".. attribute:: {field}",
                f"   :type: {stringify_annotation(info.annotation)}",
            ]
            lines += [] if info.is_required() else [f"   :value: {info.default!r}"]
            lines += ["", f"   {info.description or ''}", ""]
    if what in ("attribute", "data", "property", "type"):
        _as_written[name] = lines[:]


def keep_colons(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Undo what napoleon makes of attributes: it takes "tokens; 0: none" for a type and a
    description.
    """
    lines[:] = _as_written.pop(name, lines)


def list_modules(app: Any, page: str, source: list[str]) -> None:
    """Put the list of modules in its place; the note below it is for readers of the repository."""
    if page == "reference/modules":
        source[0] = source[0].split(modules.PLACE)[0] + modules.tables()


def setup(app: Any) -> None:
    app.connect("source-read", list_modules)
    app.connect("autodoc-process-docstring", describe_fields, priority=400)  # napoleon has 500
    app.connect("autodoc-process-docstring", keep_colons, priority=600)
