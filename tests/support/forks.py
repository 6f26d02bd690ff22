"""Forked child processes of tests."""

from __future__ import annotations

import os
import signal
import traceback
import warnings

ALARM_S = 120  # seconds after which a child that hangs is ended, far more than any takes


def passes_in_child(check):
    """Return what ``check`` returns in a forked child; False if it raises or hangs."""
    with warnings.catch_warnings(action="ignore"):  # Python 3.12 warns of forks beside threads
        pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(ALARM_S)
        try:
            os._exit(0 if check() else 1)
        except BaseException:  # noqa: BLE001  pytest may not go on in the child
            traceback.print_exc()
        finally:
            os._exit(2)
    return os.waitpid(pid, 0)[1] == 0
