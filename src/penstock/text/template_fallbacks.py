"""Equivalent conversations for chat templates that reject the original one.

Many templates raise errors for messages that agents often send: several system messages, a later or any system message,
two turns of one role in a row, or text beside the reasoning of a tool call. Each function below rewrites one of these;
the rewrites are applied cumulatively.
"""

from collections.abc import Callable, Iterator
from typing import Any

from penstock.text.content import joined, text_of

Messages = list[dict[str, Any]]


def fallbacks(messages: Messages) -> Iterator[Messages]:
    """Yield the cumulative rewrites of a conversation, without those that change nothing."""
    if not all(isinstance(message.get("role"), str) and _is_content(message.get("content")) for message in messages):
        return  # parts in another form, for templates that read it
    for change in _CHANGES:
        changed = change(messages)
        if changed != messages:
            yield changed
            messages = changed


def _is_content(content: Any) -> bool:
    """Whether it is text, or parts of text, images and sounds."""
    if not isinstance(content, list):
        return isinstance(content, str)
    return all(isinstance(part, dict) and part.get("type") in ("text", "image", "audio") for part in content)


def _text_in_reasoning(messages: Messages) -> Messages:
    """The text beside a call becomes the end of its reasoning (gpt-oss)."""

    def changed(message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if not (message.get("tool_calls") and message.get("thinking") and content and isinstance(content, str)):
            return message
        return {**message, "thinking": f"{message['thinking']}\n\n{message['content']}", "content": ""}

    return [changed(message) for message in messages]


def _system_first(messages: Messages) -> Messages:
    """All system messages, in order, become one at the beginning (Qwen 3.5, Mistral)."""
    texts = [text_of(message["content"]) for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others] if texts else messages


def _turns_merged(messages: Messages) -> Messages:
    """Consecutive messages of a user or assistant, without calls, become one (Gemma, Mistral)."""
    merged: Messages = []
    for message in messages:
        last = merged[-1] if merged else {}
        if last.get("role") == message["role"] in ("user", "assistant") and last.keys() == message.keys() == _PLAIN:
            merged[-1] = {**last, "content": joined(last["content"], message["content"], "\n\n")}
        else:
            merged.append(message)
    return merged


def _system_in_user(messages: Messages) -> Messages:
    """The system message becomes the beginning of the first user message (Gemma 1 and 2)."""
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
        return messages
    user = {**messages[1], "content": joined(messages[0]["content"], messages[1]["content"], "\n\n")}
    return [user, *messages[2:]]


_PLAIN = {"role", "content"}
_CHANGES: tuple[Callable[[Messages], Messages], ...] = (
    _text_in_reasoning,
    _system_first,
    _turns_merged,
    _system_in_user,
)
