"""The wire format of Anthropic's Messages: schemas of bodies and answers."""

from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from penstock.server.body import Body, HistoryItem, IgnoredValues, Many
from penstock.server.response_format import SchemaFormat

# ── what comes in ────────────────────────────────────────────────────────────────────────────────────────────────────


class Block(HistoryItem):
    """A content block; its type determines its fields.

    `text`, `thinking`, `tool_use`, `tool_result`, `search_result`, and `document` with a text in it are read; `image`
    too, also in results, if the model takes images. Any other becomes a placeholder, but is refused in the current
    user turn.
    """

    type: str = ""
    text: str | None = None
    thinking: str | None = Field(None, description="The assistant's reasoning, passed to the chat template.")
    id: str = ""
    name: str = ""
    input: Any = None
    tool_use_id: str = ""
    tool_name: str = ""
    content: "str | Many[Block] | Any" = Field(None, union_mode="left_to_right")
    is_error: bool | None = Field(None, description="The result is given to the model with `Error: ` before it.")
    source: Any = None
    title: str | None = None


class Turn(HistoryItem):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[Block] = Field(description="Blocks of text are concatenated.")


class ToolParam(Body):
    """A tool of the caller. Anthropic's own tools, which have other types, are left out of the prompt."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {
            *("allowed_callers", "cache_control", "defer_loading", "eager_input_streaming", "input_examples"),
            "toolset_name",
        }
    )

    name: str = ""
    input_schema: dict[str, Any] | None = Field(None, description="A JSON schema of an object.")
    description: str | None = None
    strict: bool | None = Field(None, description="Inputs always validate, even if calls are not required.")
    type: str = "custom"


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="Name of the tool that must be called, for type `tool`.")
    disable_parallel_tool_use: bool | None = Field(None, description="True: at most one call.")


class Thinking(Body):
    """Whether the model reasons, if its chat template has a switch."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"budget_tokens"})

    type: Literal["adaptive", "disabled", "enabled"]
    display: str | None = Field(None, description="`omitted`: blocks of thinking come without their text.")


class OutputConfig(Body):
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"task_budget"})

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Passed to the chat template, if it has a variable for it; otherwise without effect."
    )
    format: SchemaFormat | None = Field(None, description="The answer validates against the schema.")


class ContextEdit(HistoryItem):
    """A rule by which Anthropic's servers clear parts of the conversation."""

    type: str
    keep: Any = None


class ContextManagement(Body):
    edits: Many[ContextEdit] | None = None


class PromptBody(Body):
    """Fields of the prompt, shared by messages and `count_tokens`."""

    UNSUPPORTED: ClassVar[IgnoredValues] = {
        "compaction": (),
        "container": (),
        "max_output_tokens": (),
        "mcp_servers": ([],),
        "thread": (),
    }
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {
            *("anthropic_beta", "betas", "billing_policy", "cache_control", "diagnostics", "fallback_credit_token"),
            *("fallbacks", "inference_geo", "metadata", "service_tier", "speed", "user_profile_id"),
        }
    )

    model: str | None = Field(None, description="Default: the served model.")
    messages: list[Turn] = Field(
        min_length=1,
        fail_fast=True,
        description="Consecutive turns of one role are merged. A final assistant turn is continued.",
    )
    system: str | Many[Block] | None = None
    tools: Many[ToolParam] | None = Field(None, description="Tools that the model may call.")
    tool_choice: ToolChoice | None = Field(None, description="Inputs of required calls always validate.")
    thinking: Thinking | None = Field(
        None, description="Default and `adaptive`: as in the chat template. Without effect if it has no switch."
    )
    context_management: ContextManagement | None = Field(
        None, description="Edits of thinking have no effect: the chat template decides. Others are refused."
    )
    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = Field(None, description="Older name of `output_config.format`.")


class MessagesBody(PromptBody):
    """The body of `POST /v1/messages`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"messages": [{"role": "user", "content": "What is 37 + 58?"}], "max_tokens": 50}]
        }
    )

    max_tokens: int = Field(ge=0, lt=2**31)
    stop_sequences: Many[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1, description="0 is greedy.")
    top_k: int | None = Field(None, ge=0, lt=2**31, description="Keep the k most likely tokens; 0 keeps all.")
    top_p: float | None = Field(None, gt=0, le=1)
    priority: int | None = Field(
        None, ge=-(2**31), lt=2**31, description="Penstock's own: lower values are served first."
    )


class CountTokensBody(PromptBody):
    """The body of `POST /v1/messages/count_tokens`; the other fields of a message's body have no effect."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = PromptBody.WITHOUT_EFFECT | (
        MessagesBody.model_fields.keys() - PromptBody.model_fields.keys()
    )


# ── what goes out ────────────────────────────────────────────────────────────────────────────────────────────────────

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn"]


class TextAnswer(TypedDict):
    type: Literal["text"]
    text: str


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
