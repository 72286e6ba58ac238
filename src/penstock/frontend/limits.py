"""Limits on queued and open requests, overall and per tenant; requests above a limit are refused immediately.

CallLimits (HTTP) ──Caller──> AsyncEngine.open ──> Admission.enter ──> queue
"""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from penstock.api.request import MediaKind, Request
from penstock.checkpoint.created import LATEST
from penstock.config.engine_config import option
from penstock.dataclass import dataclass
from penstock.errors import (
    ConfigError,
    InvalidRequestError,
    ModelNotPermittedError,
    OverloadedError,
    PromptTooLongError,
    shown,
)


class Account(Protocol):
    """A caller's token rate limit."""

    def check(self, num_tokens: int) -> None:
        """
        Raises:
            RateLimitError: the allowance does not cover this many tokens now.
            InvalidRequestError: the allowance is never large enough.
        """

    def spend(self, num_tokens: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request, with its limits and permissions."""

    tenant: str = ""
    namespace: str = ""
    """Prefix cache namespace: callers with different namespaces never share a block."""
    top_priority: int | None = None
    """The lowest (most urgent) `priority` its requests may have; None: any."""
    account: Account | None = None
    operator: bool = False
    """Whether it may see data of other callers."""
    models: frozenset[str] | None = None
    """Names of the models and adapters that it may use; None: all."""

    def may_use(self, name: str) -> bool:
        """Whether it may use the model or adapter of this name; Ollama's clients add a tag to a name."""
        return self.models is None or name in self.models or name.removesuffix(LATEST) in self.models

    def check_model(self, name: str) -> None:
        """
        Raises:
            ModelNotPermittedError: it may not use the model or adapter of this name, whether or not there is one.
        """
        if not self.may_use(name):
            raise ModelNotPermittedError(f"this API key may not use the model {shown(name)}; it may use: {self._known}")

    def check_any(self, names: Iterable[str]) -> None:
        """
        Raises:
            ModelNotPermittedError: it may use none of these models and adapters, whose names the error does not tell.
        """
        if not any(map(self.may_use, names)):
            raise ModelNotPermittedError(f"this API key may use no model of this server; it may use: {self._known}")

    @property
    def _known(self) -> str:
        return ", ".join(sorted(self.models or ()))

    @property
    def default_priority(self) -> int:
        """Priority of a request that does not set one."""
        return max(0, self.top_priority or 0)

    def check_priority(self, priority: int) -> None:
        """
        Raises:
            InvalidRequestError: the caller may not use this priority.
        """
        if self.top_priority is not None and priority < self.top_priority:
            raise InvalidRequestError(
                f"priority is {priority}; the most urgent that this API key may ask for is {self.top_priority}",
                "priority",
            )


ANYONE = Caller()


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of the queue and of the time in it.

    Raises:
        ConfigError: a value is out of range.
    """

    max_queued: int = option(1024, "maximum queued answers, beside the max_num_seqs that run; more are refused")
    max_queued_tokens: int = option(
        4_194_304, "maximum prompt tokens of requests without a first token; more are refused"
    )
    max_prompt_tokens: int | None = option(None, "maximum tokens of a prompt; default: the context")
    queue_timeout: float = option(
        600.0, "maximum seconds in the queue; a request may ask for less (header x-queue-timeout)"
    )
    refuse_long_max_tokens: bool = option(
        False,
        "refuse requests whose max_tokens exceeds what the prompt leaves of the context; by default the answer ends "
        "with the context (finish reason length)",
    )
    max_unread_tokens: int = option(4096, "unread tokens per sequence after which a stream with a slow reader is ended")

    def __post_init__(self) -> None:
        for name, least in (("max_queued", 0), ("max_queued_tokens", 1), ("max_unread_tokens", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ConfigError(f"max_prompt_tokens must be at least 1, not {self.max_prompt_tokens}")
        if not self.queue_timeout > 0:
            raise ConfigError(f"queue_timeout must be above 0 seconds, not {self.queue_timeout:g}")


class SharedLimit:
    """A limit shared by several tenants; no single tenant can use it up.

    A tenant may hold at most `LARGEST_SHARE` times what would still be free: the first can take four fifths of the
    total, a second four fifths of the rest, and so on (dynamic thresholds, Choudhury and Hahne 1998). When nothing is
    held, a tenant may take all of it.
    """

    LARGEST_SHARE = 4

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        self._by_name: dict[str, int] = {}

    def fits(self, amount: int, name: str) -> bool:
        """Whether `amount` more may be taken now; `name` "" stands for all tenants together."""
        if not self.held:
            return amount <= self.most
        free, mine = self.most - self.held - amount, self._by_name.get(name, 0) + amount
        return free >= 0 and (not name or mine <= self.LARGEST_SHARE * free)

    def take(self, amount: int, name: str) -> None:
        """Take `amount`; a negative amount is returned."""
        self.held += amount
        mine = self._by_name.get(name, 0) + amount
        # A table of tenants that hold something: keys come and go.
        if mine:
            self._by_name[name] = mine
        else:
            self._by_name.pop(name, None)


class Timer(Protocol):
    """A scheduled call, such as `asyncio.TimerHandle`."""

    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Timer]
"""Schedules a function after this many seconds."""


def call_later(seconds: float, call: Callable[[], None]) -> Timer:
    """Schedule a function on the running event loop."""
    import asyncio  # a server has it; the command line reads this module for the options' sake alone

    return asyncio.get_running_loop().call_later(seconds, call)


@dataclass(slots=True)
class Admitted:
    """What one open request counts for in the limits."""

    caller: Caller
    answers: int
    """Answers, or beams."""
    tokens_waiting: int
    """Prompt tokens; 0 after the first output."""
    pixels: int = 0
    """Bytes of its images."""
    timer: Timer | None = None


class Admission:
    """Counts open requests, and refuses those beyond the limits before they reach the engine."""

    def __init__(
        self,
        limits: QueueLimits,
        max_num_seqs: int,
        expire: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        call_later: CallLater = call_later,
    ) -> None:
        """
        Args:
            expire: called repeatedly with the id of a request that has had no output in its time; must end the request
                if it has not run.
        """
        self._limits = limits
        self._answers = SharedLimit(max_num_seqs + limits.max_queued)
        self._tokens = SharedLimit(limits.max_queued_tokens)
        self._pixels = SharedLimit(sys.maxsize)
        self._expire = expire
        self._clock = clock
        self._call_later = call_later
        self._num_waiting = 0
        self._last_left: float | None = None
        self._seconds_an_answer = 1.0

    def resize(self, max_num_seqs: int, image_pixels: int) -> None:
        """Set the number of sequences that can run, and the bytes that images may take; 0: any number.

        Open requests stay, even if they exceed it.
        """
        self._answers.most = max_num_seqs + self._limits.max_queued
        self._pixels.most = image_pixels or sys.maxsize

    @property
    def num_open(self) -> int:
        """Answers (n per request) and beams that run or wait."""
        return self._answers.held

    @property
    def tokens_waiting(self) -> int:
        """Prompt tokens of the requests without output so far."""
        return self._tokens.held

    def enter(self, requests: Sequence[Request], caller: Caller, timeout: float | None) -> list[Admitted]:
        """Count all requests of a call as open, or none. Returns what each counts for.

        Args:
            timeout: seconds that each may wait in the queue, up to the server's own limit; None: the server's limit.

        Raises:
            OverloadedError: the limit of open or queued requests is reached.
            RateLimitError: the caller's token rate limit is exhausted.
            PromptTooLongError: a prompt is longer than `max_prompt_tokens`.
        """
        answers = sum(request.params.num_sequences for request in requests)
        tokens = sum(len(request.prompt_token_ids) for request in requests)
        pixels = sum(map(_pixels_of, requests))
        if self._limits.max_prompt_tokens is not None:
            self._check_prompts(requests, self._limits.max_prompt_tokens)
        self._check_room(answers, tokens, caller)
        if pixels:
            self._check_images(requests, pixels, caller)
        # Last, as it takes from the caller's allowance: nothing may refuse the call after that.
        if caller.account is not None:
            caller.account.check(tokens)
            caller.account.spend(tokens)
        self._answers.take(answers, caller.tenant)
        self._tokens.take(tokens, caller.tenant)
        self._pixels.take(pixels, caller.tenant)
        self._num_waiting += len(requests)
        seconds = self.queue_seconds(timeout)
        return [self._admit(request, caller, seconds) for request in requests]

    def restore(self, request: Request) -> Admitted:
        """Count a request that an earlier server admitted as open: it is never refused, and waits however long.

        Nothing is charged to its caller, whose token rate limit began anew with this server.
        """
        admitted = _admitted(request, Caller(request.tenant))
        self._answers.take(admitted.answers, request.tenant)
        self._tokens.take(admitted.tokens_waiting, request.tenant)
        self._pixels.take(admitted.pixels, request.tenant)
        self._num_waiting += 1
        return admitted

    def queue_seconds(self, timeout: float | None) -> float:
        """Seconds that a request may wait in the queue; `timeout` as in `enter`."""
        longest = self._limits.queue_timeout
        return longest if timeout is None else min(timeout, longest)

    def _admit(self, request: Request, caller: Caller, seconds: float) -> Admitted:
        admitted = _admitted(request, caller)

        def expire() -> None:
            admitted.timer = self._call_later(1.0, expire)  # again: an engine that dies now loses the message
            self._expire(request.request_id)

        admitted.timer = self._call_later(seconds, expire)
        return admitted

    @staticmethod
    def _check_prompts(requests: Sequence[Request], most: int) -> None:
        for request in requests:
            if len(request.prompt_token_ids) > most:
                raise PromptTooLongError(
                    f"the prompt is too long: {len(request.prompt_token_ids)} tokens > {most} maximum "
                    "(max_prompt_tokens)",
                    "prompt",
                )

    def check_number(self, answers: int) -> None:
        """
        Raises:
            InvalidRequestError: a call asks for more answers than may ever be open.
        """
        if answers > self._answers.most:
            raise InvalidRequestError(
                f"the call asks for {answers} answers; at most {self._answers.most} may be open at once "
                "(max_num_seqs and max_queued): ask for fewer"
            )

    def _check_room(self, answers: int, tokens: int, caller: Caller) -> None:
        self.check_number(answers)
        if not self._answers.fits(answers, caller.tenant):
            raise OverloadedError(
                f"the queue is full: {self._answers.held} answers run or wait, of at most {self._answers.most} "
                "(max_num_seqs and max_queued), of which one API key may not take all",
                self._retry_after(),
            )
        if self._tokens.held and not self._tokens.fits(tokens, caller.tenant):
            raise OverloadedError(
                f"the queue is full: {self._tokens.held} prompt tokens wait; this call's {tokens} would exceed "
                f"the limit of one API key, or of all together, {self._tokens.most} (max_queued_tokens)",
                self._retry_after(),
            )

    def _check_images(self, requests: Sequence[Request], pixels: int, caller: Caller) -> None:
        most, held = self._pixels.most, self._pixels.held
        if pixels <= most and self._pixels.fits(pixels, caller.tenant):
            return
        kinds = sorted({image.kind for request in requests for image in request.images})
        what = " and ".join(f"{kind}s" for kind in kinds)
        form, smaller = (" or ".join(words[kind] for kind in kinds) for words in (_FORMS, _SMALLER))
        if pixels > most:
            raise InvalidRequestError(
                f"the call's {what} take {pixels} bytes as {form}; the memory plan has {most} for those of all open "
                f"requests: send fewer or {smaller} {what}, or give the engine more memory"
            )
        raise OverloadedError(
            f"the {what} of open requests take {held} bytes as {form}; the memory plan has {most} for them, of which "
            f"one API key may not take all, and this call's {pixels} do not fit",
            self._retry_after(),
        )

    def _retry_after(self) -> float:
        """Estimated seconds until the queue is empty, from the recent rate of completed answers; from 1 to 60."""
        return min(max(self._seconds_an_answer * self._num_waiting, 1.0), 60.0)

    def output(self, admitted: Admitted, num_tokens: int) -> None:
        """Record an output: the request no longer waits, and its caller is charged for the tokens."""
        if admitted.tokens_waiting:
            self._begun(admitted)
        if admitted.caller.account is not None:
            admitted.caller.account.spend(num_tokens)

    def _begun(self, admitted: Admitted) -> None:
        self._tokens.take(-admitted.tokens_waiting, admitted.caller.tenant)
        self._num_waiting -= 1
        admitted.tokens_waiting = 0
        if admitted.timer is not None:
            admitted.timer.cancel()

    def left(self, admitted: Admitted) -> None:
        """Subtract an ended request from the limits."""
        self._answers.take(-admitted.answers, admitted.caller.tenant)
        self._pixels.take(-admitted.pixels, admitted.caller.tenant)
        now = self._clock() if self._num_waiting else None  # the rate is measured only while there is a queue
        if admitted.tokens_waiting:
            self._begun(admitted)
        elif now is not None and self._last_left is not None:
            seconds = (now - self._last_left) / admitted.answers
            self._seconds_an_answer += 0.1 * (seconds - self._seconds_an_answer)
        self._last_left = now


_FORMS: dict[MediaKind, str] = {"image": "pixels", "sound": "features"}
_SMALLER: dict[MediaKind, str] = {"image": "smaller", "sound": "shorter"}


def _admitted(request: Request, caller: Caller) -> Admitted:
    return Admitted(caller, request.params.num_sequences, len(request.prompt_token_ids), _pixels_of(request))


def _pixels_of(request: Request) -> int:
    """Bytes of its images, which the engine holds until it ends."""
    return sum(len(image.pixels) for image in request.images)
