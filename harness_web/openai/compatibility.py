"""What of OpenAI's chat completions is served, as data: the page `docs/openai-compatibility.md` is made of it, and a
test sends every sample to the server, so that neither can say what the other does not do.

    python -m harness_web.openai.compatibility > docs/openai-compatibility.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Support(StrEnum):
    """SUPPORTED: it does what OpenAI says. IGNORED: it is taken and changes nothing. REFUSED: 400 that names it."""

    SUPPORTED = "supported"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A field of the request. `samples`: values that show its support; `note`: what is particular, or why."""

    name: str
    support: Support
    note: str
    samples: tuple[Any, ...]


TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]
SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi."}]}]

# Samples go together with these fields where OpenAI asks for that.
NEEDED: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "tool_choice": {"tools": TOOLS},
    "parallel_tool_calls": {"tools": TOOLS},
}


def _supported(name: str, note: str, *samples: Any) -> Parameter:
    return Parameter(name, Support.SUPPORTED, note, samples)


def _ignored(name: str, note: str, *samples: Any) -> Parameter:
    return Parameter(name, Support.IGNORED, note, samples)


def _refused(name: str, note: str, *samples: Any) -> Parameter:
    return Parameter(name, Support.REFUSED, note, samples)


CHAT: tuple[Parameter, ...] = (
    _supported("model", "A name that `GET /v1/models` lists for the key.", "org/name:tag"),
    _supported(
        "messages",
        "All roles; text, or parts of type `text`; tool calls and their results.",
        SAID,
    ),
    _refused("messages", "Image, audio and file parts: no model here takes them.", IMAGE),
    _supported("stream", "", True),
    _supported("stream_options", "`include_usage`; only with `stream`.", {"include_usage": True}),
    _supported("max_completion_tokens", "Of each answer, 1 to the tier's maximum. Wins over `max_tokens`.", 7),
    _supported("max_tokens", "The older name of the same.", 7),
    _supported("n", "1 to 128, as many as the model makes at a time; `n` x `max_tokens` within the tier's maximum.", 2),
    _supported("temperature", "0 to 2.", 0.3),
    _supported("top_p", "0 to 1.", 0.9),
    _supported("presence_penalty", "-2 to 2.", 0.5),
    _supported("frequency_penalty", "-2 to 2.", -0.5),
    _supported("logit_bias", "Token ids of the model's vocabulary, -100 to 100.", {"5": 1.5}),
    _supported("seed", "The same answer again on the same deployment; several answers have different ones.", 7),
    _supported("stop", "One string or up to 4. None of it is shown, also not as log-probabilities.", "END", ["a", "b"]),
    _supported("logprobs", "`logprobs.content` of each choice.", True),
    _supported("top_logprobs", "0 to 20.", 3),
    _supported(
        "response_format",
        "`text`, `json_object`, `json_schema`. The answer is held to the schema whether `strict` is given or not; with "
        "`strict` the schema must also close its objects and require all properties. What takes more than a second to "
        "compile is refused.",
        {"type": "json_object"},
        JSON_SCHEMA,
    ),
    _supported("tools", "Up to 128 functions, on deployments that name a `tool_parser`.", TOOLS),
    _refused("tools", "Tools other than functions: there is nothing here that would run them.", [{"type": "mcp"}]),
    _supported(
        "tool_choice",
        "`none`, `auto`, `required`, or one function. An answer with calls ends with `tool_calls`, however chosen.",
        "required",
        {"type": "function", "function": {"name": "now"}},
        "none",
    ),
    _refused(
        "tool_choice",
        "`allowed_tools`: send only the tools that may be called.",
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
    ),
    _supported("parallel_tool_calls", "`false`: at most one call.", False),
    _supported(
        "service_tier",
        "`flex` runs as the lowest tier; `priority`, `scale` and `fast` are for keys of the best tier, others get 400; "
        "`auto` and `default` are what the key is entitled to. The answer names what it ran as: the best tier is "
        "`priority`, the worst `flex`, any other `default`.",
        "flex",
    ),
    _ignored("user", "The key says who is asking.", "somebody"),
    _ignored("safety_identifier", "No request is judged here.", "somebody"),
    _ignored("prompt_cache_key", "Prompts of a tenant share a cache without it.", "a"),
    _ignored("prompt_cache_retention", "The cache is as large as the engine's free memory.", "24h"),
    _ignored("metadata", "Answers are not stored.", {"a": "b"}),
    _ignored("store", "Answers are not stored.", True),
    _ignored("prediction", "A hint for speed only.", {"type": "content", "content": "Hi."}),
    _ignored("reasoning_effort", "The models served have no such setting.", "low"),
    _ignored("verbosity", "The models served have no such setting.", "low"),
    _refused("functions", "Deprecated by OpenAI; send `tools`.", [{"name": "f"}]),
    _refused("function_call", "Deprecated by OpenAI; send `tool_choice`.", {"name": "f"}),
    _refused("modalities", "Anything but text: no model here makes it.", ["text", "audio"]),
    _refused("audio", "No model here makes it.", {"voice": "alloy", "format": "wav"}),
    _refused("web_search_options", "There is nothing here that would search.", {}),
)

HEADER = """\
# Compatibility with OpenAI

What `POST /v1/chat/completions` does with every field of OpenAI's request. *Supported*: what OpenAI says it does.
*Ignored*: it is taken and changes nothing. *Refused*: it would change the answer and is not offered, so the request is
a 400 that names it in `param`. Fields that are not listed are ignored; an explicit `null` equals absent. What Harness
adds is in [the API](api.md#extensions-of-a-chat-request).

This page is made from `harness_web/openai/compatibility.py`, and a test sends every example to the server.
"""


def page(parameters: Iterable[Parameter] = CHAT) -> str:
    """The document."""
    return "\n".join([HEADER, "| Field | | Remarks | For example |", "|---|---|---|---|", *_rows(parameters), ""])


def _rows(parameters: Iterable[Parameter]) -> Iterator[str]:
    for one in parameters:
        samples = ", ".join(f"`{json.dumps(sample)}`" for sample in one.samples if len(json.dumps(sample)) <= 60)
        yield f"| `{one.name}` | {one.support} | {one.note} | {samples} |"


if __name__ == "__main__":
    sys.stdout.write(page())
