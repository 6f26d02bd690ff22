"""Calls of replicas through Serve's handle, and waiting for their answers."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

FAULTS = (RayError, RayServeException, StopAsyncIteration)  # a replica died, or there is none
PARTS = 5  # of a time limit


def call(method: Any, *arguments: Any) -> Any:
    """Return the response of a replica's method, called under a new request id.

    Serve gives all calls made for one HTTP request the same id, and its routers confuse those under way at once.
    """
    return contextvars.Context().run(method.remote, *arguments)


async def next_within(stream: Any, limit_s: float, may_give_up: Callable[[], bool] = lambda: True) -> Any:
    """Return the next answer of a stream, or None if there is none within a time limit.

    Args:
        limit_s: seconds. They are counted in parts, so that answers which arrive while this process stands still are
            not missing when it goes on.
        may_give_up: asked whenever the limit is over; if it returns False, the limit begins again.
    """
    answer = asyncio.ensure_future(_next(stream))
    try:
        while not await _is_done(answer, limit_s):
            if may_give_up():
                return None
        return answer.result()
    finally:
        answer.cancel()


async def _is_done(answer: asyncio.Future[Any], limit_s: float) -> bool:
    for _ in range(PARTS):
        if (await asyncio.wait({answer}, timeout=limit_s / PARTS))[0]:
            return True
    return False


async def _next(stream: Any) -> Any:
    """Return the next answer of a stream. Serve turns a task's cancellation into another error; raise the original."""
    try:
        return await anext(stream)
    except serve.exceptions.RequestCancelledError as error:
        raise asyncio.CancelledError from error
