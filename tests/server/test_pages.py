"""Pages for people: they need no network, and say what is served."""

import gzip
import re

import pytest
from starlette.requests import Request

from penstock.server.keys import KeyRing, load_keys
from penstock.server.pages import DOCS_PATHS, encoder_page
from tests.server.in_process import with_app

FOREIGN = re.compile(r"""(?:src|href)=["'](?:https?:)?//""")


def test_the_pages_load_nothing_from_elsewhere(tiny_llama):
    async def talk(http, engine, app):
        docs = await http.get("/docs")
        assert docs.headers["content-type"].startswith("text/html")
        needed = re.findall(r'(?:src|href)="(docs/[^"]+)"', docs.text)
        assert {f"/{path}" for path in needed} == DOCS_PATHS - {"/docs", "/redoc"}
        assert not FOREIGN.search(docs.text)
        assert "default-src 'self'" in docs.headers["content-security-policy"]
        for path in needed:
            assert (await http.get(f"/{path}")).status_code == 200
        assert (await http.get("/redoc")).headers["location"] == "docs"
        assert (await http.get("/docs/nothing")).status_code == 404

    with_app(talk, tiny_llama)


def test_files_are_sent_packed_to_those_who_take_that(tiny_llama):
    async def talk(http, engine, app):
        packed = await http.get("/docs/swagger-ui-bundle.js", headers={"accept-encoding": "gzip"})
        assert packed.headers["content-encoding"] == "gzip"
        assert int(packed.headers["content-length"]) < 600_000
        plain = await http.get("/docs/swagger-ui-bundle.js", headers={"accept-encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert packed.text == plain.text
        assert len(gzip.compress(plain.content)) < len(plain.content)

    with_app(talk, tiny_llama)


def test_an_encoders_home_page_shows_a_request_that_it_answers():
    scope = {"type": "http", "method": "GET", "path": "/", "root_path": "/below", "headers": [(b"host", b"here")]}
    page = encoder_page(Request({**scope, "scheme": "http", "server": ("here", 80), "query_string": b""}), "a<b", None)
    text = page.body.decode()
    assert "<strong>a&lt;b</strong>:\nready" in text
    assert '/v1/embeddings -d \'{"input": "Hello"}\'' in text
    assert 'href="/below/docs"' in text


@pytest.mark.parametrize(
    "keys", [None, load_keys("sk-a", None, private_cache=False)], ids=["without keys", "with keys"]
)
def test_the_description_asks_for_the_key_and_shows_requests(tiny_llama, keys: KeyRing | None):
    async def talk(http, engine, app):
        schema = (await http.get("/openapi.json")).json()
        assert ("securitySchemes" in schema["components"]) == (keys is not None)
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate"):
            body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            (example,) = schema["components"]["schemas"][body["$ref"].rpartition("/")[2]]["examples"]
            headers = {"authorization": "Bearer sk-a"} if keys else {}
            assert (await http.post(path, json=example, headers=headers)).status_code == 200

    with_app(talk, tiny_llama, keys=keys)
