"""Conversations made safe for a chat template, by every engine that has one.

Templates take roles as they come, and tokenizers turn the text of a control token into the token itself: a user who
writes `<|im_end|>` would end his own turn and speak as the system. Here unknown roles are refused, and a zero-width
space is put into every control token that stands in somebody's text; it reads the same and is no token any more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scheduler.engines.base import PromptError

ROLES = ("system", "developer", "user", "assistant", "tool")
ZERO_WIDTH_SPACE = "\u200b"
_STRUCTURE = ("role", "type")  # keys whose values are words of the wire format, not somebody's text


class ChatGuard:
    """Checks and defuses conversations for one tokenizer, given its control tokens."""

    def __init__(self, control_tokens: Iterable[str]) -> None:
        # A token of one character cannot be broken up; it is a character like any other.
        tokens = sorted((token for token in set(control_tokens) if len(token) > 1), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, tokens))) if tokens else None

    def clean(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The same conversation, defused. PromptError names the message that no template may see."""
        if not messages:
            raise PromptError("At least one message is needed.", param="messages")
        for index, message in enumerate(messages):
            _check(message, index)
        return [self._defuse(dict(message)) for message in messages]

    def clean_tools(self, tools: Any) -> Any:
        """The tools of a conversation, defused: their descriptions are somebody's text too."""
        return self._defuse(tools)

    def _defuse(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.defuse_text(value)
        if isinstance(value, Mapping):
            return {key: part if key in _STRUCTURE else self._defuse(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self._defuse(part) for part in value]
        return value

    def defuse_text(self, text: str) -> str:
        """`text` with every control token broken after its first character."""
        if self._control is None:
            return text
        while self._control.search(text):  # what is left of one token may be another
            text = self._control.sub(lambda match: f"{match[0][0]}{ZERO_WIDTH_SPACE}{match[0][1:]}", text)
        return text


def characters(messages: Sequence[Mapping[str, Any]]) -> int:
    """How long the texts of a conversation are, without looking at them; what tools were called with is text too."""
    return sum(_length(message.get("content")) + _called(message.get("tool_calls")) for message in messages)


def _length(content: Any) -> int:
    if isinstance(content, str):
        return len(content)
    if isinstance(content, list | tuple):
        return sum(len(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return 0


def _called(calls: Any) -> int:
    arguments = (call.get("function", {}).get("arguments", "") for call in calls or () if isinstance(call, Mapping))
    return sum(len(one) for one in arguments if isinstance(one, str))


def _check(message: Mapping[str, Any], index: int) -> None:
    role = message.get("role")
    if role not in ROLES:
        raise PromptError(f"Role {role!r} is not one of {', '.join(ROLES)}.", param=f"messages[{index}].role")
    content = message.get("content")
    if isinstance(content, list | tuple):
        for part in content:
            # Anything but text would have the engine fetch what a stranger points it at.
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise PromptError("Only text parts are taken.", param=f"messages[{index}].content")
    elif not (content is None or isinstance(content, str)):
        raise PromptError("Content must be text.", param=f"messages[{index}].content")
