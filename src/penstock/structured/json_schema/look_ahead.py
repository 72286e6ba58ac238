"""Replaces look-ahead, which no automaton supports, by expressions without it that match the same texts.

`^(?=X)Y` matches what `^X` and `^Y` both match. Look-ahead elsewhere, or negative, is replaced in the expressions of
zod and pydantic only.
"""

import re

from penstock.structured.json_schema.pydantic_decimal import decimal_without_lookahead

_DAYS = r"(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)"
_SECONDS = r"\d+(?:[.,]\d+)?S"
_HOURS = rf"T(?:\d+H(?:\d+M)?(?:{_SECONDS})?|\d+M(?:{_SECONDS})?|{_SECONDS})"

KNOWN = {
    # zod's email before 4.6; zod-to-json-schema's
    **{
        rf"^(?!\.)(?!.*\.\.)([{az}0-9_'+\-\.]*)[{az}0-9_+-]@([{az}0-9][{az}0-9\-]*\.)+[{az}]{{2,}}$": (
            rf"^(?:[{az}0-9_'+\-]+\.)*[{az}0-9_'+\-]*[{az}0-9_+-]@(?:[{az}0-9][{az}0-9\-]*\.)+[{az}]{{2,}}$"
        )
        for az in ("A-Za-z", "a-zA-Z")
    },
    # zod's duration
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(?:\d+W|{_DAYS}(?:{_HOURS})?|{_HOURS})$"
    ),
    # zod's IBAN
    r"^[A-Z]{2}(?!00|01|99)\d{2}[A-Z0-9]{11,30}$": r"^[A-Z]{2}(?:0[2-9]|[1-8]\d|9[0-8])[A-Z0-9]{11,30}$",
}
"""Expressions, and equal ones without look-ahead."""

_TOKEN = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
"""An escape, a class, or another character."""


def conjuncts(pattern: str) -> list[str]:
    """Expressions that all match a text if and only if this one does; with less look-ahead, or none."""
    pattern = KNOWN.get(pattern) or decimal_without_lookahead(pattern)
    ahead, at = [], 1
    while pattern.startswith("^") and pattern.startswith("(?=", at) and (end := _group_end(pattern, at)):
        ahead.append(f"^(?:{pattern[at + 3 : end - 1]})")
        at = end
    rest = pattern[at:]
    return [*ahead, f"^{rest}"] if ahead and _is_sequence(rest) else [pattern]


def _group_end(pattern: str, at: int) -> int | None:
    """The end of the group that begins at `at`; None if it has none."""
    depth = 0
    for token in _TOKEN.finditer(pattern, at):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if not depth:
            return token.end()
    return None


def _is_sequence(pattern: str) -> bool:
    """Whether an expression neither begins with a quantifier nor has alternatives outside of groups."""
    depth = 0
    for token in _TOKEN.findall(pattern):
        depth += {"(": 1, ")": -1}.get(token, 0)
        if depth < 0 or (not depth and token == "|"):
            return False
    return not pattern.startswith(("*", "+", "?", "{"))
