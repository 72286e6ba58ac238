"""Paths as clients write them, pages of other origins, and bodies of other content types."""

import pytest

from penstock.server.client_paths import usual_path
from penstock.server.config import ServerConfig
from tests.server.in_process import shared_app, with_app

BODY = {"prompt": "the", "max_tokens": 2}
TEXT = b'{"prompt": "the", "max_tokens": 2}'


@pytest.fixture(scope="module")
def healthy(tiny_llama):
    with shared_app(tiny_llama) as talk_to:
        yield talk_to


@pytest.fixture(scope="module")
def permitting(tiny_llama):
    config = ServerConfig(allowed_origins="https://a.example, app://b", admin=True)
    with shared_app(tiny_llama, config=config) as talk_to:
        yield talk_to


@pytest.mark.parametrize(
    ("path", "usual"),
    [
        *(("/v1/models/", "/v1/models"), ("/v1/chat/completions/", "/v1/chat/completions"), ("/", "/"), ("//", "//")),
        *(("/chat/completions", "/v1/chat/completions"), ("/models/a/b", "/v1/models/a/b")),
        *(("/v1/v1/messages", "/v1/messages"), ("/messages/count_tokens", "/v1/messages/count_tokens")),
        *(("/modelsx", "/modelsx"), ("/rerank", "/rerank"), ("/docs", "/docs")),
    ],
)
def test_paths_are_taken_as_clients_write_them(path, usual):
    assert usual_path(path) == usual


def test_a_slash_at_the_end_needs_no_redirect_which_would_drop_the_body(healthy):
    async def talk(http, engine, app):
        for path in ("/v1/completions/", "/completions", "/v1/v1/completions"):
            assert (await http.post(path, json=BODY)).status_code == 200
        assert (await http.get("/v1/models/")).json() == (await http.get("/v1/models")).json()
        assert (await http.get("/nothing/")).status_code == 404

    healthy(talk)


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/json"])
def test_json_is_taken_whatever_its_content_type_says(healthy, kind):
    async def talk(http, engine, app):
        answer = await http.post("/v1/completions", content=TEXT, headers={"content-type": kind} if kind else {})
        assert answer.status_code == 200, answer.text

    healthy(talk)


PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "http://127.0.0.1", "https://[::1]:8080", "https://a.example", "app://b"]
)
def test_a_page_of_a_permitted_origin_may_ask_and_read_the_answer(permitting, origin):
    async def talk(http, engine, app):
        asked = await http.options("/v1/completions", headers=PREFLIGHT | {"origin": origin})
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == origin
        assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
        answer = await http.post("/v1/completions", json=BODY, headers={"origin": origin})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == origin

    permitting(talk)


@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost.evil.example", "null"])
def test_a_page_of_another_origin_gets_nothing(permitting, origin):
    async def talk(http, engine, app):
        asked = await http.options("/v1/completions", headers=PREFLIGHT | {"origin": origin})
        assert (asked.status_code, asked.json()["error"]["code"]) == (403, "forbidden_origin")
        assert "--allowed-origins" in asked.text
        simple = {"origin": origin, "content-type": "text/plain"}  # which a browser sends without asking
        assert (await http.post("/v1/completions", content=TEXT, headers=simple)).status_code == 403
        assert (await http.post("/v1/admin/engines", headers={"origin": origin})).status_code == 403
        answer = await http.post("/v1/completions", json=BODY, headers={"origin": origin})
        assert "access-control-allow-origin" not in answer.headers

    permitting(talk)


def test_the_servers_own_pages_may_call_it(permitting):
    async def talk(http, engine, app):
        headers = {"origin": "http://penstock", "content-type": "text/plain"}
        assert (await http.post("/v1/completions", content=TEXT, headers=headers)).status_code == 200

    permitting(talk)


def test_every_origin_may_be_permitted(tiny_llama):
    async def talk(http, engine, app):
        answer = await http.post("/v1/completions", json=BODY, headers={"origin": "https://c.example"})
        assert answer.headers["access-control-allow-origin"] == "*"

    with_app(talk, tiny_llama, config=ServerConfig(allowed_origins="*"))
