"""The trained heads of the embedded target draft better than the embedded draft model."""

from __future__ import annotations

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, load_tiny_pair
from hf_slospec.tiny.embedded import FOLDER, tiny_prompts
from tests.support.breadth import quick_or

CHAINS = SLOSpecConfig(policy="fixed", max_depth=4, max_width=1)


def test_more_proposals_of_the_heads_are_accepted_than_of_the_draft_model():
    target, draft, tokenizer = load_tiny_pair()

    def num_accepted(drafter):
        ours = SLOSpecGenerator(target, drafter=drafter, config=CHAINS)
        total = 0
        for prompt in tiny_prompts()[: quick_or(2, 6)]:
            out = ours.generate(
                **tokenizer(prompt, return_tensors="pt"),
                do_sample=False,
                max_new_tokens=64,
                min_new_tokens=64,
                return_dict_in_generate=True,
            )
            total += out.slo[0].acceptance_length - 1
        return total

    of_draft = num_accepted(draft)
    for kind in ("eagle3", "mtp"):
        assert num_accepted(str(FOLDER / kind)) > 1.2 * of_draft
