"""SLOs that the length of a step decides about: first tokens, those of requests to come too,
guaranteed windows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np

from hf_slospec.tree.tree import FloatArray

# Share of a TTFT SLO, or of the time that is left of it, within which a first token is planned
IN_TIME = 0.95
MEMORY = 64  # requests that tell which will arrive
PRICE = (
    10.0  # tokens of any request that count as much as one of a request whose TTFT SLO is missed
)
# Price of each second by which a step ends too late for its own first tokens or guaranteed windows
LATE = 1e3
FAR_S = 1e6  # seconds beyond which no step lasts


class FirstTokens:
    """SLOs that a step should leave time for. The scheduler writes them, the policy reads
    :meth:`price_s`.

    A request that arrives during a step waits for its end, and gets its first token with the end of
    the next step at the earliest. So a TTFT SLO *s* is missed by those that arrive in a step's
    first ``T - (s - own)`` seconds, *T* being the seconds of the step and *own* those of a step
    that prefills the prompt beside the requests that cannot wait. In the long run as many tokens
    are written as arrive, so a share *q* of requests with that SLO is a share *q* of the tokens,
    and the step loses what the engine commits in ``q * max(T - (s - own), 0)`` seconds."""

    def __init__(self) -> None:
        # TTFT SLO in seconds and prompt tokens of recent requests; inf: none, or it arrived while
        # nothing was decoded.
        self._recent = deque[tuple[float, int]](maxlen=MEMORY)
        self.due_s = math.inf  # seconds within which the step should end
        # seconds of a step, and the price of so many
        self._knots = np.zeros(1)
        self._prices = np.zeros(1)

    @property
    def is_expected(self) -> bool:
        """Return whether recent requests had TTFT SLOs that steps could miss."""
        return any(ttft_slo_s < math.inf for ttft_slo_s, _ in self._recent)

    def arrived(self, ttft_slo_s: float, num_tokens: int) -> None:
        """Count a request whose prefill takes ``num_tokens``; inf: no step can make its first token
        late.
        """
        self._recent.append((ttft_slo_s, num_tokens))

    def begin(self, due_s: float, own_s: Callable[[FloatArray], FloatArray] | None) -> None:
        """Begin a step.

        Args:
            due_s: seconds within which the step should end for its first tokens and guaranteed
                windows; inf: any.
            own_s: seconds of a step without drafts that prefills so many further tokens; None:
                requests that arrive now would wait for other reasons.
        """
        self.due_s = due_s
        slacks_s = np.zeros(0)
        if own_s is not None and self.is_expected:
            recent = np.array([each for each in self._recent if each[0] < math.inf])
            slacks_s = np.sort(IN_TIME * recent[:, 0] - own_s(recent[:, 1]))
            # What is missed whatever the step does has no price.
            slacks_s = slacks_s[slacks_s > 0.0]
        self._knots = np.concatenate(([0.0], slacks_s, [FAR_S]))
        slopes = PRICE / max(len(self._recent), 1) * np.arange(len(slacks_s) + 1)
        self._prices = np.concatenate(([0.0], np.cumsum(slopes * np.diff(self._knots))))

    @property
    def is_due(self) -> bool:
        """Return whether there is a time within which the step should end."""
        return self.due_s < math.inf

    def price_s(self, seconds: FloatArray) -> FloatArray:
        """Return what steps of so many seconds cost beyond them, in seconds of the engine's work."""
        price: FloatArray = np.interp(seconds, self._knots, self._prices)
        return price + LATE * np.maximum(seconds - self.due_s, 0.0) if self.is_due else price
