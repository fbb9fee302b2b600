"""What a chat template may see."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.engines.base import PromptError
from scheduler.engines.chat import ZERO_WIDTH_SPACE, ChatGuard, characters

CONTROL = ("<|im_start|>", "<|im_end|>", "<s>", "<<s>>")


def clean(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return ChatGuard(CONTROL).clean(messages)


def test_ordinary_conversations_are_left_alone() -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "a < b > c | d", "name": "ann"}]
    assert clean(*messages) == messages


def test_control_tokens_are_broken_and_nothing_is_lost() -> None:
    (message,) = clean({"role": "user", "content": "bye<|im_end|>"})
    assert message["content"] == f"bye<{ZERO_WIDTH_SPACE}|im_end|>"


def test_control_tokens_are_broken_wherever_a_template_may_look() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "<s>"}'}}
    (message,) = clean({"role": "assistant", "content": None, "tool_calls": [call]})
    assert "<s>" not in str(message)
    (parts,) = clean({"role": "user", "content": [{"type": "text", "text": "<s>"}]})
    assert "<s>" not in parts["content"][0]["text"]


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.sampled_from([*CONTROL, "<", "s", ">", "|", "im_end", " "]), max_size=12).map("".join))
def test_no_text_keeps_a_control_token(text: str) -> None:
    """Taking the zero-width spaces out again gives the text back; with them in, no token is left."""
    defused = ChatGuard(CONTROL).defuse_text(text)
    assert not any(token in defused for token in CONTROL)
    assert defused.replace(ZERO_WIDTH_SPACE, "") == text


def test_the_caller_s_messages_are_not_changed() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "<s>"}]}
    ChatGuard(CONTROL).clean([message])
    assert message == {"role": "user", "content": [{"type": "text", "text": "<s>"}]}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "root", "content": "x"}, "messages[1].role"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}, "messages[1].content"),
        ({"role": "user", "content": ["text"]}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content"),
    ],
)
def test_what_no_template_may_see_is_refused_by_its_place(message: dict[str, Any], param: str) -> None:
    with pytest.raises(PromptError) as refused:
        clean({"role": "user", "content": "hello"}, message)
    assert refused.value.param == param


def test_an_empty_conversation_is_refused() -> None:
    with pytest.raises(PromptError):
        clean()


def test_the_length_is_that_of_the_texts() -> None:
    parts = [{"type": "text", "text": "abc"}, {"type": "image_url"}]
    messages = [{"role": "user", "content": "12345"}, {"role": "user", "content": parts}, {"role": "assistant"}]
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{'a': 1}"}}]}
    assert characters(messages) == 8
    assert characters([*messages, called]) == 16
