"""A server behind a proxy that publishes it under a prefix, and removes the prefix from paths, or does not."""

import re
import socket

import httpx
import openai
import pytest

from penstock.errors import ConfigError
from penstock.server.client_paths import without_prefix
from penstock.server.config import ServerConfig
from penstock.server.keys import load_keys
from tests.server.in_process import shared_app, with_app
from tests.server.running import running_server

BROWSER = {"accept": "text/html"}


@pytest.fixture(scope="module")
def proxied(tiny_llama):
    keys = load_keys("sk-a", None, private_cache=False)
    with shared_app(tiny_llama, config=ServerConfig(root_path="/pen/stock/"), keys=keys) as talk_to:
        yield talk_to


@pytest.mark.parametrize(
    ("path", "inner"), [("/p", "/"), ("/p/", "/"), ("/p/v1", "/v1"), ("/v1", "/v1"), ("/pv1", "/pv1"), ("/", "/")]
)
def test_a_path_within_the_server_has_no_prefix(path, inner):
    assert without_prefix(path, "/p") == inner
    assert without_prefix(path, "") == path


@pytest.mark.parametrize("prefix", ["", "/pen/stock"], ids=["removed", "kept"])
def test_both_kinds_of_proxies_reach_every_route(proxied, prefix):
    async def talk(http, engine, app):
        assert (await http.get(f"{prefix}/health")).status_code == 200
        assert (await http.get(f"{prefix}/openapi.json")).json()["servers"] == [{"url": "/pen/stock"}]
        client = openai.AsyncOpenAI(base_url=f"http://penstock{prefix}/v1", api_key="sk-a", http_client=http)
        model = (await client.models.list()).data[0].id
        answer = await client.completions.create(model=model, prompt=[5], max_tokens=3)
        assert answer.usage.completion_tokens == 3
        unknown = await http.get(f"{prefix}/nothing", headers={"authorization": "Bearer sk-a"})
        assert "unknown route /nothing; see /pen/stock/docs" in unknown.text
        refused = await http.post(f"{prefix}/v1/messages", json={})
        assert refused.status_code == 401
        assert refused.json()["type"] == "error", "not Anthropic's shape"

    proxied(talk)


@pytest.mark.parametrize("path", ["/", "/pen/stock", "/pen/stock/"])
def test_links_of_the_page_lead_back_through_the_proxy(proxied, path):
    async def talk(http, engine, app):
        page = (await http.get(path, headers=BROWSER)).text
        assert "curl http://penstock/pen/stock/v1/chat/completions" in page
        links = re.findall(r'<a href="([^"]+)"', page)
        assert links == [f"/pen/stock/{name}" for name in ("docs", "v1/models", "health", "metrics")]

    proxied(talk)


def test_the_docs_load_their_files_and_the_description_from_beside_them(proxied):
    async def talk(http, engine, app):
        base = httpx.URL("http://penstock/pen/stock/docs")
        page = (await http.get(base)).text
        for name in [*re.findall(r'(?:src|href)="(docs/[^"]+)"', page), "openapi.json"]:
            assert (await http.get(base.join(name))).status_code == 200
        assert base.join((await http.get("/pen/stock/redoc")).headers["location"]) == base

    proxied(talk)


@pytest.mark.parametrize("prefix", ["/v1", "/health", "/v1/chat"])
def test_a_prefix_that_begins_the_servers_own_paths_is_refused(tiny_llama, prefix):
    async def talk(http, engine, app):
        raise AssertionError

    with pytest.raises(ConfigError, match=f"root_path {prefix} begins paths of this server itself"):
        with_app(talk, tiny_llama, config=ServerConfig(root_path=prefix))


def test_a_head_that_is_refused_is_answered_in_the_dialect_of_its_path(tiny_llama):
    with running_server("--model", str(tiny_llama), "--threads", "1", "--root-path", "/pen") as server:
        assert any("/pen/docs; behind a proxy at /pen" in line for line in server.log)
        host, port = server.url.removeprefix("http://").split(":")
        for path in ("/v1/messages", "/pen/v1/messages"):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n".encode() + b"X: x\r\n" * 200 + b"\r\n")
                received = b""
                while part := connection.recv(4096):
                    received += part
            assert received.startswith(b"HTTP/1.1 431")
            assert b'"type":"error"' in received, "not Anthropic's shape"
