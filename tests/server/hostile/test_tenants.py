"""Clients with keys of their own: none can find out another one's texts, or take more than its key
allows.
"""

from __future__ import annotations

import pytest

from hf_slospec import (
    SLOSpecConfig,
    SLOSpecGenerator,
    load_drafter,
    load_tiny_pair,
    tiny_prompts,
)
from hf_slospec.server.options import SLOLimits
from tests.server.conftest import serving
from tests.support.breadth import quick_or

ONE = "key-of-one"
OTHER = "key-of-another"
KEYS = {ONE: SLOLimits(), OTHER: SLOLimits(lowest_priority=0, strictest_tpot=1.0)}
TOKENIZER = load_tiny_pair()[2]
KNOWN = TOKENIZER(f"{tiny_prompts()[0][:200]}\npassword = '")["input_ids"]  # what an attacker knows
DIGITS = [TOKENIZER(digit)["input_ids"][0] for digit in "0123456789"]
SECRET = [DIGITS[digit] for digit in quick_or((4, 0, 7), (4, 0, 7, 1, 9, 3))]
END = TOKENIZER("'\n")["input_ids"]
PROMPT = (
    KNOWN + SECRET + KNOWN
)  # its end is long, so that its K/V is copied for probes, and none takes it over


class Clients:
    """Clients of one server, told apart by their keys."""

    def __init__(self, http):
        self.http = http

    def complete(self, key, prompt, **fields):
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0} | fields
        return self.http.post(
            "/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}
        )

    def usage(self, key, prompt, **fields):
        answer = self.complete(key, prompt, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]

    def cached(self, key, prompt, **fields):
        """Return how many tokens of a prompt were found."""
        return self.usage(key, prompt, **fields)["prompt_tokens_details"]["cached_tokens"]


def clients_of(generator, **settings):
    generator.stop()
    generator.start()  # nothing is kept of other tests
    with serving(generator, **settings) as served:
        yield Clients(served.client)


@pytest.fixture
def clients(generator):
    yield from clients_of(generator, api_keys=KEYS)


def probed(clients, key, **fields):
    """Return digits behind the known tokens: at each place the one with which the most of a prompt
    is found.
    """
    digits = []
    for _ in SECRET:
        found = {
            digit: clients.cached(key, KNOWN + digits + [digit] + END, **fields) for digit in DIGITS
        }
        if len({*found.values()}) == 1:
            break  # no digit differs from the others
        digits.append(max(found, key=lambda digit: found[digit]))
    return digits


def test_probe_with_the_same_key_recovers_a_secret(clients):
    clients.usage(ONE, PROMPT)
    assert probed(clients, ONE) == SECRET, "as otherwise the next test shows nothing"


def test_probe_with_another_key_recovers_nothing(clients):
    clients.usage(ONE, PROMPT)
    assert not set(probed(clients, OTHER)) & set(SECRET[:1])
    assert clients.cached(OTHER, PROMPT, cache_salt="fresh") == 0
    assert clients.cached(OTHER, PROMPT, cache_salt="fresh") > 0, "its own is found"


def test_no_salt_leads_to_another_keys_texts(clients):
    clients.usage(ONE, KNOWN)
    for salt in ("", ONE, f"{ONE}\0", f'["{ONE}", ""]', OTHER):
        assert clients.cached(OTHER, KNOWN, cache_salt=salt) == 0
        assert clients.cached(ONE, KNOWN, cache_salt=f"{salt}x") == 0, (
            "salts of one key are apart, too"
        )
    assert clients.cached(ONE, KNOWN) > 0


@pytest.mark.parametrize("settings", [{}, {"api_keys": KEYS, "share_prefixes": True}])
def test_without_keys_or_by_the_operators_choice_all_are_one_tenant(generator, settings):
    for clients in clients_of(generator, **settings):
        clients.usage(ONE, KNOWN)
        assert (
            clients.cached(OTHER, KNOWN) > 0 and clients.cached(OTHER, KNOWN, cache_salt="own") == 0
        )


def test_shared_suffix_trees_hold_texts_of_the_same_key_only(generator):
    pytest.importorskip("arctic_inference")
    drafter = load_drafter("suffix", generator.model, share_texts=True)
    config = SLOSpecConfig(kv_tokens=20_000, policy="fixed")
    fields = {"max_tokens": 48, "min_tokens": 48}
    with SLOSpecGenerator(
        generator.model, None, generator.tokenizer, config, drafter=drafter
    ) as own:

        def accepted(clients, key):
            details = clients.usage(key, KNOWN, **fields)["completion_tokens_details"]
            return details["accepted_prediction_tokens"]

        for clients in clients_of(own, api_keys=KEYS):
            alone = accepted(clients, ONE)
            assert accepted(clients, OTHER) == alone
            assert accepted(clients, ONE) > alone
