"""Renews the files of `/docs` that come from Swagger UI's npm package: python -m tools.docs_page

They are committed, so that the page works without a network, in deterministic gzip, as browsers take them.
"""

import gzip
import io
import re
from pathlib import Path

from tools.npm import package_files

PACKAGE = "swagger-ui-dist@5.35.0"
FILES = ("swagger-ui-bundle.js", "swagger-ui.css")
_SOURCE_MAP = re.compile(rb"/[/*]# sourceMappingURL=.*\s*\Z")
"""The last line, which names a file that does not come along."""
FOLDER = Path(__file__).parents[1] / "src" / "penstock" / "server" / "docs_page"


def main() -> None:
    for name, content in zip(FILES, package_files(PACKAGE, FILES), strict=True):
        (FOLDER / f"{name}.gz").write_bytes(compressed(_SOURCE_MAP.sub(b"", content)))


def compressed(content: bytes) -> bytes:
    """Gzip without a time in it."""
    stream = io.BytesIO()
    with gzip.GzipFile(fileobj=stream, mode="wb", compresslevel=9, mtime=0, filename="") as file:
        file.write(content)
    return stream.getvalue()


if __name__ == "__main__":
    main()
