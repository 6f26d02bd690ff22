"""Options of ``hf_slospec train-drafter``.

This module imports no torch, so that the command's help, which is made from it, appears at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from hf_slospec.errors import InputModel, InvalidInputError

# Options that may change when a training is resumed, as they have no effect on the drafter. Of data
# and exclude, the contents are compared instead of the paths.
WITHOUT_EFFECT = {
    "out",
    "data",
    "exclude",
    "minutes",
    "features_gb",
    "embeddings",
}


class TrainingOptions(InputModel):
    """Options of the training of a drafter.

    Raises:
        InvalidInputError: a value is out of range, or two options exclude each other; the message
            has their names on the command line.
    """

    kind: Literal["eagle3", "dspark", "mtp"] = Field(
        "eagle3",
        description="eagle3: an EAGLE-3 head. dspark: a DSpark head, which drafts a block of "
        "--levels tokens in one forward. mtp: a multi-token prediction layer, of the target's own "
        "layer class.",
    )
    out: Path = Field(
        Path("drafter"),
        description="Folder of the drafter; its subfolder training has texts and checkpoints, "
        "from which the same command goes on.",
    )
    data: Path | None = Field(
        None,
        description="Texts to train on: conversations in a .jsonl file (messages, conversations "
        "or turns in each line), or plain text in any other. The target also answers and "
        "continues them itself. Default: texts that the target writes, the user's turns as well.",
    )
    exclude: tuple[Path, ...] = Field(
        (),
        description="A .jsonl file of conversations, such as a benchmark's, whose turns no text "
        "may hold; repeatable.",
    )
    texts: int = Field(2000, ge=1, description="Number of texts.")
    seq_len: int = Field(512, ge=96, description="Maximum tokens of a text.")
    batch: int = Field(8, ge=1, description="Texts per training step.")
    write_batch: int = Field(
        16,
        ge=1,
        description="Texts that the target writes at once, of which the first are held out; more "
        "are faster on a GPU.",
    )
    steps: int = Field(1000, ge=1, description="Training steps, at most.")
    levels: int = Field(5, ge=1, le=16, description="Levels of drafting that are trained.")
    draft_vocab: int | None = Field(
        None,
        ge=0,
        description="eagle3 and dspark: number of tokens that it can draft, the most frequent "
        "ones of the texts, with an output layer of its own. 0: all, by the target's output "
        "layer. Default: a quarter of the target's.",
    )
    layout: Literal["speculators", "sglang"] = Field(
        "speculators",
        description="eagle3: speculators is read by vLLM, too; sglang has the names of SpecForge "
        "and SGLang. hf_slospec reads both.",
    )
    embeddings: bool = Field(
        False,
        description="eagle3: also write the target's embeddings into the head's file, which the "
        "speculators library needs to load it; vLLM, SGLang and hf_slospec take the target's.",
    )
    eval_every: int = Field(
        50, ge=1, description="Steps between evaluations on held-out texts, and checkpoints."
    )
    patience: int = Field(
        6, ge=0, description="Stop after so many evaluations without a better one. 0: never."
    )
    features_gb: float = Field(
        0.0,
        ge=0.0,
        allow_inf_nan=False,
        description="Keep the target's hidden states in up to so many GB on disk, for later "
        "epochs. 0: compute them in every epoch.",
    )
    minutes: float | None = Field(
        None,
        gt=0.0,
        allow_inf_nan=False,
        description="Stop after so long, to go on later. Default: when finished.",
    )
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of texts, order and initial weights.")

    @model_validator(mode="after")
    def _fit_together(self) -> TrainingOptions:
        if self.kind == "mtp" and self.draft_vocab is not None:
            raise InvalidInputError(
                "--draft-vocab is for --kind eagle3 and dspark; an MTP layer has the target's "
                "output layer"
            )
        if self.kind != "eagle3" and self.embeddings:
            raise InvalidInputError("--embeddings is for --kind eagle3; leave it out")
        if self.kind != "eagle3" and self.layout != "speculators":
            raise InvalidInputError(f"--layout {self.layout} is for --kind eagle3; leave it out")
        return self
