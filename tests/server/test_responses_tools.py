"""The tools of Responses beside functions: how they are offered, and their calls in answers, whole and streamed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidRequestError
from penstock.server.openai.custom_input import CustomInput, custom_input
from penstock.server.openai.responses_schema import ResponsesBody
from penstock.server.openai.responses_store import input_items
from penstock.server.openai.responses_tools import ignored_tools, offered_tools, shell_action, tools_of
from tests.server.echoing import HERMES, SHOW, echoing, write_checkpoint

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit files."}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
SHELL = {"type": "local_shell"}
AGENTS = {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [FUNCTION, PATCH]}
HOSTED = [
    {"type": "web_search", "external_web_access": True},
    {"type": "mcp", "server_label": "s", "server_url": "http://s"},
    {"type": "image_generation"},
    {"type": "shell"},
    {"type": "a_type_of_tomorrow"},
]


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    templates = {"hermes": HERMES, "show": SHOW + "{{ tools | tojson }}"}
    folders = {name: write_checkpoint(tmp_path_factory.mktemp(name), one) for name, one in templates.items()}
    with echoing(folders) as run:
        yield run


def calling(name, arguments):
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>{{"name": "{name}", "arguments": {text}}}</tool_call>'


async def answered(client, says, tools, **options):
    """The answer's items, whole; streamed, they must be the same but for their ids. And the stream's events."""
    options = {"model": "rule", "input": says, "tools": tools} | options
    whole = await client.responses.create(**options)
    async with client.responses.stream(**options) as stream:
        events = [event async for event in stream]
    final = events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [(item.id, item.type) for item in added] == [(item.id, item.type) for item in final.output]
    assert [unparsed(item) for item in done] == [unparsed(item) for item in final.output]
    ids = ("id", "call_id")
    assert [unparsed(item, *ids) for item in final.output] == [unparsed(item, *ids) for item in whole.output]
    return whole.output, events


def unparsed(value, *but):
    """An item without what OpenAI's helpers add, and without these fields."""
    value = value.to_dict() if hasattr(value, "to_dict") else value
    if isinstance(value, list):
        return [unparsed(one) for one in value]
    if not isinstance(value, dict):
        return value
    hidden = {"parsed", "parsed_arguments", *but}
    return {name: unparsed(one) for name, one in value.items() if name not in hidden}


def test_a_call_of_a_custom_tool_comes_back_with_its_input(ask):
    patch = '*** Begin Patch\n+ "é" \\ 😀\n*** End Patch'

    async def talk(client, http):
        says = "Now:" + calling("apply_patch", {"input": patch})
        (message, call), events = await answered(client, says, [FUNCTION, PATCH | {"format": GRAMMAR}])
        assert message.content[0].text == "Now:"
        assert (call.type, call.name, call.input, call.namespace) == ("custom_tool_call", "apply_patch", patch, None)
        assert call.id.startswith("ctc_")
        assert call.call_id
        of_call = [event for event in events if getattr(event, "output_index", 0) == 1]
        kinds = [event.type.removeprefix("response.") for event in of_call]
        assert kinds[0] == "output_item.added"
        assert kinds[-2:] == ["custom_tool_call_input.done", "output_item.done"]
        assert set(kinds[1:-2]) == {"custom_tool_call_input.delta"}
        assert of_call[0].item.input == ""
        assert "".join(event.delta for event in of_call[1:-2]) == of_call[-2].input == patch
        assert len(kinds) > 5, "the input comes as it is written"

    ask("hermes", talk)


@pytest.mark.parametrize(
    ("arguments", "input"),
    [
        ('{"input": "a\\nb', "a\nb"),
        ('{"input": "a\\ud83d', "a"),
        ('{"patch": "x"}', "x"),
        ("{}", ""),
        ('{"input": {"a": 1}}', '{"a": 1}'),
    ],
)
def test_an_input_in_broken_or_other_json_is_what_can_be_read_of_it(ask, arguments, input):
    async def talk(client, http):
        says = f'<tool_call>{{"name": "apply_patch", "arguments": {arguments}'
        says += "}</tool_call>" if arguments.endswith("}") else ""
        (call,), events = await answered(client, says, [PATCH])
        assert call.input == input
        deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == input

    ask("hermes", talk)


def test_a_cut_call_is_incomplete(ask):
    async def talk(client, http):
        says = calling("apply_patch", {"input": "*** Begin"})
        response = await client.responses.create(model="rule", input=says, tools=[PATCH], max_output_tokens=64)
        (call,) = response.output
        assert (response.status, call.status, call.input) == ("incomplete", "incomplete", "*** B")

    ask("hermes", talk)


def test_a_call_of_the_local_shell_comes_back_with_its_action(ask):
    async def talk(client, http):
        given = {"command": ["ls", "-l"], "workdir": "/tmp", "timeout_ms": 5}
        (call,), events = await answered(client, calling("local_shell", given), [SHELL])
        assert (call.type, call.status) == ("local_shell_call", "completed")
        action = {"type": "exec", "command": ["ls", "-l"], "env": {}, "working_directory": "/tmp", "timeout_ms": 5}
        assert call.action.to_dict() == action
        kinds = [event.type for event in events][2:-1]
        assert kinds == ["response.output_item.added", "response.output_item.done"]

    ask("hermes", talk)


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ('{"command": "ls | wc"}', ["bash", "-lc", "ls | wc"]),
        ('{"command": ["rm", "-rf", "/tmp/a', []),
        ('{"command": ["sleep", 5]}', ["sleep", "5"]),
        ('{"command": null}', []),
        ("[]", []),
    ],
)
def test_a_command_is_never_a_part_of_one(arguments, command):
    assert shell_action(arguments) == {"type": "exec", "command": command, "env": {}}


def test_calls_of_a_namespaces_tools_come_back_with_name_and_namespace(ask):
    async def talk(client, http):
        says = calling("agents__f", {"a": 1}) + calling("agents__apply_patch", {"input": "x"})
        (f, patch), events = await answered(client, says, [FUNCTION, AGENTS])
        assert (f.type, f.namespace, f.name, f.arguments) == ("function_call", "agents", "f", '{"a": 1}')
        assert (patch.type, patch.namespace, patch.name) == ("custom_tool_call", "agents", "apply_patch")
        done = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert [event.name for event in done] == ["f"]

    ask("hermes", talk)


def test_a_call_goes_back_as_it_came_and_reaches_the_template_under_the_offered_name(ask):
    async def talk(client, http):
        tools = [AGENTS, PATCH, SHELL]
        says = calling("agents__f", {"a": 1}) + calling("apply_patch", {"input": "x"})
        says += calling("local_shell", {"command": ["ls"]})
        made = (await client.responses.create(model="rule", input=says, tools=tools)).output
        kinds = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
        results = [
            {"type": kinds.get(one.type, "local_shell_call_output"), "call_id": one.call_id, "output": "5"}
            for one in made
        ]
        seen.append(tools)
        return made, results

    seen = []
    made, results = ask("hermes", talk)

    async def look(client, http):
        again = [{"role": "user", "content": "x"}, *(one.to_dict() for one in made), *results]
        shown = await client.responses.create(model="rule", input=again, tools=seen[0])
        _, turn, *rest = json.JSONDecoder().raw_decode(shown.output_text)[0]
        names = [(call["function"]["name"], call["function"]["arguments"]) for call in turn["tool_calls"]]
        assert names == [
            ("agents__f", {"a": 1}),
            ("apply_patch", {"input": "x"}),
            ("local_shell", {"command": ["ls"]}),
        ]
        assert [(one["tool_call_id"], one["name"]) for one in rest] == [
            (call.call_id, name) for call, (name, _) in zip(made, names, strict=True)
        ]

    ask("show", look)


def test_a_required_custom_tool_is_called(ask):
    for choice in ({"type": "custom", "name": "apply_patch"}, {"type": "allowed_tools", "mode": "required"}):
        more = {"tools": [{"type": "custom", "name": "apply_patch"}]} if choice["type"] == "allowed_tools" else {}
        body, items = with_tools(FUNCTION, PATCH, tool_choice=choice | more)
        made = tools_of(body, offered_tools(body, items))
        assert ([function.name for function in made.callable], made.choice) == (["apply_patch"], "required")


# ── what the prompt has ──────────────────────────────────────────────────────────────────────────────────────────────


def with_tools(*tools, input="x", **more):
    """(body, items) of a request with these tools."""
    body = ResponsesBody.model_validate({"input": input, "tools": list(tools)} | more)
    return body, input_items(body)


def offered(*tools, **more):
    return offered_tools(*with_tools(*tools, **more))


def ignored(*tools, **more):
    return ignored_tools(*with_tools(*tools, **more))


def test_hosted_tools_are_left_out_and_named():
    assert [tool.name for tool in offered(FUNCTION, *HOSTED)] == ["f"]
    assert set(ignored(*HOSTED)) == {"tools.type"}
    assert ignored(FUNCTION, PATCH, SHELL, AGENTS) == []
    assert ignored(AGENTS | {"tools": [{"type": "web_search"}]}) == ["tools.tools.type"]


def test_a_grammar_is_shown_but_not_enforced():
    (tool,) = offered(PATCH | {"format": GRAMMAR})
    assert tool.function.description == "Edit files.\n\nThe input must match this grammar (lark):\nstart: /x/"
    assert tool.function.schema["properties"] == {"input": {"type": "string"}}
    assert ignored(PATCH | {"format": GRAMMAR}) == ["tools.format"]
    assert ignored(PATCH | {"format": {"type": "text"}}) == []


def test_the_functions_of_a_namespace_bear_its_name_and_the_first_its_description():
    first, second = offered(AGENTS)
    assert (first.function.name, second.function.name) == ("agents__f", "agents__apply_patch")
    assert (first.function.description, second.function.description) == ("agents: Helpers.", "Edit files.")
    (joined,) = offered({"type": "namespace", "name": "mcp__s__", "tools": [FUNCTION]})
    assert joined.function.name == "mcp__s__f"


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "web_search"}, "tool_choice.type"),
        ({"type": "mcp", "server_label": "s"}, "tool_choice.type"),
        ({"type": "local_shell"}, "tool_choice"),
        ({"type": "function"}, "tool_choice.name"),
        ({"type": "custom", "name": "nothing"}, "tool_choice"),
        ({"type": "allowed_tools", "mode": "auto"}, "tool_choice"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "tool_choice"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, "tool_choice.tools[0].type"),
    ],
)
def test_a_choice_of_a_tool_that_is_not_there_is_refused_by_name(choice, param):
    body, items = with_tools(FUNCTION, *HOSTED, tool_choice=choice)
    with pytest.raises(InvalidRequestError) as refused:
        tools_of(body, offered_tools(body, items))
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "function", "name": "agents__f"}, ["agents__f"]),
        ({"type": "function", "name": "f", "namespace": "agents"}, ["agents__f"]),
        ({"type": "custom", "name": "apply_patch"}, ["agents__apply_patch"]),
        ({"type": "function", "name": "f"}, ["f"]),
        ({"type": "auto"}, ["f", "agents__f", "agents__apply_patch"]),
        ("none", []),
    ],
)
def test_a_choice_names_a_namespaces_tool_with_or_without_it(choice, names):
    body, items = with_tools(FUNCTION, AGENTS, tool_choice=choice)
    assert [function.name for function in tools_of(body, offered_tools(body, items)).callable] == names


def test_tools_in_items_are_offered_beside_the_bodys_the_last_of_each_name():
    first = {"type": "additional_tools", "role": "developer", "tools": [PATCH, AGENTS, HOSTED[0]]}
    last = {"type": "additional_tools", "tools": [PATCH | {"description": "Better."}]}
    turns = [first, {"role": "user", "content": "x"}, last]
    made = offered(FUNCTION, input=turns)
    assert [one.function.name for one in made] == ["f", "apply_patch", "agents__f", "agents__apply_patch"]
    assert made[1].function.description == "Better."
    assert ignored(FUNCTION, input=turns) == ["tools.type"]


def test_tools_in_an_item_are_called_and_continued(ask):
    async def talk(client, http):
        tools = {"type": "additional_tools", "role": "developer", "tools": [AGENTS]}
        turns = [tools, {"role": "user", "content": calling("agents__apply_patch", {"input": "x"})}]
        first = await client.responses.create(model="rule", input=turns)
        (call,) = first.output
        assert (call.type, call.namespace, call.name, call.input) == ("custom_tool_call", "agents", "apply_patch", "x")
        says = calling("agents__f", {})
        again = await client.responses.create(model="rule", input=says, previous_response_id=first.id)
        assert [(one.namespace, one.name) for one in again.output] == [("agents", "f")]

    ask("hermes", talk)


# ── the input within its JSON ────────────────────────────────────────────────────────────────────────────────────────


def read_in_pieces(arguments, sizes):
    reader, text, place = CustomInput(), "", 0
    for size in sizes:
        text += reader.feed_text(arguments[place : place + size])
        place += size
    return text + reader.feed_text(arguments[place:]) + reader.finish()


def mended(text):
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=12)
SIZES = st.lists(st.integers(0, 5), max_size=12)


@given(ANY_TEXT, st.booleans(), SIZES)
def test_an_input_is_read_whatever_its_escapes_and_pieces(text, escaped, sizes):
    if any(0xD800 <= ord(one) < 0xE000 for one in text):
        escaped = True
    arguments = json.dumps({"input": text}, ensure_ascii=escaped)
    expected = mended(json.loads(arguments)["input"])
    assert read_in_pieces(arguments, sizes) == custom_input(arguments) == expected


@given(ANY_TEXT, SIZES, st.integers(0, 40))
def test_a_cut_input_is_a_beginning_of_it(text, sizes, cut):
    arguments = json.dumps({"input": text})[:-2][: len('{"input": "') + cut]
    read = read_in_pieces(arguments, sizes)
    assert read == custom_input(arguments)
    assert mended(json.loads(json.dumps(text))).startswith(read)


@given(st.text('{}":,inputx\\ud83de0 \n', max_size=30), SIZES)
def test_whatever_the_model_writes_is_read_the_same_in_pieces(arguments, sizes):
    read = read_in_pieces(arguments, sizes)
    assert read == custom_input(arguments)
    read.encode()


def test_with_hosted_tools_alone_an_answer_is_text(ask):
    async def talk(client, http):
        assert (await client.responses.create(model="rule", input="x", tools=HOSTED)).output_text == "x"

    ask("hermes", talk)
