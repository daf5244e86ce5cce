import pytest

from kpt_serve.openai.requests import RequestError, read_request

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
