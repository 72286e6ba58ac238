"""The input of a custom tool's call, read from the JSON `{"input": "..."}` around it, as it arrives.

If the JSON is cut or broken, the input is what can be read of it.
"""

import json
import re

_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HIGH, _LOW = r"u[dD][89abAB][0-9a-fA-F]{2}", r"u[dD][c-fC-F][0-9a-fA-F]{2}"
_NO_HEX = r"u(?=[0-9a-fA-F]{0,3}[^0-9a-fA-F])"
_CHARACTERS = re.compile(
    rf'(?:[^"\\]+|\\{_HIGH}(?:\\{_LOW}|(?=[^\\]|\\[^u]|\\u(?![dD][c-fC-F])..))'
    rf"|\\u(?![dD][89abAB])[0-9a-fA-F]{{4}}|\\{_NO_HEX}|\\[^u])*",
    re.DOTALL,
)
"""Complete characters of a JSON string; a pair of surrogates is one of them."""
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')


class CustomInput:
    """An incremental reader. The pieces it returns, and the last one by `finish`, are the input."""

    def __init__(self) -> None:
        self._arguments = ""
        self._place = 0
        """Up to here, characters of the string have been returned; 0: it has not begun."""

    def feed_text(self, arguments: str) -> str:
        """The piece of the input that more arguments contain."""
        self._arguments += arguments
        if not self._place:
            opening = _OPENING.match(self._arguments)
            if opening is None:
                return ""
            self._place = opening.end()
        return self._read_characters()

    def finish(self) -> str:
        """The rest of the input, after the last arguments."""
        if self._place:
            return ""
        begun = "".join(self._arguments.split())
        return "" if '{"input":"'.startswith(begun) else _read_other(self._arguments)

    def _read_characters(self) -> str:
        found = _CHARACTERS.match(self._arguments, self._place)
        assert found is not None, "it matches nothing, too"
        self._place = found.end()
        return _unescape(found[0])


def custom_input(arguments: str) -> str:
    """The input of a complete call."""
    reader = CustomInput()
    return reader.feed_text(arguments) + reader.finish()


def _unescape(string: str) -> str:
    """The text of a JSON string's characters; a backslash that begins no escape stands for itself."""
    escaped = _ESCAPE.sub(lambda found: found[0] if len(found[0]) > 1 else r"\\", string)
    return _valid(json.loads(f'"{escaped}"', strict=False))


def _read_other(arguments: str) -> str:
    """The input of a call that has another form: its only string, or its JSON."""
    try:
        given = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return _valid(arguments)
    if isinstance(given, dict):
        given = given.get("input", given)
    texts = [value for value in given.values() if isinstance(value, str)] if isinstance(given, dict) else []
    given = texts[0] if len(texts) == 1 else given
    if given in (None, {}):
        return ""
    return _valid(given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))


def _valid(text: str) -> str:
    """The text with unpaired surrogates replaced, as an answer cannot contain them."""
    return text.encode("utf-8", "replace").decode()
