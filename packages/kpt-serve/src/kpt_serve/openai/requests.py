"""Requests of OpenAI's API: what is passed on to transformers, what changes nothing, and what is refused."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SHARED = frozenset({"model", "stream", "temperature", "top_p"})
#: Fields that transformers' handler of a route serves, and the names that the bound of new tokens has there.
_SERVED = {
    "chat/completions": _SHARED | {"messages", "tools"},
    "completions": _SHARED | {"prompt"},
    "responses": _SHARED | {"input", "instructions", "tools"},
}
_BOUNDS = {
    "chat/completions": ("max_completion_tokens", "max_tokens"),
    "completions": ("max_tokens",),
    "responses": ("max_output_tokens",),
}
_NEEDED = {"chat/completions": "messages", "completions": "prompt", "responses": "input"}
#: Fields that never change an answer.
_WITHOUT_EFFECT = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
#: Fields that transformers ignores, and the values for which that is right: others would get a wrong answer.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "stop": ("", []),
    "store": (False,),
    # Usage is in the last part of each stream, where it harms nobody who did not ask for it.
    "stream_options": ({}, {"include_usage": True}, {"include_usage": False}),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("auto",),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_TEXTS = ("text", "input_text", "output_text")


class RequestError(Exception):
    """A request is refused, for a reason that its client gets in the shape of OpenAI's errors.

    Attributes:
        status: HTTP's number.
        param: The field that is meant.
        code: OpenAI's word for the reason.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclass
class Asked:
    """Hold what a request asks for beside its prompt.

    Attributes:
        id: Names it in the batch; never the client's, since two clients may choose the same.
        temperature: None for the model's own.
        top_p: None for the model's own.
        max_tokens: None for the server's bound.
        started: Whether it is in the batch.
    """

    id: str
    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    started: bool = False


def read_request(route: str, document: object, *, id: str, model: str, max_tokens: int) -> tuple[dict[str, Any], Asked]:
    """Return the fields of a request that transformers' handler gets, and what it asks for beside them.

    Args:
        route: Behind `/v1/`.
        document: The JSON that came.
        id: A name for the request.
        model: The one that is served.
        max_tokens: The largest bound of new tokens that a request may set.

    Raises:
        RequestError: A field is missing, unknown, out of bounds, or asks for what isn't possible.
    """
    if not isinstance(document, dict):
        raise RequestError(400, f"the body must be a JSON object; got {type(document).__name__}")
    # JSON's null is OpenAI's default.
    fields = {name: value for name, value in document.items() if value is not None}
    if fields.get("model", model) != model:
        raise RequestError(
            404,
            f"the model {str(fields['model'])[:100]!r} does not exist; this server has {model!r}",
            param="model",
            code="model_not_found",
        )
    bounds = _BOUNDS[route]
    for name, value in fields.items():
        if name in _SERVED[route] or name in bounds or name in _WITHOUT_EFFECT:
            continue
        if not any(_equal(value, neutral) for neutral in _NEUTRAL.get(name, ())):
            possible = " or ".join(repr(each) for each in _NEUTRAL.get(name, ()))
            way = f"; only {possible} is possible" if possible else "; leave it out"
            raise RequestError(400, f"{name}={str(value)[:100]!r} is not supported{way}", param=name)
    if _NEEDED[route] not in fields:
        raise RequestError(400, f"{_NEEDED[route]} is missing", param=_NEEDED[route])
    if not isinstance(fields.get("stream", False), bool):
        raise RequestError(400, "stream must be true or false", param="stream")
    _check_texts(fields.get("messages"), "messages")
    _check_input(fields)
    _check_tools(fields.get("tools", []))
    asked = Asked(id, _number(fields, "temperature", 0, 2), _number(fields, "top_p", 0, 1), None)
    for name in reversed(bounds):  # the first one counts, and no other is wrong
        if name in fields:
            asked.max_tokens = _count(fields[name], name, max_tokens)
    fields.setdefault("stream", False)  # transformers streams some routes by default
    return {name: fields[name] for name in _SERVED[route] - {"temperature", "top_p"} if name in fields}, asked


def _equal(value: object, neutral: object) -> bool:
    # In Python False is 0, but in OpenAI's API logprobs=0 asks for something.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _number(fields: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(400, f"{name} must be a number; got {str(value)[:100]!r}", param=name)
    if not least <= value <= most or (name == "top_p" and value == 0):  # NaN is in no range
        raise RequestError(400, f"{name} must be from {least} to {most}; got {str(value)[:100]}", param=name)
    return float(value)


def _count(value: object, name: str, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise RequestError(400, f"{name} must be from 1 to {most}; got {str(value)[:100]}", param=name)
    return value


def _check_texts(items: object, param: str) -> None:
    """Raise for parts of a message that are no text, which transformers would drop without a word."""
    if items is None or (isinstance(items, str) and param == "input"):
        return
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise RequestError(400, f"{param} must be a list of objects", param=param)
    # What begins with no message is for transformers the content of one, of which it drops all but texts.
    if param == "input" and items and "role" not in items[0]:
        items = [{"content": items}]
    for item in items:
        for content in (item.get("content") if item.get("type") != "reasoning" else None, item.get("output")):
            if not isinstance(content, list | str | None):
                raise RequestError(400, "content must be a text or a list of texts", param=param)
            for part in content if isinstance(content, list) else ():
                kind = part.get("type") if isinstance(part, dict) else None
                if kind not in _TEXTS:
                    raise RequestError(
                        400, f"content of type {str(kind)[:100]!r} is not supported; only text is", param=param
                    )
                if not isinstance(part.get("text"), str):
                    raise RequestError(400, f"content of type {kind!r} must have a text", param=param)


def _check_input(fields: Mapping[str, Any]) -> None:
    """Raise for what transformers' route of responses would drop without a word."""
    items, instructions = fields.get("input"), fields.get("instructions", "")
    _check_texts(items, "input")
    if not isinstance(instructions, str):
        raise RequestError(400, "instructions must be a text", param="instructions")
    if instructions and isinstance(items, list) and items and items[0].get("role") == "system":
        raise RequestError(
            400, "instructions would replace the system message of input; send one of them", param="instructions"
        )


def _check_tools(tools: object) -> None:
    """Raise for tools that are no functions, which transformers would show to the model as functions."""
    for tool in tools if isinstance(tools, list) else [None]:
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise RequestError(400, "tools must be a list of objects of type 'function'", param="tools")


def conversation(messages: Sequence[Mapping[str, Any]], modality: object = None) -> list[dict[str, Any]]:
    """Return messages as a chat template has them: content is one text, and arguments of calls are objects.

    It stands for transformers' own, which drops names, reasoning, and a text that comes with calls of tools.

    Args:
        messages: OpenAI's.
        modality: Text, whatever it says.
    """
    return [_message(each) for each in messages]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {name: value for name, value in message.items() if value is not None}
    made["role"], content = message["role"], made.get("content", "")
    made["content"] = content if isinstance(content, str) else " ".join(part["text"] for part in content)
    if calls := made.pop("tool_calls", []):
        made["tool_calls"] = [_call(each) for each in calls]
    return made


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function["arguments"], str):
        function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}
