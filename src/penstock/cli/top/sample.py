"""Samples of a server's metrics, and the rates and quantiles between them."""

import http.client
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from penstock.cli.http import call, open_path
from penstock.dataclass import dataclass
from penstock.errors import PenstockError

TIMEOUT = 10.0
"""Seconds that the server has for an answer."""
WINDOW = 60.0
"""Seconds that quantiles and shares are taken over."""
MAX_BYTES = 2**24
"""Maximum bytes of a server's metrics."""

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """A server's metrics at one time."""

    time: float
    values: Mapping[str, Mapping[Labels, float]]
    """By name, then by labels."""

    @classmethod
    def parse(cls, text: str, now: float) -> "Sample":
        """
        Raises:
            PenstockError: the text is not in Prometheus' format.
        """
        values: dict[str, dict[Labels, float]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    values.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
        except ValueError as error:
            raise PenstockError(f"/metrics is not in Prometheus' format: {error}") from None
        return cls(now, values)

    def total(self, name: str) -> float:
        """The sum over all labels; 0 if there is none."""
        return sum(self.values.get(name, {}).values())

    def labelled(self, name: str, label: str, value: str) -> float | None:
        """The sum over all values with this label, of several models; None if there is none."""
        found = [number for labels, number in self.values.get(name, {}).items() if (label, value) in labels]
        return sum(found) if found else None

    def labels(self, name: str, label: str) -> list[str]:
        """All values of a label."""
        return [dict(labels).get(label, "") for labels in self.values.get(name, {})]


def rate(before: Sample, now: Sample, name: str) -> float:
    """A counter's increase per second; 0 after a restart of the server."""
    seconds = now.time - before.time
    return max(0.0, now.total(name) - before.total(name)) / seconds if seconds > 0 else 0.0


def share(before: Sample, now: Sample, part: str, whole: str) -> float | None:
    """One counter's increase as a share of another's; None if that one did not increase."""
    increase = now.total(whole) - before.total(whole)
    return max(0.0, now.total(part) - before.total(part)) / increase if increase > 0 else None


def quantile(before: Sample, now: Sample, name: str, q: float) -> float | None:
    """A quantile of a histogram's increase, interpolated in its bucket as Prometheus does; None without any."""
    counts: dict[float, float] = {}
    for sample, sign in ((now, 1), (before, -1)):
        for labels, count in sample.values.get(f"{name}_bucket", {}).items():
            bound = float(dict(labels)["le"])
            counts[bound] = counts.get(bound, 0.0) + sign * count
    bounds = sorted(counts)
    if not bounds or (wanted := q * counts[bounds[-1]]) <= 0:
        return None
    low = previous = 0.0
    for bound in bounds:
        if counts[bound] >= wanted:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (wanted - previous) / (counts[bound] - previous)
        low, previous = bound, counts[bound]
    return low


class Samples:
    """The samples of the last minute, and the server's data for operators only: its engines and open requests."""

    def __init__(self, url: str, key: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.url = url
        self.engines: list[dict[str, Any]] | None = None
        self.requests: list[dict[str, Any]] | None = None
        """Records of the open requests as `/debug/live` has them, with their `age` in seconds, the oldest first."""
        self._key = key
        self._clock = clock
        self._may_list = self._may_look = True
        self._taken: deque[Sample] = deque()

    def take(self) -> None:
        """Ask the server.

        Raises:
            PenstockError: it does not answer, or not with metrics.
        """
        with open_path(self.url, "/metrics", key=self._key, timeout=TIMEOUT) as response:
            text = response.read(MAX_BYTES).decode(errors="replace")
        sample = Sample.parse(text, self._clock())
        if not sample.labels("penstock_model_info", "model"):
            raise PenstockError(f"{self.url}/metrics has no metrics of Penstock")
        self._taken.append(sample)
        while self.now.time - self._taken[0].time > WINDOW:
            self._taken.popleft()
        self.engines, self.requests = self._list_engines(), self._look_at_requests()

    @property
    def now(self) -> Sample:
        return self._taken[-1]

    @property
    def previous(self) -> Sample:
        return self._taken[-2] if len(self._taken) > 1 else self._taken[-1]

    @property
    def oldest(self) -> Sample:
        """The sample a minute ago, or the first."""
        return self._taken[0]

    def rates(self, name: str) -> list[float]:
        """A counter's increase per second between the samples."""
        taken = list(self._taken)
        return [rate(before, now, name) for before, now in itertools.pairwise(taken)]

    def _list_engines(self) -> list[dict[str, Any]] | None:
        if not self._may_list:
            return None
        try:
            listed = call(self.url, "/v1/admin/engines", key=self._key, timeout=TIMEOUT)
            engines: list[dict[str, Any]] = listed["engines"]
        except (PenstockError, LookupError, TypeError):
            self._may_list = False  # for operators only: to ask again would fill the server's log
            return None
        return engines

    def _look_at_requests(self) -> list[dict[str, Any]] | None:
        if not self._may_look:
            return None
        try:
            with open_path(self.url, "/debug/live", key=self._key, timeout=TIMEOUT) as response:
                first = response.readline(MAX_BYTES)  # its first event has all that are open
            seen = json.loads(first.removeprefix(b"data:"))
            records = [record for record in seen["requests"] if record["ended"] is None]
            return sorted(
                (record | {"age": seen["now"] - record["arrival"]} for record in records),
                key=lambda row: -row["age"],
            )
        except (PenstockError, OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
            self._may_look = False  # for operators only, like the engines
            return None
