"""Which grammar library: how long compiling and masks take, and which keywords of JSON Schema are obeyed.

    pip install xgrammar jsonschema          (in an environment of its own: it is no dependency of Penstock)
    python -m benchmarks.speed.grammars            writes results/<machine>/grammars.json

Both get the same 128,000 tokens, the likeliest pieces of Python's own library, and the same way to write JSON. A mask
is timed at each token of documents that are cut into the longest pieces. A keyword is obeyed if the good documents
pass and the bad ones do not; else it is refused (an error), or not obeyed without a word.
"""

import json
import re
import statistics
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import llguidance
import numpy as np

from benchmarks.report import save

VOCAB = 128_000
ROUNDS = 5

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "email": {"type": ["string", "null"]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TIMED: dict[str, tuple[Any, Any]] = {
    "person": (PERSON, {"name": "Ada Lovelace", "age": 36, "email": "ada@example.org"}),
    "people": ({"type": "array", "items": PERSON}, [{"name": f"Person {i}", "age": i} for i in range(8)]),
    "enum": ({"enum": [f"choice number {i}" for i in range(300)]}, "choice number 217"),
    "tree": (
        {
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {"v": {"type": "number"}, "of": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
                    "required": ["v"],
                    "additionalProperties": False,
                }
            },
            "$ref": "#/$defs/node",
        },
        {"v": 1.5, "of": [{"v": 2, "of": [{"v": 3}]}, {"v": -4}]},
    ),
    "any object": ({"type": "object"}, {"a": [1, 2, {"b": None}], "text": "The quick brown fox, over and over."}),
    "forty properties": (
        {
            "type": "object",
            "properties": {f"property_{i}": {"type": "string"} for i in range(40)},
            "additionalProperties": False,
        },
        {f"property_{i}": "value" for i in range(0, 40, 3)},
    ),
    "pattern": ({"type": "string", "pattern": "^[A-Z]{2}[0-9]{6}(-[a-z]+)*$"}, "AB123456-some-more-text"),
}

COVERED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "type": ({"type": ["integer", "null"]}, [1, None], ["a"]),
    "enum": ({"enum": [1, "a"]}, [1, "a"], [2]),
    "const": ({"const": {"a": [1]}}, [{"a": [1]}], [{"a": [2]}]),
    "properties, required": (PERSON, [{"name": "a", "age": 1}], [{"name": "a"}, {"name": 1, "age": 1}]),
    "additionalProperties": ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"x": 1}], [{"x": "a"}]),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
        [{"xa": 1}],
        [{"xa": "a"}, {"ya": 1}],
    ),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}, [{"a": 1}], [{"A": 1}]),
    "minProperties": ({"type": "object", "minProperties": 2}, [{"a": 1, "b": 2}], [{"a": 1}]),
    "maxProperties": ({"type": "object", "maxProperties": 1}, [{"a": 1}], [{"a": 1, "b": 2}]),
    "dependentRequired": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        [{"a": 1, "b": 2}],
        [{"a": 1}],
    ),
    "dependentSchemas": (
        {"type": "object", "properties": {"a": {}}, "dependentSchemas": {"a": {"required": ["b"]}}},
        [{"a": 1, "b": 2}],
        [{"a": 1}],
    ),
    "unevaluatedProperties": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "unevaluatedProperties": False},
        [{"a": 1}],
        [{"b": 1}],
    ),
    "items": ({"type": "array", "items": {"type": "integer"}}, [[1, 2], []], [["a"]]),
    "prefixItems": ({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False}, [[1, 2]], [[2, 1]]),
    "minItems, maxItems": (
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        [[1], [1, 2]],
        [[], [1, 2, 3]],
    ),
    "uniqueItems": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [[1, 2]], [[1, 1]]),
    "contains": ({"type": "array", "contains": {"const": 1}}, [[1, 2]], [[2]]),
    "unevaluatedItems": ({"type": "array", "prefixItems": [{"const": 1}], "unevaluatedItems": False}, [[1]], [[1, 2]]),
    "minLength, maxLength": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "日本語"], ["a", "abcd"]),
    "pattern": ({"type": "string", "pattern": "^a+b$"}, ["aab"], ["aa"]),
    "pattern, anywhere": ({"type": "string", "pattern": "b"}, ["abc"], ["aac"]),
    "pattern with maxLength": ({"type": "string", "pattern": "^a+$", "maxLength": 2}, ["aa"], ["aaa"]),
    "format date": ({"type": "string", "format": "date"}, ["2026-11-21"], ["yesterday"]),
    "format date-time": ({"type": "string", "format": "date-time"}, ["2026-11-21T10:00:00Z"], ["2026-11-21"]),
    "format email": ({"type": "string", "format": "email"}, ["a@example.org"], ["a"]),
    "format uuid": ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123"]),
    "format ipv4": ({"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["1.2.3"]),
    "format uri": ({"type": "string", "format": "uri"}, ["https://example.org/a"], ["no uri"]),
    "minimum, maximum of integers": ({"type": "integer", "minimum": 3, "maximum": 120}, [3, 120], [2, 121]),
    "minimum, maximum of numbers": ({"type": "number", "minimum": 0.5, "maximum": 9.75}, [0.5, 9.75], [0.25, 9.8]),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 3}, [4], [3]),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, [14], [15]),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, [1, True], ["a"]),
    "oneOf, disjoint": ({"oneOf": [{"type": "integer"}, {"type": "boolean"}]}, [1, True], ["a"]),
    "oneOf, overlapping": ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]}, [1, 5.5], [6]),
    "allOf of objects": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
            ]
        },
        [{"a": 1, "b": True}],
        [{"a": 1}, {"a": "x", "b": True}],
    ),
    "allOf of ranges": ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]}, [3, 9], [2, 10]),
    "not": ({"type": "integer", "not": {"const": 3}}, [4], [3]),
    "if, then, else": (
        {"type": "integer", "if": {"minimum": 10}, "then": {"multipleOf": 10}, "else": {"multipleOf": 3}},
        [20, 9],
        [21, 8],
    ),
    "$ref, $defs": ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, [1], ["a"]),
    "$ref with siblings": ({"$ref": "#/$defs/a", "maximum": 5, "$defs": {"a": {"type": "integer"}}}, [5], [6]),
    "$ref, recursive": (TIMED["tree"][0], [TIMED["tree"][1]], [{"v": 1, "of": [{}]}]),
    "$anchor": ({"$ref": "#here", "$defs": {"a": {"$anchor": "here", "type": "integer"}}}, [1], ["a"]),
    "$dynamicRef": (
        {"$dynamicRef": "#here", "$defs": {"a": {"$dynamicAnchor": "here", "type": "integer"}}},
        [1],
        ["a"],
    ),
    "true": ({"type": "array", "items": True}, [[1, "a"]], [1]),
    "false": (
        {"type": "object", "properties": {"a": False}, "additionalProperties": {"type": "integer"}},
        [{"b": 1}],
        [{"a": 1}],
    ),
}


def make_vocabulary() -> list[bytes]:
    """All bytes, and the likeliest words and signs, with and without a space before them, of Python's own library."""
    words: Counter[str] = Counter()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        words.update(re.findall(r" ?\w+| ?[^\w\s]+|\s+", file.read_text(encoding="utf-8", errors="ignore")))
    counts: Counter[bytes] = Counter()
    for word, count in words.items():
        for end in range(2, min(len(word.encode()), 24) + 1):
            counts[word.encode()[:end]] += count
    single = [bytes([byte]) for byte in range(256)]
    likely = [piece for piece, _ in counts.most_common(VOCAB + 256) if len(piece) > 1]
    return [*single, *likely][: VOCAB - 1]


class Cutter:
    """Cuts a text into the longest tokens."""

    def __init__(self, vocabulary: list[bytes]) -> None:
        self._ids = {piece: i for i, piece in reversed(list(enumerate(vocabulary)))}
        self._longest = max(map(len, vocabulary))

    def __call__(self, text: str) -> list[int]:
        rest, tokens = text.encode(), []
        while rest:
            size = next(size for size in range(min(len(rest), self._longest), 0, -1) if rest[:size] in self._ids)
            tokens.append(self._ids[rest[:size]])
            rest = rest[size:]
        return tokens


class Llguidance:
    def __init__(self, vocabulary: list[bytes], cut: Cutter) -> None:
        class Pieces:
            eos_token_id, bos_token_id, tokens = len(vocabulary), None, [*vocabulary, b"<|end|>"]
            special_token_ids = (len(vocabulary),)

            def __call__(self, text: str) -> list[int]:
                return cut(text)

        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Pieces()))
        self._mask = np.zeros((len(vocabulary) + 32) // 32, np.int32)

    def compile(self, schema: Any) -> Any:
        source = llguidance.LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        )
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def start(self, compiled: Any) -> Any:
        return compiled.deep_copy()

    def mask(self, matcher: Any) -> None:
        matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)

    def take(self, matcher: Any, token: int) -> bool:
        return bool(matcher.try_consume_tokens([token]))

    def may_end(self, matcher: Any) -> bool:
        return bool(matcher.is_accepting())


class Xgrammar:
    def __init__(self, vocabulary: list[bytes], cut: Cutter) -> None:
        import xgrammar

        self._library = xgrammar
        end = len(vocabulary)
        info = xgrammar.TokenizerInfo([*vocabulary, b"<|end|>"], xgrammar.VocabType.RAW, stop_token_ids=[end])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._mask = xgrammar.allocate_token_bitmask(1, end + 1)

    def compile(self, schema: Any) -> Any:
        return self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=False, strict_mode=False)

    def start(self, compiled: Any) -> Any:
        return self._library.GrammarMatcher(compiled, terminate_without_stop_token=False)

    def mask(self, matcher: Any) -> None:
        matcher.fill_next_token_bitmask(self._mask)

    def take(self, matcher: Any, token: int) -> bool:
        return bool(matcher.accept_token(token))

    def may_end(self, matcher: Any) -> bool:
        return bool(matcher.accept_token(VOCAB - 1))


def clock(work: Callable[[], Any]) -> tuple[Any, float]:
    """What comes out, and milliseconds of this thread's processor time."""
    began = time.thread_time()
    made = work()
    return made, 1e3 * (time.thread_time() - began)


def measure(library: Any, cut: Cutter) -> dict[str, dict[str, float]]:
    """Milliseconds to compile, and microseconds a mask, by schema."""
    rows = {}
    for name, (schema, document) in TIMED.items():
        compiling, masks = [], []
        for _ in range(ROUNDS):
            compiled, milliseconds = clock(partial(library.compile, schema))
            compiling.append(milliseconds)
            matcher = library.start(compiled)
            for token in cut(json.dumps(document)):
                masks.append(1e3 * clock(partial(library.mask, matcher))[1])
                assert library.take(matcher, token), f"{name} is not taken"
        rows[name] = {
            "compile_ms": statistics.median(compiling),
            "mask_us": statistics.median(masks),
            "mask_us_99": sorted(masks)[int(0.99 * len(masks))],
        }
    return rows


def cover(library: Any, cut: Cutter) -> dict[str, str]:
    """What becomes of each keyword."""
    verdicts = {}
    for name, (schema, good, bad) in COVERED.items():
        try:
            compiled = library.compile(schema)
        except Exception:
            verdicts[name] = "refused"
            continue

        def passes(document: Any, compiled: Any = compiled) -> bool:
            matcher = library.start(compiled)
            text = json.dumps(document, ensure_ascii=False)
            return all(library.take(matcher, token) for token in cut(text)) and library.may_end(matcher)

        if not all(map(passes, good)):
            verdicts[name] = "forbids good documents"
        else:
            verdicts[name] = "ALLOWS BAD DOCUMENTS" if any(map(passes, bad)) else "obeyed"
    return verdicts


def main() -> int:
    vocabulary = make_vocabulary()
    cut = Cutter(vocabulary)
    results: dict[str, Any] = {"vocabulary": len(vocabulary) + 1}
    for kind in (Llguidance, Xgrammar):
        name = kind.__name__.lower()
        try:
            library, milliseconds = clock(partial(kind, vocabulary, cut))
        except ImportError:
            print(f"{name} is not installed", file=sys.stderr)
            continue
        times, verdicts = measure(library, cut), cover(library, cut)
        results[name] = {"vocabulary_ms": milliseconds, "times": times, "keywords": verdicts}
        print(f"{name}: the vocabulary takes {milliseconds:.0f} ms")
        for schema, row in times.items():
            masks = f"mask {row['mask_us']:7.1f} us, 99 % {row['mask_us_99']:8.1f}"
            print(f"  {schema:18} compile {row['compile_ms']:8.2f} ms   {masks}")
        for verdict, count in Counter(verdicts.values()).most_common():
            which = "" if verdict == "obeyed" else ": " + ", ".join(k for k, v in verdicts.items() if v == verdict)
            print(f"  {verdict}: {count}{which}")
    save("grammars", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
