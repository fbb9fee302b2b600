"""Log-probabilities that keep up with the text: a stop string is not shown as tokens either."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from scheduler.engines.base import TokenLogprob


class LogprobTail:
    """Holds the log-probabilities of one answer back for as long as the text of their tokens is.

    Without stop strings (`holds` False) nothing is held.
    """

    def __init__(self, holds: bool) -> None:
        self._holds = holds
        self._kept: deque[TokenLogprob] = deque()
        self._ahead = 0  # characters of text that have been told beyond the tokens that have

    def told(self, tokens: Sequence[TokenLogprob], text: str) -> tuple[TokenLogprob, ...]:
        """`tokens` are new, and `text` goes out: those that go with it."""
        if not self._holds:
            return tuple(tokens)
        self._kept += tokens
        self._ahead += len(text)
        ready = []
        while self._kept and len(self._kept[0].chosen.token) <= self._ahead:
            self._ahead -= len(self._kept[0].chosen.token)
            ready.append(self._kept.popleft())
        return tuple(ready)

    def rest(self, text: str, *, cut: bool) -> tuple[TokenLogprob, ...]:
        """The answer ends with `text`: all tokens that are left; if a stop string cuts it there, those of the text."""
        if not cut:
            return tuple(self._kept)
        self._ahead += len(text)
        ready = []
        while self._kept and self._ahead > 0:
            self._ahead -= len(self._kept[0].chosen.token)
            ready.append(self._kept.popleft())
        return tuple(ready)
