"""The wire format of Anthropic's Messages: what a body may hold, and what answers look like."""

from typing import Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import TypedDict

from penstock.server.body import Body, Many, Neutral

# ── what comes in ────────────────────────────────────────────────────────────────────────────────────────────────────

_NOT_A_TEXT: Neutral = {
    "source": (),
    "title": (),
    "context": (),
    "id": (),
    "name": (),
    "input": (),
    "tool_use_id": (),
    "content": (),
    "is_error": (),
    "thinking": (),
    "signature": (),
    "data": (),
    "caller": (),
    "citations": ([],),
}
_CACHED = "Taken and not used: prefixes are cached by their tokens."


class TextBlock(Body):
    NOT_OBEYED: ClassVar[Neutral] = _NOT_A_TEXT

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = Field(None, description=_CACHED)


class Turn(Body):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[TextBlock] = Field(description="Blocks of text are joined as they are.")


class PromptBody(Body):
    """What asking for an answer and counting its prompt have in common."""

    NOT_OBEYED: ClassVar[Neutral] = {
        "betas": ([],),
        "container": (),
        "context_management": (),
        "diagnostics": (),
        "fallbacks": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "output_config": ({},),
        "output_format": (),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
        "thinking": ({"type": "disabled"},),
        "tool_choice": ({"type": "none"}, {"type": "auto"}),
        "tools": ([],),
        "user_profile_id": (),
    }

    model: str
    messages: list[Turn] = Field(
        min_length=1,
        fail_fast=True,
        description="Turns of one role that follow each other are one. A last one of the assistant's is continued.",
    )
    system: str | Many[TextBlock] | None = None
    cache_control: dict[str, Any] | None = Field(None, description=_CACHED)


class MessagesBody(PromptBody):
    """The body of `POST /v1/messages`."""

    max_tokens: int = Field(ge=0, lt=2**31)
    metadata: dict[str, Any] | None = Field(None, description="Taken and not used.")
    stop_sequences: Many[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1, description="0 is greedy.")
    top_k: int | None = Field(None, ge=0, lt=2**31, description="Keep the k likeliest tokens; 0 keeps all.")
    top_p: float | None = Field(None, gt=0, le=1)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="Penstock's own: lower is served first.")


# ── what goes out ────────────────────────────────────────────────────────────────────────────────────────────────────

StopReason = Literal["end_turn", "max_tokens", "stop_sequence"]


class TextAnswer(TypedDict):
    type: Literal["text"]
    text: str
    citations: None


class Usage(TypedDict):
    """The prompt's tokens are `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextAnswer]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: Usage


class TokenCount(TypedDict):
    input_tokens: int
