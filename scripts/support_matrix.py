"""Test a tiny random model of every causal-LM and image-text class of transformers, and write
docs/support.md.

Each class runs in a separate process, so that a crash, a hang or a huge model affects no other
class."""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import functools
import json
import multiprocessing
import os
import platform
import re
import resource
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a tiny random model needs nothing from the Hub

import torch
import transformers
from transformers.modeling_layers import MtpModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import hf_slospec
from hf_slospec import (
    SLOSpecConfig,
    SLOSpecError,
    SLOSpecGenerator,
    UnsupportedInputError,
    load_drafter,
)
from hf_slospec.drafters.head import HeadMethod
from hf_slospec.drafters.methods import DraftMethod
from hf_slospec.drafters.registry import named_drafters
from hf_slospec.heads.mtp import MtpHead, ShippedMtpHead
from tests.support.toys.tiny_configs import WINDOW, tiny_config
from tests.support.toys.tiny_models import VOCAB, sharpened

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "build" / "support.json"
# few: with each of further drafters
NEW_TOKENS = 36
FEW_TOKENS = 12
PROMPT_LENGTHS = (12, 25)
MAX_PARAMETERS = 50_000_000
MAX_MEMORY = 12 << 30
TIME_LIMIT_S = 240
SEEDS = (0, 1, 2)
RANK = ("wrong", "exact", "refused", "untested")
NEAR_TIE = 1e-4  # logits this close may change order with the order of a sum
OPTIONS = dict(max_new_tokens=NEW_TOKENS, pad_token_id=0, eos_token_id=2)
SAMPLING = dict(do_sample=True, temperature=0.8, top_k=30)

CODEBOOKS = "decodes several audio codebooks at once, with a generate of its own"
ASSISTANT = "drafts from the KV of the Gemma 4 model that it assists; does not decode alone"
UNTESTABLE = {
    "Gemma3nForConditionalGeneration": "its vision tower needs timm; its text decoder is Gemma3nForCausalLM",
    "Gemma4AssistantForCausalLM": ASSISTANT,
    "Gemma4UnifiedAssistantForCausalLM": ASSISTANT,
    "MusicgenForCausalLM": CODEBOOKS,
    "MusicgenMelodyForCausalLM": CODEBOOKS,
}


# Auto classes by what the page calls their models. A class of both is tested in both ways and
# listed with the first.
MAPPINGS = {
    "causal-LM": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "image-text": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}


class UntestableError(Exception):
    """The class cannot be tested; the message has the reason."""


class DifferentError(Exception):
    """An output differs from stock's, with ``gap`` between its two highest logits there; the
    message says where.
    """

    def __init__(self, kind: str, row: int, token: int, gap: float):
        super().__init__(
            f"{kind}: row {row} differs from stock at new token {token} (top-2 gap {gap:.1e})"
        )
        self.is_near_tie = gap < NEAR_TIE


def model_types(kind: str) -> dict[str, list[str]]:
    """Return the model types that load each class of one of the ``MAPPINGS``, by class name."""
    types: dict[str, list[str]] = collections.defaultdict(list)
    for model_type, names in MAPPINGS[kind].items():
        for name in [names] if isinstance(names, str) else names:
            types[name].append(model_type)
    return dict(sorted(types.items()))


def count_parameters(model_class: Any, config: Any) -> int:
    """Return the number of parameters, or 0 if the model cannot be created without memory for them."""
    try:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in model_class(config).parameters())
    except (
        RuntimeError,
        NotImplementedError,
    ):  # the constructor needs values; the memory limit applies
        return 0


def ragged_prompts(seed: int) -> list[torch.Tensor]:
    """Return three prompts of different lengths, each [1, length] int64."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(*PROMPT_LENGTHS, (3,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (1, length), generator=generator) for length in lengths]


def left_padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``input_ids`` and ``attention_mask`` of prompts, each [num_rows, longest] int64."""
    longest = max(row.shape[1] for row in rows)
    pad = functools.partial(torch.nn.functional.pad, value=0)
    ids = torch.cat([pad(row, (longest - row.shape[1], 0)) for row in rows])
    mask = torch.cat([pad(torch.ones_like(row), (longest - row.shape[1], 0)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def generated(generate: Any, rows: list[torch.Tensor], **options: Any) -> list[list[int]]:
    """Return the new tokens of each row, up to its end-of-text token."""
    torch.manual_seed(7)
    inputs = left_padded(rows)
    out = generate(**inputs | OPTIONS | options)
    new = out[:, inputs["input_ids"].shape[1] :].tolist()
    return [tokens[: tokens.index(2) + 1] if 2 in tokens else tokens for tokens in new]


@torch.no_grad()
def margin(model: Any, prompt: torch.Tensor, tokens: list[int]) -> float:
    """Return the difference of the two highest logits of stock after ``prompt`` and ``tokens``."""
    ids = torch.cat((prompt, torch.tensor([tokens], dtype=torch.int64)), dim=1)
    best, second = model(input_ids=ids).logits[0, -1].topk(2).values.tolist()
    return best - second


def first_difference(stock: list[list[int]], other: list[list[int]]) -> tuple[int, int] | None:
    """Return (row, index of the new token) of the first difference of two outputs; None if they are
    equal.
    """
    for row, (left, right) in enumerate(zip(stock, other, strict=True)):
        if left != right:
            pairs = zip(left, right, strict=False)
            return row, next(
                (i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right))
            )
    return None


def short(error: BaseException) -> str:
    """Return type and message of an error, truncated, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}{'…' if len(text) > 160 else ''}"


@dataclasses.dataclass
class Verdict:
    """Result for one class."""

    status: str  # with text alone: exact, refused, untested or wrong
    notes: list[str] = dataclasses.field(default_factory=list)
    images: str = "-"  # the same with images; "-": the class takes none
    drafters: list[str] = dataclasses.field(default_factory=list)  # that decode as stock does


def verdict_on(name: str) -> Verdict:
    """Build a tiny model of a class and compare its outputs with and without speculation."""
    verdict = verdict_on_text(name)
    if name in model_types("image-text"):
        verdict.images, notes = verdict_on_images(with_images(name))
        verdict.notes += notes
    return verdict


def verdict_on_text(name: str) -> Verdict:
    """Return the verdict on text alone."""
    if name in UNTESTABLE:
        return Verdict("untested", [UNTESTABLE[name]])
    try:
        model_class = getattr(transformers, name)
        config = (
            tiny_config(model_class.config_class)
            if name in model_types("causal-LM")
            else image_config_of(name)
        )
        if (count := count_parameters(model_class, config)) > MAX_PARAMETERS:
            raise UntestableError(f"no tiny model: {count / 1e6:.0f} M parameters")
        sharpened(lambda: model_class(config), 0)
    except UntestableError as why:
        return Verdict("untested", [str(why)])
    except Exception as error:  # noqa: BLE001 - constructors may raise anything
        return Verdict("untested", [f"the tiny model cannot be built: {short(error)}"])
    notes: list[str] = []
    for seed in SEEDS:
        model, draft = (
            sharpened(lambda: model_class(config), seed, noise) for noise in (0.0, 0.03)
        )
        try:
            verdict, is_near_tie = compare(
                name, model, draft, without_placeholders(ragged_prompts(seed), config)
            )
        except UntestableError as why:
            return Verdict("untested", [str(why)])
        if not is_near_tie:
            return dataclasses.replace(verdict, notes=notes[:1] + verdict.notes)
        notes = ["differed from stock at a near-tie with another seed"]
    return verdict


def without_placeholders(rows: list[torch.Tensor], config: Any) -> list[torch.Tensor]:
    """Return prompts without the tokens that stand for images, sounds and their ends."""
    configs = [config, *(getattr(config, name, None) for name in type(config).sub_configs)]
    fields = [
        (field, value) for own in configs if own is not None for field, value in vars(own).items()
    ]
    special = [
        value
        for field, value in fields
        if field.endswith(("token_id", "token_index")) and type(value) is int
    ]
    return [torch.where(torch.isin(row, torch.tensor([*special, -1])), 3, row) for row in rows]


def check_equal(
    model: Any, kind: str, batch: list[torch.Tensor], expected: list[list[int]], got: Any
) -> None:
    """Raise DifferentError unless two outputs are equal."""
    if (difference := first_difference(expected, got)) is not None:
        row, token = difference
        raise DifferentError(kind, row, token, margin(model, batch[row], expected[row][:token]))


def compare(name: str, model: Any, draft: Any, rows: list[torch.Tensor]) -> tuple[Verdict, bool]:
    """Return the verdict for one model, and whether its difference from stock is a near-tie."""
    stock = functools.partial(stock_generate, model)
    try:
        alone = [generated(stock, [row])[0] for row in rows]
    except Exception as error:  # noqa: BLE001 - stock may raise anything
        raise UntestableError(f"stock generate fails on the tiny model: {short(error)}") from None
    batches = [rows[:1]]
    notes = []
    try:
        padded_difference = first_difference(alone, generated(stock, rows))
    except Exception as error:  # noqa: BLE001 - stock may raise anything
        notes.append(f"batch 1 only: stock fails on a padded batch ({short(error)})")
    else:
        if padded_difference is None:
            batches.append(rows)
        else:
            row, token = padded_difference
            if margin(model, rows[row], alone[row][:token]) < NEAR_TIE:
                return Verdict(
                    "untested",
                    ["stock's padded rows differ from the same rows alone at a near-tie"],
                ), True
            notes.append(
                "batch 1 only: stock itself decodes a padded row differently from the row alone"
            )
    if len({token for tokens in alone for token in tokens}) < 6:
        notes.append("weak test: the tiny model repeats itself")
    try:
        ours = SLOSpecGenerator(model, draft, config=drafting())
        for batch in batches:
            for sampling in ({}, SAMPLING):
                kind = f"{'sampled' if sampling else 'greedy'}, batch of {len(batch)}"
                expected = generated(stock, batch, **sampling)
                try:
                    got = generated(ours.generate, batch, **sampling)
                except UnsupportedInputError:
                    if len(batch) == 1:
                        raise
                    notes.append("batch 1 only: padded rows are refused")
                    break
                check_equal(model, kind, batch, expected, got)
        drafters, reasons = working_drafters(name, model, rows[0])
    except DifferentError as difference:
        return Verdict("wrong", [str(difference), *notes]), difference.is_near_tie
    except SLOSpecError as error:
        return Verdict("refused", [reason_of(error, name)]), False
    except Exception as error:  # noqa: BLE001 - any other error of speculation is a bug
        return Verdict("wrong", [f"error {short(error)}", *notes]), False
    return Verdict("exact", notes + reasons, drafters=["assistant", *drafters]), False


def stock_generate(model: Any, **options: Any) -> Any:
    """Return the output of stock ``generate``; raises AttributeError for classes that have none."""
    return type(model).generate(model, **options)


def drafting() -> SLOSpecConfig:
    """Return a config with draft trees in every step."""
    return SLOSpecConfig(policy="adaserve", check_invariants=True, token_budget=40)


def reason_of(error: BaseException, name: str) -> str:
    """Return why a model was refused, without its name and the advice."""
    reason = re.sub(rf"^{name} (cannot be packed: )?", "", " ".join(str(error).split()))
    return re.split("; (?!such)", reason)[0]


def working_drafters(name: str, model: Any, row: torch.Tensor) -> tuple[list[str], list[str]]:
    """Return the drafters without trained files by which a prompt is decoded as by stock, and why
    others do not.

    Raises:
        DifferentError: a drafter changes the output.
    """
    batch = [torch.cat((row, row), dim=1)]  # so that the text itself has something to propose
    few = {"max_new_tokens": FEW_TOKENS}
    expected = generated(functools.partial(stock_generate, model), batch, **few)
    works = list[str]()
    reasons = list[str]()
    for kind in named_drafters():
        try:
            if (
                method := random_mtp(model) if kind == "mtp" else load_drafter(kind, model)
            ) is None:
                continue
            got = generated(
                SLOSpecGenerator(model, drafter=method, config=drafting()).generate, batch, **few
            )
        except (
            SLOSpecError,
            UntestableError,
            ImportError,
        ) as error:  # ImportError: the extra is not installed
            reasons.append(f"{kind}: {reason_of(error, name)}")
            continue
        check_equal(model, f"drafter {kind}, greedy", batch, expected, got)
        works.append(kind)
    return works, reasons


def random_mtp(model: Any) -> DraftMethod | None:
    """Return a random MTP layer in the layout in which the class has it; None if it has none.

    Checkpoints hold these layers and models do not, so that a tiny random model has no files to
    load one from."""
    head: MtpHead | ShippedMtpHead | None = None
    if hasattr(model.config.get_text_config(decoder=True), "num_mtp_layers"):
        try:
            layers = MtpModel(model, 1)
        except Exception as error:
            raise UntestableError(
                f"untested, transformers cannot build the layer: {short(error)}"
            ) from error
        head = ShippedMtpHead(model, layers)
    elif any(
        pattern.startswith("^mtp") for pattern in model._keys_to_ignore_on_load_unexpected or ()
    ):
        head = MtpHead(model)  # the prefix of Qwen3-Next
    if head is None:
        return None
    targets = {id(parameter) for parameter in model.parameters()}
    torch.manual_seed(0)
    for parameter in head.parameters():
        if id(parameter) not in targets:
            torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    return HeadMethod(head.eval())


def image_config_of(name: str) -> Any:
    """Return a tiny config of an image-text class."""
    from tests.support.toys.tiny_image_models import image_config

    return image_config(name)


def with_images(name: str) -> tuple[Any, dict[str, Any]] | str:
    """Return a tiny model and the inputs of prompts with images, or why there are none."""
    try:
        from tests.support.toys.tiny_image_models import image_inputs
    except ImportError as error:
        return short(error)
    try:
        return image_inputs(name)
    except Exception as error:  # noqa: BLE001 - constructors and encoders may raise anything
        return short(error)


@torch.no_grad()
def verdict_on_images(pictured: tuple[Any, dict[str, Any]] | str) -> tuple[str, list[str]]:
    """Return the status of one model with images, and notes."""
    if isinstance(pictured, str):
        return "untested", [f"images: {pictured}"]
    model, inputs = pictured
    torch.manual_seed(0)
    draft = copy.deepcopy(model)
    for parameter in draft.parameters():
        parameter.data.add_(0.03 * torch.randn_like(parameter))
    prompt_len = inputs["input_ids"].shape[1]
    for sampling in ({}, SAMPLING):
        kind = f"images, {'sampled' if sampling else 'greedy'}"
        options = inputs | OPTIONS | sampling | {"return_dict_in_generate": True}
        torch.manual_seed(7)
        try:
            stock = stock_generate(model, **copy.deepcopy(options), output_logits=True)
        except Exception as error:  # noqa: BLE001 - stock may raise anything
            return "untested", [f"{kind}: stock generate fails: {short(error)}"]
        torch.manual_seed(7)
        try:
            got = SLOSpecGenerator(model, draft, config=drafting()).generate(
                **copy.deepcopy(options)
            )
        except SLOSpecError as error:
            return "refused", [f"images: {reason_of(error, type(model).__name__)}"]
        except Exception as error:  # noqa: BLE001 - any other error of speculation is a bug
            return "wrong", [f"{kind}: error {short(error)}"]
        expected, ours = (output.sequences[:, prompt_len:].tolist() for output in (stock, got))
        if (difference := first_difference(expected, ours)) is not None:
            row, token = difference
            best, second = stock.logits[token][row].topk(2).values.tolist()
            different = DifferentError(kind, row, token, best - second)
            return "untested" if different.is_near_tie else "wrong", [str(different)]
    return "exact", []


def in_child(name: str, answer: Connection) -> None:
    """Test one class under a memory limit, without output, and send its verdict."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    with (
        open(os.devnull, "w") as devnull,
        contextlib.redirect_stdout(devnull),
        contextlib.redirect_stderr(devnull),
    ):
        answer.send(dataclasses.asdict(verdict_on(name)))


def lost(name: str, reason: str) -> Verdict:
    """Return the verdict on a class whose process sent none."""
    return Verdict("untested", [reason], "untested" if name in model_types("image-text") else "-")


def tested(names: list[str], jobs: int) -> Iterator[tuple[str, Verdict, float]]:
    """Yield every class with its verdict and the seconds it took, in order of completion."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "torch", "transformers.generation", "hf_slospec"])
    waiting = collections.deque(names)
    running: dict[Connection, tuple[str, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.popleft()
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(target=in_child, args=(name, sender))
            child.start()
            sender.close()
            running[receiver] = name, child, time.monotonic()
        answered = wait(list(running), timeout=1.0)
        for connection, (name, child, start) in list(running.items()):
            elapsed_s = time.monotonic() - start
            if connection in answered:
                try:
                    verdict = Verdict(**connection.recv())
                except EOFError:
                    child.join()
                    verdict = lost(name, f"the test died (exit code {child.exitcode})")
            elif elapsed_s > TIME_LIMIT_S:
                verdict = lost(name, f"no verdict within {TIME_LIMIT_S} s")
            else:
                continue
            child.kill()
            child.join()
            del running[connection]
            yield name, verdict, elapsed_s


def all_types() -> dict[str, list[str]]:
    """Return the model types that load each class of any kind, by class name."""
    types: dict[str, set[str]] = collections.defaultdict(set)
    for kind in MAPPINGS:
        for name, own in model_types(kind).items():
            types[name].update(own)
    return {name: sorted(own) for name, own in sorted(types.items())}


def counts(results: dict[str, Verdict]) -> dict[str, collections.Counter[str]]:
    """Return the numbers of classes by status: of each kind with text alone, and of image-text
    classes with images.
    """
    found = {
        kind: collections.Counter(
            results[name].status for name in model_types(kind) if name in results
        )
        for kind in MAPPINGS
    }
    images = (results[name].images for name in model_types("image-text") if name in results)
    return found | {"image-text, with images": collections.Counter(images)}


def page(results: dict[str, Verdict]) -> str:
    """docs/support.md."""
    columns = counts(results)
    not_run = [
        f"`{name}`"
        for name in named_drafters()
        if not any(name in verdict.drafters for verdict in results.values())
    ]
    lines = [
        "# Supported model classes",
        "",
        "These tables list every class that `AutoModelForCausalLM` and `AutoModelForImageTextToText` of transformers "
        f"{transformers.__version__} load, tested with hf_slospec {hf_slospec.__version__} (PyTorch "
        f"{torch.__version__}, Python {platform.python_version()}, fp32 on CPU) on a tiny random model of it and a "
        "noisy copy as the draft.",
        "",
        "- **Text**: prompts without images. **Exact** means that greedy and sampled outputs equal those of stock "
        f"`generate` token for token over {NEW_TOKENS} new tokens, for a single prompt and for a left-padded batch of "
        f"three; models with a sliding window use a window of {WINDOW} tokens, shorter than every prompt. **Refused** "
        "means that `SLOSpecGenerator` (or `enable`) raises an error with the reason before any token is decoded; the "
        "notes give the reason. **Untested** means that no tiny model of the class could be built or run by stock "
        "`generate` itself. **Wrong** is a bug.",
        "- **Images**: the same for one prompt with an image, greedy and sampled. **-** means that "
        "`AutoModelForImageTextToText` does not load the class.",
        "- **Drafters**: those that were run on the tiny model and gave stock's greedy output: `assistant` is the "
        "noisy copy, `lookup` and `suffix` draft from a prompt that repeats itself, and `mtp` is a random MTP layer, "
        "where checkpoints of the class have one. Drafters that need trained files ([EAGLE-3, DFlash, "
        "...](drafters.md)) are not part of this test"
        + (
            f", and {', '.join(not_run)} was not part of the run that is shown." if not_run else "."
        ),
        "",
        "A class is exact for the settings tested here. A checkpoint may use other settings, so each model is checked "
        "by a trial when it is enabled. `python -m hf_slospec check org/name` compares a checkpoint of yours with "
        "stock `generate` and prints a report ([Check your model](own_models.md#check-your-model)). "
        "[Encoder-decoders](encoder_decoders.md) such as Whisper, BART and T5 have a page of their own.",
        "",
        "**Attention.** The tests above use `sdpa`. `triton` (CUDA, bf16 or fp16; the default there) does everything "
        "but heads larger than 256 and more than 64 query heads per KV head; `flash` attends to committed tokens by "
        "flash-attention kernels, and leaves to `sdpa` layers with K and V of different sizes (latent attention as in "
        "DeepSeek), with heads larger than 256 or not a multiple of 8, and with softcap (Gemma 2) unless a "
        "package of FlashAttention is installed. Both use `sdpa` for layers in fp32. `python -m pytest -m gpu` "
        "compares them with the reference for every class above on a GPU.",
        "",
        "This page is generated by `python -m scripts.support_matrix --jobs 2 --write docs/support.md`. `--resume` "
        "continues an interrupted run, and `--only NAME ...` tests single classes again; both keep the other results, "
        "from `build/support.json`.",
        "",
        f"| status | {' | '.join(columns)} |",
        f"| --- |{' --- |' * len(columns)}",
        *(
            f"| {status} | {' | '.join(str(column[status]) for column in columns.values())} |"
            for status in RANK
            if any(column[status] for column in columns.values())
        ),
        f"| all | {' | '.join(str(column.total()) for column in columns.values())} |",
    ]
    both = model_types("causal-LM").keys() & model_types("image-text").keys()
    names = {"Causal LMs": [name for name in results if name in model_types("causal-LM")]}
    names["Image-text models"] = [name for name in results if name not in model_types("causal-LM")]
    for title, own in names.items():
        lines += ["", f"## {title}", ""]
        if title == "Image-text models":
            lines += [
                f"{len(both)} more classes are listed above, as `AutoModelForCausalLM` loads them, too.",
                "",
            ]
        lines += [
            "| class | model types | text | images | drafters | notes |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        lines += table_rows({name: results[name] for name in own})
    return "\n".join(lines) + "\n"


def table_rows(results: dict[str, Verdict]) -> Iterator[str]:
    """Yield the rows of classes, wrong ones first."""
    types = all_types()
    for name, verdict in sorted(
        results.items(), key=lambda item: (RANK.index(item[1].status), item[0])
    ):
        text, images = (
            f"**{status}**" if status == "wrong" else status
            for status in (verdict.status, verdict.images)
        )
        notes = "; ".join(verdict.notes).replace("|", "\\|")
        drafters = ", ".join(verdict.drafters)
        yield f"| {name} | {', '.join(types[name])} | {text} | {images} | {drafters} | {notes} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    some = parser.add_mutually_exclusive_group()
    some.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="test these classes and keep the results of the others",
    )
    some.add_argument(
        "--resume",
        action="store_true",
        help="test the classes that an interrupted run has not tested",
    )
    parser.add_argument("--jobs", type=int, default=1, help="classes to test in parallel")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the Markdown page")
    arguments = parser.parse_args()
    if arguments.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {arguments.jobs}")
    types = all_types()
    if unknown := set(arguments.only or ()) - types.keys():
        parser.error(
            f"no causal-LM or image-text class of transformers {transformers.__version__}: {', '.join(sorted(unknown))}"
        )
    keeps = (arguments.only or arguments.resume) and RESULTS.exists()
    known = json.loads(RESULTS.read_text()) if keeps else {}
    results = {name: Verdict(**result) for name, result in known.items() if name in types}
    RESULTS.parent.mkdir(exist_ok=True)
    names = arguments.only or [name for name in types if name not in results]
    for count, (name, verdict, elapsed_s) in enumerate(tested(names, arguments.jobs), 1):
        results[name] = verdict
        content = {name: dataclasses.asdict(verdict) for name, verdict in results.items()}
        partial = RESULTS.with_suffix(".partial")  # an interrupted run leaves a whole file
        partial.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
        partial.replace(RESULTS)
        print(f"{count:3}/{len(names)} {elapsed_s:5.1f} s  {verdict.status:8} {verdict.images:8} {name}  "
              f"{', '.join(verdict.drafters)}  {'; '.join(verdict.notes)}", flush=True)  # fmt: skip
    if arguments.write:
        arguments.write.write_text(page(results))
    if wrong := [
        name for name, verdict in results.items() if "wrong" in (verdict.status, verdict.images)
    ]:
        parser.exit(1, f"wrong: {', '.join(wrong)}\n")


if __name__ == "__main__":
    main()
