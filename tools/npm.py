"""Files of packages from npm, for the pages that come with the server."""

import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path


def package_files(package: str, names: Sequence[str]) -> list[bytes]:
    """The contents of files of a package, such as `preact@11.2.0`."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as members:
            files = [members.extractfile(f"package/{name}") for name in names]
            return [file.read() for file in files if file is not None]
