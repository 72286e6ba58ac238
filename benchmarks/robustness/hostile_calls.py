"""Calls that are valid HTTP and cost the server as much as they may: what `hostile_soak.py` sends besides bytes.

A call is a path and a body. Those in `ABANDONED` are left as soon as they are sent.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

Call = tuple[str, bytes]

MODEL = "penstock-demo"
EVIL = "(.*.*)*(.*.*)*(.*.*)*Z"
"""A pattern for which `re` takes time without end."""


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, **fields}).encode()


def long_stops(rng: Random) -> Call:
    length = rng.choice((900, 1000, 50_000))
    stops = [chr(97 + i) * length for i in range(16)]
    return "/v1/completions", body(prompt="hi", max_tokens=8, n=rng.choice((16, 64)), stop=stops)


def slow_schema(rng: Random) -> Call:
    schema = {"type": "object", "properties": {f"p{i}": {"multipleOf": rng.randrange(10**4, 10**7)} for i in range(3)}}
    return "/v1/completions", body(prompt="hi", max_tokens=4, structured_outputs={"json": schema})


def hostile_tools(rng: Random) -> Call:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(rng.choice((20, 100, 300))):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    schemas: tuple[dict[str, Any], ...] = (
        deep,
        {"$ref": "#"},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": EVIL, "minLength": 10**9}}},
        {"type": "object", "properties": {f"p{i}": {"enum": list(range(50))} for i in range(500)}},
        {"anyOf": [{"$ref": "#/$defs/a"}] * 300, "$defs": {"a": {"anyOf": [{"$ref": "#"}] * 300}}},
        {"type": "object", "additionalProperties": {"not": {"const": "\ud800"}}},
    )
    function = {"name": "f", "parameters": rng.choice(schemas), "strict": rng.random() < 0.5}
    tools = [{"type": "function", "function": function}]
    messages = [{"role": "user", "content": "hi"}]
    return "/v1/chat/completions", body(messages=messages, tools=tools, tool_choice="required", max_tokens=4)


def hostile_pattern(rng: Random) -> Call:
    pattern = rng.choice((EVIL, "(a{1,999}){1,999}", "(" * 5000, "[" + "a-z" * 5000 + "]{1000}", "(?=a)" * 1000))
    return "/v1/completions", body(prompt="hi", max_tokens=4, structured_outputs={"regex": pattern})


def deep_body(rng: Random) -> Call:
    depth = rng.choice((500, 100_000))
    path = rng.choice(("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"))
    return path, b'{"model": "penstock-demo", "prompt": "a", "metadata": ' + b"[" * depth + b"]" * depth + b"}"


def large_text(rng: Random) -> Call:
    text = rng.choice(("a", "hello ", "1 ", "\u00e9\u4e2d")) * rng.randrange(100_000, 1_000_000)
    if rng.random() < 0.5:
        return "/v1/completions", body(prompt=text, max_tokens=1)
    return "/v1/chat/completions", body(messages=[{"role": "user", "content": text}], max_tokens=1)


def many_turns(rng: Random) -> Call:
    turns = [{"role": ("user", "assistant")[i % 2], "content": "x"} for i in range(5001)]
    return "/v1/chat/completions", body(messages=turns, max_tokens=2)


def many_prompts(rng: Random) -> Call:
    prompts: list[Any] = [rng.choice(("hello", [1, 2, 3]))] * rng.choice((1000, 5000, 50_000))
    path, name = rng.choice((("/v1/completions", "prompt"), ("/v1/embeddings", "input"), ("/v1/rerank", "documents")))
    return path, body(**{name: prompts, "query": "a", "max_tokens": 1})


def bad_utf8(rng: Random) -> Call:
    bad = rng.choice((b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80")) * rng.choice((1, 50_000))
    path = rng.choice(("/v1/completions", "/v1/chat/completions", "/v1/messages", "/generate"))
    return path, b'{"model": "penstock-demo", "prompt": "' + bad + b'", "inputs": "' + bad + b'"}'


def unknown_path(rng: Random) -> Call:
    path = "/" + "/".join(
        rng.choice(("v1", "%2e%2e", "a" * 500, "%ff", "admin", "..")) for _ in range(rng.randrange(9))
    )
    return path, body(prompt="a")


def evil_adapter(rng: Random) -> Call:
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": rng.choice((EVIL, ["q_proj"]))}
    folder = Path(tempfile.gettempdir()) / "hostile-soak-adapter"
    folder.mkdir(exist_ok=True)
    config[rng.choice(("rank_pattern", "alpha_pattern"))] = {EVIL: 8, "(?i)q": 4}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(rng.choice((b"", b"\xff" * 100, b"\0" * 8 + b"[" * 10_000)))
    return "/v1/load_lora_adapter", body(lora_name=f"evil{rng.randrange(10)}", lora_path=str(folder))


def log_probabilities(rng: Random) -> Call:
    text = "hello " * rng.randrange(10, 150)
    return "/v1/completions", body(prompt=text, max_tokens=1, prompt_logprobs=rng.choice((1, 20)))


CALLS: tuple[Callable[[Random], Call], ...] = (
    long_stops,
    slow_schema,
    hostile_tools,
    hostile_pattern,
    deep_body,
    large_text,
    many_turns,
    many_prompts,
    bad_utf8,
    unknown_path,
    evil_adapter,
    log_probabilities,
)
ABANDONED = {slow_schema, many_turns}
