"""Fetches images from hosts that the operator lists (`--image-urls`).

A URL is a stranger's text, and the server may reach what a stranger may not: so only https, only below a listed prefix,
no redirects, and only addresses of the public internet. The host's name is resolved once, every address that it has is
checked, and one of those is dialled: a name that later resolves to another address changes nothing.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import SplitResult, unquote, urlsplit

import h11

from penstock.dataclass import dataclass
from penstock.errors import ConfigError, InvalidRequestError

SECONDS = 10.0
"""Maximum time to fetch an image."""
_HTTPS = 443
_MAX_ADDRESSES = 32
_PIECE = 65_536
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
"""Prefix of IPv4 addresses behind NAT64 (RFC 6052)."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


@dataclass(frozen=True, slots=True)
class _Place:
    """Host, port and path of a listed prefix or of a URL."""

    host: str
    port: int
    path: str


class ImageURLs:
    """The prefixes below which images may be fetched."""

    def __init__(
        self,
        prefixes: Sequence[str],
        max_bytes: int,
        *,
        resolve: Resolve | None = None,
        is_public: Callable[[str], bool] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """
        Args:
            prefixes: as https://host/ or https://host:port/path/.
            max_bytes: of one image.
            resolve: the addresses of a host; None: the system's.
            is_public: whether an address may be dialled; None: if it is global.
            tls: None: the system's certificates.

        Raises:
            ConfigError: a prefix is no https URL with a host and a path that ends with a slash.
        """
        self._allowed = [_prefix(prefix) for prefix in prefixes]
        self._max_bytes = max_bytes
        self._resolve = resolve or _resolve
        self._is_public = is_public or is_public_address
        self._tls = tls or (ssl.create_default_context() if prefixes else None)

    async def fetch(self, url: str, field: str) -> bytes:
        """The content at a URL.

        Raises:
            InvalidRequestError: the URL is not allowed, or its host does not answer with an image in time.
        """
        try:
            place = self._checked(url)
            return await asyncio.wait_for(self._fetch(place), SECONDS)
        except asyncio.TimeoutError:
            reason = f"the image's host did not answer within {SECONDS:g} s"
        except _RefusedError as error:
            reason = str(error)
        except (OSError, h11.ProtocolError) as error:
            reason = f"the image could not be fetched ({type(error).__name__})"
        raise InvalidRequestError(f"{field}: {reason}", field)

    def _checked(self, url: str) -> _Place:
        if not self._allowed:
            raise _RefusedError(
                "this server fetches no images: send a data: URL, or start it with --image-urls https://host/"
            )
        place = _place(url)
        for prefix in self._allowed:
            if (place.host, place.port) == (prefix.host, prefix.port) and place.path.startswith(prefix.path):
                return place
        raise _RefusedError(f"images of {place.host} at this path are not fetched here: the operator lists others")

    async def _fetch(self, place: _Place) -> bytes:
        addresses = await self._resolve(place.host, place.port)
        # Any private address is enough to refuse the host: the server may reach what the caller may not.
        if not addresses or not all(map(self._is_public, addresses)):
            raise _RefusedError(f"{place.host} has no address, or one that is not public")
        assert self._tls is not None, "a URL was allowed, so there are prefixes"
        reader, writer = await asyncio.open_connection(  # by a checked address: the name may have another by now
            addresses[0], place.port, ssl=self._tls, server_hostname=place.host
        )
        try:
            return await self._exchange(reader, writer, place)
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: _Place) -> bytes:
        connection = h11.Connection(h11.CLIENT)
        host = place.host if place.port == _HTTPS else f"{place.host}:{place.port}"
        headers = [("host", host), ("user-agent", "penstock"), ("accept", "image/*"), ("connection", "close")]
        asked = connection.send(h11.Request(method="GET", target=place.path, headers=headers)) or b""
        writer.write(asked + (connection.send(h11.EndOfMessage()) or b""))
        content = bytearray()
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_PIECE))
            # Redirects, too, are not followed: their target was not checked.
            elif isinstance(event, h11.Response) and event.status_code != 200:
                raise _RefusedError(f"the image's host answered with status {event.status_code}")
            elif isinstance(event, h11.Data):
                content += event.data
                if len(content) > self._max_bytes:
                    raise _RefusedError(f"the image has more than {self._max_bytes} bytes (max_image_bytes)")
            elif isinstance(event, h11.EndOfMessage):
                return bytes(content)
            elif isinstance(event, h11.ConnectionClosed):
                raise _RefusedError("the image's host closed the connection")


class _RefusedError(Exception):
    """A URL that is not fetched, and why."""


def _prefix(text: str) -> _Place:
    try:
        place = _place(text)
    except _RefusedError as error:
        raise ConfigError(f"image_urls: {text!r}: {error}") from None
    if not place.path.endswith("/"):
        raise ConfigError(f"image_urls: {text!r} must end with a slash, as https://host/ or https://host/path/")
    return place


def _place(url: str) -> _Place:
    """The host and path of a URL, without its fragment."""
    try:
        parts: SplitResult = urlsplit(url)
        host, port = parts.hostname or "", parts.port or _HTTPS
    except ValueError:
        raise _RefusedError("the URL is not valid") from None
    if parts.scheme != "https":
        raise _RefusedError("images come as data: URLs, or from https:// URLs that the operator lists")
    if not host or parts.username is not None or not url.isascii() or not url.isprintable() or " " in url:
        raise _RefusedError("the URL must be plain ASCII with a host, and without a user")
    path = parts.path or "/"
    # The host may resolve them to a path that no prefix covers.
    if any(piece in (".", "..") for piece in unquote(path).replace("\\", "/").split("/")):
        raise _RefusedError("the URL's path must not have . or .. in it")
    return _Place(host, port, f"{path}?{parts.query}" if parts.query else path)


async def _resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found][:_MAX_ADDRESSES]


def is_public_address(text: str) -> bool:
    """Whether an address belongs to the public internet, itself and as the IPv4 address that it may hold."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    held: list[ipaddress.IPv4Address | ipaddress.IPv6Address | None] = [address]
    if isinstance(address, ipaddress.IPv6Address):
        held += [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _TRANSLATED:
            held.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address.ipv4_mapped is not None:  # older Pythons call no mapped address global
            held.remove(address)
    return all(address is None or (address.is_global and not address.is_multicast) for address in held)
