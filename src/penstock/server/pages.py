"""Pages for browsers: `/docs`, the API in Swagger UI, and the home page `/` of an encoder, which does not chat.

They need no network: every file comes from the folder `docs_page` (`tools/docs_page.py` renews Swagger UI's).
"""

import functools
import gzip
import html
from collections.abc import Mapping
from pathlib import Path
from string import Template

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from penstock import __version__

_FOLDER = Path(__file__).parent / "docs_page"
_FILES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "init.js": "text/javascript",
}
DOCS_PATHS = frozenset({"/docs", "/redoc", *(f"/docs/{name}" for name in _FILES)})
_SECURITY = {
    # Swagger UI sets styles and shows its icons as data.
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
}


def wants_page(headers: Mapping[str, str]) -> bool:
    """Whether a request comes from a browser's address bar."""
    return "text/html" in headers.get("accept", "")


def encoder_page(request: Request, model: str, problem: str | None) -> Response:
    """The page at `/` of an encoder; its status is that of `/health`."""
    page = Template(_content("home.html").decode()).substitute(
        version=__version__,
        model=html.escape(model),
        state=html.escape(f"not healthy now: {problem}" if problem else "ready"),
        url=html.escape(str(request.base_url).rstrip("/")),
        base=html.escape(f"{root}/" if (root := request.scope.get("root_path", "")) else ""),
    )
    return Response(page, 503 if problem else 200, _SECURITY, "text/html")


def add_docs(app: FastAPI) -> None:
    """Add the page `/docs` and its files."""

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(_content("index.html"), headers=_SECURITY, media_type="text/html")

    @app.get("/redoc", include_in_schema=False)
    async def redoc() -> Response:
        return RedirectResponse("docs")

    @app.get("/docs/{name}", include_in_schema=False)
    async def docs_file(name: str, request: Request) -> Response:
        if name not in _FILES:
            raise HTTPException(404)
        packed = f"{name}.gz"
        headers = {**_SECURITY, "cache-control": "max-age=86400", "vary": "accept-encoding"}
        if not (_FOLDER / packed).exists():
            return Response(_content(name), headers=headers, media_type=_FILES[name])
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(_content(packed), headers=headers | {"content-encoding": "gzip"}, media_type=_FILES[name])
        return Response(gzip.decompress(_content(packed)), headers=headers, media_type=_FILES[name])


@functools.cache
def _content(name: str) -> bytes:
    return (_FOLDER / name).read_bytes()
