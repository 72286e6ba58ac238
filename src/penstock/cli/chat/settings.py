"""Sampling settings that `/set` changes, by the names of `SamplingParams`."""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.api.sampling_params import SamplingParams
from penstock.cli.chat.backend import Setting
from penstock.cli.flags import SAMPLING_FLAGS, SEVERAL
from penstock.errors import InvalidRequestError

EFFORT = "reasoning_effort"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SETTINGS: dict[str, type] = {
    **{name: kind for name, (kind, _) in SAMPLING_FLAGS.items() if name not in SEVERAL},
    "seed": int,
    EFFORT: str,
}
DEFAULT = "default"
"""Value that takes a setting of `/set` back."""


def settings_of(params: SamplingParams) -> dict[str, Setting]:
    """The settings in which parameters differ from the neutral ones."""
    neutral = SamplingParams()
    values = {name: getattr(params, name) for name in SETTINGS if name != EFFORT}
    return {name: value for name, value in values.items() if value != getattr(neutral, name)}


def changed(settings: Mapping[str, Setting], name: str, text: str) -> dict[str, Setting]:
    """The settings after `/set NAME TEXT`.

    Raises:
        InvalidRequestError: there is no such setting, or the value is out of its range.
    """
    if name not in SETTINGS:
        close = difflib.get_close_matches(name, SETTINGS, n=1)
        advice = f"did you mean {close[0]}?" if close else f"there are {', '.join(SETTINGS)}"
        raise InvalidRequestError(f"there is no setting {name}: {advice}", name)
    if text == DEFAULT:
        return {other: value for other, value in settings.items() if other != name}
    return {**settings, name: _read(name, text)}


def with_settings(params: SamplingParams, settings: Mapping[str, Setting]) -> SamplingParams:
    """The parameters with these settings instead of their own."""
    fields: dict[str, Any] = {name: value for name, value in settings.items() if name != EFFORT}
    return replace(params, **fields)


def _read(name: str, text: str) -> Setting:
    if name == EFFORT:
        if text not in EFFORTS:
            raise InvalidRequestError(f"{EFFORT} must be one of {', '.join(EFFORTS)}, not {text!r}", EFFORT)
        return text
    try:
        value: Setting = SETTINGS[name](text)
    except ValueError:
        kind = "an integer" if SETTINGS[name] is int else "a number"
        raise InvalidRequestError(f"{name} must be {kind}, not {text!r}", name) from None
    with_settings(SamplingParams(), {name: value})
    return value
