"""Race: one prompt decoded by stock ``generate``, by this package without drafts, and with them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import torch

from hf_slospec.batcher.handle import RequestHandle
from hf_slospec.demo.generator import DemoGenerator
from hf_slospec.demo.stream import gains
from hf_slospec.engine.events import Commit
from hf_slospec.generate.speculator import clock

NUM_TOKENS = 96  # new tokens of each lane, unless the text ends sooner
NUM_WARM_UP = 4  # new tokens of each lane before the race, which are not shown
NAMES = ("stock generate", "hf_slospec, no drafts", "hf_slospec with drafts")


class Recorder:
    """Streamer of transformers that records when stock ``generate`` yields each token, as the
    handle of a request does.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.from_draft: list[bool] = []
        self.commits: list[Commit] = []
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Record new tokens, [1] int64; the first call brings the prompt, [1, prompt_len] int64."""
        if self._has_prompt:
            self.token_ids += value.tolist()
            self.from_draft.append(False)
            self.commits.append(Commit(len(self.token_ids), clock(), 1, 0))
        self._has_prompt = True

    def end(self) -> None: ...


@dataclass(frozen=True)
class Lane:
    """One of the three decodings: the tokens of ``source``, and when they were yielded."""

    source: Recorder | RequestHandle
    begun_s: float  # on the engine's clock

    @property
    def steps(self) -> list[Commit]:
        """Forwards so far; times count from the begin of the lane."""
        commits = list(self.source.commits)
        return [commit._replace(at_s=commit.at_s - self.begun_s) for commit in commits]

    @property
    def end_s(self) -> float:
        """Seconds from the begin to the last step so far."""
        return max((step.at_s for step in self.steps), default=0.0)

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first one; None before there are two."""
        steps = self.steps
        num_later = sum(step.tokens for step in gains(steps))
        return (steps[-1].at_s - steps[0].at_s) / num_later if num_later else None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens per forward after the prefill; None before there is one."""
        later = gains(self.source.commits)
        return sum(step.tokens for step in later) / len(later) if later else None


@dataclass
class Race:
    """A prompt, decoded greedily in three lanes one after another, so that none slows another."""

    prompt: str
    lanes: list[Lane] = field(default_factory=list)  # those that have begun
    policy: str = ""  # of the last lane
    forwards: str = ""  # "compiled", or "eager" and why
    is_done: bool = False

    def run(self, demo: DemoGenerator) -> None:
        """Decode the three lanes, after a warm-up of each; no other request may run meanwhile.

        Raises:
            SLOSpecError: the prompt is refused, or decoding fails.
        """
        policies = ("none", "auto" if demo.policy == "none" else demo.policy)
        try:
            for policy in policies:
                warm = self._submit(demo, policy, NUM_WARM_UP)
                warm.result()
            prompt = torch.tensor([warm.request.tokens[: warm.request.prompt_len]])
            decode_stock(demo, prompt, NUM_WARM_UP, Recorder())
            recorder = Recorder()
            self.lanes.append(Lane(recorder, clock()))
            decode_stock(demo, prompt, NUM_TOKENS, recorder)
            self.policy = policies[-1]
            for policy in policies:
                begun_s = clock()
                handle = self._submit(demo, policy, NUM_TOKENS)
                self.lanes.append(Lane(handle, begun_s))
                handle.result()
            self.forwards = demo.generator.stats().forwards["target"]
            self.is_done = True
        finally:
            demo.use(demo.policy)

    def _submit(self, demo: DemoGenerator, policy: str, num_tokens: int) -> RequestHandle:
        demo.use(policy)
        salt = uuid4().hex  # each lane has K/V and texts of its own
        return demo.submit(self.prompt, max_new_tokens=num_tokens, cache_salt=salt)

    @property
    def num_same(self) -> int:
        """Number of tokens, from the first, that are the same in all lanes."""
        columns = zip(*(lane.source.token_ids for lane in self.lanes), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda column: len({*column}) == 1, columns))


def decode_stock(
    demo: DemoGenerator, prompt: torch.Tensor, num_tokens: int, recorder: Recorder
) -> None:
    """Decode greedily by the model's own ``generate``; ``prompt`` is [1, prompt_len] int64."""
    model: Any = demo.generator.model
    ids = prompt.to(model.device)
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False,
        streamer=recorder,
    )  # fmt: skip
