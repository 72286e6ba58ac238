"""Conversations through the whole server, over an engine that says the prompt again: so a test says the answer.

OpenAI's client is the real one; it talks to the application in this process.
"""

import json

import openai
import pytest

from tests.server.echoing import HARMONY, HERMES, LLAMA, MISTRAL, PLAIN, echoing, write_checkpoint

F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Run `talk(OpenAI's client, http)` against a server of a checkpoint; each is started once."""
    templates = {"hermes": HERMES, "mistral": MISTRAL, "llama": LLAMA, "harmony": HARMONY, "plain": PLAIN}
    folders = {name: write_checkpoint(tmp_path_factory.mktemp(name), one) for name, one in templates.items()}
    with echoing(folders) as run:
        yield run


async def chat(client, says, **options):
    """(reasoning, content, calls, finish reason), whole; streamed, it must be the same."""
    options = {"model": "rule", "messages": [{"role": "user", "content": says}], "tools": [F]} | options
    (choice,) = (await client.chat.completions.create(**options)).choices
    message = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    whole = (getattr(message, "reasoning_content", None) or "", message.content or "", calls, choice.finish_reason)
    streamed = await stream(client, **options)
    assert streamed == whole
    return whole


async def stream(client, **options):
    reasoning, content, calls, reasons = "", "", {}, []
    async for chunk in await client.chat.completions.create(stream=True, **options):
        (choice,) = chunk.choices
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        content += choice.delta.content or ""
        for delta in choice.delta.tool_calls or ():
            if delta.id:
                assert delta.index == len(calls)
                calls[delta.index] = [delta.function.name, ""]
            calls[delta.index][1] += delta.function.arguments
        reasons += [choice.finish_reason] if choice.finish_reason else []
    assert len(reasons) == 1
    return reasoning, content, [tuple(call) for call in calls.values()], reasons[0]


def test_each_formats_calls_come_through_special_tokens_and_all(ask):
    said = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>',
        "mistral": '[TOOL_CALLS]f[ARGS]{"a": "é"}',
        "llama": '<|python_tag|>{"name": "f", "parameters": {"a": "é"}}',
    }
    for name, text in said.items():

        async def talk(client, http, text=text):
            assert await chat(client, text) == ("", "", [("f", '{"a": "é"}')], "tool_calls")
            assert await chat(client, f"So: {text}") == ("", "So:", [("f", '{"a": "é"}')], "tool_calls")
            assert (await chat(client, text, max_tokens=12))[3] == "length"
            assert (await chat(client, text, stop=["é"]))[2:] == ([("f", '{"a": "')], "stop")

        ask(name, talk)


def test_other_special_tokens_stay_out_of_the_text_and_all_do_where_nothing_is_called(ask):
    async def talk(client, http):
        assert (await chat(client, "a<|python_tag|>b"))[1] == "ab"
        assert (await chat(client, "a[ARGS]b"))[1] == "a[ARGS]b"
        completion = await client.completions.create(model="rule", prompt="a[ARGS]b", max_tokens=20)
        assert completion.choices[0].text == "ab"

    ask("mistral", talk)


def test_reasoning_is_a_field_of_its_own(ask):
    async def hermes(client, http):
        for tools in ([F], openai.omit):
            assert await chat(client, "<think>\nhm\n</think>\n\nYes", tools=tools) == ("hm", "Yes", [], "stop")
            assert await chat(client, "Yes", tools=tools) == ("", "Yes", [], "stop")
        opened = {"extra_body": {"chat_template_kwargs": {"opened": True}}}
        assert await chat(client, "hm</think>Yes", **opened) == ("hm", "Yes<think>", [], "stop")
        whole = await client.chat.completions.create(
            model="rule", messages=[{"role": "user", "content": "<think>hm</think>Yes"}]
        )
        assert whole.usage.completion_tokens_details.reasoning_tokens == len("hm")
        cut = await client.chat.completions.create(
            model="rule", messages=[{"role": "user", "content": "<think>hm</think>Yes"}], max_tokens=9
        )
        assert cut.usage.completion_tokens_details.reasoning_tokens == 9

    async def mistral(client, http):
        assert await chat(client, "[THINK]hm[/THINK]Yes") == ("hm", "Yes", [], "stop")
        messages = [{"role": "user", "content": "[THINK]hm[/THINK]Yes"}]
        whole = await client.chat.completions.create(model="rule", messages=messages)
        assert whole.usage.completion_tokens_details.reasoning_tokens == 4

    async def plain(client, http):
        text = "<think>hm</think>Yes"
        assert await chat(client, text, tools=openai.omit) == ("", text, [], "stop")

    for name, talk in (("hermes", hermes), ("mistral", mistral), ("plain", plain)):
        ask(name, talk)


def test_texts_around_calls_are_joined_by_a_line_break(ask):
    async def hermes(client, http):
        call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
        told = await chat(client, f"<think>hm</think>One. {call} two {call}{call}\nthree.")
        assert told == ("hm", "One.\ntwo\nthree.", [("f", "{}")] * 3, "tool_calls")
        assert (await chat(client, f"{call} after"))[1] == "after"
        assert (await chat(client, f"before {call}"))[1] == "before"

    async def harmony(client, http):
        call = "<|channel|>commentary to=functions.f<|message|>{}<|call|><|start|>assistant"
        first, second = (f"<|channel|>analysis<|message|>{said}<|start|>assistant" for said in ("hm", "so"))
        final = "<|channel|>final<|message|>Yes"
        told = await chat(client, first + call + second + final)
        assert told == ("hm\nso", "Yes", [("f", "{}")], "tool_calls")
        assert (await chat(client, first + second + final))[:2] == ("hm\nso", "Yes")

    for name, talk in (("hermes", hermes), ("harmony", harmony)):
        ask(name, talk)


def test_texts_around_calls_stay_parts_of_their_own_elsewhere(ask):
    text = 'One. <tool_call>{"name": "f", "arguments": {}}</tool_call> Two.'
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}

    async def talk(client, http):
        content = (await messages(http, text, tools=[{"name": "f", "input_schema": {"type": "object"}}]))["content"]
        assert [block.get("text") for block in content] == ["One.", None, "Two."]
        items = (await client.responses.create(model="rule", input=text, tools=[tool])).output
        assert [items[0].content[0].text, items[2].content[0].text] == ["One.", "Two."]

    ask("hermes", talk)


async def messages(http, says, **options):
    """An answer of Anthropic's dialect; streamed, its blocks must be the same."""
    body = {"model": "rule", "max_tokens": 200, "messages": [{"role": "user", "content": says}]} | options
    whole = (await http.post("/v1/messages", json=body)).json()
    events = (await http.post("/v1/messages", json=body | {"stream": True})).text.split("\n\n")
    blocks = []
    for data in (json.loads(event.partition("data: ")[2]) for event in events if event):
        if data["type"] == "content_block_start":
            assert data["index"] == len(blocks)
            blocks.append(data["content_block"] | {"partial_json": ""})
        elif data["type"] == "content_block_delta":
            (name,) = data["delta"].keys() - {"type"}
            blocks[data["index"]][name] += data["delta"][name]
        elif data["type"] == "message_delta":
            assert data["delta"]["stop_reason"] == whole["stop_reason"]
    for told, streamed in zip(whole["content"], blocks, strict=True):
        written = streamed.pop("partial_json")
        if told["type"] == "tool_use":
            assert whole["stop_reason"] == "max_tokens" or json.loads(written) == told["input"]
            told = told | {"id": streamed["id"], "input": {}}
        assert streamed == told
    return whole


def test_claude_gets_blocks_in_the_order_of_the_answer(ask):
    text = '<think>hm</think>Look:<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    tools = [{"name": "f", "input_schema": {"type": "object"}}]

    async def talk(client, http):
        message = await messages(http, text, tools=tools)
        thinking, said, call = message["content"]
        assert (thinking["thinking"], said["text"], call["name"], call["input"]) == ("hm", "Look:", "f", {"a": 1})
        assert message["stop_reason"] == "tool_use"
        cut = await messages(http, text, tools=tools, max_tokens=text.index(": 1"))
        assert cut["content"][-1]["input"] == {"INVALID_JSON": '{"a"'}

    ask("hermes", talk)


def test_responses_get_items_in_the_order_of_the_answer(ask):
    text = '<think>hm</think>Look:<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}

    async def talk(client, http):
        whole = await client.responses.create(model="rule", input=text, tools=[tool])
        async with client.responses.stream(model="rule", input=text, tools=[tool]) as events:
            seen = [event async for event in events]
            streamed = await events.get_final_response()
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        for response in (whole, streamed):
            thought, message, call = response.output
            assert (thought.type, thought.content[0].text) == ("reasoning", "hm")
            assert message.content[0].text == response.output_text == "Look:"
            assert (call.name, call.arguments, call.status) == ("f", '{"a": 1}', "completed")
            assert response.usage.output_tokens_details.reasoning_tokens > 0

    ask("hermes", talk)


def test_a_call_of_a_tool_that_is_not_offered_reaches_the_agent_as_a_call(ask):
    text = '<tool_call>{"name": "invented", "arguments": {"a": 1}}</tool_call>'
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}

    async def talk(client, http):
        assert await chat(client, text) == ("", "", [("invented", '{"a": 1}')], "tool_calls")
        message = await messages(http, text, tools=[{"name": "f", "input_schema": {"type": "object"}}])
        assert [(block["name"], block["input"]) for block in message["content"]] == [("invented", {"a": 1})]
        (item,) = (await client.responses.create(model="rule", input=text, tools=[tool])).output
        assert (item.type, item.name) == ("function_call", "invented")
        for without in ({"tools": openai.omit}, {"tool_choice": "none"}):
            assert await chat(client, text, **without) == ("", text, [], "stop")

    ask("hermes", talk)


def test_a_name_of_128_characters_is_offered_and_called(ask):
    name = "mcp__" + "x" * 123
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}]

    async def talk(client, http):
        text = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
        assert (await chat(client, text, tools=tools))[2] == [(name, "{}")]

    ask("hermes", talk)


def test_an_answer_of_nothing_is_still_an_answer(ask):
    async def talk(client, http):
        text = "<think>\n\n</think>\n\n"
        assert await chat(client, text) == ("", "", [], "stop")
        assert [block["text"] for block in (await messages(http, text))["content"]] == [""]
        response = await client.responses.create(model="rule", input=text)
        assert response.output_text == ""

    ask("hermes", talk)


def test_what_does_not_go_with_the_model_is_refused_by_its_name(ask):
    asked = {"model": "rule", "messages": [{"role": "user", "content": "x"}]}
    refused = {
        "hermes": [
            (
                {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
                "reasoning_effort",
            ),
            ({"tools": [F, F]}, "tools"),
            ({"tools": [F], "tool_choice": "g"}, "tool_choice"),
            ({"tools": [F], "tool_choice": {"type": "function"}}, "tool_choice"),
            ({"messages": [{"role": "user"}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": "x", "tool_calls": [call_of("1")]}]}, "messages[0].tool_calls"),
        ],
    }
    for name, cases in refused.items():

        async def talk(client, http, cases=cases):
            for change, param in cases:
                content = json.dumps(asked | change)
                answer = await http.post(
                    "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
                )
                assert answer.status_code == 400, (change, answer.text)
                assert answer.json()["error"]["param"] == param

        ask(name, talk)


def call_of(id):
    return {"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
