"""What OpenAI's dialect refuses: each with OpenAI's error object, by the parameter."""

import dataclasses
import typing

import openai
import pytest
from huggingface_hub.inference._generated.types import ChatCompletionInput
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams

from penstock.server.openai.schema import ChatBody, CompletionBody
from tests.support import fetch
from tests.support.bodies import known_fields

HELLO = [{"role": "user", "content": "the quick brown fox"}]


def refusal(answer, status=400):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "x-request-id" in answer.headers
    return error


REFUSED = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 1.5}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 4097}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream_options": {"continuous_usage_stats": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": "yes"}}, "stream_options.continuous_usage_stats"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"priority": 1.5}, "priority"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"typical_p": 0}, "typical_p"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias.five"),
    ({"logit_bias": {"1000000": 1}}, "logit_bias"),
    ({"bad_words": [" "]}, "bad_words"),
    ({"bad_words": ["x" * 8193]}, "bad_words"),
    ({"bad_token_ids": [-1]}, "bad_token_ids[0]"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [5], "bad_token_ids": [5]}, "allowed_token_ids"),
    ({"temprature": 1}, "temprature"),
    ({"model": 5}, "model"),
    ({"repeat_penalty": 1.1}, "repeat_penalty"),
    ({"mirostat": 2}, "mirostat"),
]
REFUSED_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"user": "\ud800"}, "user"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].image_url",
    ),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json"}}, "response_format"),
    ({"response_format": {"type": "regex", "value": {"type": "object"}}}, "response_format"),
    ({"response_format": {"type": "text", "value": "a"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "value": {}}}, "response_format"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
]
REFUSED_COMPLETION = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["fine", ""]}, "prompt"),
    ({"prompt": [384]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": "\udfff"}, "prompt"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 129}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
]


def test_a_form_that_cannot_be_had_is_refused_by_the_parameter_and_what_is_wrong_with_it(server):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "null"}}}}
    error = refusal(server.post("/v1/chat/completions", messages=HELLO, response_format=schema))
    assert error["param"] == "response_format"
    assert error["message"] == "the JSON schema cannot be enforced: these keywords are not supported: not"
    error = refusal(server.post("/v1/completions", prompt="x", structured_outputs={"regex": "(a"}))
    assert error["param"] == "structured_outputs"
    assert "unclosed group" in error["message"]


def test_each_caller_of_an_impossible_schema_is_told_its_own_field(server):
    schema = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
    asked = {"messages": HELLO, "max_tokens": 2, "output_format": {"type": "json_schema", "schema": schema}}
    assert server.post("/v1/messages", **asked).status_code == 400
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert refusal(server.post("/v1/chat/completions", messages=HELLO, response_format=form))["param"] == (
        "response_format"
    )


def test_controls_that_contradict_the_grammar_are_the_callers_mistake(server):
    asked = {"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [5]}
    error = refusal(server.post("/v1/completions", prompt="x", **asked))
    assert "relax allowed_token_ids" in error["message"]


@pytest.mark.parametrize(("change", "param"), REFUSED + REFUSED_CHAT)
def test_a_chat_that_cannot_be_obeyed_is_refused_by_the_parameter(server, change, param):
    error = refusal(server.post("/v1/chat/completions", **{"messages": HELLO} | change))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.split("[")[0].split(".")[-1] in error["message"]


@pytest.mark.parametrize(("change", "param"), REFUSED + REFUSED_COMPLETION)
def test_a_completion_that_cannot_be_obeyed_is_refused_by_the_parameter(server, change, param):
    error = refusal(server.post("/v1/completions", **{"prompt": "the quick"} | change))
    assert error["param"] == param


def test_each_parameter_that_the_clients_document_is_obeyed_or_refused_by_name():
    hugging_face = {field.name for field in dataclasses.fields(ChatCompletionInput)}
    for documented, body in (
        (typing.get_type_hints(ChatParams), ChatBody),
        (typing.get_type_hints(CompletionParams), CompletionBody),
        (hugging_face, ChatBody),
    ):
        assert set(documented) <= known_fields(body)


def test_an_unknown_parameter_is_refused_with_the_nearest_known_one(server):
    error = refusal(server.post("/v1/completions", prompt="a", temprature=1))
    assert "did you mean 'temperature'?" in error["message"]


@pytest.mark.parametrize("tokens", [512, 600, 5000])
def test_a_prompt_longer_than_the_context_is_refused_and_never_cut(server, tokens):
    for path, param, prompt in (
        ("/v1/completions", "prompt", [5] * tokens),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": "日" * tokens}]),
    ):
        error = refusal(server.post(path, **{param: prompt}))
        assert error["param"] == param
        assert error["code"] == "context_length_exceeded"
        assert "512" in error["message"]


def test_max_tokens_beyond_the_context_end_with_the_context(server):
    answer = server.post("/v1/completions", prompt=[5] * 500, max_tokens=32_000, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["choices"][0]["finish_reason"] == "length"


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"{", "application/json"),
        (b"", "application/json"),
        (b"[]", "application/json"),
        (b"3", "application/json"),
        (b"\xff\xfe", "application/json"),
        (b"a=b", "application/x-www-form-urlencoded"),
        (b"[" * 100_000, "application/json"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "application/json"),
        (b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', "application/json"),
        (b'{"model": "tiny", "prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "application/json"),
        (b'{"model": "tiny", "prompt": "a", "\\ud800": 1}', "application/json"),
    ],
)
def test_a_body_that_is_no_request_is_refused(server, content, kind):
    answer = fetch.post(f"{server.url}/v1/completions", content=content, headers={"content-type": kind})
    assert refusal(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"model": "tiny", "prompt": "\xe9"}', "not UTF-8"),
        (b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", "digits"),
    ],
)
def test_a_body_that_python_cannot_read_is_refused_with_the_reason(server, content, words):
    answer = fetch.post(f"{server.url}/v1/completions", content=content, headers={"content-type": "application/json"})
    assert words in refusal(answer)["message"]


def test_a_body_that_is_nested_too_deeply_is_refused_with_that_reason(server):
    for size in (5_000, 100_000):  # bodies below and above those that a thread parses
        content = (b"[" * 5_000).rjust(size)
        answer = fetch.post(
            f"{server.url}/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        assert refusal(answer)["message"] == "the body is nested too deeply"


def test_wrong_paths_and_methods_are_told_in_the_same_shape(server):
    assert "/docs" in refusal(fetch.get(f"{server.url}/v1/nothing"), 404)["message"]
    answer = fetch.get(f"{server.url}/v1/completions")
    assert "GET" in refusal(answer, 405)["message"]
    assert answer.headers["allow"] == "POST"


def post_text(server, body):
    headers = {"content-type": "application/json"}
    return fetch.post(f"{server.url}/v1/chat/completions", content=body, headers=headers)


@pytest.mark.parametrize("padding", [0, 70_000])
def test_a_number_that_a_schema_would_lose_digits_of_is_refused_by_its_place(server, padding):
    schema = '{"type": "object", "properties": {"x": {"const": 123456789.123456789}}}'
    body = """{"model": "tiny", "messages": [{"role": "user", "content": "%s"}],
      "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": %s}}}"""
    error = refusal(post_text(server, body % ("a" * padding, schema)))
    assert "/properties/x/const is 123456789.123456789" in error["message"]
    assert error["param"] == "response_format"


def test_a_number_with_more_digits_than_needed_is_taken_outside_of_schemas(server):
    body = """{"model": "tiny", "messages": [{"role": "user", "content": "fox"}], "max_tokens": 1,
      "temperature": 0.69999999999999996}"""
    assert post_text(server, body).status_code == 200


def test_a_model_that_generates_refuses_to_embed(server):
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ):
        error = refusal(server.post(path, **body))
        assert error["param"] == "model"
        assert "generates text; it has no embeddings" in error["message"]
        assert error["message"].endswith(": ask /v1/chat/completions or /v1/completions")
    for path, body in (("/embed", {"inputs": "a"}), ("/rerank", {"query": "a", "texts": ["b"]})):
        assert fetch.post(f"{server.url}{path}", json=body).status_code == 422
