"""The characters that byte-level BPE writes bytes with (Radford et al. 2019)."""


def _byte_alphabet() -> dict[str, bytes]:
    """Bytes by character: printable Latin-1 as itself, the other 68 bytes, in order, as U+0100 and on."""
    itself = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in itself]
    alphabet = {chr(byte): bytes([byte]) for byte in itself}
    return alphabet | {chr(0x100 + place): bytes([byte]) for place, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
