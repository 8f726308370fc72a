"""Whether the processors run at the rate they can."""

import time

from tf_fused_ops.bench import machine

_FULL = 0.8  # of the best rate, and above
_WAIT = 0.05  # seconds


class Pace:
    """Compares the rate of multiply-adds with the best so far.

    A host may run two virtual processors on one core for seconds: whatever is timed meanwhile looks
    twice as slow as it is.

    Args:
        threads: How many compute.
        patience: For how many seconds a case waits for the rate to be full.

    Attributes:
        steady: Whether the rate was full at the last two looks.
    """

    def __init__(self, threads, patience):
        self._threads = threads
        self._patience = patience
        self._best = 0.0

    def begin(self):
        """Looks for the first time in a case, with patience anew."""
        self._full = self.steady = self._is_full()
        self._deadline = None

    def kept(self):
        """Whether what ran since the last call, or since `begin`, may count.

        Returns:
            True if the rate was full then and is now, or if there is no more patience. Otherwise
            False, as soon as the rate is full again.
        """
        before, self._full = self._full, self._is_full()
        self.steady = before and self._full
        if self.steady:
            return True
        if self._deadline is None:
            self._deadline = time.monotonic() + self._patience
        while not self._full and time.monotonic() < self._deadline:
            time.sleep(_WAIT)
            self._full = self._is_full()
        return time.monotonic() >= self._deadline

    def _is_full(self):
        rate = machine.brief_rate(self._threads)
        self._best = max(self._best, rate)
        return rate >= _FULL * self._best
