"""Rewrites the expressions of pydantic 2.11 and 2.12 for `Decimal`, whose lookahead no automaton supports.

`^(?!^[-+.]*$)` requires a digit. Each of the four kinds is written here without it; those with a limit
of digits match a little less than the original, which does not look at what follows them.
"""

import re

_START = r"^(?!^[-+.]*$)[+-]?0*"
_PLACES = re.compile(r"\\d\*\\\.\?\\d\{0,(\d+)\}0\*\$")
_DIGITS = re.compile(r"\(\?:\\d\{0,(\d+)\}\|\(\?=\[\\d\.\]\{1,\d+\}0\*\$\)\\d\*\\\.\\d\*0\*\$\)")
_BOTH = re.compile(r"\(\?:\\d\{0,(\d+)\}\|\(\?=\[\\d\.\]\{1,\d+\}0\*\$\)\\d\{0,\d+\}\\\.\\d\{0,(\d+)\}0\*\$\)")


def decimal_without_lookahead(pattern: str) -> str:
    """An equivalent without lookahead for these expressions; any other stays as it is."""
    if not pattern.startswith(_START):
        return pattern
    rest = pattern[len(_START) :]
    if rest == r"\d*\.?\d*$":
        return r"^[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)$"
    if found := _PLACES.fullmatch(rest):
        return rf"^[+-]?(?:[0-9]+(?:\.[0-9]{{0,{found[1]}}}0*)?{_only_places(int(found[1]))})$"
    if found := _BOTH.fullmatch(rest):
        whole, places = int(found[1]), int(found[2])
        return (
            rf"^[+-]?0*(?:[0-9]{{1,{whole}}}(?:\.[0-9]{{0,{places}}})?{_only_places(places)})$"
            if whole
            else (rf"^[+-]?0*\.[0-9]{{1,{places}}}$")
        )
    if found := _DIGITS.fullmatch(rest):
        most = int(found[1])
        split = "|".join(rf"[0-9]{{{whole}}}\.[0-9]{{1,{most - whole}}}" for whole in range(min(most, 40)))
        return rf"^[+-]?0*(?:[0-9]{{1,{most}}}|{split})$"
    return pattern


def _only_places(places: int) -> str:
    return rf"|\.[0-9]{{1,{places}}}" if places else ""
