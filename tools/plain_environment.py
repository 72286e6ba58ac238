"""Makes an environment as a plain `pip install .` does, without PyTorch, of links to this one's packages.

    python -m tools.plain_environment FOLDER     then: FOLDER/bin/python -m pytest ...

It has what pyproject.toml names in `dependencies`, with all that they require, and of the extra `dev` what works
without torch.
"""

import argparse
import importlib.metadata
import venv
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

try:
    import tomllib
except ModuleNotFoundError:  # before Python 3.11
    import tomli as tomllib

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
REFERENCES = {"transformers", "triton"}
"""They install without torch, and do nothing without it."""


def required(requirement: str, found: dict[str, importlib.metadata.Distribution]) -> None:
    """Add to `found` the distributions that a requirement installs, by name."""
    wanted = Requirement(requirement)
    if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
        return
    distribution = importlib.metadata.distribution(wanted.name)
    known = wanted.name in found and not wanted.extras
    found[wanted.name] = distribution
    if known:
        return
    for other in distribution.requires or []:
        parsed = Requirement(other)
        extras = {"", *wanted.extras}
        if parsed.marker is None or any(parsed.marker.evaluate({"extra": extra}) for extra in extras):
            parsed.marker = None
            required(str(parsed), found)


def chosen() -> dict[str, importlib.metadata.Distribution]:
    """The distributions of the environment."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    found = {name: importlib.metadata.distribution(name) for name in ("penstock", "pip")}
    for requirement in project["dependencies"]:
        required(requirement, found)
    assert "torch" not in found
    for requirement in project["optional-dependencies"]["dev"]:
        more: dict[str, importlib.metadata.Distribution] = {}
        required(requirement, more)
        if not more.keys() & {"torch", *REFERENCES}:
            found |= more
    return found


def entries(distribution: importlib.metadata.Distribution) -> Iterator[str]:
    """The files and folders of a distribution in the folder of packages."""
    yield from {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__", "/")}


def make(folder: Path) -> None:
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in chosen().values():
        for entry in entries(distribution):
            link = packages / entry
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(entry))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    make(parser.parse_args().folder)
