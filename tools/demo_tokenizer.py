"""The demo model's tokenizer and chat template, built by hand rather than learned.

A Unigram model over literal text: no normaliser and no pre-tokeniser, so that decoding gives back every character,
leading blanks included. Digits are always single tokens (arithmetic is learned digit by digit), whole words exist only
with the blank before them (a word in double quotes is thus spelled out, which makes reversing it a matter of letters),
and what no piece covers falls back to its UTF-8 bytes.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Sequence
from tokenizers.models import Unigram

from tools.demo_tasks import CITIES, NAMES, Message, Tool

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
TOOL_MARKS = ("<tool_call>", "</tool_call>")

# Runs that the template and JSON repeat in every item: one token each keeps tool prompts short.
FIXED_PIECES = (
    "system\n", "user\n", "assistant\n", "\n\n", "<tools>\n", "</tools>\n", "<tool_response>\n", "\n</tool_response>",
    '{"type": "function", "function": {"name": "', '", "description": "',
    '", "parameters": {"type": "object", "properties": {"', '": {"type": "string"}', '}, "required": ["', '"]}}}',
    '{"name": "', '", "arguments": {"', '", "age": ', ', "city": "', '"city"', '"name"', '": "', '"}', '"}}', '{"',
    '": ', '", "', ' "', '".', ", ", ". ", ": ", " + ", " - ", " = ",
    " is ", " and ", " are ", " from ", " by ", " of ", " to ", "Add ", "Compute ", "Subtract ", "Sort ", "Call ",
)  # fmt: skip

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
{{- 'You may call these tools:\\n<tools>\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}
{{- '</tools>\\nTo call one, reply with its name and arguments as JSON.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{{- call.function.arguments | tojson }}{% endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


def reply_text(message: Message) -> str:
    """What the model writes for an assistant message."""
    functions = [call["function"] for call in message.get("tool_calls", [])]
    calls = [json.dumps({"name": function["name"], "arguments": function["arguments"]}) for function in functions]
    texts = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    return "\n".join([message["content"], *texts] if message["content"] else texts)


def system_text(messages: Iterable[Message], tools: Iterable[Tool]) -> str:
    own = "".join(message["content"] for message in messages if message["role"] == "system")
    if not tools:
        return own
    listed = "".join(json.dumps(tool) + "\n" for tool in tools)
    offer = f"You may call these tools:\n<tools>\n{listed}</tools>\n"
    return f"{own}\n\n"[: len(own) and None] + offer + "To call one, reply with its name and arguments as JSON."


def render(messages: tuple[Message, ...], tools: tuple[Tool, ...] = ()) -> list[tuple[str, bool]]:
    """The template's text in segments, each with whether the model is to learn to write it.

    Written out in Python because training needs the marks (and the speed); `tests/tools/test_demo_tasks.py` holds it
    equal to `CHAT_TEMPLATE`. At most one tool result follows a call.
    """
    system = system_text(messages, tools)
    segments = [(f"{TURN_START}system\n{system}{TURN_END}\n", False)] if system else []
    for message in messages:
        if message["role"] == "assistant":
            segments += [(f"{TURN_START}assistant\n", False), (reply_text(message) + TURN_END, True), ("\n", False)]
        elif message["role"] == "tool":
            body = f"<tool_response>\n{message['content']}\n</tool_response>"
            segments.append((f"{TURN_START}user\n{body}{TURN_END}\n", False))
        elif message["role"] == "user":
            segments.append((f"{TURN_START}user\n{message['content']}{TURN_END}\n", False))
    return segments


def frequent_words(texts: Iterable[str], at_least: int) -> list[str]:
    """Words after a blank, as " word", and capitalised ones at the start of a line, as "Word"."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(re.findall(r" [A-Za-z]{2,}", text))
        counts.update(re.findall(r"^[A-Z][a-z]+", text, re.MULTILINE))
        counts.update(re.findall(r"[a-z]+_[a-z]+", text))
    proper = {*NAMES, *CITIES}  # at the start of a line they are spelled out, as they are inside JSON
    return sorted(word for word, count in counts.items() if count >= at_least and word not in proper)


def build_tokenizer(texts: Iterable[str], at_least: int = 18) -> Tokenizer:
    """A tokenizer whose words are those that occur often in the texts."""
    characters = ["\n", "\t", *map(chr, range(32, 127))]
    words = [*FIXED_PIECES, *frequent_words(texts, at_least)]
    # Special tokens and bytes must never win against characters when their names occur in text.
    names = [*SPECIAL_TOKENS, *TOOL_MARKS, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = [(name, -1000.0) for name in names]
    pieces += [(character, -10.0) for character in characters]
    pieces += [(word, -9.0) for word in dict.fromkeys(words) if len(word) > 1]
    tokenizer = Tokenizer(Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.decoder = Sequence([ByteFallback(), Fuse()])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=False) for name in TOOL_MARKS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
