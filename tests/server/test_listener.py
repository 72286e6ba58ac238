"""Addresses: Unix sockets, whose files others left or use, and who may reach a socket."""

import os
import signal
import socket
import stat
import subprocess
import sys

import httpx
import openai
import pytest

from penstock.cli import main
from penstock.errors import ConfigError
from penstock.server.config import ServerConfig
from penstock.server.listener import bound, is_open_to_others
from tests.server.running import RunningServer, running_server
from tests.support.waiting import wait_until

BODY = {"prompt": [5], "max_tokens": 3}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "penstock.sock"


def over(path):
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://penstock", timeout=60)


def test_clients_are_served_over_a_unix_socket_until_it_is_removed_at_the_end(tiny_llama, path, monkeypatch, capsys):
    flags = ("--model", str(tiny_llama), "--engines", "2", "--threads", "1", "--admin", "--uds", str(path))
    with running_server(*flags) as server:
        assert server.url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        for number in (0, 1):
            assert any(f"engine {number}: Memory: " in line for line in server.log)
        assert not any("no API key" in line for line in server.log)
        with over(path) as http:
            assert http.get("/health").json()["status"] == "ok"
            answer = http.post("/v1/completions", json=BODY, headers={"x-forwarded-for": "203.0.113.9"})
            assert answer.status_code == 200
            client = openai.OpenAI(base_url="http://penstock/v1", api_key="none", http_client=http)
            stream = client.completions.create(model=server.model, prompt=[5], max_tokens=20, stream=True)
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("length", "stop")
        wait_until(lambda: any("client=203.0.113.9 " in line for line in server.log))
        assert main(["reload", "--url", server.url]) == 0
        assert capsys.readouterr().out.count("engine ") == 2
        second = RunningServer("--model", str(tiny_llama), "--uds", str(path))
        assert second.wait() == second.stop() == 2
        assert f"another server uses the Unix socket {path}" in second.log[-1]
        with over(path) as http, http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
            server.process.send_signal(signal.SIGTERM)
            assert "[DONE]" in "".join(answer.iter_text())
        assert server.wait() == 0
    assert not list(path.parent.glob("penstock.sock*"))


def test_the_socket_of_a_dead_server_is_replaced_and_that_of_a_loading_one_is_not(path):
    config = ServerConfig(uds=str(path))
    program = (
        "import os, sys; from penstock.server.config import ServerConfig; from penstock.server.listener import bound\n"
        "with bound(ServerConfig(uds=sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(path)], timeout=60).returncode == -signal.SIGKILL
    assert path.exists()
    with bound(config), pytest.raises(ConfigError, match="another server uses"), bound(config):
        pass
    assert not list(path.parent.iterdir())


def test_what_is_not_an_abandoned_socket_is_left_alone(path):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with (
            pytest.raises(ConfigError, match="another program uses the Unix socket"),
            bound(ServerConfig(uds=str(path))),
        ):
            pass
    path.unlink()
    path.write_text("precious")
    with pytest.raises(ConfigError, match="exists and is not a socket"), bound(ServerConfig(uds=str(path))):
        pass
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("uds", "message"), [("nowhere/x.sock", "nowhere/x.sock.*No such file"), ("x" * 200, "AF_UNIX path too long")]
)
def test_a_path_that_cannot_be_used_is_refused(uds, message, tmp_path):
    with pytest.raises(ConfigError, match=message), bound(ServerConfig(uds=str(tmp_path / uds))):
        pass
    assert not list(tmp_path.iterdir())


def test_the_sockets_mode_does_not_depend_on_the_umask(path):
    before = os.umask(0o777)
    try:
        with bound(ServerConfig(uds=str(path))):
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with bound(ServerConfig(uds=str(path))):  # the lock's file of mode 0 would refuse the next server
            pass
    finally:
        os.umask(before)


def test_a_socket_that_another_program_put_in_its_place_is_kept(path):
    with bound(ServerConfig(uds=str(path))):
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"


LOOPBACK = ("127.0.0.1", "127.0.0.2", "localhost", "::1", "::ffff:127.0.0.1")


@pytest.mark.parametrize("host", [*LOOPBACK, "0.0.0.0", "::"])
def test_an_address_that_other_machines_reach_is_known(host):
    try:
        with bound(ServerConfig(host=host, port=0)) as listener:
            assert is_open_to_others(listener) is (host not in LOOPBACK)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("flags", "warns"), [((), True), (("--api-key", "sk-a"), False), (("--host", "127.0.0.1"), False)]
)
def test_an_open_address_without_a_key_is_warned_about_once(tiny_llama, flags, warns):
    with running_server("--model", str(tiny_llama), "--threads", "1", "--host", "0.0.0.0", *flags) as server:
        warnings = [line for line in server.log if "no API key is set" in line]
    assert len(warnings) == int(warns)
    assert all("WARNING" in line and "--api-key" in line for line in warnings)
