"""Renews the libraries of the page at `/` from their npm packages: python -m tools.page_vendor

They are committed, so that the page works without a network and without a build. Each begins with its version and
licence; the licences' texts are beside them.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tools.npm import package_files

FOLDER = Path(__file__).parents[1] / "src" / "penstock" / "server" / "page" / "vendor"
_SOURCE_MAP = re.compile(rb"\s*/[/*]# sourceMappingURL=.*\s*\Z")


@dataclass(frozen=True)
class Library:
    """A file of an npm package that is one ES module."""

    package: str
    file: str
    license: str
    name: str
    """Of the module in `vendor`."""
    export: bytes = b""
    """Appended to a script that is not a module."""
    license_file: str = "LICENSE"


LIBRARIES = (
    Library("preact@11.2.0", "dist/preact.mjs", "MIT", "preact"),
    Library("preact@11.2.0", "hooks/dist/hooks.mjs", "MIT", "hooks"),
    Library("htm@3.1.1", "dist/htm.mjs", "Apache-2.0", "htm"),
    Library("marked@18.2.1", "lib/marked.esm.js", "MIT", "marked"),
    Library(
        "dompurify@3.4.18",
        "dist/purify.min.js",
        "Apache-2.0",
        "purify",
        b"export default globalThis.DOMPurify;\n",
    ),
)


def main() -> None:
    for library in LIBRARIES:
        content, license_text = package_files(library.package, (library.file, library.license_file))
        content = _SOURCE_MAP.sub(b"", content).replace(b'from"preact"', b'from"./preact.js"')
        head = f"/* {library.package}, {library.file}, {library.license}: from npm by tools/page_vendor.py */\n"
        (FOLDER / f"{library.name}.js").write_bytes(head.encode() + content.rstrip() + b"\n" + library.export)
        (FOLDER / f"{library.package.partition('@')[0]}.LICENSE.txt").write_bytes(license_text)


if __name__ == "__main__":
    main()
