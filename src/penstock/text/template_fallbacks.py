"""Equivalent conversations for chat templates that reject the original one.

Many templates raise errors for messages that agents often send: several system messages, a later or any system message,
two turns of one role in a row, or text beside the reasoning of a tool call. Each function below rewrites one of these;
the rewrites are applied cumulatively.
"""

from collections.abc import Callable, Iterator
from typing import Any

Messages = list[dict[str, Any]]


def fallbacks(messages: Messages) -> Iterator[Messages]:
    """Yield the cumulative rewrites of a conversation, without those that change nothing."""
    if not all(isinstance(message.get(name), str) for message in messages for name in _PLAIN):
        return  # content in parts, for templates that read those
    for change in _CHANGES:
        changed = change(messages)
        if changed != messages:
            yield changed
            messages = changed


def _text_in_reasoning(messages: Messages) -> Messages:
    """The text beside a call becomes the end of its reasoning (gpt-oss)."""

    def changed(message: dict[str, Any]) -> dict[str, Any]:
        if not (message.get("tool_calls") and message.get("thinking") and message.get("content")):
            return message
        return {**message, "thinking": f"{message['thinking']}\n\n{message['content']}", "content": ""}

    return [changed(message) for message in messages]


def _system_first(messages: Messages) -> Messages:
    """All system messages, in order, become one at the beginning (Qwen 3.5, Mistral)."""
    texts = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others] if texts else messages


def _turns_merged(messages: Messages) -> Messages:
    """Consecutive messages of a user or assistant, without calls, become one (Gemma, Mistral)."""
    merged: Messages = []
    for message in messages:
        last = merged[-1] if merged else {}
        if last.get("role") == message["role"] in ("user", "assistant") and last.keys() == message.keys() == _PLAIN:
            merged[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            merged.append(message)
    return merged


def _system_in_user(messages: Messages) -> Messages:
    """The system message becomes the beginning of the first user message (Gemma 1 and 2)."""
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
        return messages
    user = {**messages[1], "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
    return [user, *messages[2:]]


_PLAIN = {"role", "content"}
_CHANGES: tuple[Callable[[Messages], Messages], ...] = (
    _text_in_reasoning,
    _system_first,
    _turns_merged,
    _system_in_user,
)
