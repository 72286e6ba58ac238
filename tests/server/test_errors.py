"""Validation errors in the caller's notation and in plain words."""

from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from penstock.errors import AuthenticationError, NotPermittedError
from penstock.server.body import Body
from penstock.server.dialects import shape_of
from penstock.server.errors import param_of, reply_to_error
from penstock.server.openai.responses_schema import ResponsesBody
from penstock.server.openai.schema import ChatBody, CompletionBody
from penstock.server.tgi.schema import GenerateBody

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/chat/completions", ("authentication_error", "permission_error")),
        ("/v1/messages", ("authentication_error", "permission_error")),
        ("/generate", ("validation", "validation")),
        ("/embed", ("validation", "validation")),
        ("/v2/rerank", ("told", "told")),
    ],
)
def test_an_unknown_key_is_401_and_a_known_one_without_the_right_403_in_every_dialect(path, words):
    for error, expected in (
        (AuthenticationError("told"), (401, words[0])),
        (NotPermittedError("told"), (403, words[1])),
    ):
        status, body = shape_of(path)(reply_to_error(error))
        assert status == expected[0]
        assert expected[1] in str(body)


@pytest.mark.parametrize(
    ("location", "param"),
    [
        (("body",), None),
        (("body", "temperature"), "temperature"),
        (("body", "messages", 3, "content", "str"), "messages[3].content"),
        (("body", "messages", 0, "content", "list[TextPart]", 1, "text"), "messages[0].content[1].text"),
        (("body", "stream_options", "include_usage"), "stream_options.include_usage"),
    ],
)
def test_a_location_is_told_as_a_path(location, param):
    assert param_of(location) == param


@pytest.mark.parametrize(
    ("schema", "body", "message"),
    [
        (ChatBody, {"stop": 5}, "stop: must be a string or a list"),
        (ChatBody, {"stop": ["a", 5]}, "stop[1]: must be a string"),
        (ChatBody, {"n": 1.5}, "n: must be a whole number"),
        (ChatBody, {"temperature": 3}, "temperature: must be less than or equal to 2"),
        (ChatBody, {"messages": []}, "messages: must not be empty"),
        (ChatBody, {"response_format": "json"}, "response_format: must be an object"),
        (ChatBody, {"tool_choice": 5}, "tool_choice: must be a string or an object"),
        (
            ChatBody,
            {"tool_choice": {"type": "x"}},
            "tool_choice.type: must be 'function', 'allowed_tools', 'auto', 'none', 'required' or 'any'",
        ),
        (ChatBody, {"early_stopping": "x"}, "early_stopping: must be true or false or 'never'"),
        (CompletionBody, {"prompt": 5.5}, "prompt: must be a string or a list"),
        (CompletionBody, {"prompt": None}, "prompt: this parameter is required"),
        (CompletionBody, {"prompt": [1, "a"]}, "prompt[1]: must be a whole number"),
        (CompletionBody, {"prompt": ["a"] * 1025}, "prompt: must have at most 1024 items"),
        (ResponsesBody, {"input": []}, "input: must not be empty"),
        (GenerateBody, {"parameters": 5}, "parameters: must be an object"),
    ],
)
def test_a_value_of_the_wrong_kind_is_told_every_kind_that_would_do(
    schema: type[Body], body: dict[str, Any], message: str
) -> None:
    fields = {"model": "m", "messages": HELLO, "prompt": "a", "input": "a", "inputs": "a"}
    whole = {name: value for name, value in fields.items() if name in schema.model_fields} | body
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(whole)
    errors = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    assert reply_to_error(RequestValidationError(errors)).message == message
