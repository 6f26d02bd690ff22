"""Time limits of single methods, so that one which hangs does not take the check with it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

GRACE_S = 30.0  # after the limit, until a method counts as hanging
AGAIN_S = 5.0  # a library may catch the first error


class TimedOutError(BaseException):
    """A method exceeded its time; like KeyboardInterrupt, no library should catch it."""


@contextlib.contextmanager
def at_most(
    seconds: float, on_hang: Callable[[], None], grace_s: float = GRACE_S
) -> Iterator[None]:
    """Raise TimedOutError within the context after this time, where the interpreter runs.

    Args:
        on_hang: called in another thread if the context has not ended ``grace_s`` after that, as
            with a kernel that never ends.
    """

    def stop(*_: Any) -> None:
        raise TimedOutError(f"it took longer than {seconds:.0f} s")

    def hang() -> None:
        signal.setitimer(
            signal.ITIMER_REAL, 0.0
        )  # it would outlive a replaced process, and end the new one
        on_hang()

    hanging = threading.Timer(seconds + grace_s, hang)
    hanging.daemon = True
    before = signal.signal(signal.SIGALRM, stop)
    hanging.start()
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), AGAIN_S)
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    finally:  # also where the limit was reached just before the line above
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        hanging.cancel()
