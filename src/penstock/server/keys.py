"""API keys: authentication of callers, their permissions and rate limits.

The key file is TOML, with one table per key:

    [[key]]
    name = "team-a"                   # in logs and metrics, and the tenant of fair scheduling
    secret = "sk-..."                 # or: secret_sha256 = "<64 hexadecimal digits>"
    requests_per_minute = 60          # optional, like the following: no limit by default
    tokens_per_minute = 100_000       # of prompts and answers
    max_concurrent_requests = 8
    priority = 0                      # the most urgent `priority` that a body may ask for (lower is sooner)
    private_cache = true              # share no prefix-cache block with other keys, so that timing reveals nothing
    operator = true                   # may see GET /debug/timeline and every key's requests
    models = ["small", "my-adapter"]  # the models and adapters that it may use; by default all
"""

import hashlib
import hmac
import math
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers

from penstock.config.engine_config import NAMES_OF_TYPES
from penstock.dataclass import dataclass
from penstock.errors import AuthenticationError, ConfigError, InvalidRequestError, RateLimitError
from penstock.frontend.limits import Caller
from penstock.system.toml import read_toml


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, without its secret."""

    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None
    priority: int = 0
    private_cache: bool = False
    operator: bool = False
    models: frozenset[str] | None = None


class TokenBucket:
    """A rate limit that refills evenly: at most `per_minute`, and as much per minute.

    Costs not known beforehand may overdraw it; then nothing is available until it has refilled.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    def _refill(self) -> float:
        now = self._clock()
        self._level = min(float(self.per_minute), self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        return self._level

    @property
    def remaining(self) -> int:
        """Tokens available now, rounded down, at least 0."""
        return max(0, math.floor(self._refill()))

    def seconds_until(self, amount: float) -> float:
        """Seconds until `amount` is available; 0 if it is now."""
        return max(0.0, (amount - self._refill()) * 60 / self.per_minute)

    def take(self, amount: float) -> None:
        self._refill()
        self._level -= amount


class KeyHolder:
    """State of one API key: its remaining allowance and open calls."""

    def __init__(self, key: ApiKey, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self.num_open = 0
        self._requests = _bucket(key.requests_per_minute, clock)
        self._tokens = _bucket(key.tokens_per_minute, clock)
        namespace = f"key:{key.name}" if key.private_cache else ""
        self.caller = Caller(key.name, namespace, key.priority, self, key.operator, key.models)

    def enter(self) -> None:
        """Begin a call.

        Raises:
            RateLimitError: the key's concurrent calls, or its requests or tokens per minute, are exhausted.
        """
        most = self.key.max_concurrent_requests
        if most is not None and self.num_open >= most:
            raise RateLimitError(f"{self.num_open} requests of this API key are open; at most {most} may be at once")
        if self._tokens is not None:
            self._need(self._tokens, 1, "tokens")
        if self._requests is not None:
            self._need(self._requests, 1, "requests")
            # Last of the checks: a call that is refused costs the key nothing.
            self._requests.take(1)
        self.num_open += 1

    def leave(self) -> None:
        """Record that the call was answered."""
        self.num_open -= 1

    def check(self, num_tokens: int) -> None:
        if self._tokens is None:
            return
        if num_tokens > self._tokens.per_minute:
            raise InvalidRequestError(
                f"the prompt has {num_tokens} tokens, more than the {self._tokens.per_minute} that this API key has a "
                "minute",
                "prompt",
            )
        self._need(self._tokens, num_tokens, "tokens")

    def spend(self, num_tokens: int) -> None:
        if self._tokens is not None:
            self._tokens.take(num_tokens)

    def _need(self, bucket: TokenBucket, amount: int, what: str) -> None:
        seconds = bucket.seconds_until(amount)
        if seconds > 0:
            raise RateLimitError(
                f"this API key has {bucket.per_minute} {what} a minute; {bucket.remaining} are left and "
                f"{amount} needed: try again in {_duration(seconds)}",
                seconds,
            )

    def headers(self) -> dict[str, str]:
        """Rate-limit headers as OpenAI sends them."""
        shown = {}
        for what, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                shown[f"x-ratelimit-limit-{what}"] = str(bucket.per_minute)
                shown[f"x-ratelimit-remaining-{what}"] = str(bucket.remaining)
                shown[f"x-ratelimit-reset-{what}"] = _duration(bucket.seconds_until(bucket.per_minute))
        return shown


def _bucket(per_minute: int | None, clock: Callable[[], float]) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket(per_minute, clock)


def _duration(seconds: float) -> str:
    """Format a duration as in OpenAI's headers: 17ms, 1.2s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{math.ceil(seconds * 10) / 10:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"


class KeyRing:
    """All API keys of a server. Without keys, calls need none."""

    def __init__(self, keys: Iterable[tuple[ApiKey, bytes]]) -> None:
        """
        Args:
            keys: each with the SHA-256 of its secret.

        Raises:
            ConfigError: two have the same name or secret.
        """
        # Keys are looked up by a keyed hash of the input, so that timing reveals nothing about any key.
        self._pepper = secrets.token_bytes(32)
        self._holders: dict[bytes, KeyHolder] = {}
        names = set()
        for key, digest in keys:
            peppered = self._keyed(digest)
            if key.name in names or peppered in self._holders:
                raise ConfigError(f"two API keys have the name or the secret of {key.name!r}")
            names.add(key.name)
            self._holders[peppered] = KeyHolder(key)
        self._anyone = KeyHolder(ApiKey("", operator=True))
        # Without keys every client is an operator: the server warns if its address is reachable from outside.
        self._anyone.caller = Caller(operator=True)

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def num_sharing(self) -> int:
        """Number of keys that share a prefix cache."""
        return sum(not holder.caller.namespace for holder in self._holders.values())

    def authenticate(self, headers: Headers) -> KeyHolder:
        """The holder of the key sent as `Authorization: Bearer` or `x-api-key`.

        Raises:
            AuthenticationError: there is no key, or it is unknown.
        """
        if not self._holders:
            return self._anyone
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Anthropic's clients send the second header, all others the first.
        secret = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not secret:
            raise AuthenticationError("no API key was sent: send one as `Authorization: Bearer KEY`")
        keyed = self._keyed(hashlib.sha256(secret.encode()).digest())
        holder = self._holders.get(keyed)
        if holder is None:
            raise AuthenticationError("the API key is unknown")
        return holder

    def _keyed(self, digest: bytes) -> bytes:
        return hmac.digest(self._pepper, digest, "sha256")


def load_keys(api_key: str | None, path: str | None, *, private_cache: bool) -> KeyRing:
    """Load the keys that the options name.

    Args:
        api_key: one key without limits, named `default`, with all permissions.
        path: a key file.
        private_cache: give each key its own prefix cache, whatever the file says.

    Raises:
        ConfigError: the file does not match the module's docstring. The message contains no secrets.
    """
    keys = []
    if api_key is not None:
        if not api_key:
            raise ConfigError("api_key is empty: set a key, or leave it out to serve without authentication")
        key = ApiKey("default", priority=-(2**31), private_cache=private_cache, operator=True)
        keys.append((key, hashlib.sha256(api_key.encode()).digest()))
    if path is not None:
        keys += _read_keys(path, private_cache)
    return KeyRing(keys)


def _read_keys(path: str | Path, private_cache: bool) -> list[tuple[ApiKey, bytes]]:
    content = read_toml(path)
    tables = content.get("key")
    if set(content) != {"key"} or not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise ConfigError(f"{path} must hold tables [[key]], and nothing else")
    return [_parse_key(table, private_cache, f"{path}, key {number}") for number, table in enumerate(tables, 1)]


def _parse_key(table: Mapping[str, Any], private_cache: bool, where: str) -> tuple[ApiKey, bytes]:
    values = dict(table)
    digest = _digest_of(values.pop("secret", None), values.pop("secret_sha256", None), where)
    models = _models_of(values.pop("models", None), where)
    known = {f.name: f for f in fields(ApiKey)}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{where}: unknown entry {name!r}; known are secret, secret_sha256, {', '.join(known)}")
        default = known[name].default
        kind = str if default is MISSING else bool if isinstance(default, bool) else int
        if type(value) is not kind:
            raise ConfigError(f"{where}: {name} must be {NAMES_OF_TYPES[kind]}")
        if default is None and isinstance(value, int) and value < 1:
            raise ConfigError(f"{where}: {name} must be at least 1, not {value}")
    if not values.get("name"):
        raise ConfigError(f"{where}: it has no name")
    if models is not None and values.get("operator"):
        raise ConfigError(f"{where}: an operator may use every model: leave out models or operator")
    if private_cache:
        values["private_cache"] = True
    return ApiKey(**values, models=models), digest


def _models_of(names: object, where: str) -> frozenset[str] | None:
    if names is None:
        return None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{where}: models must be a list of the names of models and adapters")
    return frozenset(names)


def _digest_of(secret: object, sha256: object, where: str) -> bytes:
    if isinstance(secret, str) and secret and sha256 is None:
        return hashlib.sha256(secret.encode()).digest()
    if secret is None and isinstance(sha256, str) and re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        return bytes.fromhex(sha256)
    raise ConfigError(f"{where}: it must have either secret, a text, or secret_sha256, 64 hexadecimal digits")
