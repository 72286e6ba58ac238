"""The table of other programs' flags in docs/coming-from.md."""

from penstock.cli.parser import FOREIGN_FLAGS
from penstock.config.engine_config import FOREIGN_OPTIONS
from tools.flags_table import NOTES, PAGE, table, updated


def test_the_table_in_docs_is_what_the_command_line_answers() -> None:
    assert PAGE.read_text() == updated(PAGE.read_text())


def test_each_flag_and_option_of_another_program_is_in_the_table_and_each_note_in_a_row() -> None:
    for flag in [*FOREIGN_FLAGS, *("--" + name.replace("_", "-") for name in FOREIGN_OPTIONS)]:
        assert f"`{flag}`" in table()
    assert set(NOTES) <= set(FOREIGN_FLAGS.values())
