"""Earlier turns as chat templates read them."""

import pytest

from penstock.parsers.history import clean_messages, reasoning_fields_of, switches_of

BILLING = "x-anthropic-billing-header: cc_version=2.1.100; cch=eb6c6;"


@pytest.mark.parametrize(
    ("template", "fields"),
    [
        ("{{ message.reasoning_content }}", ("reasoning_content",)),
        ("{{ message['reasoning_content'] }}", ("reasoning_content",)),
        ("{{ message.get('reasoning') }}", ("reasoning",)),
        ("{% if message.thinking and message.content %}", ("thinking",)),
        ("{{ message.reasoning_content or message.reasoning }}", ("reasoning_content", "reasoning")),
        ("{{ message.content }} thinking", ("reasoning_content",)),
    ],
)
def test_reasoning_goes_to_the_field_that_the_template_reads(template, fields):
    assert reasoning_fields_of(template) == fields
    turn = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    (made,) = clean_messages([turn], fields)
    assert made == {"role": "assistant", "content": "", **dict.fromkeys(fields, "hm")}


@pytest.mark.parametrize(
    ("template", "switches"),
    [
        ("{% if enable_thinking is defined and not enable_thinking %}", {"enable_thinking"}),
        ("{{ 'Reasoning: ' ~ (reasoning_effort or 'medium') }}", {"reasoning_effort"}),
        ("{% if thinking %}<think>{% endif %}", {"thinking"}),
        ("{% if message.thinking %}{% endif %}{% if 'thinking' in message %}{% endif %}", set()),
        ("{% set thinking = message.content %}", set()),
        ("Say what you are thinking; enable_thinking", set()),
    ],
)
def test_variables_that_control_reasoning_are_those_that_the_template_reads(template, switches):
    assert switches_of(template) == switches


def test_claude_codes_billing_line_is_not_part_of_the_prompt():
    asked = {"role": "user", "content": BILLING}
    system = {"role": "system", "content": f"{BILLING}\nYou are an agent."}
    assert clean_messages([system, asked], ()) == [{"role": "system", "content": "You are an agent."}, asked]
    assert clean_messages([{"role": "system", "content": BILLING}, asked], ()) == [asked]
