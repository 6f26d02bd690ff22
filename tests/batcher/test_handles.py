"""Handles over the toy model: results, streams and awaits."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest

from hf_slospec.batcher.handle import RequestHandle
from hf_slospec.engine.events import Commit, PhaseTimes
from hf_slospec.errors import InvalidInputError, InvalidTypeError, RequestCancelledError
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from tests.support.toys.server import WAIT_S, alone


def test_results_streams_and_awaits_agree(server):
    handles = [server.submit(new) for new in (1, 7, 30)]
    for handle, new in zip(handles, (1, 7, 30), strict=True):
        result = handle.result(WAIT_S)
        assert result.token_ids == list(handle.tokens()) == handle.token_ids == alone(new)
        assert result.text == "".join(handle) == "".join(map(str, alone(new))) == handle.text
        assert (result.finish_reason, handle.done(), result.metrics.tokens) == ("length", True, new)
    assert {request.index for request in server.books.ended} == {1, 2, 3}


def test_a_handle_is_awaited_for_its_result_or_its_error(server):
    async def awaited(handle):
        return await handle

    assert asyncio.run(awaited(server.submit(7))).token_ids == alone(7)
    server.toy.gate.clear()
    handle = server.submit(7)
    handle.cancel()
    server.toy.gate.set()
    with pytest.raises(RequestCancelledError):
        asyncio.run(awaited(handle))


def test_timeouts_are_numbers_of_seconds(server):
    handle = server.submit(7)
    refused = [
        (math.nan, InvalidInputError), ("1", InvalidTypeError), (True, InvalidTypeError),
    ]  # fmt: skip
    for wrong, error in refused:
        with pytest.raises(error, match="timeout must be a number of seconds"):
            handle.result(wrong)
        with pytest.raises(error, match="timeout must be a number of seconds"):
            asyncio.run(handle.aresult(wrong))
    handle.result(WAIT_S)
    for endless in (math.inf, 1e10, None):
        server.toy.gate.clear()
        handle = server.submit(7)
        threading.Timer(0.05, server.toy.gate.set).start()
        assert (
            handle.result(endless).token_ids
            == asyncio.run(handle.aresult(endless)).token_ids
            == alone(7)
        )


def test_a_handle_says_which_tokens_the_draft_had_proposed(server):
    handle = server.submit(12)
    handle.result(WAIT_S)
    origins = handle.from_draft
    commits = handle.commits
    assert len(origins) == 12 == commits[-1].num_emitted
    assert sum(origins) == handle.metrics.accepted > 0
    assert not origins[0]  # chosen behind the prompt, where nothing is drafted
    ends = [commit.num_emitted for commit in commits]
    assert ends == sorted(set(ends))
    assert not any(origins[end - 1] for end in ends)  # a step's last token is the target's own
    assert [commit.at_s for commit in commits] == sorted(commit.at_s for commit in commits)
    assert sum(commit.num_nodes - 1 for commit in commits) == handle.metrics.drafted


def test_unpublished_tokens_have_no_origin_and_no_text():
    request = Request(0, RequestParams([0, 1, 2], 10))
    texts = {(): "", (1,): "caf\ufffd", (1, 2): "café"}
    handle = RequestHandle(
        request, lambda tokens: texts[tuple(tokens)], lambda handle, error: None, None
    )
    request.emit(1)
    request.record_step(0, 0, 1.0, PhaseTimes(), 1.0)
    assert handle.from_draft == handle.commits == handle.token_ids == []
    assert handle.text == ""
    handle.advance()
    assert handle.text == "caf"  # the rest of the character is to come
    assert handle.from_draft == [False]
    assert handle.commits == [Commit(1, 1.0, 1, 0)]


def test_output_arrives_while_the_request_goes_on(server):
    server.toy.gate.clear()
    handle = server.submit(8)
    tokens = handle.tokens()
    server.toy.gate.set()
    assert [next(tokens), *tokens] == alone(8)


def test_asyncio_streams_and_results(server):
    async def collect(new):
        handle = server.submit(new)
        text = "".join([str(piece) async for piece in handle])
        assert (await handle.aresult(WAIT_S)).text == text
        return text

    async def main():
        return await asyncio.gather(*(collect(new) for new in (3, 9, 20)))

    assert asyncio.run(main()) == ["".join(map(str, alone(new))) for new in (3, 9, 20)]


def test_aresult_with_timeouts_leaves_no_wakers(server):
    async def main():
        server.toy.gate.clear()
        handle = server.submit(3)
        for _ in range(20):
            with pytest.raises(TimeoutError):
                await handle.aresult(0.001)
        assert handle._wakers == []
        server.toy.gate.set()
        await handle.aresult(WAIT_S)
        assert handle._wakers == []

    asyncio.run(main())


def test_a_result_that_takes_too_long_times_out_and_goes_on(server):
    server.toy.gate.clear()
    handle = server.submit(3)
    with pytest.raises(TimeoutError, match="goes on"):
        handle.result(0.01)
    server.toy.gate.set()
    assert handle.result(WAIT_S).token_ids == alone(3)
