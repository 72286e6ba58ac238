"""String formats, and the constraints that enforce them. All others are annotations (JSON Schema 2020-12, 7.2.1).

The library's own dates, times and hosts are looser than the standards: February has 29 days in each year, a minute 61
seconds, a host's name any length. Here they are exact or narrower: what is written is of the format to any reader.
"""

from penstock.dataclass import dataclass

OF_THE_LIBRARY = frozenset({"duration", "uri"})


@dataclass(frozen=True, slots=True)
class Format:
    """Constraints on the strings of a format."""

    pattern: str | None = None
    """Regular expression that matches the whole string; None: no constraint."""
    max_length: int | None = None
    of_library: bool = False
    """Whether the grammar library enforces the format by itself."""


_DAY = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # some readers have no year 0
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = f"(?:{_YEAR}-(?:{_DAY})|{_LEAP_YEAR}-02-29)"
# A minute has a second 60 on a few days only, and many readers know of none.
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"

_A, _X = "[a-zA-Z0-9]", "[a-zA-Z0-9-]"
_LABEL = f"{_A}(?:{_X}?{_A}|{_X}(?:{_A}{_X}|-{_A})(?:{_X}{{0,58}}{_A})?)?"
"""A label of a host name: at most 63 characters, no hyphen at either end or at both third and fourth (RFC 5891)."""
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_H16 = "[0-9a-fA-F]{1,4}"
_SHORT_IPV6 = (
    f"(?:{_H16}(?::{_H16}){{0,{before - 1}}})?::(?:{_H16}(?::{_H16}){{0,{6 - before}}})?" for before in range(1, 7)
)
_IPV6 = "|".join([f"(?:{_H16}:){{7}}{_H16}", *_SHORT_IPV6])

_HEX = "[0-9a-fA-F]"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_BASE64 = "(?:[{set}]{{4}})*(?:[{set}][AQgw]==|[{set}]{{2}}[AEIMQUYcgkosw048]=)?"

_FORMATS = {
    "date": Format(_DATE),
    "time": Format(_TIME),
    "date-time": Format(f"{_DATE}T{_TIME}"),
    "hostname": Format(_HOST, 253),
    "email": Format(rf"{_ATOM}(?:\.?{_ATOM}){{0,31}}@{_HOST}", 254),
    "ipv4": Format(_IPV4),
    "ipv6": Format(_IPV6),
    "ipvanyaddress": Format(f"{_IPV4}|{_IPV6}"),
    "uuid": Format(f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}"),
    "json-pointer": Format(_POINTER),
    "relative-json-pointer": Format(f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})"),
    "base64": Format(_BASE64.format(set="A-Za-z0-9+/")),
    "base64url": Format(_BASE64.format(set="A-Za-z0-9_-")),
    **{
        f"uuid{version}": Format(f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}")
        for version in range(1, 9)
    },
}


def find_format(name: str) -> Format:
    """The constraints of a format; none if it is an annotation."""
    return _FORMATS.get(name, Format(of_library=name in OF_THE_LIBRARY))
