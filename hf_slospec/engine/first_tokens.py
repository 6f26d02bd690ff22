"""``FirstTokens``: SLOs that limit how long a step should last: TTFT SLOs of waiting requests and
of requests that will arrive during the step, and guaranteed windows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np

from hf_slospec.tree.tree import FloatArray

# Share of a TTFT SLO, or of the remaining time of it, within which a first token is planned.
IN_TIME = 0.95
MEMORY = 64  # number of recent requests from which future arrivals are estimated
# A token of a request that misses its TTFT SLO costs as much as this many tokens of any request.
PRICE = 10.0
# Price, in seconds per second, of exceeding the step's time limit `due_s`.
LATE = 1e3
FAR_S = 1e6  # seconds; upper end of the price curve, longer than any step


class FirstTokens:
    """Prices the length of a step by the SLOs that a longer step would miss. The scheduler updates
    it, and the policy reads :meth:`price_s`.

    A request that arrives during a step waits for the step's end, and gets its first token at the
    end of the next step at the earliest. So a TTFT SLO *s* is missed by requests that arrive in a
    step's first ``T - (s - own)`` seconds, where *T* is the length of the step and *own* the length
    of a step that prefills the prompt beside the requests that cannot wait. In the long run, as
    many tokens are written as requests ask for, so if a share *q* of requests has that SLO, so has
    a share *q* of the tokens, and the step loses what the engine commits in ``q * max(T - (s -
    own), 0)`` seconds.
    """

    def __init__(self) -> None:
        # TTFT SLO in seconds and prefill tokens of recent requests. The SLO is inf if the request
        # has none, or arrived while no request was decoding.
        self._recent = deque[tuple[float, int]](maxlen=MEMORY)
        self.due_s = math.inf  # seconds within which the step should end
        # Price curve of future first tokens: seconds of a step, and their prices.
        self._knots = np.zeros(1)
        self._prices = np.zeros(1)

    @property
    def is_expected(self) -> bool:
        """Return whether any of the recent requests had a TTFT SLO that a long step could have
        missed.
        """
        return any(ttft_slo_s < math.inf for ttft_slo_s, _ in self._recent)

    def arrived(self, ttft_slo_s: float, num_tokens: int) -> None:
        """Record a request that has arrived.

        Args:
            ttft_slo_s: its TTFT SLO; inf: no step can make its first token late.
            num_tokens: tokens that its prefill takes.
        """
        self._recent.append((ttft_slo_s, num_tokens))

    def begin(self, due_s: float, own_s: Callable[[FloatArray], FloatArray] | None) -> None:
        """Set the limits of the step that begins now.

        Args:
            due_s: seconds within which the step should end for the sake of first tokens and
                guaranteed windows; inf: no limit.
            own_s: maps numbers of further prefill tokens to the seconds of a step without drafts
                that prefills them; None: requests that arrive during the step have to wait for
                other reasons anyway.
        """
        self.due_s = due_s
        slacks_s = np.zeros(0)
        if own_s is not None and self.is_expected:
            recent = np.array([each for each in self._recent if each[0] < math.inf])
            slacks_s = np.sort(IN_TIME * recent[:, 0] - own_s(recent[:, 1]))
            # SLOs that are missed however short the step is do not affect the price.
            slacks_s = slacks_s[slacks_s > 0.0]
        self._knots = np.concatenate(([0.0], slacks_s, [FAR_S]))
        slopes = PRICE / max(len(self._recent), 1) * np.arange(len(slacks_s) + 1)
        self._prices = np.concatenate(([0.0], np.cumsum(slopes * np.diff(self._knots))))

    @property
    def is_due(self) -> bool:
        """Return whether the step has a time limit."""
        return self.due_s < math.inf

    def price_s(self, seconds: FloatArray) -> FloatArray:
        """Return what steps of these lengths cost in addition to their length, in seconds of the
        engine's work.
        """
        price: FloatArray = np.interp(seconds, self._knots, self._prices)
        return price + LATE * np.maximum(seconds - self.due_s, 0.0) if self.is_due else price
