"""Tables of what was measured on machines: each function returns one from files below
benchmarks/results.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from docs.tables import find, markdown, paired, result

OURS = "hf_slospec"
EPYC = "cpu-2core-0.6B-bf16.json"
AMX = {1: "cpu-2core-0.6B-bf16-amx-batch1.json", 8: "cpu-2core-0.6B-bf16-amx-batch8.json"}
PEERS = "peers-batch{}-cpu-2core-0.6B{}.json"
PEERS_VLLM = "peers-vllm-cpu-2core-0.6B-bf16.json"
SPEC_BENCH = "spec-bench-smollm2-135m-cpu-2core-bf16.json"
SPEC_BENCH_ALL = "spec-bench-smollm2-135m-all-cpu-2core-bf16.json"
SPEC_BENCH_16 = "spec-bench-smollm2-135m-batch16-cpu-2core-bf16.json"
SPEC_BENCH_GEMMA = "spec-bench-gemma3-270m-cpu-2core-bf16.json"
SPEC_BENCH_HEAD = "spec-bench-smollm2-135m-head-cpu-2core-fp32-avx2.json"
CONSTANTS = "spec-bench-smollm2-135m-constants-cpu-2core-bf16.json"
REAL_LOAD = "serving-load-smollm2-135m-cpu-2core-bf16.json"
FIRST_CALL = "first-call-smollm2-135m-cpu-2core-bf16.json"
REAL_PEERS = "peers-smollm2-135m-cpu-2core-bf16.json"
QUANTISED_PEERS = "peers-quantised-smollm2-135m-cpu-2core-amx.json"
BF16_PEERS = "peers-bf16-smollm2-135m-cpu-2core-amx.json"
QUANTISED_PEERS_8 = "peers-quantised-smollm2-135m-batch8-cpu-2core-amx.json"
PRODUCTS = {
    "AMX, bf16 pairs": "products-cpu-2core-amx.json",
    "AVX2 (restricted)": "products-cpu-2core-avx2.json",
}
VERSUS = "versus-smollm2-135m-cpu-2core-amx-bf16.json"
RETRAINING = "retraining-embedded-cpu-2core-fp32.json"
ROLLOUTS = "rollouts-epochs-smollm2-135m-cpu-2core-amx-bf16.json"
NOISE = "noise-cpu-amx.json"
SPINNING = "spinning-smollm2-135m-cpu-2core-amx.json"
GENERATE_BATCH = "generate-batch-smollm2-135m-cpu-2core-amx-bf16.json"
GPU = "gpu-check-h100-8b-batch1.json", "gpu-check-h100-8b-batches-8-64.json"
GPU_ALL = "gpu-check-h100-8b.json"  # all methods at batch 1
EXACT_BITS = "exact-bits-smollm2-135m-cpu-2core.json"
LIBRARIES = "torch", "MKL", "OneDNN", "FBGEMM"  # kernels of torch and its libraries
NOT_MEASURED = "not measured"
TABLES: dict[str, Callable[[], str]] = {}


def table(make: Callable[[], str]) -> Callable[[], str]:
    """Register a table under the name of its function, with hyphens."""
    TABLES[make.__name__.replace("_", "-")] = make
    return make


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def two_digits(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def percent(share: float | None, digits: int = 0) -> str:
    return "" if share is None else f"{100 * share:.{digits}f} %"


def spread(values: Sequence[float]) -> str:
    """Return the lowest and the highest of repeats."""
    return f"{min(values):.2f}-{max(values):.2f}" if len(set(values)) > 1 else ""


def bold(name: str) -> str:
    return f"**{name}**" if name == OURS else name


# --- Published checkpoints
# -------------------------------------------------------------------------------------------


def spec_bench(temperature: float, batch: int, file: str = SPEC_BENCH) -> str:
    """Return the speed-ups of Spec-Bench by task."""
    rows = [
        r for r in result(file)["results"] if (r["temperature"], r["batch"]) == (temperature, batch)
    ]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines = []
    for method in sorted(
        dict.fromkeys(row["method"] for row in rows), key=lambda name: name != "stock"
    ):
        cells = [find(rows, method=method, task=task) for task in tasks]
        low, high = cells[-1]["interval"]
        lines.append([
            method, *(ratio(cell["speedup"]) for cell in cells[:-1]),
            f"{ratio(cells[-1]['speedup'])} ({low:.2f}-{high:.2f})",
            two_digits(cells[-1]["tokens_per_step"]), f"{cells[-1]['tokens_per_s']:.1f}",
        ])  # fmt: skip
    return markdown(" | ".join(["method", *tasks, "tokens per step", "tokens/s"]), lines)


@table
def spec_bench_batch1() -> str:
    return spec_bench(0.0, 1)


@table
def spec_bench_all() -> str:
    return spec_bench(0.0, 1, SPEC_BENCH_ALL)


@table
def spec_bench_batch8() -> str:
    return spec_bench(0.0, 8)


@table
def spec_bench_temperature1() -> str:
    return spec_bench(1.0, 1)


@table
def spec_bench_batch4() -> str:
    return spec_bench(0.0, 4)


@table
def spec_bench_batch16() -> str:
    return spec_bench(0.0, 16, SPEC_BENCH_16)


@table
def spec_bench_gemma() -> str:
    return spec_bench(0.0, 1, SPEC_BENCH_GEMMA)


@table
def spec_bench_head() -> str:
    return spec_bench(0.0, 1, SPEC_BENCH_HEAD)


@table
def spec_bench_head_temperature1() -> str:
    return spec_bench(1.0, 1, SPEC_BENCH_HEAD)


@table
def constants() -> str:
    """Return `auto` beside the best constant shape of each task in hindsight."""
    rows = result(CONSTANTS)["results"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines = []
    for task in tasks:
        cells = {row["method"]: row for row in rows if row["task"] == task}
        best = max(
            (row for name, row in cells.items() if "/" in name), key=lambda row: row["speedup"]
        )
        shape = best["method"].partition("/")[2]
        auto = cells[f"{OURS}, lookup"]
        lines.append([
            task, ratio(auto["speedup"]), ratio(cells[f"{OURS}, none"]["speedup"]),
            f"{ratio(best['speedup'])} ({shape})", two_digits(auto["speedup"] / best["speedup"]),
            f"{auto['tokens_per_step']:.2f}", two_digits(auto["expected_over_committed"]),
        ])  # fmt: skip
    return markdown(
        "task | `auto` | no drafts | best constant, its shape | `auto` / best | tokens per step "
        "| tokens expected / committed",
        lines,
    )


@table
def constants_replayed() -> str:
    """Return `auto` of two versions beside the best constant shapes of recorded answers."""
    found = result("constants.json")["results"]
    lines = []
    for old, new in zip(*found.values(), strict=True):
        if new["task"] == "overall" or (new["batch"] == 1 and new["machine"].startswith("0.3 B")):
            versions = old["policies"]["auto"], new["policies"]["auto"]
            gain = versions[1]["tokens_per_s"] / new["policies"]["none"]["tokens_per_s"]
            lines.append([
                new["machine"], new["batch"], new["task"], ratio(gain), new["best"],
                *(f"{each['auto_to_best']:.3f}" for each in (old, new)),
                *(two_digits(each["expected_over_committed"]) for each in versions),
            ])  # fmt: skip
    return markdown(
        "machine | batch | task | `auto` of no drafts | best constant | `auto` to it: before | now "
        "| expected / committed: before | now",
        lines,
    )


@table
def first_call() -> str:
    rows = result(FIRST_CALL)["medians"]
    return markdown(
        "process | creating the generator, s | first call, s | second call, s | peak memory, GB (after loading)",
        [
            [name, *(two_digits(row[key]) for key in ("generator_s", "first_s", "second_s")),
             f"{row['peak_gb']:.2f} ({row['loaded_gb']:.2f})"]
            for name, row in rows.items()
        ],
    )  # fmt: skip


@table
def exact_bits() -> str:
    """Return how many outputs equal stock's, and at what speed."""
    rows = result(EXACT_BITS)["results"]
    return markdown(
        "method | equal to stock | of stock's speed",
        [
            [r["method"], f"{r['equal_to_stock']} of {r['questions']}", ratio(r["speedup"])]
            for r in rows
        ],
    )


# --- Speed against stock generate
# ------------------------------------------------------------------------------------


def speed_rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of a run of `bench`, with our paired ratio to each method of the same batch."""
    lines = []
    for row in rows:
        ours = find(rows, batch=row["batch"], name=OURS)["speedup_per_repeat"]
        lines.append([
            str(row["batch"]), bold(row["name"]), ratio(row["speedup_vs_generate"]), spread(row["speedup_per_repeat"]),
            "" if row["name"] == OURS else ratio(paired(ours, row["speedup_per_repeat"])), f"{row['tokens_per_s']:.1f}",
            percent(row["host_share"], 1), two_digits(row["acceptance_length"]), row["rows_equal_to_generate"],
        ])  # fmt: skip
    return lines


SPEED = (
    "batch | method | of stock | lowest-highest repeat | hf_slospec is | tokens/s | host share | acceptance length "
    "| rows equal"
)


@table
def speed_epyc() -> str:
    return markdown(SPEED, speed_rows(result(EPYC)["results"]))


@table
def speed_amx() -> str:
    return markdown(
        SPEED, [line for file in AMX.values() for line in speed_rows(result(file)["results"])]
    )


@table
def attribution() -> str:
    """Return where the speed comes from: packed weights, drafts, and what is left against assisted
    generation.
    """
    lines = []
    for batch in (1, 8):
        for cpu, file in (("Xeon, AMX", AMX[batch]), ("EPYC, AVX-512 bf16", EPYC)):
            rows = [row for row in result(file)["results"] if row["batch"] == batch]
            ours, plain, off, assisted = (
                find(rows, name=name)
                for name in (
                    OURS,
                    f"{OURS}, no drafts",
                    f"{OURS}, prepack off",
                    "assisted, defaults",
                )
            )
            constants = [row for row in rows if row["name"].endswith(" constant")]
            best = max(constants, key=lambda row: row["speedup_vs_generate"], default=None)
            cells = [NOT_MEASURED if plain is None else ratio(plain["speedup_vs_generate"])]
            cells += [
                f"{ratio(row['speedup_vs_generate'])} ({spread(row['speedup_per_repeat'])})"
                for row in (off, ours)
            ]
            for row in (ours, off):
                cells += [
                    ratio(paired(row["speedup_per_repeat"], other["speedup_per_repeat"]))
                    if other
                    else "refuses batches"
                    for other in (assisted, best)
                ]
            lines.append([str(batch), cpu, *cells])
    header = "batch | CPU | compiled, packed weights, no drafts | drafts, prepack off | both (hf_slospec)"
    for name in ("both", "prepack off"):
        header += f" | {name} / assisted, defaults | {name} / assisted, best constant"
    return markdown(header, lines)


@table
def h100() -> str:
    return _checked_gpu([run for file in GPU for run in result(file)["results"]["speed"]])


@table
def h100_all_methods() -> str:
    return _checked_gpu(result(GPU_ALL)["results"]["speed"][:1])


def _checked_gpu(runs: Iterable[dict[str, Any]]) -> str:
    lines = []
    for run in runs:
        measured = [row for row in run["contestants"] if row["status"] == "measured"]
        ours, plain = (find(measured, name=name) for name in (OURS, f"{OURS}, no drafts"))
        for row in measured:
            repeats = row["speedup_per_repeat"]
            both = ["" if other is row else times_as_fast(other, row) for other in (ours, plain)]
            length = row["acceptance_length"]
            warm = row["warm_up"]
            lines.append([
                str(run["batch"]), bold(row["name"]), ratio(row["speedup_vs_generate"]), spread(repeats), *both,
                f"{row['tokens_per_s']:.1f}", "" if length is None else f"{length:.2f}", row["rows_equal_to_generate"],
                f"{warm['calls']} calls, {warm['seconds']:.0f} s",
            ])  # fmt: skip
    return markdown(
        "batch | method | of stock | lowest-highest repeat | hf_slospec is | without drafts it is | tokens/s "
        "| acceptance length | rows equal | warm-up",
        lines,
    )


def times_as_fast(method: dict[str, Any], other: dict[str, Any]) -> str:
    """Return how many times as fast one method is as another, by the repeats that both have."""
    both = list(zip(method["speedup_per_repeat"], other["speedup_per_repeat"], strict=False))
    return ratio(paired(*zip(*both, strict=True))) + ("" if len(both) > 1 else " (one repeat)")


def peer_rows(file: str) -> list[list[str]]:
    """Return the rows of a comparison with other engines, ours against each in the same precision."""
    lines = []
    for row in result(file)["summary"]:
        if row["name"].startswith("stock"):
            continue
        key = "ours_fp32_vs_it" if "fp32" in row["name"] else "ours_bf16_vs_it"
        ours = row["name"].startswith(OURS)
        lines.append([
            str(row["batch"]), f"**{row['name']}** (beside {row['group'].split('-')[0]})" if ours else row["name"],
            ratio(row["vs_stock"]), "" if ours else ratio(row[key]), "" if ours else spread(row[f"{key}_per_repeat"]),
            row["rows_equal"],
        ])  # fmt: skip
    return lines


PEER = "batch | engine | of stock, fp32 | hf_slospec is | lowest-highest repeat | rows equal to stock, fp32"


@table
def peers_checkpoint() -> str:
    """Contestants of all groups by task; what is in every group is listed once for each."""
    return _by_task(REAL_PEERS)


@table
def peers_quantised() -> str:
    """Contestants with quantised weights by task."""
    return _by_task(QUANTISED_PEERS)


@table
def peers_bf16() -> str:
    """Contestants in bf16 on a CPU with AMX by task."""
    return _by_task(BF16_PEERS)


@table
def peers_quantised_batch8() -> str:
    return _by_task(QUANTISED_PEERS_8)


@table
def products() -> str:
    """Products with packed weights beside their floors and other kernels, by number of rows."""
    numbers = "1", "2", "4", "8", "16"
    lines = []
    for cpu, file in PRODUCTS.items():
        for dtype, shapes in result(file)["results"].items():
            beside_floor, beside_others = [], []
            for number in numbers:
                records = [shape[number] for shape in shapes.values()]
                floors = [max(r["memory_floor_ms"], r["compute_floor_ms"]) for r in records]
                ours = [r["ms"]["Blocks"] for r in records]
                others = [
                    min(ms for name, ms in r["ms"].items() if name in LIBRARIES) for r in records
                ]
                paired_floors = zip(ours, floors, strict=True)
                paired_others = zip(others, ours, strict=True)
                beside_floor.append(two_digits(max(a / b for a, b in paired_floors)))
                beside_others.append(ratio(min(a / b for a, b in paired_others)))
            lines.append([cpu, dtype, "of the floor, at most", *beside_floor])
            lines.append([cpu, dtype, "faster than libraries by, at least", *beside_others])
    return markdown(" | ".join(("CPU", "dtype", "", *numbers)), lines)


@table
def spinning() -> str:
    """Milliseconds per token by how long threads spin, alone and beside a busy process."""
    results = result(SPINNING)["results"]
    lines = []
    for count in dict.fromkeys(key.partition(",")[0] for key in results):
        places = results[f"{count}, alone"], results[f"{count}, beside a busy process"]
        cells = [f"{place[name]:.0f}" for place in places for name in ("stock_ms", "ours_ms")]
        lines.append([count if count == "default" else f"{int(count):,}", *cells])
    header = (
        "`GOMP_SPINCOUNT` | stock alone | ours alone | stock beside a busy process | ours beside it"
    )
    return markdown(header, lines)


@table
def noise() -> str:
    """Milliseconds of the noise and the choice of sampled tokens."""
    lines = [
        [f"{int(vocab):,}", name, *(f"{ms:.2f}" for ms in found.values())]
        for vocab, steps in result(NOISE)["results"].items()
        for name, found in steps.items()
    ]
    return markdown("vocabulary | | torch, ms | hf_slospec, ms", lines)


@table
def versus() -> str:
    """Servers under the same arrivals."""
    lines = []
    for rate, servers in result(VERSUS)["results"].items():
        for server, found in servers.items():
            attained = found["attained"]
            medians = [found["classes"][name] for name in ("code", "chat", "summary")]
            cells = [f"{1000 * own['tpot_s'][0]:.0f}" if own["tpot_s"] else "" for own in medians]
            share = "{mean:.0f} ({low:.0f}-{high:.0f})".format(
                **{key: 100 * value for key, value in attained.items()}
            )
            goodput = f"{found['goodput']['mean']:.0f}"
            lines.append([rate, server, share, goodput, f"{found['tokens_per_s']:.0f}", *cells])
    header = (
        "requests/s | server | attained, % | goodput, tokens/s | tokens/s | "
        "median TPOT: code, ms | chat | summary"
    )
    return markdown(header, lines)


@table
def rollouts() -> str:
    """Speeds of rollouts by epoch, and their ratios to other ways."""
    lines = []
    for epoch, systems in result(ROLLOUTS)["epochs"].items():
        for name, found in systems.items():
            ratios = [
                ratio(found.get(f"of {other}"))
                for other in (f"{OURS}, no drafts", "stock generate_batch", "stock generate")
            ]
            committed = two_digits(found.get("tokens_per_step"))
            lines.append([epoch, name, f"{found['tokens_per_s']:.0f}", committed, *ratios])
    header = (
        "epoch | | tokens/s | tokens per step | of no drafts | of stock `generate_batch` | "
        "of stock `generate`"
    )
    return markdown(header, lines)


@table
def retraining() -> str:
    """Tokens per step while the target is trained, by a head that stays and one that follows."""
    lines = [
        [each["epoch"], f"{each['reward']:.1f}", f"{each['kept']:.2f}", f"{each['retrained']:.2f}"]
        for each in result(RETRAINING)["epochs"]
    ]
    return markdown("epoch | reward | head as it was | retrained", lines)


@table
def generate_batch() -> str:
    """``generate_batch`` of an enabled model beside stock's and stock ``generate``."""
    lines = []
    for way, by_limit in result(GENERATE_BATCH)["results"].items():
        for limit, found in by_limit.items():
            speeds = [f"{speed:.0f}" for speed in found["tokens_per_s"].values()]
            ratios = [ratio(value) for name, value in found["ratio"].items() if name != OURS]
            lines.append([way, limit, *speeds, *ratios])
    header = (
        "| at a time | hf_slospec, tokens/s | stock `generate_batch` | stock `generate` "
        "| of `generate_batch` | of `generate`"
    )
    return markdown(header, lines)


def _by_task(file: str) -> str:
    rows = result(file)["summary"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines = []
    for batch, group, name in sorted(
        dict.fromkeys((row["batch"], row["group"], row["name"]) for row in rows),
        key=lambda key: key[0],
    ):
        cells = [find(rows, batch=batch, group=group, name=name, task=task) for task in tasks]
        low, high = cells[-1]["interval"]
        overall = f"{ratio(cells[-1]['speedup'])} ({low:.2f}-{high:.2f})"
        own = f"**{name}**" if name.startswith(OURS) else name
        lines.append(
            [
                str(batch),
                group.split("-")[0],
                own,
                *(ratio(cell["speedup"]) for cell in cells[:-1]),
                overall,
            ]
        )
    return markdown(" | ".join(["batch", "beside", "contestant", *tasks]), lines)


@table
def peers_batch1() -> str:
    return markdown(PEER, peer_rows(PEERS.format(1, "")))


@table
def peers_avx2() -> str:
    return markdown(PEER, peer_rows(PEERS.format(1, "-avx2")))


@table
def peers_batch8() -> str:
    return markdown(PEER, peer_rows(PEERS.format(8, "")))


@table
def peers_vllm() -> str:
    return markdown(PEER, peer_rows(PEERS_VLLM))


@table
def images() -> str:
    return markdown(
        "images | tokens of the prompt | time to the first token, of stock's | speed of the call, of stock's",
        [
            [
                row["images"],
                f"{row['prompt_tokens']:,}",
                f"{row['first_token_of_stock']:.2f}",
                ratio(row["speed_of_stock"]),
            ]
            for row in result("cpu-2core-images-bf16.json")["images"]
        ],
    )


@table
def hybrids() -> str:
    measured = result("cpu-2core-hybrids-bf16.json")
    names = {
        "Qwen3_5": "Qwen3.5-like: 18 gated delta nets, 6 attention layers",
        "Lfm2": "LFM2-like: 10 short convolutions, 6 attention layers",
    }
    lines = []
    for key, name in names.items():
        model = measured[key]
        verify = " / ".join(f"{model['verify'][tokens]:.2f}" for tokens in ("4", "8", "16", "32"))
        for index, run in enumerate(model["speed"]):
            first = (
                [name, verify, f"{model['state_mb_per_request']:.2f} MB"]
                if index == 0
                else ["", "", ""]
            )
            lines.append([
                *first, run["batch"], run["acceptance"], ratio(run["speed_of_stock"]),
                "-".join(f"{bound:.2f}" for bound in run["spread"]), f"{run['tokens_per_request_and_step']:.1f}",
            ])  # fmt: skip
    return markdown(
        "target (0.56 B) | verify 4 / 8 / 16 / 32 tokens, of stock's forward of one | state per text | batch "
        "| acceptance | speed of stock | spread | tokens per step",
        lines,
    )


# --- Drafters and sampling
# -------------------------------------------------------------------------------------------


@table
def drafters_acceptance() -> str:
    rows = result("drafters-acceptance.json")["results"]
    kinds = [key for key in rows[0] if key not in ("texts", "sampling", "depth", "width")]
    return markdown(
        f"texts | shape | {' | '.join(kinds)}",
        [
            [
                f"{row['texts']}, {row['sampling']}",
                f"{row['depth']}x{row['width']}",
                *(f"{row[k]:.2f}" for k in kinds),
            ]
            for row in rows
        ],
    )


@table
def drafters_speed() -> str:
    one, eight = (
        result(f"drafters-speed-0.3B-batch{batch}-xeon-amx.json")["results"] for batch in (1, 8)
    )
    columns = {
        "prompts, greedy, batch 1": one["prompts, greedy"],
        "repetitive, greedy, batch 1": one["repetitive, greedy"],
        "prompts, greedy, batch 8": eight["prompts, greedy"],
    }
    stock = {
        "generate": "stock `generate`",
        "assisted, defaults": "stock, assistant",
        "prompt lookup, 10": "stock, prompt lookup",
        "use_mtp": "stock, `use_mtp` (the same layer)",
    }

    def cell(rows: list[dict[str, Any]], name: str) -> str:
        row = find(rows, name=name)
        if row is None:
            return ""
        repeats = spread(row["speedup_per_repeat"])
        return ratio(row["speedup_vs_generate"]) + (f" ({repeats})" if repeats else "")

    names = [row["name"] for row in one["prompts, greedy"]]
    return markdown(
        f" | {' | '.join(columns)}",
        [
            [stock.get(name, name), *(cell(rows, name) for rows in columns.values())]
            for name in names
        ],
    )


@table
def coupling_acceptance() -> str:
    rows = result("sampling-acceptance.json")["results"]

    def run(temperature: float, width: int, *, coupled: bool) -> dict[str, Any]:
        return next(
            row
            for row in rows
            if (row["depth"], row["width"], row["temperature"]) == (5, width, temperature)
            and row["sharpness"] == (0.9 if coupled else None)
        )

    lines = []
    for temperature in (0.3, 0.7, 1.0, 1.3):
        pairs = [
            [run(temperature, width, coupled=coupled) for coupled in (False, True)]
            for width in (1, 4)
        ]
        coupled = pairs[1][1]
        lines.append([
            temperature, *(f"{a['tokens_per_step']:.2f} → {b['tokens_per_step']:.2f}" for a, b in pairs),
            f"{coupled['expected_over_committed']:.3f}", " → ".join(f"{error:.3f}" for error in coupled["ece"]),
        ])  # fmt: skip
    return markdown(
        "temperature | tokens per step, one child per node | tokens per step, beams of 4 | expected / committed tokens "
        "| ECE before → after calibration",
        lines,
    )


@table
def sampling_speed() -> str:
    runs = result("sampling-speed-cpu-2core-0.6B-bf16.json")["runs"]
    cells = [
        (1, 0, "temperature 1"),
        (0, 0, "temperature 0.7, top-p 0.95"),
        (2, 0, "temperature 0.3"),
    ]
    cells += [
        (2, 0, "temperature 1.3"),
        (0, 8, "temperature 1"),
        (0, 8, "temperature 0.7, top-p 0.95"),
    ]
    lines = []
    for run, batch, name in cells:
        rows = [row for row in runs[run]["results"][name] if row["batch"] == (batch or 1)]
        ours, without, assisted = (
            find(rows, name=n) for n in (OURS, f"{OURS}, uncoupled", "assisted, defaults")
        )
        lines.append([
            name, batch or 1, f"{ratio(ours['speedup_vs_generate'])} ({spread(ours['speedup_per_repeat'])})",
            ratio(assisted["speedup_vs_generate"]) if assisted else "refuses batches",
            ratio(paired(ours["speedup_per_repeat"], assisted["speedup_per_repeat"])) if assisted else "",
            ratio(ours["speedup_vs_uncoupled"]),
            f"{without['acceptance_length']:.2f} → {ours['acceptance_length']:.2f}", len(ours["speedup_per_repeat"]),
        ])  # fmt: skip
    return markdown(
        " | batch | of stock (lowest-highest repeat) | assisted, of stock | hf_slospec / assisted "
        "| with / without the noise | tokens per step, without → with | repeats",
        lines,
    )


# --- SLOs and the policy
# ---------------------------------------------------------------------------------------------


@table
def slo_attainment() -> str:
    lines = []
    for name, row in result("slo-cpu-2core-0.6B-bf16.json")["results"].items():
        times = [
            f"{row['tpot_ms'][k]:.0f} ({percent(row['attained_by_target'][k])})"
            for k in ("0.6", "1.0", "2.0")
        ]
        lines.append([
            f"**{name}**" if name == "auto" else name, percent(row["attained"]), *times, ratio(row["speedup_vs_plain"]),
            f"{row['tokens_per_step']:.2f}",
        ])  # fmt: skip
    return markdown(
        "policy | attained | 0.6x: ms | 1.0x: ms | 2.0x: ms | against plain | tokens per step",
        lines,
    )


@table
def constant_shapes() -> str:
    runs = sorted(
        result("shapes-cpu-2core-0.3B-bf16.json")["runs"], key=lambda run: run["provenance"]["date"]
    )
    cells: dict[str, list[tuple[dict[str, Any], int]]] = {}
    for run in runs:
        for name, row in run["results"].items():
            cells.setdefault(name, []).append((row, run["provenance"]["repeats"]))
    lines = []
    for name in sorted(cells, key=lambda name: (name[0] != "g", int(name.rsplit(" ", 1)[1]))):
        (before, earlier), (row, repeats) = cells[name]
        low, middle, high = row["auto to best"]
        text, batch = name.split(", batch ")
        lines.append([
            text.replace("T=", "temperature "), batch, row["best constant"], f"{middle:.2f} ({low:.2f} to {high:.2f})",
            f"{row['auto to plain'][1]:.2f}", repeats, f"{before['auto to best'][1]:.2f} ({earlier})",
        ])  # fmt: skip
    return markdown(
        "text | batch | fastest constant shape | `auto` to it (quartiles) | `auto` to plain decoding | repeats "
        "| earlier run (repeats)",
        lines,
    )


@table
def little_known() -> str:
    rows = result("uncertainty.json")["results"]
    ratios = {name: row["auto_to_best_fixed"] for name, row in rows.items()}
    return markdown(
        "scenario | mean | lowest, highest seed",
        [
            [name, f"{statistics.fmean(r):.3f}", f"{min(r):.3f}, {max(r):.3f}"]
            for name, r in ratios.items()
        ],
    )


@table
def planning() -> str:
    rows = result("selection-cpu.json")["ms"]
    lines = []
    for number in (1, 8, 64, 256, 1024):
        cells = []
        for policy in ("auto", "adaserve"):
            row = rows[f"{policy}, {number} requests"]
            cells += [f"{row['plan'] + row['select']:.2f}", f"{row['observe']:.2f}"]
        lines.append([number, *cells])
    return markdown(
        "requests | `auto`: plan and select, ms | learn, ms | `adaserve`: plan and select, ms | learn, ms",
        lines,
    )


# --- The batcher, the server and replicas
# ----------------------------------------------------------------------------


def wilson(row: dict[str, Any]) -> str:
    attained = row["attainment"]
    return f"{100 * attained['mean']:.0f} ({100 * attained['low']:.0f} to {100 * attained['high']:.0f})"


@table
def mixed_load() -> str:
    lines = []
    for arrivals, loads in result("serving-load-cpu-2core-0.1B-bf16.json")["results"].items():
        for index, (load, systems) in enumerate(loads.items()):
            chain = max((systems["fixed-2"], systems["fixed-4"]), key=lambda row: row["attained"])
            lines.append([
                {"poisson": "Poisson", "bursty": "bursts"}[arrivals] if index == 0 else "", load,
                *(wilson(systems[name]) for name in ("auto", "plain", "fixed-2", "fixed-4")),
                f"{chain['misses_vs_ours']:.1f}x", ratio(chain["goodput_of_ours_vs_it"]),
            ])  # fmt: skip
    return markdown(
        "arrivals | load | **auto** | plain | chains of 2 | chains of 4 | misses of the better chain "
        "| goodput of `auto`",
        lines,
    )


@table
def real_load() -> str:
    """Every policy on a published checkpoint: requests that attained, goodput, and misses against
    `auto`.
    """
    lines = []
    for arrivals, loads in result(REAL_LOAD)["results"].items():
        for load, systems in loads.items():
            for name, row in systems.items():
                good = row["goodput"]
                misses = row["misses_vs_ours"]
                classes = row["classes"]
                lines.append([
                    {"poisson": "Poisson", "bursty": "bursts"}[arrivals], load,
                    f"**{name}**" if name == "auto" else name,
                    wilson(row), f"{good['mean']:.0f} ({good['low']:.0f} to {good['high']:.0f})", ratio(misses),
                    *(f"{100 * classes[kind]['attained']['mean']:.0f}" for kind in ("code", "chat", "summary")),
                ])  # fmt: skip
    return markdown(
        "arrivals | load | policy | attained, % | goodput, tokens/s | misses, of those of `auto` "
        "| code | chat | summaries",
        lines,
    )


@table
def simulated_load() -> str:
    """Every policy in the simulator: requests that attained, goodput, and kept guarantees."""
    lines = []
    for load, systems in result("simulated-load-smollm2-135m.json")["results"].items():
        others = max(row["goodput"] for name, row in systems.items() if not name.startswith("auto"))
        for name, row in systems.items():
            seeds = row["goodput_by_seed"]
            kept = f"{row['kept']:,} of {row['guaranteed']:,}" if name == "auto" else ""
            lines.append([
                load.replace("bursty", "bursts").replace("poisson", "Poisson"),
                f"**{name}**" if name == "auto" else name, f"{100 * row['attained']['mean']:.0f}",
                f"{row['goodput']:.0f} ({min(seeds):.0f} to {max(seeds):.0f})",
                ratio(row["goodput"] / others),
                *(f"{100 * row['classes'][kind]:.0f}" for kind in ("code", "chat", "summary")), kept,
            ])  # fmt: skip
    return markdown(
        "arrivals | policy | attained, % | goodput, tokens/s (seeds) | of the best other | code | chat "
        "| summaries | guarantees kept",
        lines,
    )


@table
def throughput() -> str:
    rows = result("serving-throughput-cpu-2core-0.3B-bf16.json")["results"]
    names = {
        "generate_batch": "transformers' `generate_batch`",
        "plain": "hf_slospec without drafts (packed weights alone)",
        "fixed-4": "chains of 4",
        "auto": "`auto`",
    }
    lines = [
        [n, f"{rows[k]['tokens_per_s']:.0f}", ratio(rows[k]["vs_generate_batch"])]
        for k, n in names.items()
    ]
    return markdown("system | tokens/s | of `generate_batch`", lines)


@table
def chat_turns() -> str:
    lines = [
        [
            row["turn"], row["prompt_tokens"], row["reused"], f"{row['without_ms']:.0f}", f"{row['with_ms']:.0f}",
            f"{row['ratio']:.1f}x",
        ]
        for row in result("chat-cpu-2core-0.3B-bf16.json")["rows"]
        if row["turn"] in (1, 2, 4, 6, 8)
    ]  # fmt: skip
    return markdown(
        "turn | prompt tokens | found | TTFT without, ms | with, ms | shorter by", lines
    )


@table
def http_cost() -> str:
    lines = []
    for row in result("http-overhead-cpu-2core.json")["rows"]:
        token = f"{row['added_ms_per_token']:.2f}" if row["tokens"] > 1 else ""
        lines.append([
            row["streams"], row["tokens"], f"{row['submit_ms']:.0f}", f"{row['added_ms_per_request']:.1f}", token,
        ])  # fmt: skip
    return markdown(
        "streams at a time | new tokens | `submit`, ms per round | HTTP adds, ms per request | per token",
        lines,
    )


@table
def replica_cost() -> str:
    return markdown(
        "streams at a time | new tokens | local, ms per request | one replica, ms per request | added",
        [
            [
                row["streams"],
                row["tokens"],
                *(f"{row[key]:.0f}" for key in ("local_ms", "replica_ms", "added_ms")),
            ]
            for row in result("replica-overhead-cpu-2core.json")["results"]["rows"]
        ],
    )


@table
def replica_faults() -> str:
    return markdown(
        "fault | streams as stock's | resumed elsewhere | longest pause | new requests | the slowest took",
        [
            [fault, f"not run: {row['not_run']}", "", "", "", ""]
            if "not_run" in row
            else [
                fault, f"{row['equal']} of {row['streams']}", row["resumed"], f"{row['longest_pause_s']:.1f} s",
                f"{row['new_equal']} of {row['new']}", f"{row['longest_new_s']:.1f} s",
            ]
            for fault, row in result("replica-faults-machines-cpu-2core.json")["results"].items()
        ],
    )  # fmt: skip


# --- Inside a step
# ---------------------------------------------------------------------------------------------------

PHASES: dict[str, Iterable[tuple[str, str | None]]] = {
    "**verify**": [("verify", None)],
    "… linear layers": [("verify", "linear layers")],
    "… attention": [("verify", "attention")],
    "… norms": [("verify", "norms")],
    "… activations": [("verify", "activations")],
    "… rotary embedding": [("verify", "rotary embedding")],
    "… the rest of the layers": [("verify", "the rest of the layers")],
    "… inputs, masks, sampling": [
        ("verify", "inputs and masks"),
        ("verify", "choosing tokens"),
        ("verify", "rest"),
    ],
    "**draft**": [("draft", None)],
    "**plan and select**": [("plan and select", None)],
    "**accept, commit, the rest of the step**": [
        ("accept", None),
        ("commit", None),
        ("rest of the step", None),
    ],
    "**outside the steps**": [("around the steps", None)],
}


@table
def step_shares() -> str:
    files = ("step-table-cpu-2core-0.6B-bf16.json", "step-table-cpu-2core-0.6B-bf16-amx.json")
    columns = [row["shares"] for file in files for row in result(file)["rows"]]

    def share(shares: list[dict[str, Any]], parts: Iterable[tuple[str, str | None]]) -> float:
        wanted = set(parts)
        return sum(
            s["share"]
            for s in shares
            if (s["phase"], s["what"]) in wanted or (s["phase"], None) in wanted
        )

    return markdown(
        " | EPYC, batch 1 | EPYC, batch 8 | Xeon, batch 1 | Xeon, batch 8",
        [
            [name, *(percent(share(shares, parts), 1) for shares in columns)]
            for name, parts in PHASES.items()
        ],
    )


@table
def compiled_forwards() -> str:
    rows = result("cpu-forwards-2core-0.3B-bf16.json")["ms"]
    return markdown(
        "tokens | as loaded, ms | packed weights, ms | `torch.compile`, frozen, ms",
        [
            [row["tokens"], *(f"{row[key]:.0f}" for key in ("as loaded", "prepacked", "compiled"))]
            for row in rows
        ],
    )


@table
def divergences() -> str:
    rows = result("bf16-divergence.json")["results"]
    names = {
        "ours against generate, batches of 1": "hf_slospec and stock, batch 1",
        "ours against generate, batches of 8": "hf_slospec and stock, batch 8",
        "generate against itself, batches of 8 and of 1": "stock at batch 8 and stock at batch 1",
    }
    lines = []
    for key, name in names.items():
        row = rows[key]
        lines.append([
            name, f"{row['divergences']} of {row['rows']}", row["near_ties"], f"{max(row['margins']):.4f}",
        ])  # fmt: skip
    return markdown("compared | rows that differ | at near-ties | largest margin", lines)


# --- The first table of benchmarks.md
# --------------------------------------------------------------------------------


def _of_stock(batch: int, name: str) -> str:
    """Return the speed of a method against stock on both CPUs."""
    values = (find(result(file)["results"], batch=batch, name=name) for file in (AMX[batch], EPYC))
    xeon, epyc = (row["speedup_vs_generate"] for row in values)
    return f"{xeon:.2f}x (Xeon, AMX), {epyc:.2f}x (EPYC)"


def _of_assisted(name: str) -> str:
    """Return the paired ratios to assisted generation, with its defaults and its best constant, on
    both CPUs.
    """
    texts = []
    for file, cpu in ((AMX[1], "Xeon, AMX"), (EPYC, "EPYC")):
        rows = [row for row in result(file)["results"] if row["batch"] == 1]
        ours, defaults = (
            find(rows, name=n)["speedup_per_repeat"] for n in (name, "assisted, defaults")
        )
        constants = [row for row in rows if row["name"].endswith(" constant")]
        best = max(constants, key=lambda row: row["speedup_vs_generate"])["speedup_per_repeat"]
        texts.append(f"{paired(ours, defaults):.2f}x and {paired(ours, best):.2f}x ({cpu})")
    return ", ".join(texts)


def _vllm_on_pair(batch: int) -> str:
    """Return our speed in bf16 against vLLM as it is fastest on the pair, with drafts or without."""
    rows = [
        row
        for row in result(PEERS_VLLM)["summary"]
        if row["batch"] == batch and row["name"].startswith("vLLM")
    ]
    return ratio(max(rows, key=lambda row: row["vs_stock"])["ours_bf16_vs_it"])


def _peers_on_checkpoint(batch: int) -> str:
    """Return our speed as we are fastest on the published checkpoint against each engine as it is,
    in one run each.
    """
    texts = []
    for group, engine in (
        ("llama-bf16", "llama.cpp"),
        ("openvino-bf16", "OpenVINO"),
        ("vllm-bf16", "vLLM"),
    ):
        rows = [
            row
            for row in result(REAL_PEERS)["summary"]
            if (row["group"], row["task"]) == (group, "overall")
        ]
        rows = [row for row in rows if row["batch"] == batch]
        ours, theirs = (
            max(row["speedup"] for row in rows if row["name"].startswith(name))
            for name in (OURS, engine)
        )
        texts.append(f"{ours / theirs:.2f}x ({engine})")
    return ", ".join(texts)


@table
def summary() -> str:
    off = f"{OURS}, prepack off"
    gpu = {
        run["batch"]: run["contestants"] for file in GPU for run in result(file)["results"]["speed"]
    }

    def h100(batch: int) -> str:
        rows = gpu[batch]
        ours, plain, compiled = (
            find(rows, name=name)
            for name in (OURS, f"{OURS}, no drafts", "generate, static cache, compiled")
        )
        both = [(ours, ""), (plain, "; without drafts ")]
        return "".join(
            f"{words}{ratio(row['speedup_vs_generate'])} of stock"
            + ("" if compiled is None else f", {times_as_fast(row, compiled)} of compiled stock")
            for row, words in both
        )

    slo = {
        name: percent(row["attained"])
        for name, row in result("slo-cpu-2core-0.6B-bf16.json")["results"].items()
    }
    load = [
        row
        for arrivals in result("serving-load-cpu-2core-0.1B-bf16.json")["results"].values()
        for row in arrivals.values()
    ]
    misses = [
        max((row["fixed-2"], row["fixed-4"]), key=lambda chain: chain["attained"])["misses_vs_ours"] for row in load
    ]  # fmt: skip
    turns = [row["ratio"] for row in result("chat-cpu-2core-0.3B-bf16.json")["rows"][1:]]
    batched = {
        k: ratio(row["vs_generate_batch"])
        for k, row in result("serving-throughput-cpu-2core-0.3B-bf16.json")["results"].items()
    }
    real = {
        row["method"]: ratio(row["speedup"])
        for row in result(SPEC_BENCH)["results"]
        if (row["temperature"], row["batch"], row["task"]) == (0.0, 1, "overall")
    }
    lookups = f"transformers' prompt lookup {max(v for k, v in real.items() if k.startswith('prompt lookup'))}"
    lines = [
        ("tokens against stock, fp32", "equal, greedy and sampled, where compared", "[model classes](support.md)"),
        (
            "a published checkpoint of 135 M on Spec-Bench, batch 1, no draft model, against stock",
            f"suffix trees {real[f'{OURS}, suffix']}, lookup {real[f'{OURS}, lookup']}, no drafts "
            f"{real[f'{OURS}, none']}; {lookups}",
            "[published checkpoint](benchmarks/published.md)",
        ),
        ("one text against stock, CPU", _of_stock(1, OURS), "[CPU](benchmarks/cpu.md)"),
        ("the same without packed weights", _of_stock(1, off), "[CPU](benchmarks/cpu.md)"),
        (
            "one text against assisted generation: defaults, best constant",
            _of_assisted(OURS),
            "[CPU](benchmarks/cpu.md)",
        ),
        ("the same without packed weights", _of_assisted(off), "[CPU](benchmarks/cpu.md)"),
        ("batch of 8 against stock, CPU", _of_stock(8, OURS), "[CPU](benchmarks/cpu.md)"),
        ("the same without packed weights", _of_stock(8, off), "[CPU](benchmarks/cpu.md)"),
        (
            "16 requests against `generate_batch`, CPU",
            f"{batched['auto']}; {batched['plain']} without drafts",
            "[batcher](benchmarks/batcher.md)",
        ),
        *(
            (f"{what}, 8B-shaped, H100", h100(batch), "[GPU](benchmarks/gpu.md)")
            for batch, what in ((1, "one text"), (8, "batch of 8"), (64, "batch of 64"))
        ),
        *(
            (
                f"against engines in bf16 on a CPU, a published checkpoint, each as it is fastest, batch {batch}",
                _peers_on_checkpoint(batch),
                "[published checkpoint](benchmarks/published.md)",
            )
            for batch in (1, 8)
        ),
        (
            "against vLLM in bf16 on a CPU as it is fastest, with a draft model",
            f"{_vllm_on_pair(1)} at batch 1, {_vllm_on_pair(8)} at batch 8",
            "[engines](benchmarks/engines.md)",
        ),
        (
            "TPOT SLOs attained, batch of 8",
            f"`auto` {slo['auto']}, best chain {slo['chain of 2']}, plain decoding {slo['no speculation']}",
            "[SLOs](benchmarks/slos.md)",
        ),
        (
            "missed SLOs of a mixed load",
            f"the better chain has {min(misses):.1f} to {max(misses):.1f} times as many as `auto`",
            "[batcher](benchmarks/batcher.md)",
        ),
        (
            "time to the first token of later chat turns",
            f"{min(turns):.0f} to {max(turns):.0f} times shorter by prefix caching",
            "[batcher](benchmarks/batcher.md)",
        ),
    ]  # fmt: skip
    return markdown("what | hf_slospec | more", lines)


# --- Options of a command
# --------------------------------------------------------------------------------------------


@table
def serve_options() -> str:
    """Return the options of `serve` as the command declares them."""
    import typer.main

    from hf_slospec.cli.app import app

    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    lines = []
    for option in command.params:
        if option.name == "help":
            continue
        default = option.default() if callable(option.default) else option.default
        shown = "" if default in (None, False, "", [], ()) else f"`{default}`"
        names = ", ".join(f"`{name}`" for name in option.opts)
        lines.append([names, shown, (getattr(option, "help", None) or "").replace("|", r"\|")])
    return markdown("option | default | meaning", lines)
