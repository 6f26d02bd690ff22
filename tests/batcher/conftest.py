"""Fixtures shared by the tests of serving."""

from __future__ import annotations

import pytest

from hf_slospec import SLOSpecGenerator, load_tiny_pair
from tests.support.served_pair import CONFIG
from tests.support.toys.server import Server


@pytest.fixture
def server():
    made = Server()
    made.batcher.start()
    yield made
    made.toy.gate.set()
    made.batcher.stop(drain=False, timeout=None)
    assert not made.toy.cached, "K/V was left behind"


@pytest.fixture(scope="module")
def pair():
    return load_tiny_pair()


@pytest.fixture(scope="module")
def served(pair):
    target, draft, tokenizer = pair
    with SLOSpecGenerator(target, draft, tokenizer, CONFIG) as generator:
        yield generator
