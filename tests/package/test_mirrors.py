"""A reader of a module finds its tests: in the mirrored file, or where its room's docstring says."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "penstock"


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def test_every_module_has_a_test_file_of_its_own_or_its_room_names_one() -> None:
    for path in SOURCE.rglob("*.py"):
        module = path.relative_to(SOURCE)
        if path.stem.startswith("__") or (ROOT / "tests" / module.with_name(f"test_{module.name}")).exists():
            continue
        rooms = [folder / "__init__.py" for folder in path.parents if SOURCE in folder.parents]
        named = [one for one in (path, *rooms) if re.search(r"Tested (by|elsewhere:) ", docstring(one))]
        assert named or module.name == "errors.py", f"{module} has no tests/{module.with_name(f'test_{module.name}')}"


def test_the_files_that_rooms_name_exist() -> None:
    for path in SOURCE.rglob("*.py"):
        for file in re.findall(r"\btests/[\w/]+\.py", docstring(path)):
            assert (ROOT / file).exists(), f"{path}: {file}"
