"""The table of controls in docs/sampling.md."""

from dataclasses import fields

from penstock.api.sampling_params import SamplingParams
from tools.sampling_table import DIALECTS, OTHER_NAMES, PAGE, table, updated


def test_the_table_in_docs_is_what_the_code_makes() -> None:
    assert PAGE.read_text() == updated(PAGE.read_text())


def test_each_field_has_a_row_that_says_what_it_does() -> None:
    rows = table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [field.name for field in fields(SamplingParams)]
    assert all(len(row.rstrip(" |").split("|")[-1]) > 10 for row in rows)


def test_each_other_name_is_one_that_its_dialect_knows() -> None:
    for names in OTHER_NAMES.values():
        for dialect, name in names.items():
            known = {*DIALECTS[dialect].model_fields, *DIALECTS[dialect].UNSUPPORTED, ""}
            assert name in known, f"{dialect} has no {name}"
