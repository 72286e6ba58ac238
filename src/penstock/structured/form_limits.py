"""The maximum size of a requested schema or grammar, and the error for one that cannot be enforced."""

from penstock.api.sampling_params import MAX_FORM_CHARACTERS, Structured
from penstock.errors import InvalidRequestError

MAX_CHOICES = 2000
MAX_PATTERN = 2**13
"""Characters of a regular expression."""
MAX_REASON = 500


def check_size(structured: Structured) -> None:
    """
    Raises:
        InvalidRequestError: the grammar, or that of the tool calls, is too large to be compiled.
    """
    size = len(structured.text) + sum(map(len, structured.choices))
    most = MAX_PATTERN if structured.kind == "regex" else MAX_FORM_CHARACTERS
    if size > most:
        raise refusal(structured, f"it has {size} characters; at most {most}")
    if len(structured.calls) > MAX_FORM_CHARACTERS:
        raise refusal(structured, f"its tools have {len(structured.calls)} characters; at most {MAX_FORM_CHARACTERS}")
    if len(structured.choices) > MAX_CHOICES:
        raise refusal(structured, f"it has {len(structured.choices)} choices; at most {MAX_CHOICES}")


def refusal(structured: Structured, reason: str) -> InvalidRequestError:
    """The error for the caller, with the first line of the reason."""
    kinds = {"json_schema": "JSON schema", "json_object": "form", "regex": "regular expression"}
    lines = reason.splitlines() or ["the library does not say why"]  # after the first comes a drawing of the place
    summary = " ".join([lines[0].strip(), *(line for line in lines[1:] if line.startswith("error:"))])[:MAX_REASON]
    kind = kinds.get(structured.kind, structured.kind)
    return InvalidRequestError(f"the {kind} cannot be enforced: {summary}", "structured")
