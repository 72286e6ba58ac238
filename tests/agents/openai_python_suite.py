"""openai's Python package: create, stream, parse and responses; all that a helper returns is sent back as history."""

import openai
import pytest
from common import (
    ANSWER,
    CALLED,
    DESCRIPTIONS,
    FEW_TOKENS,
    HOW,
    KEY,
    KINDS,
    MODEL,
    SCHEMAS,
    SERVERS,
    STREAMED,
    run_tool,
    script,
)
from pydantic import BaseModel

CLIENTS = {
    kind: openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) for kind, url in SERVERS.items()
}
FUNCTIONS = [{"name": name, "description": DESCRIPTIONS[name], "parameters": SCHEMAS[name]} for name in SCHEMAS]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
RESPONSES_TOOLS = [{"type": "function", **function, "strict": False} for function in FUNCTIONS]
MOST_TURNS = 6


class Lookup(BaseModel):
    query: str


class Add(BaseModel):
    a: int
    b: int


class Answer(BaseModel):
    text: str


STRICT_TOOLS = [openai.pydantic_function_tool(Lookup, name="lookup"), openai.pydantic_function_tool(Add, name="add")]


def created(client, **body):
    return client.chat.completions.create(**body).choices[0].message


def streamed(client, **body):
    with client.chat.completions.stream(**body) as stream:
        return stream.get_final_completion().choices[0].message


def parsed(client, **body):
    return client.chat.completions.parse(**body).choices[0].message


def chat_loop(ask, kind, name, **options):
    """Messages of a tool loop, and the names of the tools called; what `ask` returns goes back as it is."""
    messages, called = [{"role": "user", "content": script(name)}], []
    for _ in range(MOST_TURNS):
        message = ask(CLIENTS[kind], model=MODEL, messages=messages, **options)
        messages.append(message)
        if not message.tool_calls:
            return messages, called
        for call in message.tool_calls:
            called.append(call.function.name)
            content, _ = run_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    raise AssertionError(f"the loop did not end: {called}")


@pytest.mark.parametrize("ask", [created, streamed])
@HOW
def test_chat_loop(ask, kind, thinks):
    effort = {} if thinks else {"reasoning_effort": "none"}
    messages, called = chat_loop(ask, kind, "loop", tools=TOOLS, **effort)
    assert called == CALLED
    assert messages[-1].content == ANSWER
    assert bool(getattr(messages[1], "reasoning_content", None)) == thinks


@pytest.mark.parametrize("effort", ["minimal", "low", "medium", "high", "xhigh"])
@KINDS
def test_efforts(kind, effort):
    messages, called = chat_loop(created, kind, "loop", tools=TOOLS, reasoning_effort=effort)
    assert called == CALLED
    assert messages[1].reasoning_content


@pytest.mark.parametrize("ask", [created, streamed])
@pytest.mark.parametrize("name", ["error", "unknown"])
@KINDS
def test_tools_that_fail_or_do_not_exist(ask, name, kind):
    messages, _ = chat_loop(ask, kind, name, tools=TOOLS)
    messages.append({"role": "user", "content": "Go on."})
    assert ask(CLIENTS[kind], model=MODEL, messages=messages, tools=TOOLS).content == ANSWER


@pytest.mark.parametrize("name", ["broken", "thinking"])
@KINDS
def test_answers_that_max_tokens_cuts(name, kind):
    client, messages = CLIENTS[kind], [{"role": "user", "content": script(name)}]
    body = {"model": MODEL, "tools": TOOLS}
    choice = client.chat.completions.create(messages=messages, max_completion_tokens=FEW_TOKENS, **body).choices[0]
    assert choice.finish_reason == "length"
    messages.append(choice.message)
    for call in choice.message.tool_calls or []:
        content, _ = run_tool(call.function.name, call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    messages.append({"role": "user", "content": "Go on."})
    assert client.chat.completions.create(messages=messages, **body).choices[0].message.content == ANSWER


@pytest.mark.parametrize("ask", [parsed, streamed])
@KINDS
def test_strict_tools(ask, kind):
    """A grammar forces tokens that no script says, in harmony from the start on: it is asked for one turn."""
    if kind == "harmony":
        messages = [{"role": "user", "content": script("loop")}]
        messages.append(ask(CLIENTS[kind], model=MODEL, messages=messages, tools=STRICT_TOOLS, tool_choice="required"))
        assert messages[-1].tool_calls
        return
    messages, called = chat_loop(ask, kind, "loop", tools=STRICT_TOOLS)
    assert called
    assert messages[-1].content == ANSWER


@pytest.mark.parametrize("ask", [parsed, streamed])
@KINDS
def test_a_form_and_another_turn(ask, kind):
    client, messages = CLIENTS[kind], [{"role": "user", "content": script("plain")}]
    for _ in range(3):
        message = ask(client, model=MODEL, messages=messages, response_format=Answer)
        assert isinstance(message.parsed, Answer)
        messages += [message, {"role": "user", "content": "Again."}]


def response(client, stream, **body):
    if not stream:
        return client.responses.create(**body)
    with client.responses.stream(**body) as events:
        *_, last = events  # the helper's get_final_response takes no answer that max_output_tokens has cut
        return last.response


def results_of(answer):
    calls = [item for item in answer.output if item.type == "function_call"]
    made = [(call, run_tool(call.name, call.arguments)[0]) for call in calls]
    return [{"type": "function_call_output", "call_id": call.call_id, "output": output} for call, output in made]


@STREAMED
@HOW
def test_responses_loop(stream, kind, thinks):
    reasoning = {"effort": "medium", "summary": "auto"} if thinks else {"effort": "none"}
    options = {"tools": RESPONSES_TOOLS, "reasoning": reasoning, "include": ["reasoning.encrypted_content"]}
    items, answers = [{"role": "user", "content": script("loop")}], []
    for _ in range(3):
        answers.append(response(CLIENTS[kind], stream, model=MODEL, input=items, store=False, **options))
        items += [*answers[-1].output, *results_of(answers[-1])]
    called = [item.name for answer in answers for item in answer.output if item.type == "function_call"]
    assert called == CALLED
    assert answers[-1].output_text == ANSWER
    assert (answers[0].output[0].type == "reasoning") == thinks


@STREAMED
@KINDS
def test_responses_by_their_ids(stream, kind):
    items, previous = [{"role": "user", "content": script("loop")}], openai.omit
    for _ in range(3):
        options = {"previous_response_id": previous, "tools": RESPONSES_TOOLS}
        answer = response(CLIENTS[kind], stream, model=MODEL, input=items, **options)
        items, previous = results_of(answer), answer.id
    assert answer.output_text == ANSWER


@pytest.mark.parametrize("name", ["error", "unknown", "broken"])
@STREAMED
@KINDS
def test_responses_after_calls_that_fail(name, stream, kind):
    few = {"max_output_tokens": FEW_TOKENS} if name == "broken" else {}
    items = [{"role": "user", "content": script(name)}]
    answer = response(CLIENTS[kind], stream, model=MODEL, input=items, tools=RESPONSES_TOOLS, **few)
    items += [*answer.output, *results_of(answer), {"role": "user", "content": "Go on."}]
    assert response(CLIENTS[kind], stream, model=MODEL, input=items, tools=RESPONSES_TOOLS).output_text == ANSWER


@KINDS
def test_parsed_responses_go_back(kind):
    items = [{"role": "user", "content": script("plain")}]
    for _ in range(3):
        answer = CLIENTS[kind].responses.parse(model=MODEL, input=items, text_format=Answer)
        assert isinstance(answer.output_parsed, Answer)
        items += [*answer.output, {"role": "user", "content": "Again."}]


@STREAMED
def test_a_real_model(stream):
    client, messages = CLIENTS["smollm2"], [{"role": "user", "content": "What is 2 + 2?"}]
    for _ in range(3):
        ask = streamed if stream else created
        messages.append(ask(client, model=MODEL, messages=messages, max_tokens=16, temperature=0))
        messages.append({"role": "user", "content": "And twice that?"})
    items = [{"role": "user", "content": "What is 2 + 2?"}]
    for _ in range(2):
        items += response(client, stream, model=MODEL, input=items, max_output_tokens=16).output
        items.append({"role": "user", "content": "And twice that?"})
