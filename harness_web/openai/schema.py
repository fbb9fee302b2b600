"""The body of a chat request: what is taken, what is refused, and which field is at fault.

Unknown fields are ignored; an explicit null equals absent. What would change the answer and is not offered is
refused by name rather than ignored. Nothing reaches an engine that has not passed here.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from harness_web.openai.errors import SHOWN, InvalidRequest
from harness_web.openai.json_schema import check_schema
from scheduler.gateway import JsonFormat, Sampling, Tools

MAX_DEPTH = 64
MAX_MESSAGES = 10_000
MAX_STOPS = 4
MAX_TOOLS = 128
MAX_LOGPROBS = 20
SMALLEST_TOP_P = 1e-9
INT32 = 2**31 - 1

Role = Literal["system", "developer", "user", "assistant", "tool"]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
Tokens = Annotated[int, Meta(ge=1, le=INT32)]

# Fields that would change the answer, and the values of them that ask for nothing special.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"], []),
    "audio": (),
    "web_search_options": (),
}


class StreamOptions(Struct):
    include_usage: bool | None = None


class Function(Struct):
    name: str
    arguments: str


class ToolCall(Struct):
    id: str
    function: Function
    type: Literal["function"] = "function"


class Part(Struct):
    type: str
    text: str | None = None


class ChatMessage(Struct):
    role: Role
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class NamedFunction(Struct):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    function: NamedFunction
    type: Literal["function"] = "function"


class ChosenFunction(Struct):
    name: str


class ToolChoice(Struct):
    """The one function that must be called."""

    function: ChosenFunction
    type: Literal["function"] = "function"


class JsonSchema(Struct):
    name: FunctionName
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(Struct):
    """`POST /v1/chat/completions`, the fields that are understood. Ranges are OpenAI's."""

    model: Annotated[str, Meta(min_length=1)]
    messages: list[ChatMessage]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    ignore_eos: bool | None = None
    # Harness
    priority: Literal["high", "normal", "low"] | None = None
    slo_threshold: Annotated[float, Meta(gt=0)] | None = None  # seconds
    queue_timeout: Annotated[float, Meta(gt=0)] | None = None  # seconds
    simulate: dict[str, Any] | None = None
    # refused unless they ask for nothing special, see UNSUPPORTED
    functions: Annotated[list[Any], Meta(max_length=MAX_TOOLS)] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def output_limit(self) -> int | None:
        """The newer name wins where both are given."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def answers(self) -> int:
        return self.n or 1

    def prompt(self) -> tuple[dict[str, Any], ...]:
        """The conversation as plain dicts, without the fields that were absent or null."""
        return tuple(_plain(message) for message in self.messages)

    def json_format(self) -> JsonFormat | None:
        """The format of the answer; None: text."""
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.json_schema is None or wanted.json_schema.schema is None:
            return JsonFormat()
        return JsonFormat(msgspec.json.encode(wanted.json_schema.schema).decode())

    def usable_tools(self) -> Tools | None:
        """The tools that the answer may call; None: it is text."""
        if not self.tools or self.tool_choice == "none":
            return None
        wish = self.tool_choice or "auto"
        choice = f"named:{wish.function.name}" if isinstance(wish, ToolChoice) else wish
        functions = msgspec.json.encode([_plain_tool(tool) for tool in self.tools]).decode()
        return Tools(functions, choice, self.parallel_tool_calls is not False)

    def sampling(self) -> Sampling:
        """How to answer, as it travels to the engine."""
        return Sampling(
            max_tokens=self.output_limit,
            temperature=self.temperature,
            # 0 asks for the likeliest token only; engines want a share above zero, and the smallest one says the same.
            top_p=None if self.top_p is None else max(self.top_p, SMALLEST_TOP_P),
            stop=self.stops,
            seed=self.seed,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias or {},
            ignore_eos=bool(self.ignore_eos),
            n=self.answers,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            format=self.json_format(),
            tools=self.usable_tools(),
        )


T = TypeVar("T")

_chat = msgspec.json.Decoder(ChatRequest)
_object = msgspec.json.Decoder(dict[str, Any])


def parse_chat(body: bytes) -> ChatRequest:
    """The request in `body`, valid in itself. Raises InvalidRequest naming the first field at fault."""
    chat = _decode(_chat, body)
    _check_support(chat)
    _check_messages(chat.messages)
    _check_sampling(chat)
    _check_format(chat.response_format)
    _check_tools(chat)
    _check_text(chat)
    return chat


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object of any content, for bodies that their own domain validates."""
    return _decode(_object, body)


# --- decoding -------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{}]', re.DOTALL)
_AT = re.compile(r" - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<field>[^`]*)`")


def _decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    _check_depth(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidRequest("The body is not valid JSON in UTF-8.", None, reason="invalid_json") from None


def _check_depth(body: bytes) -> None:
    """Nesting is bounded before anything recursive sees it."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for match in _TOKEN.finditer(body):
        token = match[0]
        if token in (b"[", b"{"):
            depth += 1
            if depth > MAX_DEPTH:
                raise InvalidRequest(f"The body is nested more than {MAX_DEPTH} deep.", None, reason="invalid_json")
        elif token in (b"]", b"}"):
            depth -= 1


def _invalid_field(text: str) -> InvalidRequest:
    """msgspec's sentence as ours: `Expected `str`, got `int` - at `$.messages[0].role`` and the like."""
    at = _AT.search(text)
    path = at["path"] if at else ""
    what = text[: at.start()] if at else text
    missing = _MISSING.search(what)
    if missing:
        param = f"{path}.{missing['field']}" if path else missing["field"]
        return InvalidRequest(f"Missing required parameter: '{param}'.", param, reason="missing_parameter")
    reason = "invalid_type" if ", got " in what else "invalid_value"
    param = path.replace("[...]", "") or None
    place = f"Invalid value for '{param}'" if param else "Invalid body"
    return InvalidRequest(f"{place}: {what}.", param, reason=reason)


# --- what types cannot say ------------------------------------------------------------------------------------------


def _check_support(chat: ChatRequest) -> None:
    if chat.top_logprobs and not chat.logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    for field, harmless in UNSUPPORTED.items():
        value = getattr(chat, field)
        if value is not None and value not in harmless:
            raise _unsupported(field, f"'{field}' is not supported with this value.")
    if chat.stream_options is not None and not chat.stream:
        raise InvalidRequest("'stream_options' is only allowed when 'stream' is true.", "stream_options")


def _check_format(wanted: ResponseFormat | None) -> None:
    if wanted is None or wanted.type != "json_schema":
        return
    if wanted.json_schema is None:
        raise InvalidRequest(
            "Missing required parameter: 'response_format.json_schema'.",
            "response_format.json_schema",
            reason="missing_parameter",
        )
    if wanted.json_schema.schema is not None:
        at = "response_format.json_schema.schema"
        check_schema(wanted.json_schema.schema, at, strict=bool(wanted.json_schema.strict))


def _check_tools(chat: ChatRequest) -> None:
    tools = chat.tools or []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        at = f"tools[{index}].function"
        if tool.function.name in names:
            raise InvalidRequest(f"Two tools are named {tool.function.name!r}.", f"{at}.name")
        names.add(tool.function.name)
        if tool.function.parameters is not None:
            check_schema(tool.function.parameters, f"{at}.parameters", strict=bool(tool.function.strict))
    choice = chat.tool_choice
    if isinstance(choice, ToolChoice) and choice.function.name not in names:
        raise InvalidRequest(f"There is no tool {choice.function.name[:SHOWN]!r}.", "tool_choice")
    if choice == "required" and not tools:
        raise InvalidRequest("'tool_choice' needs 'tools'.", "tool_choice")
    forced = choice == "required" or isinstance(choice, ToolChoice)
    if forced and chat.response_format is not None and chat.response_format.type != "text":
        raise InvalidRequest("A tool that must be called leaves no room for a format.", "response_format")


def _check_messages(messages: list[ChatMessage]) -> None:
    if not messages:
        raise InvalidRequest("'messages' must hold at least one message.", "messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"'messages' holds more than {MAX_MESSAGES} messages.", "messages")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")


def _check_message(message: ChatMessage, at: str) -> None:
    if message.tool_calls is not None and message.role != "assistant":
        raise InvalidRequest("Only assistant messages have 'tool_calls'.", f"{at}.tool_calls")
    if message.role == "tool" and not message.tool_call_id:
        raise InvalidRequest("A tool message needs 'tool_call_id'.", f"{at}.tool_call_id", reason="missing_parameter")
    if message.content is None and not message.tool_calls:
        raise InvalidRequest("The message has no content.", f"{at}.content", reason="missing_parameter")
    if isinstance(message.content, list):
        _check_parts(message.content, f"{at}.content")


def _check_parts(parts: list[Part], at: str) -> None:
    if not parts:
        raise InvalidRequest("'content' must hold at least one part.", at)
    for index, part in enumerate(parts):
        if part.type != "text":
            raise _unsupported(f"{at}[{index}].type", "Only content parts of type 'text' are supported.")
        if part.text is None:
            raise InvalidRequest("A text part needs 'text'.", f"{at}[{index}].text", reason="missing_parameter")


def _check_sampling(chat: ChatRequest) -> None:
    if len(chat.stops) > MAX_STOPS:
        raise InvalidRequest(f"'stop' takes at most {MAX_STOPS} sequences.", "stop")
    if not all(chat.stops):
        raise InvalidRequest("A stop sequence cannot be empty.", "stop")
    for field in ("slo_threshold", "queue_timeout"):
        value = getattr(chat, field)
        if value is not None and not math.isfinite(value):
            raise InvalidRequest(f"'{field}' must be a finite number of seconds.", field)
    if any(token < 0 for token in chat.logit_bias or ()):
        raise InvalidRequest("'logit_bias' is keyed by token ids, which are not negative.", "logit_bias")


def _check_text(chat: ChatRequest) -> None:
    """No NUL: engines, databases and terminals each end a text there in their own way."""
    if any("\0" in stop for stop in chat.stops):
        raise InvalidRequest("NUL characters are not allowed.", "stop")
    for index, message in enumerate(chat.messages):
        content = message.content
        texts = [part.text or "" for part in content] if isinstance(content, list) else [content or ""]
        texts += [call.function.arguments for call in message.tool_calls or ()]
        if any("\0" in text for text in texts):
            raise InvalidRequest("NUL characters are not allowed.", f"messages[{index}].content")


def _unsupported(param: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, param, reason="unsupported_parameter")


def _plain(message: ChatMessage) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(message)
    if isinstance(message.content, list):
        plain["content"] = [{"type": "text", "text": part.text} for part in message.content]
    return {key: value for key, value in plain.items() if value is not None}


def _plain_tool(tool: Tool) -> dict[str, Any]:
    """A tool as the template wants it, without the fields that were absent or null; a schema keeps its own."""
    function = {key: value for key, value in msgspec.to_builtins(tool.function).items() if value is not None}
    return {"type": tool.type, "function": function}
