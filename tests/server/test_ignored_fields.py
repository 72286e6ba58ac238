"""Fields that cannot change the answer are accepted and named; typos are refused."""

import pytest

from penstock.frontend.limits import QueueLimits
from penstock.server.config import ServerConfig
from tests.server.in_process import shared_app, with_app

HELLO = [{"role": "user", "content": "the quick brown fox"}]
CALLS = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/completions": {"prompt": "the", "max_tokens": 2},
    "/v1/responses": {"input": "the", "max_output_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/generate": {"model": None, "inputs": "the", "parameters": {"max_new_tokens": 2}},
}


def ignored(answer):
    assert answer.status_code == 200, answer.text
    return answer.headers.get("penstock-ignored")


@pytest.mark.parametrize("path", CALLS)
def test_unknown_fields_are_accepted_and_named_in_the_header(server, path):
    assert ignored(server.post(path, **CALLS[path])) is None
    assert ignored(server.post(path, **CALLS[path], x_trace={"a": [1]}, foo=1)) == "x_trace, foo"
    assert ignored(server.post(path, **CALLS[path], x_trace=None)) is None, "null is left out"


def test_a_stream_names_them_too(server):
    answer = server.post("/v1/chat/completions", **CALLS["/v1/chat/completions"], stream=True, x_trace=1)
    assert ignored(answer) == "x_trace"


def test_hints_are_named_by_their_place(server):
    tool = {"name": "f", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}, "x": 1}
    asked = CALLS["/v1/messages"] | {
        "tools": [tool, tool | {"name": "g"}],
        "tool_choice": {"type": "none"},
        "metadata": {"a": {}},
    }
    assert ignored(server.post("/v1/messages", **asked)) == "metadata, tools.cache_control, tools.x"


def test_unknown_keys_of_response_formats_are_named_by_their_place(server):
    form = {"type": "json_schema", "x": 1, "json_schema": {"schema": {"type": "boolean", "y": 1}, "z": 1}}
    asked = CALLS["/v1/chat/completions"] | {"response_format": form}
    assert ignored(server.post("/v1/chat/completions", **asked)) == "response_format.json_schema.z, response_format.x"
    asked = CALLS["/v1/messages"] | {"output_config": {"format": {"type": "json_schema", "schema": {}, "x": 1}}}
    assert ignored(server.post("/v1/messages", **asked)) == "output_config.format.x"


@pytest.mark.parametrize(
    "hint",
    [
        *("cache_prompt", "keep_alive", "prompt_cache_retention", "session_id", "store", "user", "user_id"),
        *("client_metadata", "message_id", "background_tasks", "x-litellm-tags"),
    ],
)
def test_hints_of_other_servers_are_accepted_whatever_their_value(server, hint):
    for value in (True, "5m", {"a": {"b": 1}}, [1]):
        assert ignored(server.post("/v1/chat/completions", **CALLS["/v1/chat/completions"], **{hint: value})) == hint


@pytest.mark.parametrize(
    ("field", "meant"),
    [
        *(("temprature", "temperature"), ("topP", "top_p"), ("max-tokens", "max_tokens"), ("tool", "tools")),
        ("repeat_penalty", "repetition_penalty"),
    ],
)
def test_a_field_that_looks_like_a_typo_is_refused(server, field, meant):
    answer = server.post("/v1/chat/completions", **CALLS["/v1/chat/completions"], **{field: 1})
    assert answer.status_code == 400
    assert f"did you mean {meant!r}?" in answer.json()["error"]["message"]


def test_names_in_the_header_are_bounded_and_cannot_break_it(server):
    fields = {"x" * 100: 1, 'a"\r\nset-cookie: b': 1} | {f"field_{i}_{'y' * 40}": 1 for i in range(30)}
    value = ignored(server.post("/v1/completions", **CALLS["/v1/completions"], **fields))
    assert len(value) < 1100
    assert value.endswith("...")
    assert "x" * 64 in value
    assert "x" * 65 not in value
    assert "\\r\\n" in value
    answer = server.post("/v1/completions", **CALLS["/v1/completions"], **{f"q{i}": 1 for i in range(40)})
    assert answer.status_code == 400
    assert "more than 32 unknown parameters" in answer.json()["error"]["message"]


def test_the_metrics_count_ignored_fields_and_a_caller_cannot_add_labels(server):
    def counts():
        return {name: value for name, value in server.metrics().items() if "ignored_fields" in name}

    before = counts()
    server.post("/v1/completions", **CALLS["/v1/completions"], x_trace=1, y_trace=1, user="a")
    after = counts()
    unknown, user = (f'penstock_ignored_fields_total{{field="{label}"}}' for label in ("unknown", "user"))
    assert after[unknown] == before.get(unknown, 0) + 2
    assert after[user] == before.get(user, 0) + 1
    assert not any("x_trace" in name for name in after)


@pytest.fixture(scope="module")
def strict(tiny_llama):
    config = ServerConfig(strict_fields=True, queue=QueueLimits(refuse_long_max_tokens=True))
    with shared_app(tiny_llama, config=config) as talk_to:
        yield talk_to


def test_a_strict_server_refuses_every_unknown_field_but_not_documented_hints(strict):
    async def talk(http, engine, app):
        body = {"prompt": "the", "max_tokens": 2}
        assert (await http.post("/v1/completions", json=body | {"user": "a"})).status_code == 200
        refused = await http.post("/v1/completions", json=body | {"x_trace": 1})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x_trace")

    strict(talk)


@pytest.mark.parametrize(
    "change",
    [{"max_tokens": 2.0}, {"seed": -1.0}, {"n": 1.0, "top_k": 5.0}, {"stop_token_ids": [5.0]}, {"temperature": 1}],
)
def test_whole_numbers_may_be_written_with_a_point(server, change):
    assert ignored(server.post("/v1/completions", **CALLS["/v1/completions"] | change)) is None


def test_a_call_without_a_model_is_for_the_served_one(server):
    for path, body in CALLS.items():
        answer = server.post(path, **body | {"model": None})
        assert answer.status_code == 200, answer.text
        assert answer.json().get("model", "tiny") == "tiny"


def test_a_model_may_have_several_names(tiny_llama):
    async def talk(http, engine, app):
        cards = (await http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["a", "b"]
        for name in ("a", "b"):
            answer = (await http.post("/v1/completions", json={"model": name, "prompt": "the", "max_tokens": 1})).json()
            assert answer["model"] == name
            assert (await http.get(f"/v1/models/{name}")).json()["id"] == name
        missing = await http.post("/v1/completions", json={"model": "c", "prompt": "the"})
        assert "'a' or 'b' is" in missing.json()["error"]["message"]

    with_app(talk, tiny_llama, config=ServerConfig(served_model_name="a, b"))


@pytest.mark.parametrize(
    ("path", "field", "words"),
    [
        ("/v1/chat/completions", "max_completion_tokens", "maximum context length is 512 tokens"),
        ("/v1/completions", "max_tokens", "maximum context length is 512 tokens"),
        ("/v1/responses", "max_output_tokens", "maximum context length is 512 tokens"),
        ("/v1/messages", "max_tokens", "input length and `max_tokens` exceed context limit: "),
        ("/generate", "max_new_tokens", "`inputs` tokens + `max_new_tokens` must be <= 512"),
    ],
)
def test_long_max_tokens_are_lowered_or_refused_in_each_dialects_words(server, strict, path, field, words):
    limit = {"parameters": {field: 2000}} if path == "/generate" else {"max_tokens": None, field: 2000}
    asked = CALLS[path] | limit | {"max_output_tokens": limit.get("max_output_tokens")}
    body = {name: value for name, value in asked.items() if value is not None}
    assert server.post(path, **body).status_code == 200

    async def talk(http, engine, app):
        refused = await http.post(path, json=body)
        assert refused.status_code in (400, 422)
        assert words in refused.text

    strict(talk)
