"""Renews the files of `/docs` that come from Swagger UI's npm package: python -m tools.docs_page

They are committed, so that the page works without a network, in deterministic gzip, as browsers take them.
"""

import gzip
import io
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "swagger-ui-dist@5.35.0"
FILES = ("swagger-ui-bundle.js", "swagger-ui.css")
_SOURCE_MAP = re.compile(rb"/[/*]# sourceMappingURL=.*\s*\Z")
"""The last line, which names a file that does not come along."""
FOLDER = Path(__file__).parents[1] / "src" / "penstock" / "server" / "docs_page"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as members:
            for name in FILES:
                member = members.extractfile(f"package/{name}")
                assert member is not None
                (FOLDER / f"{name}.gz").write_bytes(compressed(_SOURCE_MAP.sub(b"", member.read())))


def compressed(content: bytes) -> bytes:
    """Gzip without a time in it."""
    stream = io.BytesIO()
    with gzip.GzipFile(fileobj=stream, mode="wb", compresslevel=9, mtime=0, filename="") as file:
        file.write(content)
    return stream.getvalue()


if __name__ == "__main__":
    main()
