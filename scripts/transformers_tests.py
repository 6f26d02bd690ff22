"""Run transformers' own tests of generation with every ``generate`` speculated, and compare with
the unpatched run.

    git clone --depth 1 --branch v5.23.0 https://github.com/huggingface/transformers python -m
    scripts.transformers_tests transformers --write docs/transformers_tests.md

Each test file runs in a process of its own, once unpatched and once for each way to draft. What has
run is kept in ``build/transformers_tests``, and an interrupted run continues; ``--only git zamba``
runs these model families alone. The tests need the packages ``parameterized`` and ``datasets``, and
files that cannot be downloaded fail in every run."""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationMixin
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

import hf_slospec
from hf_slospec import FallbackWarning, SLOSpecConfig

ROOT = Path(__file__).parent.parent
STOCK = "stock"
WAYS = ("lookup", "copy")
WAY, REPORT = (
    "SLOSPEC_TESTS_WAY",
    "SLOSPEC_TESTS_REPORT",
)  # environment variables of the processes that test
TIME_LIMIT_S = 3600  # per file
NOISE = 0.03  # added to the copy that drafts
BASES = (
    "GenerationTesterMixin",
    "CausalLMModelTest",
    "VLMModelTest",
    "ALMModelTest",
    "MultiModalModelTest",
)
MAPPINGS = {
    "causal LM": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "image-text": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "encoder-decoder": MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    | MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
KINDS = {
    kind: {
        name
        for names in mapping.values()
        for name in ([names] if isinstance(names, str) else names)
    }
    for kind, mapping in MAPPINGS.items()
}


@dataclasses.dataclass
class Report:
    """What the tests of one file did."""

    outcomes: dict[str, str] = dataclasses.field(
        default_factory=dict
    )  # by test: passed, failed or skipped
    messages: dict[str, str] = dataclasses.field(default_factory=dict)  # by test that failed
    kinds: dict[str, str] = dataclasses.field(default_factory=dict)  # class under test, by test
    speculated: dict[str, int] = dataclasses.field(default_factory=dict)  # calls by model class
    fell_back: dict[str, int] = dataclasses.field(default_factory=dict)  # calls by reason


# ---- inside of pytest, which loads this module as a plugin


class Patched:
    """Pytest plugin: selects the tests of generation, speculates their calls and reports what
    happened.
    """

    def __init__(self, way: str, path: Path):
        self.way = way
        self.path = path
        self.report = Report()
        self._is_inside = False  # a call is being speculated
        if way != STOCK:
            self._patch(GenerationMixin)

    def _patch(self, owner: Any) -> None:
        stock: Callable[..., Any] = owner.__dict__["generate"]

        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside or "generate" in vars(model):
                return stock(model, *args, **kwargs)
            self._is_inside = True
            try:
                return self._speculated(model, *args, **kwargs)
            finally:
                self._is_inside = False

        generate.__signature__ = inspect.signature(stock)  # type: ignore[attr-defined]
        owner.generate = generate

    def _speculated(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        draft = (
            noisy_copy(model)
            if self.way == "copy" and kwargs.get("assistant_model") is None
            else None
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hf_slospec.enable(
                model,
                draft,
                always=True,
                fallback=True,
                config=SLOSpecConfig(policy="adaserve", token_budget=40),
            )
            try:
                output = model.generate(*args, **kwargs)
            finally:
                hf_slospec.disable(model)
        reasons = [
            str(each.message) for each in caught if issubclass(each.category, FallbackWarning)
        ]
        for each in caught:
            if not issubclass(each.category, FallbackWarning):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        if reasons:
            count = self.report.fell_back
            key = short(reasons[0])
        else:
            count = self.report.speculated
            key = type(model).__name__
        count[key] = count.get(key, 0) + 1
        return output

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Keep the tests of generation in files with a class of a known kind, or without model
        classes.
        """
        from tests.generation.test_utils import GenerationTesterMixin  # type: ignore[import-not-found]

        owners = {item.cls: generative_classes(item.cls) for item in items}
        names = {
            owner: {each.__name__ for each in classes}
            for owner, classes in owners.items()
            if classes
        }
        kinds = {
            owner: next((kind for kind, members in KINDS.items() if members & own), "other")
            for owner, own in names.items()
        }
        for item in items:
            if item.cls in kinds:
                self.report.kinds[item.nodeid] = kinds[item.cls]
        if names:
            is_ours = set(kinds.values()) != {"other"}
            wanted = [
                item
                for item in items
                if is_ours and item.cls in kinds and hasattr(GenerationTesterMixin, item.name)
            ]
            config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
            items[:] = wanted
        if self.way != STOCK:
            for owner in {
                base for classes in owners.values() for each in classes for base in each.__mro__
            }:
                if "generate" in vars(owner) and not hasattr(
                    owner.generate, "__signature__"
                ):  # Whisper's is a mixin's
                    self._patch(owner)

    def pytest_collectreport(self, report: Any) -> None:
        """Record a file that cannot be imported as a test that fails."""
        if report.failed:
            self.report.outcomes[report.nodeid] = "failed"
            self.report.messages[report.nodeid] = short(str(report.longrepr)[-400:])

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record the outcome of one phase of a test: the worst one counts."""
        if report.when == "call" or report.outcome != "passed":
            self.report.outcomes[report.nodeid] = report.outcome
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.report.messages[report.nodeid] = short(
                crash.message if crash else str(report.longrepr)
            )

    def pytest_sessionfinish(self) -> None:
        """Write the report."""
        self.path.write_text(json.dumps(dataclasses.asdict(self.report), indent=1))


def generative_classes(owner: Any) -> list[Any]:
    """Return the model classes that a class of tests generates with."""
    if not hasattr(owner, "all_model_classes"):
        return []
    case = owner(next(name for name in dir(owner) if name.startswith("test_")))
    case.setUp()  # many take the classes from their tester
    return list(case.all_generative_model_classes)


def noisy_copy(model: Any) -> Any:
    """Return a copy of a model that drafts well, but not always right; leaves the global generator
    alone.
    """
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(NOISE * parameter.std(correction=0) * noise.to(parameter))
    return draft.eval()


def short(text: str) -> str:
    """Return a message on one line, without what differs from call to call."""
    text = " ".join(text.split()).removeprefix("stock generate runs instead, without slo_tpot: ")
    text = re.sub(r"\b[A-Z]\w+For\w+\b", "the class", re.sub(r"\d+", "N", text))
    return re.split("; (?!such)", text)[0][:200]


def pytest_configure(config: Any) -> None:
    """Register the plugin of a process that tests."""
    config.pluginmanager.register(Patched(os.environ[WAY], Path(os.environ[REPORT])))


# ---- the run


def test_files(checkout: Path, only: list[str] | None) -> list[Path]:
    """Return the files with tests of generation, those of some model families if they are given."""
    models = sorted((checkout / "tests" / "models").glob("*/test_modeling_*.py"))
    files = [
        path for path in models if any(base in path.read_text(encoding="utf-8") for base in BASES)
    ]
    if only is not None:
        return [path for path in files if path.parent.name in only]
    return [*files, checkout / "tests" / "generation" / "test_utils.py"]


def run_file(checkout: Path, file: Path, way: str, kept: Path) -> Report:
    """Return the report on one file, which is kept; a process that dies or hangs leaves one failed
    test.
    """
    name = str(file.relative_to(checkout / "tests").with_suffix("")).replace(os.sep, ".")
    path = kept / way / f"{name}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        pythonpath = os.pathsep.join([str(checkout), str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {
            WAY: way, REPORT: str(path), "PYTHONPATH": pythonpath,
            "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "scripts.transformers_tests",
            "-p",
            "no:cacheprovider",
        ]
        try:
            done = subprocess.run(
                [*command, str(file)], cwd=checkout, env=environment, timeout=TIME_LIMIT_S,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            )  # fmt: skip
            reason = f"the process ended with {done.returncode}: {done.stdout[-400:]}"
        except subprocess.TimeoutExpired:
            reason = f"no end within {TIME_LIMIT_S} s"
        if not path.exists():
            lost = Report({name: "failed"}, {name: reason})
            path.write_text(json.dumps(dataclasses.asdict(lost), indent=1))
    return Report(**json.loads(path.read_text()))


def merged(reports: list[Report]) -> Report:
    """Return several reports as one."""
    total = Report()
    for report in reports:
        for field in ("outcomes", "messages", "kinds"):
            getattr(total, field).update(getattr(report, field))
        for field in ("speculated", "fell_back"):
            counts = collections.Counter(getattr(total, field)) + collections.Counter(
                getattr(report, field)
            )
            setattr(total, field, dict(counts))
    return total


def new_failures(stock: Report, other: Report) -> dict[str, str]:
    """Return the tests that fail only when they are speculated, with their messages."""
    return {
        test: other.messages.get(test, "")
        for test, outcome in other.outcomes.items()
        if outcome == "failed" and stock.outcomes.get(test) != "failed"
    }


def page(reports: dict[str, Report], version: str, only: list[str] | None) -> str:
    """Return the page of the documentation, of some model families if they are given."""
    of_which = "every class" if only is None else f"the classes of {', '.join(sorted(only))}"
    lines = [
        "# transformers' own tests",
        "",
        f"The tests of generation of transformers {version}, run with transformers {transformers.__version__} and "
        f"hf_slospec {hf_slospec.__version__} for {of_which} that `AutoModelForCausalLM`, "
        "`AutoModelForImageTextToText`, `AutoModelForSeq2SeqLM` or `AutoModelForSpeechSeq2Seq` loads: once as they "
        "are, and once for each way to draft (prompt lookup, and a noisy copy of the model) with `enable(model, "
        "always=True, fallback=True)` around every `generate`. Tests that need files from the Hub, or packages that "
        "are not installed, fail in all runs. *other* are classes in the same files that these do not load.",
        "",
        "This page is generated by `python -m scripts.transformers_tests CHECKOUT --write docs/transformers_tests.md`.",
        "",
        "| classes | run | passed | failed | skipped | fail only when speculated |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for kind in [*KINDS, "other"]:
        for way, report in reports.items():
            outcomes = {
                t: o for t, o in report.outcomes.items() if report.kinds.get(t, "other") == kind
            }
            count = collections.Counter(outcomes.values())
            new = sum(test in outcomes for test in new_failures(reports[STOCK], report))
            if outcomes:
                columns = [
                    kind,
                    way,
                    count["passed"],
                    count["failed"],
                    count["skipped"],
                    "-" if way == STOCK else new,
                ]
                lines.append(f"| {' | '.join(map(str, columns))} |")
    ways = [way for way in reports if way != STOCK]
    lines += ["", f"| calls of `generate` | {' | '.join(ways)} |", f"| --- |{' --- |' * len(ways)}"]
    counts = [reports[way].speculated for way in ways]
    speculated = [f"{sum(count.values())}, of {len(count)} classes" for count in counts]
    lines.append(f"| speculated | {' | '.join(speculated)} |")
    reasons = collections.Counter[str]()
    for way in ways:
        reasons.update(reports[way].fell_back)
    for reason, _ in reasons.most_common():
        numbers = " | ".join(str(reports[way].fell_back.get(reason, 0)) for way in ways)
        lines.append(f"| fell back: {reason.replace('|', '/')} | {numbers} |")
    for way in ways:
        if new := new_failures(reports[STOCK], reports[way]):
            lines += ["", f"Fail only when speculated by {way}:", ""]
            lines += [f"- `{test}`: {message}" for test, message in new.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkout", type=Path, help="folder of transformers' sources, of the installed version"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="FAMILY", help="folders of tests/model, such as git"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument(
        "--kept", type=Path, default=ROOT / "build" / "transformers_tests", help="folder of reports"
    )
    parser.add_argument("--write", type=Path, help="file for the table")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    found = re.search(r'version="(.+?)"', (checkout / "setup.py").read_text(encoding="utf-8"))
    version = found[1] if found else "of unknown version"
    if version != transformers.__version__:
        print(
            f"the checkout is transformers {version}; {transformers.__version__} is installed",
            flush=True,
        )
    files = test_files(checkout, options.only)
    by_way: dict[str, list[Report]] = {way: [] for way in (STOCK, *options.ways)}
    for number, file in enumerate(files, 1):
        for way, reports in by_way.items():
            reports.append(run_file(checkout, file, way, options.kept))
        new = {way: new_failures(by_way[STOCK][-1], reports[-1]) for way, reports in by_way.items()}
        print(
            f"{number}/{len(files)} {file.stem}: {len(by_way[STOCK][-1].outcomes)} tests",
            flush=True,
        )
        for way, failures in new.items():
            for test, message in failures.items():
                print(f"  fails only by {way}: {test}: {message}", flush=True)
    table = page({way: merged(reports) for way, reports in by_way.items()}, version, options.only)
    print(table)
    if options.write is not None:
        options.write.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
