"""A server that is killed leaves no process behind, whatever its processes are doing."""

import signal
import threading
from contextlib import suppress
from pathlib import Path

import httpx

from tests.server.running import RunningServer
from tests.support.waiting import alive, descendants, stop, wait_until

SCHEMA = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(5)}}
KINDS = ("penstock.engine.process", "penstock.text.chat_worker", "penstock.structured.worker")


def test_no_process_of_a_killed_server_outlives_it_not_even_a_stopped_one() -> None:
    server = RunningServer().wait_until_listening()
    messages = [{"role": "user", "content": "hi"}]
    response_format = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    assert server.post("/v1/chat/completions", messages=messages, max_tokens=4).status_code == 200
    answer = server.post("/v1/chat/completions", messages=messages, max_tokens=4, response_format=response_format)
    assert answer.status_code == 200
    pids = descendants(server.process.pid)
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]
    assert all(any(kind in command for command in commands) for kind in KINDS), commands

    def talk() -> None:
        with suppress(httpx.HTTPError):
            server.post("/v1/completions", prompt="a", max_tokens=200, ignore_eos=True)

    caller = threading.Thread(target=talk)
    caller.start()
    for pid in pids[1:]:
        stop(pid)  # neither sees its pipe closed nor runs its threads, as one that holds the interpreter's lock
    server.process.send_signal(signal.SIGKILL)
    server.wait()
    caller.join()
    wait_until(lambda: not any(map(alive, pids)), 10)
    assert server.process.stderr is not None
    server.process.stderr.close()
