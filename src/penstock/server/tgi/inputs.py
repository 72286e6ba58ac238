"""Images in TGI's inputs: Markdown, as `![](data:image/png;base64,...)`."""

from penstock.errors import InvalidRequestError
from penstock.text.content import ImageSource

_OPEN, _CLOSE = "![](", ")"
_SCHEMES = ("data:image/", "http://", "https://")
_FIELD = "inputs"


def split_images(inputs: str, takes_images: bool) -> list[str | ImageSource]:
    """The texts and images of inputs; without images, the inputs alone.

    Raises:
        InvalidRequestError: there is an image's data, and the model takes text only.
    """
    parts: list[str | ImageSource] = []
    start = search = 0
    while (begin := inputs.find(_OPEN, search)) >= 0:
        search = begin + len(_OPEN)
        if not inputs.startswith(_SCHEMES, search) or (end := inputs.find(_CLOSE, search)) < 0:
            continue
        if not takes_images:
            if inputs.startswith(_SCHEMES[0], search):
                raise InvalidRequestError(f"{_FIELD}: images are not supported here: this checkpoint takes text only")
            continue
        parts += [inputs[start:begin], ImageSource(_FIELD, inputs[search:end], is_url=True)]
        start = search = end + len(_CLOSE)
    return [*parts, inputs[start:]]
