"""anthropic's Python package: create, stream, its tool runner and thinking; answers are sent back as they came."""

import anthropic
import pytest
from common import (
    ANSWER,
    CALLED,
    DESCRIPTIONS,
    FEW_TOKENS,
    KEY,
    KINDS,
    MODEL,
    QUIET,
    SCHEMAS,
    SERVERS,
    STREAMED,
    add,
    lookup,
    run_tool,
    script,
)

CLIENTS = {kind: anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) for kind, url in SERVERS.items()}
TOOLS = [{"name": name, "description": DESCRIPTIONS[name], "input_schema": SCHEMAS[name]} for name in SCHEMAS]
THINKING = {
    "unset": {},
    "enabled": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "adaptive": {"thinking": {"type": "adaptive"}},
    "summarized": {"thinking": {"type": "adaptive", "display": "summarized"}, "output_config": {"effort": "high"}},
}
MOST_TURNS = 6


def ask(kind, stream, **body):
    body = {"model": MODEL, "max_tokens": 2000, **body}
    if not stream:
        return CLIENTS[kind].messages.create(**body)
    with CLIENTS[kind].messages.stream(**body) as events:
        return events.get_final_message()


def results_of(answer):
    blocks = []
    for block in answer.content:
        if block.type == "tool_use":
            content, failed = run_tool(block.name, block.input)
            blocks.append({"type": "tool_result", "tool_use_id": block.id, "content": content, "is_error": failed})
    return blocks


def tool_loop(kind, stream, name, **options):
    """The answers of a tool loop; their content goes back as it is."""
    messages, answers = [{"role": "user", "content": script(name)}], []
    for _ in range(MOST_TURNS):
        answers.append(ask(kind, stream, messages=messages, tools=TOOLS, **options))
        results = results_of(answers[-1])
        if not results:
            return answers
        messages += [{"role": "assistant", "content": answers[-1].content}, {"role": "user", "content": results}]
    raise AssertionError("the loop did not end")


def kinds_of(answer):
    return [block.type for block in answer.content]


def called_by(answers):
    return [block.name for answer in answers for block in answer.content if block.type == "tool_use"]


@pytest.mark.parametrize("thinking", THINKING)
@STREAMED
@KINDS
def test_tool_loop(thinking, stream, kind):
    answers = tool_loop(kind, stream, "loop", **THINKING[thinking])
    assert called_by(answers) == CALLED
    assert [kinds_of(answer) for answer in answers] == [
        ["thinking", "tool_use"],
        ["text", "tool_use"],
        ["thinking", "text"],
    ]
    assert answers[-1].content[-1].text == ANSWER


@STREAMED
@KINDS
def test_thinking_disabled(stream, kind):
    answers = tool_loop(kind, stream, "loop", thinking={"type": "disabled"})
    assert called_by(answers) == CALLED
    assert answers[-1].content[-1].text == ANSWER
    if kind in QUIET:
        assert "thinking" not in kinds_of(answers[0]) + kinds_of(answers[-1])


@STREAMED
@KINDS
def test_a_tool_that_fails(stream, kind):
    answers = tool_loop(kind, stream, "error")
    assert answers[-1].content[-1].text == ANSWER


@pytest.mark.parametrize("name", ["unknown", "broken", "thinking"])
@STREAMED
@KINDS
def test_calls_of_no_tool_and_answers_that_max_tokens_cuts(name, stream, kind):
    few = {} if name == "unknown" else {"max_tokens": FEW_TOKENS}
    messages = [{"role": "user", "content": script(name)}]
    answer = ask(kind, stream, messages=messages, tools=TOOLS, **few)
    assert answer.stop_reason != "max_tokens" or few
    results = [*results_of(answer), {"type": "text", "text": "Go on."}]
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    assert ask(kind, stream, messages=messages, tools=TOOLS).content[-1].text == ANSWER


@STREAMED
@KINDS
def test_tool_runner(stream, kind):
    tools = [anthropic.beta_tool(tool) for tool in (lookup, add)]
    messages = [{"role": "user", "content": script("loop")}]
    options = {"model": MODEL, "max_tokens": 2000, "messages": messages, "tools": tools, "stream": stream}
    runner = CLIENTS[kind].beta.messages.tool_runner(**options)
    answers = [turn.get_final_message() if stream else turn for turn in runner]
    assert called_by(answers) == CALLED
    assert answers[-1].content[-1].text == ANSWER


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}, {"type": "none"}])
@KINDS
def test_tool_choices(choice, kind):
    answer = ask(kind, False, messages=[{"role": "user", "content": script("loop")}], tools=TOOLS, tool_choice=choice)
    assert ("tool_use" in kinds_of(answer)) == (choice["type"] != "none")


@KINDS
def test_fields_of_agents(kind):
    """What Claude Code and others add to every request."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": script("loop"), "cache_control": {"type": "ephemeral"}}]}
    ]
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    answer = CLIENTS[kind].beta.messages.create(
        model=MODEL,
        max_tokens=2000,
        messages=messages,
        tools=TOOLS,
        system=[{"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": "someone"},
        context_management=edits,
        betas=["context-management-2025-06-27"],
    )
    assert "tool_use" in kinds_of(answer)
    counted = CLIENTS[kind].messages.count_tokens(model=MODEL, messages=messages, tools=TOOLS, **THINKING["enabled"])
    assert counted.input_tokens > 0


@STREAMED
def test_a_real_model(stream):
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    for _ in range(3):
        answer = ask("smollm2", stream, messages=messages, max_tokens=16)
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "And twice that?"}]
