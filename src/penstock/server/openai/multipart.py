"""Forms of files and fields, `multipart/form-data` (RFC 7578). The body is complete, and within the limit on bodies."""

from collections.abc import Iterator
from email.message import Message

from penstock.dataclass import dataclass
from penstock.errors import InvalidRequestError

_MOST_PARTS = 64
_LONGEST_HEAD = 1024
"""Bytes of a part's header fields, which are parsed in quadratic time. File systems' names have at most 255 bytes."""
_LONGEST_BOUNDARY = 70
_LONGEST_FIELD = 4096
"""Bytes of a field that is no file: the longest is a prompt, of at most 223 tokens."""


@dataclass(frozen=True, slots=True)
class Form:
    """The fields of a form by name, as texts, and its files, as bytes."""

    fields: dict[str, list[str]]
    files: dict[str, bytes]


def parse_form(content_type: str, body: bytes) -> Form:
    """
    Raises:
        InvalidRequestError: the body is no such form, or has too many or too large parts.
    """
    form = Form({}, {})
    for count, (head, content) in enumerate(_parts(_boundary(content_type), body)):
        if count >= _MOST_PARTS:
            raise InvalidRequestError(f"the form has more than {_MOST_PARTS} parts")
        name, is_file = _name(head)
        if is_file:
            if name in form.files:
                raise InvalidRequestError(f"{name}: the form has two of these files; one is taken", name)
            form.files[name] = content
            continue
        if len(content) > _LONGEST_FIELD:
            raise InvalidRequestError(f"{name} has more than {_LONGEST_FIELD} bytes", name)
        try:
            form.fields.setdefault(name, []).append(content.decode())
        except UnicodeDecodeError:
            raise InvalidRequestError(f"{name} is not valid UTF-8; a file needs a file name", name) from None
    return form


def _boundary(content_type: str) -> bytes:
    message = Message()
    message["content-type"] = content_type[:_LONGEST_HEAD]
    boundary = message.get_param("boundary")
    if message.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
        raise InvalidRequestError("send the audio as a form: content-type multipart/form-data with a boundary", "file")
    if not 0 < len(boundary) <= _LONGEST_BOUNDARY or not boundary.isascii():
        raise InvalidRequestError(f"the form's boundary must have 1 to {_LONGEST_BOUNDARY} ASCII characters")
    return b"--" + boundary.encode()


def _parts(boundary: bytes, body: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The header fields and the content of each part."""
    delimiter = b"\r\n" + boundary
    at = 0 if body.startswith(boundary) else body.find(delimiter) + 2
    if at == 1:
        raise InvalidRequestError("the form does not have its boundary: it is damaged")
    at += len(boundary)
    while not body.startswith(b"--", at):
        begin = body.find(b"\r\n", at, at + _LONGEST_HEAD)  # after the boundary there may be spaces
        head_end = body.find(b"\r\n\r\n", begin, begin + _LONGEST_HEAD)
        end = body.find(delimiter, head_end + 2)
        if begin < 0 or head_end < 0 or end < 0:
            raise InvalidRequestError(
                f"the form is cut off or damaged: a part has no end, or a head of more than {_LONGEST_HEAD} bytes"
            )
        yield body[begin + 2 : head_end], body[head_end + 4 : end]
        at = end + len(delimiter)


def _name(head: bytes) -> tuple[str, bool]:
    """The name of a part, and whether it is a file."""
    message = Message()
    for line in head.decode("utf-8", errors="replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            message["content-disposition"] = value.strip()
    params = dict(reversed(message.get_params([], header="content-disposition")))  # the first of a name counts
    name = params.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError("a part of the form has no name")
    return name[:256], "filename" in params
