"""Tools for chat templates that show none."""

from penstock.api.tools import Function, Tools, called
from penstock.parsers.conversation import HERMES, ChatFormat, Conversation, format_of
from penstock.parsers.described_tools import describe

F = Function("f", "Does.", {"type": "object", "properties": {"a": {"type": "string"}}})
TOOLS = [F.as_template_sees_it()]
USER = {"role": "user", "content": "hi"}
ASKED = {"role": "assistant", "content": "I look.", "tool_calls": [called("f", '{"a": "é"}', "1")] * 2}
RESULT = {"role": "tool", "content": "5", "tool_call_id": "1", "name": "f"}


def test_tools_are_described_at_the_end_of_the_system_message():
    (system, user) = describe([{"role": "system", "content": "Be brief."}, USER], TOOLS)
    assert user == USER
    assert system["content"].startswith("Be brief.\n\nYou can call tools.")
    assert '{"name": "f", "description": "Does.", "parameters": {"type": "object"' in system["content"]
    assert describe([USER], TOOLS)[0]["content"] == system["content"].removeprefix("Be brief.\n\n")


def test_calls_and_results_become_text_also_without_tools():
    for tools in (TOOLS, []):
        *_, turn, results, last = describe([USER, ASKED, RESULT, {**RESULT, "content": "6"}, USER], tools)
        call = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
        assert turn == {"role": "assistant", "content": f"I look.\n{call}\n{call}"}
        results_text = "<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response>"
        assert results == {"role": "user", "content": results_text}
        assert last == USER


def test_a_conversation_without_tools_stays_as_it_is():
    assert describe([USER], []) == [USER]


def test_the_template_sees_the_tools_or_the_description_but_not_both():
    conversation = Conversation([USER], Tools((F,)))
    own, described = ChatFormat(HERMES, None, frozenset()), format_of("{{ messages }}")
    assert conversation.template_input(own) == ([USER], TOOLS)
    messages, tools = conversation.template_input(described)
    assert messages[0]["role"] == "system"
    assert tools is None
