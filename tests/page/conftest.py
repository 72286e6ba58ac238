"""A browser, and a server with the demo model. `scripts/page` runs these tests; without playwright they are skipped."""

import pytest

from tests.server.running import running_server
from tests.support.browser import open_browser, open_page


@pytest.fixture(scope="session")
def server():
    with running_server() as running:
        yield running


@pytest.fixture(scope="session")
def browser():
    pytest.importorskip("playwright")
    with open_browser() as opened:
        yield opened


@pytest.fixture
def page(browser, server):
    with open_page(browser, server.url) as opened:
        yield opened
