"""The table in `docs/sampling.md`: every control by dialect, from the schemas: `python -m tools.sampling_table`."""

import ast
import inspect
import textwrap
from dataclasses import fields
from pathlib import Path

from penstock.api.sampling_params import SamplingParams
from penstock.checkpoint.generation_config import GenerationDefaults
from penstock.cli.flags import SAMPLING_FLAGS
from penstock.server.anthropic.schema import MessagesBody
from penstock.server.body import Body
from penstock.server.ollama.schema import Options
from penstock.server.openai.responses_schema import ResponsesBody
from penstock.server.openai.schema import ChatBody, CompletionBody
from penstock.server.tgi.schema import GenerateParameters

PAGE = Path(__file__).parents[1] / "docs" / "sampling.md"
BEGIN, END = "<!-- made by tools/sampling_table.py -->", "<!-- end -->"

DIALECTS: dict[str, type[Body]] = {
    "chat": ChatBody,
    "completions": CompletionBody,
    "Responses": ResponsesBody,
    "Anthropic": MessagesBody,
    "Ollama": Options,
    "TGI": GenerateParameters,
}
OTHER_NAMES: dict[str, dict[str, str]] = {
    "max_tokens": {
        "chat": "max_completion_tokens",
        "Responses": "max_output_tokens",
        "Ollama": "num_predict",
        "TGI": "max_new_tokens",
    },
    "stop": {"Anthropic": "stop_sequences"},
    "logprobs": {"chat": "top_logprobs", "Responses": "top_logprobs", "TGI": "top_n_tokens"},
    "prompt_logprobs": {"TGI": "decoder_input_details"},
    "repetition_penalty": {"Ollama": "repeat_penalty"},
    "frequency_penalty": {"TGI": ""},
    "share_penalty": {"TGI": "frequency_penalty"},
    "structured": {
        "chat": "response_format",
        "completions": "response_format",
        "Responses": "text",
        "Anthropic": "output_config",
        "TGI": "grammar",
    },
}
"""What a dialect calls a field of `SamplingParams`; "" where its parameter of that name is another."""
OTHER_FLAGS = {"stop": "--stop", "bad_words": "--bad-word", "structured": "--json-schema"}


def table() -> str:
    """A row for each field of `SamplingParams`."""
    lines = [
        "| `SamplingParams` | " + " | ".join(DIALECTS) + " | `penstock generate` | checkpoint | |",
        "|" + "---|" * (len(DIALECTS) + 4),
    ]
    told = _docstrings()
    defaults = {field.name for field in fields(GenerationDefaults)}
    for field in fields(SamplingParams):
        name = field.name
        cells = [_cell(name, dialect) for dialect in DIALECTS]
        flag = OTHER_FLAGS.get(name) or ("--" + name.replace("_", "-") if name in SAMPLING_FLAGS else "")
        cells += [f"`{flag}`" if flag else "–", "yes" if name in defaults else "–", told[name]]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(name: str, dialect: str) -> str:
    body, called = DIALECTS[dialect], OTHER_NAMES.get(name, {}).get(dialect, name)
    if called in body.model_fields:
        return "yes" if called == name else f"`{called}`"
    return "refused" if called in body.UNSUPPORTED else "–"


def _docstrings() -> dict[str, str]:
    """What stands below each field."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(SamplingParams))).body
    assert isinstance(definition, ast.ClassDef)
    told: dict[str, str] = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            told[field.target.id] = " ".join(str(below.value.value).split())
    return told


def updated(page: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
