"""Tokens to text, step by step: no character is split, no stop string is shown, nor the beginning of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
UNFINISHED = "\ufffd"  # what a decoder writes for the first bytes of a character


class TextStream:
    """The text of one answer. `decode` turns token ids into text."""

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = stops
        self._keep = max((len(stop) for stop in stops), default=1) - 1
        self._ids: list[int] = []  # the last tokens that gave text, and those after them
        self._read = 0  # how many of these have given their text
        self._held = ""

    def push(self, token: int) -> tuple[str, bool]:
        """The text to show after one more token, and whether a stop string ends the answer here."""
        self._held += self._new_text(token)
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        ready = min(found) if found else max(len(self._held) - self._keep, 0)
        shown, self._held = self._held[:ready], self._held[ready:]
        return shown, bool(found)

    def rest(self) -> str:
        """What was held back and may be shown, because no stop string has come of it."""
        return self._held

    def _new_text(self, token: int) -> str:
        """What the token adds. Decoded with the tokens before it: spaces and characters reach over tokens."""
        self._ids.append(token)
        before = self._decode(self._ids[: self._read])
        text = self._decode(self._ids)
        if text.endswith(UNFINISHED):
            return ""
        del self._ids[: self._read]
        self._read = len(self._ids)
        return text[len(before) :]
