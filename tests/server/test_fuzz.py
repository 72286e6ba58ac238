"""Requests made of the server's own OpenAPI description, by schemathesis: a fixed budget, each time the same."""

import os

import httpx
import hypothesis
import pytest

from tests.server.running import running_server
from tests.support import fetch
from tests.support.waiting import wait_until

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis needs Python 3.11")

EXAMPLES = int(os.environ.get("TEST_FUZZ", "10"))
"""Of a route and mode."""


@pytest.fixture(scope="module")
def small_server(tiny_llama):
    """Answers are short, whatever is asked for."""
    flags = ("--served-model-name", "tiny", "--threads", "1", "--max-model-len", "48", "--max-num-seqs", "8")
    with running_server("--model", str(tiny_llama), *flags) as running:
        yield running


def operations(server):
    description = fetch.get(f"{server.url}/openapi.json").json()
    for schema in description["components"]["schemas"].values():
        if "model" in (fields := schema.get("properties", {})) and "digest" not in fields:
            # Else most requests would end there. null is a field left out, everywhere.
            schema["properties"]["model"] = {"enum": ["tiny", None]}
    return [found.ok() for found in schemathesis.openapi.from_dict(description).get_all_operations()]


@pytest.mark.parametrize("mode", schemathesis.GenerationMode, ids=lambda mode: mode.value)
def test_no_route_fails_or_answers_what_it_does_not_document(small_server, mode):
    from schemathesis import checks
    from schemathesis.specs.openapi import checks as described

    held_to = [
        checks.not_a_server_error,
        described.status_code_conformance,
        described.content_type_conformance,
        described.response_schema_conformance,
        described.negative_data_rejection,
    ]
    for operation in operations(small_server):
        if mode is schemathesis.GenerationMode.NEGATIVE and not operation.body:
            continue

        @hypothesis.settings(
            max_examples=EXAMPLES, derandomize=True, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
        )
        @hypothesis.given(case=operation.as_strategy(mode))
        def answer(case):
            case.call_and_validate(base_url=small_server.url, checks=held_to, timeout=60)

        answer()
    wait_until(small_server.idle)


def test_every_route_says_what_it_does_and_no_other_method_is_taken(small_server):
    for operation in operations(small_server):
        assert operation.definition.raw["description"], operation.label
        other = httpx.patch(small_server.url + operation.path.replace("{", "").replace("}", ""))
        assert other.status_code == 405, operation.label
        assert operation.method.upper() in other.headers["allow"]
