"""The page at `/` and its files. What it does in a browser: `tests/page`, by `scripts/page`."""

import gzip
import re

import httpx
import pytest

from penstock.server.app import create_app
from penstock.server.config import ServerConfig
from penstock.server.keys import load_keys
from penstock.server.web_page import WEB_PAGE_PATHS
from tests.server.in_process import shared_app

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
LINK = re.compile(r"""(?:src|href)="(?!data:)([^"]+)\"""")


@pytest.fixture(scope="module")
def run(tiny_llama):
    """Runs a talk with the application of one engine, whose options it chooses."""
    with shared_app(tiny_llama) as run_with:

        def run(talk, keys=None, **options):
            async def talk_with(_http, engine, _app):
                transport = httpx.ASGITransport(create_app(engine, ServerConfig(**options), keys))
                async with httpx.AsyncClient(transport=transport, base_url="http://penstock") as http:
                    await talk(http)

            run_with(talk_with)

        yield run


def test_the_root_is_a_page_for_a_browser_and_health_for_programs(run):
    async def talk(http):
        page = await http.get("/", headers=BROWSER)
        assert page.headers["content-type"].startswith("text/html")
        assert "It serves <strong>" in page.text
        command = re.search(r"curl http://penstock(\S+) -d '(.*)'</pre>", page.text)
        assert (await http.post(command[1], content=command[2])).status_code == 200
        for headers in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
            assert (await http.get("/", headers=headers)).json() == {"status": "ok", "reason": None}

    run(talk)


def test_the_page_loads_only_files_of_its_own_and_browsers_keep_them(run):
    async def talk(http):
        page = await http.get("/", headers=BROWSER)
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert not re.search("unsafe|http", policy)
        links = {f"/{link}" for link in LINK.findall(page.text) if link.startswith("page/")}
        assert links == WEB_PAGE_PATHS
        size = len(page.content)
        for link in links:
            response = await http.get(link)  # without a key, also where there are keys
            assert response.status_code == 200
            assert "immutable" in response.headers["cache-control"]
            assert not re.search(rb"""(?:from|import\() ?["']https?:""", response.content)
            size += len(response.content)
        assert size <= 300_000

    run(talk, keys=load_keys("sk-a", None, private_cache=False))


def test_files_are_packed_for_browsers_and_found_behind_a_prefix(run):
    async def talk(http):
        page = await http.get("/below/", headers=BROWSER)
        (script,) = re.findall(r'<script type="module" src="([^"]+)"', page.text)
        assert script.startswith("/below/page/")
        plain = await http.get(script, headers={"accept-encoding": "identity"})
        packed = await http.get(script, headers={"accept-encoding": "gzip"})
        assert "content-encoding" not in plain.headers
        assert packed.headers["content-encoding"] == "gzip"
        assert packed.content == plain.content
        assert int(packed.headers["content-length"]) < len(gzip.compress(plain.content)) + 100

    run(talk, root_path="/below")
