import pytest

from kpt_serve.errors import ServeError
from kpt_serve.openai import OpenAIOptions
from kpt_serve.openai.requests import RequestError, conversation, read_request

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}]}
REFUSED = {
    "temperature": (2.5, "must be from 0 to 2; got 2.5"),
    "top_p": (0, "must be from 0 to 1; got 0"),
    "max_tokens": (65, "must be from 1 to 64; got 65"),
    "stream": (1, "must be true or false"),
    "seed": (7, "'7' is not supported; leave it out"),
    "stop": (["x"], "only '' or [] is possible"),
    "n": (2, "only 1 is possible"),
    "logit_bias": ({"1": 2}, "only {} is possible"),
    "frequency_penalty": (0.5, "only 0 is possible"),
    "logprobs": (0, "only False is possible"),
    "response_format": ({"type": "json_object"}, "is not supported"),
    "chat_template": ("{% for i in range(10**9) %}", "is not supported; leave it out"),
    "chat_template_kwargs": ({"chat_template": "x"}, "is not supported; leave it out"),
    "generation_config": ("{}", "is not supported; leave it out"),
    "messages": ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url' is not supp"),
}


def read(document, route="chat/completions"):
    return read_request(route, document, id="1", model="toy", max_tokens=64)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_ignored_or_run_is_refused_by_name(name):
    value, reason = REFUSED[name]
    with pytest.raises(RequestError) as caught:
        read(CHAT | {name: value})
    assert (caught.value.status, caught.value.param) == (400, name)
    assert reason in str(caught.value)


def test_another_model_is_not_found():
    with pytest.raises(RequestError, match="'gpt' does not exist; this server has 'toy'") as caught:
        read(CHAT | {"model": "gpt"})
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


@pytest.mark.parametrize("document", [[], {"model": "toy"}, CHAT | {"messages": ["Hi"]}, CHAT | {"max_tokens": True}])
def test_what_is_no_request_is_told(document):
    with pytest.raises(RequestError) as caught:
        read(document)
    assert caught.value.status == 400


def test_settings_are_taken_apart_from_what_transformers_gets():
    fields, asked = read(CHAT | {"temperature": 0, "top_p": None, "max_completion_tokens": 5, "n": 1, "user": "me"})
    assert fields == CHAT | {"stream": False}
    assert (asked.temperature, asked.top_p, asked.max_tokens) == (0.0, None, 5)
    fields, asked = read({"input": "Hi", "max_output_tokens": 3}, "responses")
    assert (fields, asked.max_tokens) == ({"input": "Hi", "stream": False}, 3)


@pytest.mark.parametrize("value", [10**400, -(10**400), float("nan"), float("inf"), 1e300])
def test_no_number_is_too_large_to_be_refused(value):
    for name in ("temperature", "top_p", "max_tokens"):
        with pytest.raises(RequestError, match=f"{name} must be from"):
            read(CHAT | {name: value})


def test_each_bound_of_new_tokens_must_be_right_though_one_counts():
    with pytest.raises(RequestError, match="max_tokens must be from 1 to 64; got -5"):
        read(CHAT | {"max_tokens": -5, "max_completion_tokens": 4})
    assert read(CHAT | {"max_tokens": 5, "max_completion_tokens": 4})[1].max_tokens == 4


DROPPED = {
    "a result without its call": (
        [{"type": "function_call_output", "call_id": "1", "output": "x"}],
        "type 'function_call_output' is",
    ),
    "a reference": ([{"type": "item_reference", "id": "1"}], "type 'item_reference' is not supported"),
    "a message behind a text": ([{"type": "input_text", "text": "a"}, {"role": "user", "content": "b"}], "type 'None'"),
    "an image that a tool gave": (
        [{"role": "user"}, {"type": "function_call_output", "output": [{"type": "input_image"}]}],
        "type 'input_image' is not supported",
    ),
    "no text": ([{"role": "user", "content": 0}], "content must be a text or a list of texts"),
    "an object": ([{"role": "user", "content": {}}], "content must be a text or a list of texts"),
    "a part without its text": ([{"role": "user", "content": [{"type": "input_text"}]}], "must have a text"),
}


@pytest.mark.parametrize("name", DROPPED)
def test_input_that_would_be_dropped_is_refused(name):
    items, reason = DROPPED[name]
    with pytest.raises(RequestError, match=reason) as caught:
        read({"input": items}, "responses")
    assert caught.value.param == "input"


def test_instructions_do_not_replace_a_system_message():
    items = [{"role": "system", "content": "Be brief."}, *CHAT["messages"]]
    with pytest.raises(RequestError, match="send one of them"):
        read({"input": items, "instructions": "Be long."}, "responses")
    for told in ({"input": items}, {"input": CHAT["messages"], "instructions": "Be long."}):
        assert read(told, "responses")[0] == told | {"stream": False}


@pytest.mark.parametrize("tools", ["f", ["f"], [{"type": "web_search"}]])
def test_tools_are_functions(tools):
    with pytest.raises(RequestError, match="tools must be a list of objects of type 'function'"):
        read({"input": "Hi", "tools": tools}, "responses")


def test_a_template_gets_all_of_a_message():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "I ask.", "reasoning_content": "Hm.", "tool_calls": [call], "refusal": None},
        {"role": "assistant", "content": None, "tool_calls": None},  # as JSON of OpenAI's client has it
    ]
    found = conversation(messages)
    assert found[0] == {"role": "user", "name": "Ann", "content": "a b"}
    assert found[1] == {
        "role": "assistant",
        "content": "I ask.",
        "reasoning_content": "Hm.",
        "tool_calls": [call | {"function": {"name": "f", "arguments": {"x": 1}}}],
    }
    assert found[2] == {"role": "assistant", "content": ""}
    assert call["function"]["arguments"] == '{"x": 1}'


def test_a_body_is_bounded_by_what_its_tokens_need():
    assert OpenAIOptions(max_body=64 << 20, max_prompt=4096).largest == 266240
    assert OpenAIOptions(max_body=1000, max_prompt=4096).largest == 1000


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_prompt": 0}, "max_prompt is 0; expected at least 1"),
        ({"max_tokens": -1}, "max_tokens is -1; expected at least 1"),
        ({"settle": float("nan")}, "settle is nan"),
        ({"token": ""}, "the token is empty"),
        ({"token": "p\u00e4ss"}, "not ASCII"),
        ({"tls_key": "key.pem"}, "TLS needs a certificate and its private key"),
        ({"tls_certificate": "none.pem", "tls_key": "none.pem"}, "TLS with none.pem and none.pem fails"),
    ],
)
def test_options_that_make_no_sense_are_told(options, reason):
    with pytest.raises(ServeError, match=reason):
        OpenAIOptions(**options).check()
