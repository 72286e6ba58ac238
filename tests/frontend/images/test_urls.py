"""Images fetched from listed hosts, against a local server over TLS."""

import asyncio
import ssl
import subprocess

import pytest

from penstock.errors import ConfigError, InvalidRequestError
from penstock.frontend.images import urls
from penstock.frontend.images.urls import ImageURLs, is_public_address

ANSWERS = {
    "/pictures/a.png": b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc",
    "/pictures/chunks": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n",
    "/pictures/moved": b"HTTP/1.1 302 Found\r\nlocation: https://127.0.0.1/\r\ncontent-length: 0\r\n\r\n",
    "/pictures/large": b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 2000,
    "/pictures/nonsense": b"\x16\x03\x01 hello\r\n\r\n",
    "/pictures/cut": b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc",
    "/pictures/never": b"",
}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    options = "-x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=pictures.test -addext subjectAltName=DNS:pictures.test"
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(["openssl", "req", *options.split(), *files], check=True, capture_output=True)
    return folder


def fetch(certificate, path, *, addresses=("127.0.0.1",), host="pictures.test", is_public=lambda address: True):
    """(The content at a path, or the error; the addresses that were asked for and the paths that were read.)"""
    seen = []

    async def answer(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        seen.append(head.split()[1])
        content = ANSWERS[head.split()[1].partition("?")[0]]
        if not content:
            await reader.read()
        writer.write(content)
        await writer.drain()
        writer.close()

    async def resolve(host, port):
        seen.append(host)
        return addresses

    async def run():
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        trusted = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
        fetching = ImageURLs(
            [f"https://pictures.test:{port}/pictures/", f"https://other.test:{port}/pictures/"],
            1000,
            resolve=resolve,
            is_public=is_public,
            tls=trusted,
        )
        try:
            return await fetching.fetch(path.format(f"https://{host}:{port}"), "f")
        except InvalidRequestError as error:
            return str(error)
        finally:
            server.close()

    return asyncio.run(run()), seen


def test_a_listed_image_is_fetched_from_the_address_that_was_checked(certificate):
    for path in ("/pictures/a.png", "/pictures/chunks"):
        assert fetch(certificate, "{}" + path + "?size=1#part") == (b"abc", ["pictures.test", f"{path}?size=1"])


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("{}/pictures/moved", "answered with status 302"),
        ("{}/pictures/large", "more than 1000 bytes"),
        ("{}/pictures/nonsense", "could not be fetched"),
        ("{}/pictures/cut", "could not be fetched"),
    ],
)
def test_an_answer_that_is_no_image_of_bounded_size_is_refused(certificate, path, words):
    content, _ = fetch(certificate, path)
    assert words in content


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("{}/secrets/a.png", "not fetched here"),
        ("{}/pictures/../secrets", ". or .."),
        ("{}/pictures/%2e%2e/secrets", ". or .."),
        ("{}/pictures/..%5csecrets", ". or .."),
        ("http://pictures.test/pictures/a.png", "https:// URLs"),
        ("file:///etc/passwd", "https:// URLs"),
        ("https://pictures.test.evil.test/pictures/a.png", "not fetched here"),
        ("https://pictures.test/pictures/a.png", "not fetched here"),  # another port
        ("https://user@pictures.test/pictures/a.png", "without a user"),
        ("https://pictures.test:99999/pictures/", "not valid"),
        ("https://[::1/pictures/", "not valid"),
        ("https://pictures.test/pictures/a b\r\nx: y", "plain ASCII"),
    ],
)
def test_no_other_url_is_even_resolved(certificate, url, words):
    content, seen = fetch(certificate, url)
    assert words in content
    assert seen == []


def test_a_host_with_any_address_that_is_not_public_is_not_dialled(certificate):
    for addresses in (("127.0.0.1", "10.0.0.1"), ()):
        content, seen = fetch(certificate, "{}/pictures/a.png", addresses=addresses, is_public=lambda a: a[0] != "1")
        assert "not public" in content
        assert seen == ["pictures.test"]


def test_a_certificate_of_another_host_is_not_accepted(certificate):
    content, seen = fetch(certificate, "{}/pictures/a.png", host="other.test")
    assert "could not be fetched" in content
    assert seen == ["other.test"]


def test_a_host_that_does_not_answer_is_left(certificate, monkeypatch):
    monkeypatch.setattr(urls, "SECONDS", 0.2)
    assert "did not answer within 0.2 s" in fetch(certificate, "{}/pictures/never")[0]


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1"),
        *("::ffff:169.254.169.254", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "fe80::1%eth0", "x"),
    ],
)
def test_an_address_within_a_network_is_not_public(address):
    assert not is_public_address(address)


def test_an_address_of_the_internet_is_public():
    assert all(map(is_public_address, ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")))


@pytest.mark.parametrize("prefix", ["http://a/", "https://a/b", "a.test/", "https:///", "https://u@a/"])
def test_a_prefix_that_allows_more_than_it_says_is_refused(prefix):
    with pytest.raises(ConfigError, match="image_urls"):
        ImageURLs([prefix], 1)


def test_without_a_list_no_url_is_fetched():
    with pytest.raises(InvalidRequestError, match="--image-urls"):
        asyncio.run(ImageURLs([], 1).fetch("https://pictures.test/a.png", "f"))
