"""A chat's model on a running server, by OpenAI's API."""

import argparse
import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.cli.chat.backend import Ending, Setting, StreamItem, Usage
from penstock.cli.chat.settings import settings_of
from penstock.cli.flags import sampling_params
from penstock.cli.http import call, open_path
from penstock.errors import InvalidRequestError, PenstockError
from penstock.parsers.parts import Reasoning, Text

TIMEOUT = 10.0
"""Seconds that the server has to list its models."""
MAX_EVENT_BYTES = 2**24
"""Maximum bytes of an event that the server streams."""


class RemoteBackend:
    """A server that answers `/v1/chat/completions`."""

    def __init__(self, url: str, key: str | None, args: argparse.Namespace) -> None:
        self._url, self._key = url, key
        params = sampling_params(args)
        self.settings: dict[str, Setting] = settings_of(params)
        self._fields: dict[str, Any] = {}
        if params.stop:
            self._fields["stop"] = list(params.stop)
        if params.bad_words:
            self._fields["bad_words"] = list(params.bad_words)
        if params.structured is not None:
            schema = {"name": "answer", "schema": json.loads(params.structured.text)}
            self._fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        served = self.models()
        if not served:
            raise PenstockError(f"{url} serves no model")
        self.model = served[0]
        if (wanted := getattr(args, "model", None)) is not None:
            self.select(wanted)

    def models(self) -> list[str]:
        answer = call(self._url, "/v1/models", key=self._key, timeout=TIMEOUT)
        try:
            return [str(entry["id"]) for entry in answer["data"]]
        except (LookupError, TypeError):
            raise PenstockError(f"{self._url}/v1/models does not answer as OpenAI's API does") from None

    def select(self, model: str) -> None:
        served = self.models()
        if model not in served:
            raise InvalidRequestError(f"{self._url} does not serve {model}: it serves {', '.join(served)}", "model")
        self.model = model

    def stream(self, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Setting]) -> Iterator[StreamItem]:
        body = {"model": self.model, "messages": list(messages), **self._fields, **self.settings, **settings}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return _items(self._url, open_path(self._url, "/v1/chat/completions", body, self._key))

    def close(self) -> None:
        """Do nothing: the server goes on."""


def _items(url: str, response: http.client.HTTPResponse) -> Iterator[StreamItem]:
    with response:
        try:
            for event in _events(url, response):
                yield from _items_of(event)
        except (LookupError, TypeError, AttributeError) as error:
            raise PenstockError(f"{url} sent an event that is not one of OpenAI's API: {error!r}") from None


def _items_of(event: Any) -> Iterator[StreamItem]:
    if (error := event.get("error")) is not None:
        yield Ending("error", error["message"])
        return
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or {}
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            yield Reasoning(str(reasoning))
        if text := delta.get("content"):
            yield Text(str(text))
        if (reason := choice.get("finish_reason")) is not None:
            yield Ending(str(reason))
    if usage := event.get("usage"):
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        yield Usage(usage["prompt_tokens"], usage["completion_tokens"], cached)


def _events(url: str, response: http.client.HTTPResponse) -> Iterator[Any]:
    """The JSON of a stream's events, until its end."""
    try:
        while line := response.readline(MAX_EVENT_BYTES):
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise PenstockError(f"the answer from {url} broke off: {error}") from None
    raise PenstockError(f"the answer from {url} broke off before its end")
