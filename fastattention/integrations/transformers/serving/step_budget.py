"""How many tokens of prompts a step reads, so that answers under way are not held up."""

from __future__ import annotations

_LEAST = 16  # tokens of prompts that any step may read
_FIRST = 64  # in the first step that reads a prompt beside answers
_SLOWDOWN = 1.5  # how many times as long as one of answers alone a step may take; clients see about twice
_KEPT = 0.9  # weight of the steps before in averages


class StepBudget:
    """Chooses the tokens of a step from the times of steps before.

    A step that reads n tokens of prompts takes about fixed + n * per_token seconds, a line fitted to the last ones. It
    may take _SLOWDOWN times as long as a step of answers alone. On a GPU steps of answers alone are CUDA graphs, and
    the fixed part of others is longer than that: then a step may take _SLOWDOWN times the fixed part, since fewer
    tokens would gain little.
    """

    def __init__(self, most: int) -> None:
        """most: tokens of a step that the batch has room for."""
        self._most = most
        self._alone: float | None = None  # seconds of a step of answers alone
        self._largest = _FIRST // 2  # tokens of prompts that a step has read beside answers
        # Over steps that read n tokens of prompts in t seconds: weights, and sums of n, t, n * n and n * t.
        self._sums: tuple[float, ...] = (0.0,) * 5

    def tokens(self, answers: int, longest: int) -> int:
        """Tokens of the next step, one for each of the answers under way included.

        longest: tokens of the longest prompt that is being read or waits. One that fits a step is read at once, since
        chunks would cost a batch of short prompts an eighth of its rate.
        """
        if answers == 0 or longest <= self._most or self._alone is None:
            return self._most
        return min(self._most, answers + max(_LEAST, min(2 * self._largest, self._allowed(self._alone))))

    def took(self, answers: int, read: int, seconds: float) -> None:
        """Notes a step that read `read` tokens of prompts beside some answers."""
        if read == 0:
            self._alone = seconds if self._alone is None else _KEPT * self._alone + (1.0 - _KEPT) * seconds
            return
        if answers:
            self._largest = max(self._largest, read)
        new = (1.0, read, seconds, read * read, read * seconds)
        self._sums = tuple(_KEPT * old + value for old, value in zip(self._sums, new, strict=True))

    def _allowed(self, alone: float) -> int:
        """Tokens of prompts by the fitted line."""
        weight, n, t, n_n, n_t = self._sums
        if weight == 0.0:
            return self._most
        mean, seconds = n / weight, t / weight
        spread = n_n / weight - mean * mean
        if spread > 0.01 * mean * mean:
            per_token = (n_t / weight - mean * seconds) / spread
        else:  # one point is no line
            per_token = (seconds - alone) / mean
        if per_token <= 0.0:
            return self._most
        fixed = max(seconds - per_token * mean, 0.0)
        return int((_SLOWDOWN * max(alone, fixed) - fixed) / per_token)
