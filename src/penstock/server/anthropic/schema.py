"""The wire format of Anthropic's Messages: what a body may hold, and what answers look like."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict

from penstock.server.body import Body, Many, Neutral
from penstock.server.response_format import SchemaFormat

# ── what comes in ────────────────────────────────────────────────────────────────────────────────────────────────────

_CACHED = "Accepted without effect: prefixes are cached by their tokens."


class TextBlock(Body):
    NOT_OBEYED: ClassVar[Neutral] = {"citations": ([],)}

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = Field(None, description=_CACHED)


class ThinkingBlock(Body):
    """The assistant's reasoning, passed to the chat template."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description="Accepted without effect.")


class ToolUseBlock(Body):
    """A call that the assistant made."""

    NOT_OBEYED: ClassVar[Neutral] = {"caller": ({"type": "direct"},), "toolset_name": ()}

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = Field(None, description=_CACHED)


class ToolResultBlock(Body):
    """The result of a tool call."""

    NOT_OBEYED: ClassVar[Neutral] = {"toolset_name": ()}

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[TextBlock] | None = None
    is_error: bool | None = Field(None, description="The content is given to the model with `Error: ` before it.")
    cache_control: dict[str, Any] | None = Field(None, description=_CACHED)


def _kind_of(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return f"{kind} block"


_NO_BLOCK = "a block is of type text, thinking, tool_use or tool_result here"
Block = Annotated[
    Annotated[TextBlock, Tag("text block")]
    | Annotated[ThinkingBlock, Tag("thinking block")]
    | Annotated[ToolUseBlock, Tag("tool_use block")]
    | Annotated[ToolResultBlock, Tag("tool_result block")],
    Discriminator(_kind_of, custom_error_type="no_block", custom_error_message=_NO_BLOCK),
]


class Turn(Body):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[Block] = Field(description="Blocks of text are concatenated.")


class ToolParam(Body):
    """A tool of the caller's."""

    NOT_OBEYED: ClassVar[Neutral] = {
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "eager_input_streaming": (True,),
        "input_examples": ([],),
    }

    name: str
    input_schema: dict[str, Any] = Field(description="A JSON schema of an object.")
    description: str | None = None
    strict: bool | None = Field(None, description="Inputs always validate, even if calls are not required.")
    type: Literal["custom"] | None = None
    cache_control: dict[str, Any] | None = Field(None, description=_CACHED)


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="Name of the tool that must be called, for type `tool`.")
    disable_parallel_tool_use: bool | None = Field(None, description="True: at most one call.")


class Thinking(Body):
    """Whether the model reasons, if its chat template knows how to say so."""

    NOT_OBEYED: ClassVar[Neutral] = {"budget_tokens": (), "display": ("summarized",)}

    type: Literal["adaptive", "disabled", "enabled"]


class OutputConfig(Body):
    NOT_OBEYED: ClassVar[Neutral] = {"effort": ()}

    format: SchemaFormat | None = Field(None, description="The answer validates against the schema.")


class PromptBody(Body):
    """Fields of the prompt, shared by messages and `count_tokens`."""

    NOT_OBEYED: ClassVar[Neutral] = {
        "betas": ([],),
        "billing_policy": (),
        "compaction": (),
        "container": (),
        "context_management": (),
        "diagnostics": (),
        "fallback_credit_token": (),
        "fallbacks": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
        "thread": (),
        "user_profile_id": (),
    }

    model: str
    messages: list[Turn] = Field(
        min_length=1,
        fail_fast=True,
        description="Consecutive turns of one role are merged. A final assistant turn is continued.",
    )
    system: str | Many[TextBlock] | None = None
    cache_control: dict[str, Any] | None = Field(None, description=_CACHED)
    tools: Many[ToolParam] | None = Field(None, description="Tools that the model may call.")
    tool_choice: ToolChoice | None = Field(None, description="Inputs of required calls always validate.")
    thinking: Thinking | None = Field(None, description="Default: as in the chat template.")
    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = Field(None, description="Older name of `output_config.format`.")


class MessagesBody(PromptBody):
    """The body of `POST /v1/messages`."""

    max_tokens: int = Field(ge=0, lt=2**31)
    metadata: dict[str, Any] | None = Field(None, description="Accepted without effect.")
    stop_sequences: Many[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1, description="0 is greedy.")
    top_k: int | None = Field(None, ge=0, lt=2**31, description="Keep the k most likely tokens; 0 keeps all.")
    top_p: float | None = Field(None, gt=0, le=1)
    priority: int | None = Field(
        None, ge=-(2**31), lt=2**31, description="Penstock's own: lower values are served first."
    )


# ── what goes out ────────────────────────────────────────────────────────────────────────────────────────────────────

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn"]


class TextAnswer(TypedDict):
    type: Literal["text"]
    text: str
    citations: None


class ThinkingAnswer(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseAnswer(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


BlockAnswer = TextAnswer | ThinkingAnswer | ToolUseAnswer


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
    content: list[BlockAnswer]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: Usage


class TokenCount(TypedDict):
    input_tokens: int
