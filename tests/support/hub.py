"""A server with what downloading a repository asks of the Hugging Face hub."""

import contextlib
import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

LARGE_FILES = (".gguf", ".safetensors")


def etag(file: Path) -> str:
    """The hub's: of a large file its SHA-256, of others git's SHA-1."""
    content = file.read_bytes()
    if file.suffix in LARGE_FILES:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@contextlib.contextmanager
def hub(folder: Path, branches: dict[str, str], sent: "list[tuple[str, str]] | None" = None) -> Iterator[str]:
    """The address of a hub with the repository some/repo; its commits are the folders in `folder`.

    Args:
        sent: filled with the name of each file that is sent, and its Range.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
            if path.startswith("/api/models/some/repo"):
                self.answer_api(path.removeprefix("/api/models/some/repo").strip("/").split("/"))
                return
            commit, _, name = path.removeprefix("/some/repo/resolve/").partition("/")
            commit = branches.get(commit, commit)
            file = folder / commit / name
            if not file.is_file():
                self.answer(b"", 404, {"X-Error-Code": "EntryNotFound"})
                return
            content, part = file.read_bytes(), self.headers.get("Range", "")
            if self.command == "GET" and sent is not None:
                sent.append((name, part))
            headers = {"ETag": f'"{etag(file)}"', "X-Repo-Commit": commit}
            if not part:
                self.answer(content, 200, headers)
                return
            first = int(part.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            self.answer(content[first:], 206, headers)

        def answer_api(self, parts: list[str]) -> None:
            commit = branches.get(parts[1] if len(parts) > 1 else "main", parts[-1])
            files = sorted((folder / commit).iterdir())
            if parts[0] == "tree":
                listed: object = [
                    {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0" * 40} for file in files
                ]
            else:
                listed = {"id": "some/repo", "sha": commit, "siblings": [sibling(file) for file in files]}
            self.answer(json.dumps(listed).encode(), 200, {"Content-Type": "application/json"})

        def answer(self, content: bytes, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def sibling(file: Path) -> dict[str, object]:
    """A file in the list of a repository."""
    size = file.stat().st_size
    lfs = {"sha256": etag(file), "size": size, "pointerSize": 130} if file.suffix in LARGE_FILES else None
    return {"rfilename": file.name, "size": size, "lfs": lfs}
