"""Draw the pictures of the documentation: ``python -m docs.pictures``, all or those named.

Those of concepts.md, replicas.md and design.md are drawn here. The others are of measurements: what
drew them when they were measured draws them again from the files in benchmarks/results. What is in
those of concepts.md comes from the library: trees that the embedded draft proposes for
real prompts, the mask of a real packed forward, the nodes that the default policy selects at
measured step times, the steps of a real run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
import torch
from matplotlib import pyplot
from matplotlib.patches import Patch, Rectangle

from benchmarks import serving, spec_bench
from docs.tables import result
from hf_slospec import SLOSpecConfig, SLOSpecGenerator, TokenTree, load_tiny_pair
from hf_slospec.drafters.assistant import AssistantDrafter
from hf_slospec.drafters.methods import Room
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.interfaces import Plan
from hf_slospec.engine.latency_curves import ForwardCost, LatencyCurve
from hf_slospec.model.attention.sdpa import masked_attention, plan_sequences
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.sequences import Sequences
from hf_slospec.policies.urgency import urgency
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.tree.select import best_ratio_nodes
from hf_slospec.tree.tree import ROOT, Forest

HERE = Path(__file__).parent
PROFILE = HERE.parent / "benchmarks" / "results" / "profile-cpu-2core-0.6B-bf16.json"
PROMPT = "class Stack:\n    def __init__(self"
ROWS = (PROMPT, "    def test_empty(self):\n        self.assertEqual(", "def fibonacci(n):")
DEPTH = 4
WIDTH = 3

# Okabe and Ito's colours, which colour-blind people can tell apart.
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
GREY = "#767676"
PALE = "#E6E6E6"
ROW_COLOURS = (BLUE, ORANGE, GREEN)


class Drawer:
    """The embedded pair, its candidate trees and its choices."""

    def __init__(self) -> None:
        self.target, self.draft, self.tokenizer = load_tiny_pair()

    def request(self, text: str, index: int = 0) -> Request:
        return Request(index, RequestParams(self.tokenizer(text)["input_ids"], max_new_tokens=64))

    def candidates(self, requests: Sequence[Request], width: int = WIDTH) -> Sequence[TokenTree]:
        drafter = AssistantDrafter(
            PackedModel(self.draft), Room(DEPTH * width, self.target.config.vocab_size)
        )
        return drafter.draft(requests, Plan(DEPTH, width))

    def shown(self, token: int) -> str:
        """Return a token as a label with visible spaces and line ends."""
        return self.tokenizer.decode([token]).replace("\n", "↵").replace(" ", "·")

    def walk(self, request: Request, tree: TokenTree) -> tuple[list[int], str]:
        """Return the nodes that plain decoding follows, and the token that it chooses after the
        last one.
        """
        ids = torch.tensor([request.tokens])
        out = self.target.generate(ids, max_new_tokens=tree.max_depth + 1, do_sample=False)[
            0, ids.shape[1] :
        ].tolist()
        path = [ROOT]
        for token in out:
            child = tree.child(path[-1], token)
            if child is None:
                return path, self.shown(token)
            path.append(child)
        raise AssertionError("the text is one token longer than the tree is deep")


def boxed(axes: Any, x: float, y: float, text: str, **style: Any) -> None:
    box = {
        "boxstyle": "round,pad=0.35",
        "facecolor": style.pop("face"),
        "edgecolor": style.pop("edge", GREY),
    }
    box |= {"linestyle": style.pop("line", "-"), "linewidth": style.pop("line_width", 1.0)}
    axes.text(x, y, text, ha="center", va="center", family="monospace", bbox=box, **style)


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def draw_tree(drawer: Drawer) -> None:
    request = drawer.request(PROMPT)
    (tree,) = drawer.candidates([request])
    path, bonus = drawer.walk(request, tree)
    figure, axes = pyplot.subplots(figsize=(9.5, 3.6), layout="constrained")
    places = {ROOT: (0.0, 1.0)}
    for depth in range(1, tree.max_depth + 1):
        # Children in the order of their parents, so that few edges cross.
        level = sorted(
            np.flatnonzero(tree.depths == depth), key=lambda v: (-places[tree.parents[v]][1], v)
        )
        places |= {
            int(v): (float(depth), float(len(level) - 1 - place)) for place, v in enumerate(level)
        }
    places[len(places)] = places[path[-1]][0] + 1.0, places[path[-1]][1]
    for node, (x, y) in list(places.items())[1:]:
        is_bonus = node == tree.num_nodes
        parent = path[-1] if is_bonus else int(tree.parents[node])
        on_path = is_bonus or node in path
        ends = [places[parent][0], x], [places[parent][1], y]
        axes.plot(
            *ends, color=BLUE if on_path else "#B0B0B0", linewidth=2.5 if on_path else 1.0, zorder=0
        )
    for node, (x, y) in places.items():
        if node == ROOT:
            boxed(axes, x, y, drawer.shown(request.tokens[-1]) + "\nroot", face=PALE, fontsize=10)
        elif node == tree.num_nodes:
            boxed(
                axes,
                x,
                y,
                bonus + "\nbonus",
                face="#F7DFA8",
                edge=ORANGE,
                line_width=2,
                fontsize=10,
            )
        else:
            prob = tree.path_probs[node]
            text = f"{drawer.shown(int(tree.tokens[node]))}\n{'<0.01' if prob < 0.01 else f'{prob:.2f}'}"
            style = (
                {"face": "#CCE3F2", "edge": BLUE, "line_width": 2}
                if node in path
                else {"face": "white"}
            )
            boxed(axes, x, y, text, fontsize=10, **style)
    for x, text in enumerate(
        ("last token", "depth 1", "depth 2", "depth 3", "depth 4", "from the target")
    ):
        axes.text(x, 2.62, text, ha="center", color=GREY)
    axes.set(xlim=(-0.5, 5.5), ylim=(-0.45, 2.85))
    axes.axis("off")
    save(figure, "token-tree.png")


def draw_packed_batch(drawer: Drawer) -> None:
    requests = [
        drawer.request(text, index)
        for index, text in enumerate(("for i in range(", "with open(path"))
    ]
    trees = [
        tree.subtree(np.arange(nodes))
        for tree, nodes in zip(drawer.candidates(requests), (6, 5), strict=True)
    ]
    packed = PackedModel(drawer.target)
    batches = []
    sequences = Sequences(packed, max_nodes=max(tree.num_nodes for tree in trees))
    sequences.reserve(requests)
    for request in requests:
        sequences.prefill(request, len(request.tokens) - 1)

    def attend(query: Any, keys: Any, values: Any, batch: Any, *rest: Any) -> Any:
        batches.append(batch)
        return masked_attention(query, keys, values, batch, *rest)

    packed.backend = attend
    parts = [
        sequences.chain_and_tree(r, r.tokens[-1:], tree)
        for r, tree in zip(requests, trees, strict=True)
    ]
    sequences.forward(parts, torch.arange(sum(tree.num_nodes for tree in trees)))

    spans = batches[0].spans
    plan = plan_sequences(batches[0], None, None, 1, torch.float32)
    num_tokens = spans[-1].end
    num_keys = sum(span.num_visible for span in spans)
    figure, axes = pyplot.subplots(figsize=(10, 6.4), layout="constrained")
    columns = list[str]()
    left = 0
    rows = zip(spans, plan.sequences, requests, trees, ROW_COLOURS, strict=False)
    for span, keys, request, tree, colour in rows:
        is_seen = keys.seen(None, None).numpy()  # [num_tokens, num_visible] of this request
        committed = span.sequence.length
        for line, column in np.argwhere(is_seen):
            alpha = 0.35 if column < committed else 1.0
            axes.add_patch(
                Rectangle((left + column, span.begin + line), 1, 1, facecolor=colour, alpha=alpha)
            )
        end = left + span.num_visible
        axes.add_patch(
            Rectangle(
                (left, span.begin),
                end - left,
                span.num_tokens,
                fill=False,
                edgecolor=colour,
                linewidth=2,
            )
        )
        columns += [drawer.shown(token) for token in (*request.tokens[:-1], *tree.tokens)]
        for begin, stop, name in (
            (left, left + committed, "committed"),
            (left + committed, end, "this step"),
        ):
            axes.annotate(
                "",
                (begin + 0.1, -0.35),
                (stop - 0.1, -0.35),
                arrowprops={"arrowstyle": "<->", "color": GREY},
            )
            axes.text((begin + stop) / 2, -0.6, name, ha="center", color=GREY)
        axes.text(
            (left + end) / 2,
            -1.35,
            f"keys of request {request.index + 1}",
            ha="center",
            color=colour,
            weight="bold",
        )
        left = end
    labels = []
    for tree, part in zip(trees, parts, strict=True):
        for node, position in enumerate(part.positions.tolist()):
            name = (
                "root"
                if node == ROOT
                else f"child of {drawer.shown(int(tree.tokens[tree.parents[node]]))}"
            )
            labels.append(f"{name}   {drawer.shown(int(tree.tokens[node]))}   position {position}")
    axes.set(xlim=(0, num_keys), ylim=(num_tokens, -1.9))
    axes.set_xticks(np.arange(num_keys) + 0.5, columns, rotation=90, family="monospace")
    axes.set_yticks(np.arange(num_tokens) + 0.5, labels, family="monospace")
    axes.hlines(range(num_tokens + 1), 0, num_keys, color=PALE, linewidth=0.6, zorder=0)
    axes.vlines(range(num_keys + 1), 0, num_tokens, color=PALE, linewidth=0.6, zorder=0)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("keys that a token may attend to")
    axes.set_ylabel("tokens of the packed batch, in order")
    save(figure, "packed-batch.png")


def step_seconds(num_rows: int) -> Any:
    """Return the seconds of a step with four draft levels by its nodes, measured for the 0.6 B pair
    on two cores.
    """
    results = json.loads(PROFILE.read_text())["results"]
    costs = StepCosts(*(cost_of(results[name]["fit"]) for name in ("target", "draft")))
    draft_s = costs.draft_s(num_rows, DEPTH, WIDTH)
    return lambda num_nodes: draft_s + costs.verify_s(num_nodes, num_rows)


def cost_of(fit: dict[str, Any]) -> ForwardCost:
    curve = LatencyCurve(tuple(fit["tokens"]), tuple(ms / 1e3 for ms in fit["ms"]))
    return ForwardCost(curve, fit["ms_per_further_request"] / 1e3, fit["ms_per_1000_keys"] / 1e6)


def draw_budget(drawer: Drawer) -> None:
    forest = Forest.of(
        drawer.candidates([drawer.request(text, index) for index, text in enumerate(ROWS)])
    )
    seconds = step_seconds(len(ROWS))
    best = int(best_ratio_nodes(forest, forest.path_probs, len(forest.depths), seconds).sum())
    order = forest.canonical(forest.path_probs)
    nodes = np.arange(len(ROWS), len(forest.depths) + 1)
    tokens = len(ROWS) + np.concatenate(([0.0], np.cumsum(forest.path_probs[order])))
    step_s = seconds(nodes)
    figure, panels = pyplot.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
    for panel, values, title, colour in zip(
        panels,
        (tokens, step_s * 1e3, tokens / step_s),
        (
            "tokens expected of the step",
            "milliseconds the step takes",
            "expected tokens per second",
        ),
        (BLUE, ORANGE, GREEN),
        strict=True,
    ):
        panel.plot(nodes, values, color=colour, linewidth=2)
        panel.axvline(best, color=GREY, linestyle="--", linewidth=1)
        panel.plot(best, values[nodes == best], "o", color=colour)
        panel.set(title=title, xlabel="nodes verified, over all rows", ylim=(0, values.max() * 1.1))
        panel.grid(alpha=0.3)
    panels[2].text(best + 0.8, 2, f"best: {best} nodes", color=GREY)
    save(figure, "budget.png")


def draw_selection(drawer: Drawer) -> None:
    requests = [drawer.request(text, index) for index, text in enumerate(ROWS)]
    trees = drawer.candidates(requests)
    forest = Forest.of(trees)
    seconds = step_seconds(len(ROWS))
    late = np.array([-np.inf, -2.0, 2.0])  # tokens: no SLO, ahead, late
    weights = urgency(late, np.zeros(3), np.zeros(3, np.bool_), SLOSpecConfig().urgency)
    names = ("no SLO", "ahead", "2 tokens late")
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained", sharey=True)
    for panel, w, title in zip(
        panels, (np.ones(3), weights), ("without SLOs", "with SLOs"), strict=True
    ):
        taken = best_ratio_nodes(
            forest, w[forest.tree_of] * forest.path_probs, len(forest.depths), seconds
        )
        x = 0.0
        ticks = []
        for index, (name, colour) in enumerate(zip(names, ROW_COLOURS, strict=True)):
            own = np.flatnonzero((forest.tree_of == index) & (forest.depths > 0))
            own = own[np.argsort(-forest.path_probs[own], kind="stable")]
            for place, node in enumerate(own):
                style = (
                    {"facecolor": colour}
                    if taken[node]
                    else {"facecolor": "white", "hatch": "////"}
                )
                panel.bar(
                    x + place,
                    forest.path_probs[node],
                    width=0.8,
                    edgecolor=colour,
                    linewidth=0.8,
                    **style,
                )
            expected = 1.0 + forest.path_probs[own][taken[own]].sum()
            standing = f"\n{name}, w = {w[index]:.1f}" if w is weights else ""
            label = f"row {index + 1}{standing}\n{counted(taken[own].sum(), 'node')}, {expected:.1f} tokens"
            ticks.append((x + (len(own) - 1) / 2, label))
            x += len(own) + 1.5
        panel.set_xticks(*zip(*ticks, strict=True))
        panel.tick_params(axis="x", length=0)
        panel.set_title(f"{title}: {int(taken.sum()) - len(ROWS)} nodes beside the roots")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("path probability of a candidate node")
    handles = [
        Patch(facecolor=GREY, edgecolor=GREY),
        Patch(facecolor="white", edgecolor=GREY, hatch="////"),
    ]
    figure.legend(
        handles, ("verified", "left out"), loc="outside lower center", ncols=2, frameon=False
    )
    save(figure, "selection.png")


def draw_steps(drawer: Drawer) -> None:
    gen = SLOSpecGenerator(
        drawer.target,
        drawer.draft,
        drawer.tokenizer,
        SLOSpecConfig(policy="fixed", max_depth=DEPTH, max_width=WIDTH),
    )
    with gen:
        handle = gen.submit(PROMPT, max_new_tokens=36, do_sample=False)
        handle.result()
    tokens = handle.token_ids
    is_drafted = handle.from_draft
    begin = 0
    figure, axes = pyplot.subplots(
        figsize=(9, 0.36 * len(handle.commits) + 0.9), layout="constrained"
    )
    for line, commit in enumerate(handle.commits):
        x = 0.0
        for token, drafted in zip(
            tokens[begin : commit.num_emitted], is_drafted[begin : commit.num_emitted], strict=True
        ):
            text = drawer.shown(token)
            face, edge = ("#CCE3F2", BLUE) if drafted else ("#F7DFA8", ORANGE)
            axes.add_patch(
                Rectangle((x, line + 0.1), len(text) + 1.0, 0.8, facecolor=face, edgecolor=edge)
            )
            axes.text(
                x + (len(text) + 1.0) / 2,
                line + 0.5,
                text,
                ha="center",
                va="center",
                family="monospace",
                fontsize=9,
            )
            x += len(text) + 1.5
        name = "prompt" if line == 0 else f"step {line}"
        count = counted(commit.num_emitted - begin, "token")
        axes.text(-1.0, line + 0.5, f"{name}: {count}", ha="right", va="center", color=GREY)
        begin = commit.num_emitted
    axes.set(xlim=(-13, 47), ylim=(len(handle.commits), -0.1))
    axes.axis("off")
    handles = [
        Patch(facecolor="#CCE3F2", edgecolor=BLUE),
        Patch(facecolor="#F7DFA8", edgecolor=ORANGE),
    ]
    figure.legend(handles, ("drafted and accepted", "the target's own (bonus)"), loc="outside lower center", ncols=2,
                  frameon=False)  # fmt: skip
    save(figure, "steps.png")


def draw_replicas(drawer: Drawer) -> None:
    """Draw the way of a request over replicas: offered, declined, taken, resumed."""
    figure, axes = pyplot.subplots(figsize=(10.5, 4.6), layout="constrained")
    axes.set(xlim=(0, 10.5), ylim=(-0.3, 4.6))
    axes.axis("off")
    small = {"fontsize": 9}
    boxed(axes, 0.8, 2.2, "clients\n(OpenAI)", face="white", **small)
    boxed(axes, 2.5, 2.2, "Serve's\nproxy", face="white", edge=BLUE, **small)
    boxed(
        axes,
        4.7,
        2.2,
        "front\nHTTP application\ntokenizer, answers\n\nrouter\nranks the replicas",
        face=PALE,
        **small,
    )
    states = (
        (3.9, "replica A\nbatcher, K/V", "declines: the TPOT SLO\ncannot be kept"),
        (2.2, "replica B\nbatcher, K/V", "takes it, guaranteed,\nand dies after 40 tokens"),
        (0.5, "replica C\nbatcher, K/V", "goes on from token 41;\nthe stream does not break"),
    )
    for number, (y, name, words) in enumerate(states, 1):
        colour = (GREY, ORANGE, GREEN)[number - 1]
        boxed(axes, 8.0, y, name, face="white", edge=colour, line_width=2.0, **small)
        axes.annotate(
            "",
            (7.2, y),
            (5.75, 2.2 + (y - 2.2) * 0.3),
            arrowprops={"arrowstyle": "<->", "color": colour},
        )
        axes.text(
            6.55,
            2.2 + (y - 2.2) * 0.72 + 0.16,
            f"{number}",
            color=colour,
            fontsize=11,
            ha="center",
            weight="bold",
        )
        axes.text(8.85, y, words, va="center", fontsize=8.5)
    for begin, end in ((1.25, 2.0), (3.0, 3.7)):
        axes.annotate("", (end, 2.2), (begin, 2.2), arrowprops={"arrowstyle": "<->", "color": GREY})
    axes.text(
        4.7,
        0.25,
        "every 0.5 s the replicas report load, step times,\nguaranteed SLOs and free K/V",
        ha="center",
        fontsize=8.5,
    )
    axes.text(
        4.7,
        4.2,
        "an offer has the prompt, its options,\nand the output so far",
        ha="center",
        fontsize=8.5,
    )
    save(figure, "replicas.png")


LAYERS = (  # from the outermost ring, with what is in them
    ("server, replicas, lab, training, demo, cli", "applications: on the public API"),
    ("cpu, cuda, families, heads", "plugins: paths, overrides, families, formats"),
    ("batcher", "core: SLOSpecGenerator, the batcher"),
    ("generate", "core: the drop-in for transformers' generate"),
    ("drafters", "core: draft models, lookup, registry"),
    ("model", "core: packed forwards, attention, K/V, sampling"),
    ("policies, scheduler", "core: shapes of a step; queue, guarantees"),
    ("engine", "core: the step, cost model, acceptance"),
    ("request, tree", "core: parameters, SLOs; token trees (numpy)"),
)
STEPS = ("schedule", "plan", "draft", "select", "verify", "accept", "commit", "learn")


def draw_architecture(drawer: Drawer) -> None:
    """Draw the layers, and the way of a request through them."""
    figure, axes = pyplot.subplots(figsize=(11, 5.6), layout="constrained")
    axes.set(xlim=(0, 11), ylim=(-1.0, 8.6))
    axes.axis("off")
    axes.text(2.3, 8.35, "rings: imports point inward only", ha="center", fontsize=10)
    for row, (name, words) in enumerate(LAYERS):
        y = 7.5 - row
        axes.add_patch(
            Rectangle(
                (0.1, y - 0.38), 4.5, 0.76, facecolor=PALE if row % 2 else "white", edgecolor=GREY
            )
        )
        axes.text(0.25, y + 0.13, name, fontsize=9.5, weight="bold", va="center")
        axes.text(0.25, y - 0.17, words, fontsize=8.5, va="center")
    axes.text(8.0, 8.35, "the way of a request", ha="center", fontsize=10)
    small = {"fontsize": 9}
    entrances = ((6.2, "model.generate(slo_tpot=...)"), (9.4, "submit(...), HTTP"))
    for x, text in entrances:
        boxed(axes, x, 7.5, text, face="white", edge=BLUE, **small)
    boxed(
        axes,
        7.8,
        6.2,
        "prepare the call: stock generate reads\noptions and prompt; one Request per row",
        face="white",
        **small,
    )
    for x, _ in entrances:
        axes.annotate(
            "",
            (7.8 + (x - 7.8) * 0.35, 6.65),
            (x, 7.15),
            arrowprops={"arrowstyle": "->", "color": GREY},
        )
    ends = (
        (6.2, "static scheduler:\nall rows to their ends"),
        (9.4, "continuous scheduler:\njoin, leave, SLO admission"),
    )
    for x, text in ends:
        boxed(axes, x, 4.8, text, face="white", **small)
        axes.annotate(
            "",
            (x, 5.25),
            (7.8 + (x - 7.8) * 0.35, 5.75),
            arrowprops={"arrowstyle": "->", "color": GREY},
        )
        axes.annotate(
            "",
            (7.8 + (x - 7.8) * 0.35, 3.75),
            (x, 4.35),
            arrowprops={"arrowstyle": "->", "color": GREY},
        )
    axes.add_patch(
        Rectangle((5.0, 1.55), 5.8, 2.2, facecolor="white", edgecolor=ORANGE, linewidth=2)
    )
    axes.text(
        7.9,
        3.42,
        "Engine.step(), until no request is left",
        ha="center",
        fontsize=9.5,
        weight="bold",
    )
    for index, step in enumerate(STEPS):
        boxed(
            axes,
            5.75 + 1.42 * (index % 4),
            2.85 - 0.75 * (index // 4),
            step,
            face="#F7DFA8",
            edge=ORANGE,
            **small,
        )
    models = (
        (6.2, "draft: candidate trees"),
        (9.4, "target: one packed forward,\nK/V of accepted nodes"),
    )
    for x, text in models:
        boxed(axes, x, 0.45, text, face="#CCE3F2", edge=BLUE, **small)
        axes.annotate("", (x, 0.95), (x, 1.5), arrowprops={"arrowstyle": "<->", "color": GREY})
    save(figure, "architecture.png")


def draw_spec_bench(drawer: Drawer) -> None:
    record = result("spec-bench-smollm2-135m-cpu-2core-bf16.json")
    shown = [row for row in record["results"] if row["method"] != "hf_slospec, lookup+suffix"]
    spec_bench.plot(shown, record["provenance"], HERE / "images" / "spec-bench.png")


def draw_serving_load(drawer: Drawer) -> None:
    record = result("serving-load-cpu-2core-0.1B-bf16.json")
    path = HERE / "images" / "serving-load.png"
    serving.draw_attainment(record["results"], record["provenance"], path)


def draw_adaserve(drawer: Drawer) -> None:
    # Scripts of that folder import each other by name.
    sys.path.append(str(HERE.parent / "benchmarks" / "papers"))
    import adaserve

    found = result("papers-adaserve-bounds.json")["results"]
    adaserve.draw_figures(found, adaserve.RATES, HERE / "images" / "adaserve.png")


def save(figure: Any, name: str) -> None:
    figure.savefig(HERE / "images" / name, dpi=130, facecolor="white", metadata={"Software": None})
    pyplot.close(figure)
    print(name)


def main(names: Sequence[str] = ()) -> None:
    drawer = Drawer()
    for draw in (
        draw_tree,
        draw_packed_batch,
        draw_budget,
        draw_selection,
        draw_steps,
        draw_replicas,
        draw_architecture,
        draw_spec_bench,
        draw_serving_load,
        draw_adaserve,
    ):
        if not names or draw.__name__.removeprefix("draw_") in names:
            draw(drawer)


if __name__ == "__main__":
    main(sys.argv[1:])
