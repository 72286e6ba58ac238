"""Conversations that a chat template refuses, in forms that it accepts."""

import pytest

from penstock.errors import InvalidRequestError
from penstock.text.chat_template import ChatTemplates
from penstock.text.template_fallbacks import fallbacks

SHOW = "{% for m in messages %}[{{ m.role }}: {{ m.thinking or '' }}{{ m.content }}]{% endfor %}"
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "{% endfor %}"
)
ALTERNATING = (
    "{% for m in messages if m.role != 'system' %}{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{ raise_exception('must alternate') }}{% endif %}{% endfor %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
NOT_BOTH = (
    "{% for m in messages if m.tool_calls and m.thinking and m.content %}{{ raise_exception('both') }}{% endfor %}"
)


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def render(template, messages):
    templates = ChatTemplates({"default": template + SHOW}, {})
    try:
        return templates.render(messages, None, True, {})
    finally:
        templates.close()


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (SYSTEM_FIRST, [system("a"), system("b"), user("c")], "[system: a\n\nb][user: c]"),
        (SYSTEM_FIRST, [user("c"), system("b")], "[system: b][user: c]"),
        (SYSTEM_FIRST + ALTERNATING, [user("c"), system("b"), user("d")], "[system: b][user: c\n\nd]"),
        (NO_SYSTEM, [system("a"), user("c")], "[user: a\n\nc]"),
        (
            SYSTEM_FIRST + ALTERNATING + NO_SYSTEM,
            [system("a"), user("c"), user("d"), system("b")],
            "[user: a\n\nb\n\nc\n\nd]",
        ),
        (
            NOT_BOTH,
            [user("c"), {"role": "assistant", "content": "I look.", "thinking": "hm", "tool_calls": [{}]}],
            "[user: c][assistant: hm\n\nI look.]",
        ),
    ],
)
def test_a_refused_conversation_gets_the_first_form_that_is_accepted(template, messages, text):
    assert render(template, messages) == text


def test_a_conversation_that_is_accepted_stays_as_it_is():
    assert render("", [system("a"), user("c"), system("b"), user("d")]) == "[system: a][user: c][system: b][user: d]"


def test_what_no_form_helps_is_refused_in_the_words_of_the_first_error():
    with pytest.raises(InvalidRequestError, match="says: never"):
        render("{{ raise_exception('never') }}", [system("a"), system("b"), user("c")])


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], [{"role": "user", "content": [{"type": "text"}]}]])
def test_messages_without_text_have_no_other_form(messages):
    assert list(fallbacks(messages)) == []
