"""Packages of Penstock's extras, which may be absent."""

from importlib.util import find_spec

from penstock.errors import MissingTorchError


def has_torch() -> bool:
    """Whether PyTorch is installed; it is not imported, which takes a second."""
    return find_spec("torch") is not None


def has_pillow() -> bool:
    """Whether Pillow is installed."""
    return find_spec("PIL") is not None


def require_torch(purpose: str, reason: str = "") -> None:
    """See `MissingTorchError` for the arguments.

    Raises:
        MissingTorchError: PyTorch is not installed.
    """
    if not has_torch():
        raise MissingTorchError(purpose, reason)
