"""API keys: the file, the comparison, the allowances."""

import hashlib

import pytest
from starlette.datastructures import Headers

from penstock.errors import AuthenticationError, ConfigError, InvalidRequestError, RateLimitError
from penstock.server.keys import ApiKey, KeyHolder, KeyRing, load_keys

FILE = """
[[key]]
name = "quiet"
secret = "sk-quiet"
requests_per_minute = 60
tokens_per_minute = 600
max_concurrent_requests = 2
priority = 5
private_cache = true

[[key]]
name = "loud"
secret_sha256 = "{digest}"
operator = true
"""


@pytest.fixture
def ring(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(FILE.format(digest=hashlib.sha256(b"sk-loud").hexdigest()))
    return load_keys(None, str(path), private_cache=False)


def holder_of(ring, **headers):
    return ring.authenticate(Headers({name.replace("_", "-"): value for name, value in headers.items()}))


def test_a_key_is_known_by_its_secret_in_either_header(ring):
    for headers in (
        {"authorization": "Bearer sk-quiet"},
        {"authorization": "bearer  sk-quiet"},
        {"x_api_key": "sk-quiet"},
    ):
        assert holder_of(ring, **headers).key.name == "quiet"
    loud = holder_of(ring, authorization="Bearer sk-loud")
    assert (loud.key.name, loud.key.requests_per_minute, loud.caller.operator) == ("loud", None, True)


def test_what_a_key_may_do_goes_with_its_calls(ring):
    caller = holder_of(ring, x_api_key="sk-quiet").caller
    assert (caller.tenant, caller.namespace, caller.top_priority, caller.operator) == ("quiet", "key:quiet", 5, False)
    assert holder_of(ring, x_api_key="sk-loud").caller.namespace == ""


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer "},
        {"authorization": "Bearer sk-quie"},
        {"authorization": "Basic sk-quiet"},
        {"x_api_key": "é"},
    ],
)
def test_without_a_known_key_nobody_is_let_in_and_the_key_is_not_told(ring, headers):
    with pytest.raises(AuthenticationError) as refused:
        holder_of(ring, **headers)
    assert "sk-qui" not in str(refused.value)


def test_without_keys_everybody_is_let_in():
    holder = KeyRing([]).authenticate(Headers({"authorization": "Bearer whatever"}))
    holder.enter()
    assert holder.headers() == {}
    assert holder.caller.operator
    assert holder.caller.tenant == ""


def test_one_key_from_the_options_has_no_limits():
    ring = load_keys("sk-one", None, private_cache=True)
    holder = holder_of(ring, authorization="Bearer sk-one")
    assert holder.caller.namespace == "key:default"
    assert ring.num_sharing == 0
    assert load_keys("sk-one", None, private_cache=False).num_sharing == 1
    holder.caller.check_priority(-(2**31))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[[key]]\nname = "a"\nsecret = "sk-secret', "not valid TOML"),
        ('key = "sk-secret"', "must hold tables"),
        ('[[key]]\nname = "a"', "key 1: it must have either secret"),
        ('[[key]]\nsecret = "sk-secret"', "key 1: it has no name"),
        ('[[key]]\nname = "a"\nsecret = "sk-secret"\nrpm = 1', "key 1: unknown entry 'rpm'"),
        ('[[key]]\nname = "a"\nsecret = "sk-secret"\npriority = true', "key 1: priority must be a whole number"),
        ('[[key]]\nname = "a"\nsecret = "sk-secret"\ntokens_per_minute = 0', "must be at least 1, not 0"),
        ('[[key]]\nname = "a"\nsecret = "sk-secret"\nmodels = "b"', "models must be a list of the names"),
        ('[[key]]\nname = "a"\nsecret = "sk-secret"\nmodels = ["b"]\noperator = true', "may use every model"),
        ('[[key]]\nname = "a"\nsecret_sha256 = "sk-secret"', "64 hexadecimal digits"),
        ('[[key]]\nname = "a"\nsecret = "sk-secret"\n' * 2, "two API keys have the name or the secret of 'a'"),
    ],
)
def test_a_bad_file_is_refused_with_its_place_and_without_its_secrets(tmp_path, content, message):
    path = tmp_path / "keys.toml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as refused:
        load_keys(None, str(path), private_cache=False)
    assert "sk-secret" not in str(refused.value)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_keys(None, str(tmp_path / "none"), private_cache=False)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_requests_a_minute_run_out_come_back_evenly_and_are_told_as_openai_tells_them():
    clock = Clock()
    holder = KeyHolder(ApiKey("a", requests_per_minute=60), clock=clock)
    for _ in range(60):
        holder.enter()
    with pytest.raises(RateLimitError, match="60 requests a minute; 0 are left and 1 needed") as refused:
        holder.enter()
    assert refused.value.retry_after == 1.0
    assert holder.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
    }
    clock.now += 1.5
    holder.enter()
    assert holder.headers()["x-ratelimit-reset-requests"] == "59.5s"
    clock.now += 1000
    assert holder.headers()["x-ratelimit-remaining-requests"] == "60"
    assert holder.headers()["x-ratelimit-reset-requests"] == "0ms"


def test_tokens_a_minute_may_be_overdrawn_by_answers_and_are_made_up_for_before_the_next_call():
    clock = Clock()
    holder = KeyHolder(ApiKey("a", tokens_per_minute=600), clock=clock)
    holder.enter()
    holder.check(600)
    holder.spend(600)
    holder.spend(30)
    with pytest.raises(RateLimitError) as refused:
        holder.enter()
    assert refused.value.retry_after == pytest.approx(3.1)
    clock.now += 3.2
    holder.enter()
    with pytest.raises(RateLimitError, match="and 100 needed: try again in 9"):
        holder.check(100)
    with pytest.raises(InvalidRequestError, match="more than the 600"):
        holder.check(601)


def test_calls_at_one_time_are_bounded():
    holder = KeyHolder(ApiKey("a", max_concurrent_requests=1))
    holder.enter()
    with pytest.raises(RateLimitError, match="at most 1 may be at once"):
        holder.enter()
    holder.leave()
    holder.enter()
