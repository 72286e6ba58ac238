"""Where a validation error points to, in the caller's words."""

import pytest

from penstock.server.errors import param_of


@pytest.mark.parametrize(
    ("location", "param"),
    [
        (("body",), None),
        (("body", "temperature"), "temperature"),
        (("body", "messages", 3, "content", "str"), "messages[3].content"),
        (("body", "messages", 0, "content", "list[TextPart]", 1, "text"), "messages[0].content[1].text"),
        (("body", "stream_options", "include_usage"), "stream_options.include_usage"),
    ],
)
def test_a_location_is_told_as_a_path(location, param):
    assert param_of(location) == param
