"""Recorded bodies are short, distinct, and the same whenever they are recorded."""

import json
from pathlib import Path
from typing import Any

from tools.agents_bodies import KEPT_TEXT, read_requests, write_bodies
from tools.agents_proxy import Exchange

HOME = Path("/tmp/agents")


def exchange(body: Any, path: str = "/v1/x") -> Exchange:
    return Exchange("POST", path, {"anthropic-version": "1", "user-agent": "a/2.0"}, body, 200, "{}")


def recorded(folder: Path, *bodies: Any) -> list[dict[str, Any]]:
    """The bodies that are kept of these."""
    write_bodies(folder / "bodies" / "a.json", map(exchange, bodies), HOME)
    return [request["body"] for request in read_requests(folder / "bodies" / "a.json")]


def test_only_bodies_of_another_kind_are_kept(tmp_path: Path) -> None:
    bodies = [{"model": "m", "text": text, **more} for text, more in (("a", {}), ("b", {}), ("a", {"stream": True}))]
    assert recorded(tmp_path, *bodies) == [bodies[0], bodies[2]]
    roles = [{"model": "m", "messages": [{"role": role, "content": None}]} for role in ("user", "tool", "user")]
    assert recorded(tmp_path, *roles) == roles[:2]


def test_long_texts_are_cut_also_inside_json_and_paths_ids_and_dates_are_replaced(tmp_path: Path) -> None:
    arguments = json.dumps({"path": f"{HOME}/x", "text": "w" * 999})
    call = {"id": "call_8f3a", "arguments": arguments}
    body = {
        "model": "m",
        "messages": [{"tool_calls": [call]}, {"tool_call_id": "call_8f3a", "content": "on 2026-11-26"}],
    }
    (kept,) = recorded(tmp_path, body)
    call, result = kept["messages"][0]["tool_calls"][0], kept["messages"][1]
    assert json.loads(call["arguments"]) == {"path": "/home/agent/x", "text": "w" * KEPT_TEXT + "…"}
    assert call["id"] == result["tool_call_id"] != "call_8f3a"
    assert result["content"] == "on 2026-01-01"


def test_large_fields_stand_once_in_the_file(tmp_path: Path) -> None:
    tools = [{"name": f"tool {number}", "description": "x" * 100} for number in range(20)]
    bodies = [{"model": "m", "tools": tools}, {"model": "m", "tools": tools, "stream": True}]
    assert recorded(tmp_path, *bodies) == bodies
    assert (tmp_path / "bodies" / "a.json").read_text().count("tool 7") == 1


def test_bodies_that_need_another_servers_answers_are_left_out(tmp_path: Path) -> None:
    kept = {"model": "m", "input": [{"type": "message"}], "previous_response_id": None}
    referring = (
        {"previous_response_id": "resp_1"},
        {"input": [{"type": "item_reference", "id": "fc_1"}]},
        {"thread": {}},
    )
    assert recorded(tmp_path, *({"model": "m", **body} for body in referring), kept, "text", None) == [kept]
