"""Agents: real clients, a real server, the demo model. It calls a tool, is told the result, and answers."""

import json

import anthropic
import huggingface_hub
import openai
import pytest

from tests.server.running import running_server
from tests.support import fetch

ARGUMENT = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get the weather of a city.", "parameters": ARGUMENT}
TIME = {"name": "get_time", "description": "Get the time in a city.", "parameters": ARGUMENT}
CHAT_TOOLS = [{"type": "function", "function": one} for one in (WEATHER, TIME)]
RESPONSE_TOOLS = [{"type": "function", **one} for one in (WEATHER, TIME)]
CLAUDE_TOOLS = [
    {"name": one["name"], "description": one["description"], "input_schema": ARGUMENT} for one in (WEATHER, TIME)
]
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
ANSWER = "It is 21 degrees and sunny in Paris."


def run_tool(name, arguments):
    assert (name, arguments) == ("get_weather", {"city": "Paris"})
    return json.dumps({"temperature": 21, "sky": "sunny"})


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    journal = tmp_path_factory.mktemp("journal") / "journal"
    with running_server("--threads", "1", "--journal", str(journal)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as opened:
        yield opened


# ── the loops ────────────────────────────────────────────────────────────────────────────────────────────────────────


def chat(client, server, stream, **options):
    """One completion, whole or put together by the client from its chunks."""
    options = {"model": server.model, "temperature": 0, "tools": CHAT_TOOLS} | options
    if not stream:
        return client.chat.completions.create(**options).choices[0]
    with client.chat.completions.stream(**options) as events:
        pieces = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
        choice = events.get_final_completion().choices[0]
    assert not choice.message.tool_calls or len(pieces) > 3, "arguments come as they are written"
    return choice


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_agent_over_chat_completions(client, server, stream):
    messages, reasons = [QUESTION], []
    for _ in range(4):
        choice = chat(client, server, stream, messages=messages)
        reasons.append(choice.finish_reason)
        messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in choice.message.tool_calls or ():
            arguments = json.loads(call.function.arguments)
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": run_tool(call.function.name, arguments)}
            )
        if choice.finish_reason != "tool_calls":
            break
    assert reasons == ["tool_calls", "stop"]
    assert choice.message.content == ANSWER


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_agent_over_responses(client, server, stream):
    def respond(items):
        options = {"model": server.model, "temperature": 0, "tools": RESPONSE_TOOLS, "input": items}
        if not stream:
            return client.responses.create(**options)
        with client.responses.stream(**options) as events:
            kinds = [event.type for event in events]
            assert kinds[0] == "response.created"
            assert kinds[-1] == "response.completed"
            return events.get_final_response()

    first = respond([QUESTION])
    (call,) = first.output
    assert (call.type, call.status) == ("function_call", "completed")
    result = run_tool(call.name, json.loads(call.arguments))
    output = {"type": "function_call_output", "call_id": call.call_id, "output": result}
    second = respond([QUESTION, *first.output, output])
    assert second.output_text == ANSWER


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_agent_over_messages(claude, server, stream):
    def create(messages):
        options = {"model": server.model, "max_tokens": 100, "messages": messages, "tools": CLAUDE_TOOLS}
        options["extra_body"] = {"temperature": 0}
        if not stream:
            return claude.messages.create(**options)
        with claude.messages.stream(**options) as events:
            pieces = [event.partial_json for event in events if event.type == "input_json"]
            message = events.get_final_message()
        assert message.stop_reason != "tool_use" or len(pieces) > 3
        return message

    messages = [QUESTION]
    first = create(messages)
    assert first.stop_reason == "tool_use"
    (call,) = first.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": run_tool(call.name, call.input)}
    second = create([*messages, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}])
    assert (second.stop_reason, second.content[0].text) == ("end_turn", ANSWER)


# ── tools and a form of the answer at once ───────────────────────────────────────────────────────────────────────────

FILL_IN = {"role": "user", "content": "Fill in JSON with name, age and city: Alice is 34 years old and lives in Paris."}
PERSON = {"name": "Alice", "age": 34, "city": "Paris"}
PERSON_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tools_beside_a_form_over_chat_completions(client, server, stream):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON_SCHEMA, "strict": True}}
    tools = [{"type": "function", "function": WEATHER | {"strict": True}}]  # as agents send them
    told = {"model": server.model, "temperature": 0, "tools": tools, "response_format": form, "stream": stream}

    def ask(message):
        answer = client.chat.completions.create(messages=[message], **told)
        if not stream:
            message = answer.choices[0].message
            return message.content, [call.function.arguments for call in message.tool_calls or ()]
        deltas = [chunk.choices[0].delta for chunk in answer if chunk.choices]
        calls = "".join(call.function.arguments or "" for delta in deltas for call in delta.tool_calls or ())
        return "".join(delta.content or "" for delta in deltas), [calls] if calls else []

    text, calls = ask(QUESTION)
    assert not text
    assert [json.loads(call) for call in calls] == [{"city": "Paris"}]
    text, calls = ask(FILL_IN)
    assert json.loads(text) == PERSON
    assert calls == []


def test_tools_beside_a_form_over_responses_and_messages(client, claude, server):
    form = {"type": "json_schema", "name": "person", "schema": PERSON_SCHEMA}
    tools = [{"type": "function", **WEATHER, "strict": True}]
    options = {"model": server.model, "temperature": 0, "tools": tools, "text": {"format": form}}
    (call,) = client.responses.create(input=[QUESTION], **options).output
    assert (call.type, json.loads(call.arguments)) == ("function_call", {"city": "Paris"})
    assert json.loads(client.responses.create(input=[FILL_IN], **options).output_text) == PERSON
    form = {"format": {"type": "json_schema", "schema": PERSON_SCHEMA}}
    tools = [CLAUDE_TOOLS[0] | {"strict": True}]
    options = {"model": server.model, "max_tokens": 100, "tools": tools, "output_config": form}
    (use,) = claude.messages.create(messages=[QUESTION], extra_body={"temperature": 0}, **options).content
    assert (use.type, use.input) == ("tool_use", {"city": "Paris"})
    (text,) = claude.messages.create(messages=[FILL_IN], extra_body={"temperature": 0}, **options).content
    assert json.loads(text.text) == PERSON


def test_the_tool_runner_of_anthropics_client_goes_on_without_a_thread_that_the_server_holds(claude, server):
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        return run_tool("get_weather", {"city": city})

    runner = claude.beta.messages.tool_runner(
        model=server.model, max_tokens=100, messages=[QUESTION], tools=[get_weather], extra_body={"temperature": 0}
    )
    assert runner.until_done().content[0].text == ANSWER


def test_hugging_faces_client_calls_tools_by_name_as_tgi_has_it(server):
    with huggingface_hub.InferenceClient(server.url) as hub:
        for choice in ("get_weather", {"function": {"name": "get_weather"}}, "auto", None):
            answer = hub.chat_completion(
                [QUESTION], tools=CHAT_TOOLS, tool_choice=choice, temperature=0.0, max_tokens=100
            )
            (call,) = answer.choices[0].message.tool_calls
            assert run_tool(call.function.name, json.loads(call.function.arguments))


def test_a_stream_that_broke_off_in_the_middle_of_a_call_is_taken_up_there(server):
    def stream(last=None):
        headers = {} if last is None else {"last-event-id": last}
        body = {"model": server.model, "messages": [QUESTION], "tools": CHAT_TOOLS, "temperature": 0, "seed": 1}
        answer = fetch.post(
            f"{server.url}/v1/chat/completions", json=body | {"stream": True}, headers=headers, timeout=60
        )
        lines = [line for line in answer.text.splitlines() if line]
        assert lines.pop() == "data: [DONE]"
        told = []
        for line in lines:
            if line.startswith("id: "):
                told.append(line[4:])
            else:
                (choice,) = json.loads(line[6:])["choices"]
                for call in choice["delta"].get("tool_calls", ()):
                    call.pop("id", None)
                told.append(choice)
        return told

    whole = stream()
    ids = [one for one in whole if isinstance(one, str)]
    assert len(ids) > 10
    for last in ids[::4]:
        rest = whole[whole.index(last) + 2 :]  # the id stands before the event that it is of
        assert stream(last) == rest


# ── calls that must be ───────────────────────────────────────────────────────────────────────────────────────────────

NUMBERS = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
        "kind": {"enum": ["red", "green"]},
        "more": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["count", "kind"],
    "additionalProperties": False,
}
PICK = {"type": "function", "function": {"name": "pick", "description": "Pick.", "parameters": NUMBERS}}
HELLO = [{"role": "user", "content": "Hello!"}]


def is_pick(call):
    said = json.loads(call.function.arguments)
    assert call.function.name == "pick"
    return (
        said["count"] in range(1, 10)
        and said["kind"] in ("red", "green")
        and said.keys() <= NUMBERS["properties"].keys()
    )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pick"}}, "pick"])
def test_a_forced_call_has_arguments_that_validate_however_hot_the_model_is(client, server, choice):
    for stream in (False, True):
        for seed in range(4):
            options = {"messages": HELLO, "tools": [PICK], "tool_choice": choice, "temperature": 1.5, "seed": seed}
            answer = chat(client, server, stream, max_tokens=200, parallel_tool_calls=False, **options)
            assert answer.finish_reason == "tool_calls"
            (call,) = answer.message.tool_calls
            assert is_pick(call)


def test_a_form_beside_a_forced_call_is_that_of_a_text_which_does_not_come(client, server):
    text = {"format": {"type": "json_schema", "name": "pick", "schema": NUMBERS}}  # instructor sends both
    tool = {"type": "function", **PICK["function"]}
    options = {"model": server.model, "input": "Hello!", "tools": [tool], "text": text, "max_output_tokens": 200}
    response = client.responses.create(tool_choice={"type": "function", "name": "pick"}, **options)
    (call,) = response.output
    assert (call.type, call.name) == ("function_call", "pick")


def test_several_answers_of_forced_calls_with_logprobs(client, server):
    options = {"messages": HELLO, "tools": [PICK], "tool_choice": "required", "parallel_tool_calls": False}
    answer = client.chat.completions.create(
        model=server.model, n=3, seed=1, temperature=1.5, logprobs=True, max_tokens=200, **options
    )
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls if is_pick(call)]
    assert len(set(ids)) == 3
    tokens = sum(len(choice.logprobs.content) for choice in answer.choices)
    assert tokens <= answer.usage.completion_tokens


def test_a_choice_of_allowed_tools_keeps_the_others_from_being_called(client, server):
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    choice = chat(
        client,
        server,
        False,
        messages=[QUESTION],
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
        parallel_tool_calls=False,
    )
    assert choice.message.tool_calls[0].function.name == "get_time"


def test_none_keeps_the_model_from_calling(client, server):
    choice = chat(client, server, False, messages=[QUESTION], tool_choice="none")
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


def test_a_strict_tool_may_be_left_alone_and_is_called_well(client, server):
    strict = [{"type": "function", "function": {**WEATHER, "strict": True}}]
    assert chat(client, server, False, messages=HELLO, tools=strict).message.content == "Hello! How can I help you?"
    (call,) = chat(client, server, False, messages=[QUESTION], tools=strict).message.tool_calls
    assert run_tool(call.function.name, json.loads(call.function.arguments))


def test_claude_is_forced_too(claude, server):
    tool = {"name": "pick", "input_schema": NUMBERS}
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "pick"}):
        message = claude.messages.create(
            model=server.model, max_tokens=200, messages=HELLO, tools=[tool], tool_choice=choice
        )
        (call,) = message.content
        assert (call.name, message.stop_reason) == ("pick", "tool_use")
        assert call.input["count"] in range(1, 10)


def test_a_strict_schema_that_cannot_be_obeyed_is_refused_by_the_name_of_tools(server):
    for parameters in ({"type": "object", "not": {"required": ["a"]}}, {"type": "object", "required": 5}):
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
        answer = server.post("/v1/chat/completions", messages=HELLO, tool_choice="required", tools=tools)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "tools"


def test_a_prompt_for_tools_as_tgi_has_it_goes_at_the_end_of_the_last_message(server):
    body = {"messages": [QUESTION], "tools": CHAT_TOOLS, "model": "tgi"}
    plain = server.post("/chat_tokenize", **body).json()["templated_text"]
    told = server.post("/chat_tokenize", tool_prompt="Do call.", **body).json()["templated_text"]
    assert "get_weather" in plain
    assert told == plain.replace("in Paris?", "in Paris?\n---\nDo call.")
    assert "get_weather" not in server.post("/chat_tokenize", tool_choice="none", **body).json()["templated_text"]
