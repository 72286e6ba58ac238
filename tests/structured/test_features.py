import json
from pathlib import Path

import pytest
from jsonschema import validators

from penstock.api.sampling_params import Structured
from penstock.errors import InvalidRequestError
from penstock.structured.grammar import compile_grammar
from tests.structured.answers import accepts
from tests.structured.features import FEATURES, table


def test_the_table_in_the_docs_is_this_one():
    """Regenerate it with `python -c "from tests.structured.features import table; print(table())"`."""
    page = Path(__file__).parents[2] / "docs" / "structured.md"
    assert table() in page.read_text()


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_each_row_of_the_table_holds(vocabulary, tokenizer, feature):
    structured = Structured.json_schema(feature.schema)
    if feature.refused:
        with pytest.raises(InvalidRequestError) as caught:
            compile_grammar(vocabulary, structured)
        assert feature.refused in str(caught.value)
        assert caught.value.param == "structured"
        return
    validator = validators.validator_for(feature.schema)(feature.schema)
    for text in feature.good:
        assert accepts(vocabulary, tokenizer, structured, text), text
        if "[[:" not in json.dumps(feature.schema) and None not in feature.schema.values():
            validator.validate(json.loads(text))
    for text in feature.bad:
        assert not accepts(vocabulary, tokenizer, structured, text), text
