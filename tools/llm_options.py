"""The types of the keywords of `LLM`, generated from `penstock.config.engine_config` for editors and type checkers.

python -m tools.llm_options  (writes src/penstock/config/llm_options.py; tests/config/test_signatures.py compares it)
"""

import types
import typing
from collections.abc import Iterator
from dataclasses import Field
from pathlib import Path
from textwrap import wrap
from typing import Any

from penstock.config.engine_config import iter_options

FILE = Path(__file__).parent.parent / "src" / "penstock" / "config" / "llm_options.py"
WIDTH = 113


def source() -> str:
    """The module's text."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield '"""The keywords of `LLM`, generated from `EngineConfig` by `python -m tools.llm_options`; do not edit."""'
    yield ""
    yield "from typing import Literal"
    yield ""
    yield "from typing_extensions import TypedDict"
    yield ""
    yield ""
    yield "class LLMOptions(TypedDict, total=False):"
    yield '    """The options of an engine, but for its model."""'
    yield ""
    for _, field in iter_options():
        if field.name == "model":  # a positional argument
            continue
        yield f"    {field.name}: {_type_of(field)}"
        text = f'"""{field.metadata["help"]}"""'
        yield from (f"    {line}" for line in wrap(text, WIDTH, break_on_hyphens=False))
    yield ""


def _type_of(field: "Field[Any]") -> str:
    kinds = typing.get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)
    choices = field.metadata["choices"]
    named = [f"Literal[{', '.join(f'{choice!r}' for choice in choices)}]".replace("'", '"')] if choices else []
    others = [kind for kind in kinds if not (choices and kind is str)]
    return " | ".join([*named, *("None" if kind is type(None) else kind.__name__ for kind in others)])


if __name__ == "__main__":
    FILE.write_text(source())
