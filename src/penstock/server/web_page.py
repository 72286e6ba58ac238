"""The web page at `/`: chat, and the engine live. Its files are in the folder `page`; `docs/page.md` describes it.

The page needs no network beyond this server and no build: its modules are sent as they are, at a path with a hash of
all files, so that browsers may keep them. `tools/page_vendor.py` renews its libraries.
"""

import functools
import gzip
import hashlib
import html
from pathlib import Path
from string import Template

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from penstock import __version__

_FOLDER = Path(__file__).parent / "page"
_MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_FILES = {
    path.relative_to(_FOLDER).as_posix(): path.read_bytes()
    for path in sorted(_FOLDER.rglob("*"))
    if path.suffix in _MEDIA_TYPES
}
_DIGEST = hashlib.sha256(b"\0".join(name.encode() + b"\0" + content for name, content in _FILES.items())).hexdigest()[
    :16
]
WEB_PAGE_PATHS = frozenset(f"/page/{_DIGEST}/{name}" for name in _FILES)
_SECURITY = {
    # Text of a model becomes HTML only through DOMPurify's policy, and images of other servers are not loaded: their
    # addresses could carry parts of a chat away.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def web_page(request: Request, model: str, problem: str | None) -> Response:
    """The page at `/`; its status is that of `/health`."""
    base = f"{root}/" if (root := request.scope.get("root_path", "")) else ""
    modules = (name for name in _FILES if name.endswith(".js"))
    page = Template((_FOLDER / "index.html").read_text()).substitute(
        files=html.escape(f"{base}page/{_DIGEST}"),
        modules="\n".join(
            f'<link rel="modulepreload" href="{html.escape(f"{base}page/{_DIGEST}/{name}")}">' for name in modules
        ),
        version=__version__,
        model=html.escape(model),
        state=html.escape(f"not healthy now: {problem}" if problem else "ready"),
        url=html.escape(str(request.base_url).rstrip("/")),
        base=html.escape(base),
    )
    return Response(page, 503 if problem else 200, {**_SECURITY, "cache-control": "no-cache"}, "text/html")


def add_web_page(app: FastAPI) -> None:
    """Add the routes of the page's files."""

    @app.get(f"/page/{_DIGEST}/{{name:path}}", include_in_schema=False)
    async def page_file(name: str, request: Request) -> Response:
        if name not in _FILES:
            raise HTTPException(404)
        headers = {
            **_SECURITY,
            "cache-control": "public, max-age=31536000, immutable",
            "vary": "accept-encoding",
        }
        media_type = _MEDIA_TYPES[Path(name).suffix]
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(_compressed(name), headers=headers | {"content-encoding": "gzip"}, media_type=media_type)
        return Response(_FILES[name], headers=headers, media_type=media_type)


@functools.cache
def _compressed(name: str) -> bytes:
    return gzip.compress(_FILES[name], 6, mtime=0)
