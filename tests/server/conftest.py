"""One server on a tiny random model, shared by the tests that do not stop it."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.server.running import RunningServer, running_server


@pytest.fixture(scope="session")
def server(tiny_llama: Path) -> Iterator[RunningServer]:
    with running_server("--model", str(tiny_llama), "--served-model-name", "tiny", "--threads", "1") as running:
        yield running


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened
