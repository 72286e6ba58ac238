"""The page of the dialects' parameters."""

from pathlib import Path

from penstock.server.dialects_doc import BODIES, describe


def test_the_documentation_is_what_the_schemas_say():
    page = Path(__file__).parents[2] / "docs" / "dialects.md"
    assert page.read_text() == describe() + "\n"


def test_each_parameter_stands_where_it_is_obeyed_or_where_it_is_refused():
    for body in BODIES.values():
        assert not set(body.model_fields) & set(body.NOT_OBEYED)
