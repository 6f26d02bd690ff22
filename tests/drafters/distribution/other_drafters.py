"""Distribution that adds the drafter "repeat" and a head format."""

from __future__ import annotations

from hf_slospec import Drafter, DraftMethod, TokenTree, UnsupportedModelError
from hf_slospec.drafters.registry import HeadFormat, NamedDrafter, register
from hf_slospec.heads.checkpoint import filled
from hf_slospec.heads.mtp import MtpHead


class RepeatDrafter(Drafter):
    def draft(self, requests, plan):
        return [
            TokenTree.chain(r.tokens[-1], r.tokens[-1:] * plan.depth, conditional=0.5)
            for r in requests
        ]


class RepeatMethod(DraftMethod):
    kind = "repeated last token"

    def new_drafter(self, draft, room):
        return RepeatDrafter()


def load(checkpoint, target):
    tensors = checkpoint.read("other.")
    return filled(checkpoint, target, lambda: MtpHead(target), tensors, UnsupportedModelError)


register(
    NamedDrafter("repeat", lambda target, past: RepeatMethod()),
    HeadFormat("other MTP layers", lambda checkpoint: "other.fc.weight" in checkpoint.files, load),
)
