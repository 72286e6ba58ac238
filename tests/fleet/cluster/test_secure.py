"""What engines on other machines say travels encrypted, and nobody else is let in. No Ray is needed for it."""

import asyncio
import contextlib
import time
from dataclasses import replace

import pytest
import zmq

from penstock.config.engine_config import EngineConfig
from penstock.engine import protocol
from penstock.engine.protocol import Add, Launch, Ping, Pong, Ready, Remote, StepOutputs
from penstock.errors import ConfigError
from penstock.fleet.cluster.secure import SecureListener
from penstock.fleet.engine_process import EngineProcess
from tests.engine.rule_core import RULE_CORE
from tests.engine.test_process import make_request
from tests.engine.test_protocol import STATS
from tests.support.waiting import wait_until


@pytest.fixture
def listener():
    listener = SecureListener("127.0.0.1")
    yield listener
    listener.close()


@contextlib.contextmanager
def connected(remote: Remote, **changed: bytes):
    """A client that connects as an engine does, but for some keys."""
    public, secret = remote.public_key.encode(), remote.secret_key.encode()
    keys = {"serverkey": remote.server_key.encode(), "publickey": public, "secretkey": secret} | changed
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        for name, key in keys.items():
            if key:
                setattr(client, f"curve_{name}", key)
        client.connect(remote.address)
        yield client


def stays_out(channel, seconds: float = 0.5) -> bool:
    try:
        wait_until(lambda: channel.is_connected, seconds)
    except AssertionError:
        return True
    return False


def test_an_engine_process_talks_over_one_encrypted_connection(listener):
    async def talk():
        channel, remote = listener.listen()
        process = EngineProcess(lambda folder: Launch(EngineConfig(), RULE_CORE, folder, remote=remote))
        try:
            assert isinstance(await channel.receive(), Ready)
            assert channel.is_connected
            channel.send(Add(make_request("a", 10)))
            tokens = []
            while len(tokens) < 4:
                message = await channel.receive()
                assert isinstance(message, StepOutputs)
                tokens += [token for output in message.outputs for token in output.token_ids]
            assert tokens == [11, 12, 13, 14]
            channel.send(Ping())
            process.kill()
            assert process.wait() == -9
            assert all(isinstance(one, (Pong, StepOutputs)) for one in await channel.receive_rest())
            await asyncio.to_thread(wait_until, lambda: not channel.is_connected)
            channel.send(Ping())  # is lost, and fails nobody
        finally:
            process.destroy()
            channel.close()

    asyncio.run(talk())


def test_looking_whether_an_engine_is_connected_hides_no_message_from_who_waits_for_it(listener):
    """ZeroMQ tells only once that something has come; who looks for a connection may be the first to learn of it."""

    async def talk():
        channel, remote = listener.listen()
        with connected(remote) as client:
            await asyncio.to_thread(wait_until, lambda: channel.is_connected)
            try:
                for number in range(20):
                    waiting = asyncio.ensure_future(channel.receive())
                    await asyncio.sleep(0)
                    client.send(protocol.encode(Pong(replace(STATS, steps=number))))
                    time.sleep(0.02)  # the message comes while the loop is busy, which looks next
                    assert channel.is_connected
                    assert await asyncio.wait_for(waiting, 5.0) == Pong(replace(STATS, steps=number))
            finally:
                channel.close()

    asyncio.run(talk())


def test_only_the_engine_s_own_key_is_let_in_and_only_once(listener):
    async def knock():
        (channel, remote), (other, of_other) = listener.listen(), listener.listen()
        stranger = dict(zip(("publickey", "secretkey"), zmq.curve_keypair(), strict=True))
        for keys in (
            stranger,
            {"serverkey": b"", "publickey": b"", "secretkey": b""},  # nothing is encrypted
            {"serverkey": zmq.curve_keypair()[0]},
            {"publickey": of_other.public_key.encode(), "secretkey": of_other.secret_key.encode()},
        ):
            with connected(remote, **keys):
                assert stays_out(channel)
        with connected(remote):
            await asyncio.to_thread(wait_until, lambda: channel.is_connected)
            with connected(of_other):
                await asyncio.to_thread(wait_until, lambda: other.is_connected)
        await asyncio.to_thread(wait_until, lambda: not channel.is_connected)
        with connected(remote):
            assert stays_out(channel), "words may be lost with a connection, so it is not taken up again"
        for one in (channel, other):
            one.close()
            assert not one.is_connected

    asyncio.run(knock())


def test_an_address_that_is_not_this_machine_s_is_refused(listener):
    elsewhere = SecureListener("203.0.113.7")
    try:
        with pytest.raises(ConfigError, match="cluster_host"):
            elsewhere.listen()
    finally:
        elsewhere.close()
