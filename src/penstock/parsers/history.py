"""Prepares earlier turns of a conversation for a checkpoint's chat template."""

import re
from collections.abc import Sequence
from typing import Any

REASONING = "reasoning_content"
"""Field of the reasoning in messages before `clean_messages`, and in most templates."""
_REASONING_FIELDS = (REASONING, "reasoning", "thinking")
_SWITCHES = ("enable_thinking", "reasoning_effort", "thinking")
_TAGS = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)
_STRINGS = re.compile(r"'[^']*'|\"[^\"]*\"")
_BILLING_LINE = re.compile(r"x-anthropic-billing-header:[^\n]*(?:\n+|$)")


def placeholder(kind: str) -> str:
    """The text that replaces content other than text."""
    return f"[{kind} omitted: this model reads text]"


def switches_of(template: str) -> frozenset[str]:
    """The variables of a chat template that control reasoning."""
    code = " ".join(_STRINGS.sub("''", tag) for tag in _TAGS.findall(template))
    return frozenset(name for name in _SWITCHES if re.search(rf"(?<![\w.]){name}(?!\w|\s*=[^=])", code))


def reasoning_fields_of(template: str) -> tuple[str, ...]:
    """The message fields from which a chat template reads reasoning; the usual one if it reads none."""
    read = (name for name in _REASONING_FIELDS if re.search(rf"\.{name}\b|[\[(]\s*['\"]{name}['\"]", template))
    return tuple(read) or (REASONING,)


def clean_messages(messages: Sequence[dict[str, Any]], reasoning_fields: Sequence[str]) -> list[dict[str, Any]]:
    """Messages with their reasoning in the template's fields, and without Claude Code's billing line.

    That line begins the system message and changes with each session or request, so that no later token would be found
    in the prefix cache.
    """
    made = []
    for message in messages:
        if message.get("role") == "system":
            content = message.get("content")
            if is_billing(content):
                message = {**message, "content": _BILLING_LINE.sub("", str(content), count=1)}
                if not message["content"]:
                    continue
        elif REASONING in message:
            others = {name: value for name, value in message.items() if name != REASONING}
            message = {**others, **dict.fromkeys(reasoning_fields, message[REASONING])}
        made.append(message)
    return made


def is_billing(content: object) -> bool:
    """Whether a system message's content begins with Claude Code's billing line."""
    return isinstance(content, str) and content.startswith("x-anthropic-billing-header:")
