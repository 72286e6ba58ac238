"""Numbers of bytes, as users write and read them."""

from penstock.errors import ConfigError

MIB = 2**20
GIB = 2**30


def parse_bytes(text: str | int) -> int:
    """Parse a number of bytes: 8589934592, "8GiB", "512MiB", "64KiB".

    Raises:
        ConfigError: the value has none of these forms.
    """
    units = {"kib": 2**10, "mib": MIB, "gib": GIB, "b": 1, "": 1}
    lowered = str(text).strip().lower()
    digits = lowered.rstrip("bgikm")
    try:
        count = int(float(digits) * units[lowered[len(digits) :].strip()])
    except (KeyError, ValueError):
        raise ConfigError(f"{text!r} is not a number of bytes; write 8589934592, 8GiB or 512MiB") from None
    if count <= 0:
        raise ConfigError(f"{text!r}: the number of bytes must be positive")
    return count


def in_words(count: int) -> str:
    """Format a number of bytes: 8 GiB, 92.1 MiB, 10 KiB, 500 bytes."""
    for unit, name, digits in ((GIB, "GiB", 2), (MIB, "MiB", 1), (2**10, "KiB", 1)):
        if count >= unit:
            return f"{count / unit:.{digits}f}".rstrip("0").rstrip(".") + f" {name}"
    return f"{count} bytes"
