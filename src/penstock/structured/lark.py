"""The JSON schemas inside of a grammar in Lark's notation."""

import json
import re

from penstock.structured.json_schema.document import SchemaError
from penstock.structured.json_schema.rewrite import Rewritten, rewrite

_LEXEME = re.compile(
    r"""(?P<json>%json\s*)
    | (?:\#|//)[^\n]*             # a comment
    | "(?:\\.|[^"\\])*"
    | /(?:\\.|[^/\\])+/
    | .""",
    re.VERBOSE | re.DOTALL,
)


def rewrite_schemas(grammar: str) -> tuple[str, list[Rewritten]]:
    """A grammar in which each schema is one that the library obeys to the letter, and what they leave to others.

    Raises:
        SchemaError: one cannot be obeyed.
    """
    pieces, schemas = [], []
    at = 0
    while found := _LEXEME.match(grammar, at):
        at = found.end()
        pieces.append(found[0])
        if found["json"]:
            try:
                _, end = json.JSONDecoder().raw_decode(grammar, at)
            except (json.JSONDecodeError, RecursionError) as error:
                raise SchemaError("", f"after %json there is no JSON: {error}") from error
            schemas.append(rewrite(grammar[at:end]))
            pieces.append(json.dumps(schemas[-1].schema))
            at = end
    return "".join(pieces), schemas
