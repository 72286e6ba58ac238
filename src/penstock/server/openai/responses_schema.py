"""The wire format of OpenAI's Responses, as far as they are text and calls of tools."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field
from typing_extensions import NotRequired, TypedDict

from penstock.api.sampling_params import MAX_LOGPROBS
from penstock.server.body import Body, IgnoredValues, Many, Metadata
from penstock.server.openai.responses_items_schema import Item
from penstock.server.openai.responses_tools_schema import Tool, ToolChoiceObject
from penstock.server.openai.schema import (
    UNSUPPORTED_ANYWHERE,
    WITHOUT_EFFECT_ANYWHERE,
    ChatTokenLogprob,
    Effort,
    TokenDetails,
)
from penstock.server.response_format import TextFormat

LOGPROBS = "message.output_text.logprobs"

# ── what comes in ────────────────────────────────────────────────────────────────────────────────────────────────────


class TextBody(Body):
    """Format of an answer's text."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: TextFormat | None = None


class ReasoningOptions(Body):
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"context", "generate_summary", "mode", "summary"})

    effort: Effort | None = None


class ResponsesStreamOptions(Body):
    """A response's usage always comes in the last event."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {"continuous_usage_stats", "include_obfuscation", "include_usage"}
    )


_CONTROLS_OF_CHATS: IgnoredValues = {
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "max_completion_tokens": (),
    "max_tokens": (),
    "messages": (),
    "min_p": (0,),
    "n": (1,),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": (),
    "seed": (),
    "stop": ([], ""),
    "top_k": (0, -1),
}


class ResponsesBody(Body):
    """The body of `POST /v1/responses`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"input": "What is 37 + 58?", "max_output_tokens": 50}]})

    UNSUPPORTED: ClassVar[IgnoredValues] = {
        **{name: neutral for name, neutral in UNSUPPORTED_ANYWHERE.items() if name != "max_output_tokens"},
        **_CONTROLS_OF_CHATS,
        "access_programs": (),
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "moderation": (),
        "prompt": (),
    }
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = WITHOUT_EFFECT_ANYWHERE - {"metadata", "store"} | {
        "max_tool_calls",
        "usage",
    }

    model: str | None = Field(None, description="Default: the served model.")
    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: str | None = Field(
        None, description="System message, placed before the conversation. Not carried over to the next response."
    )
    include: Many[str] | None = Field(None, description=f"`{LOGPROBS}`; others have no effect.")
    max_output_tokens: int | None = Field(None, ge=0, lt=2**31)
    metadata: Metadata | None = Field(None, description="Returned with the answer.")
    previous_response_id: str | None = Field(None, description="A stored response, which the input continues.")
    store: bool | None = Field(
        None, description="False: the response is not stored; default: true, unless the server stores none."
    )
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy.")
    text: TextBody | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description=f"Needs {LOGPROBS} in `include`.")
    top_p: float | None = Field(None, gt=0, le=1)
    tools: Many[Tool] | None = Field(
        None, description="Functions, custom tools, `local_shell`, and namespaces of tools. Others are left out."
    )
    tool_choice: Literal["auto", "none", "required"] | ToolChoiceObject | None = Field(
        None, description="Arguments of required calls always validate."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="`auto` has no effect: a conversation that is too long is refused."
    )
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call.")
    reasoning: ReasoningOptions | None = Field(
        None, description="`effort` is passed to the chat template, if it has a variable for it; otherwise no effect."
    )
    priority: int | None = Field(
        None, ge=-(2**31), lt=2**31, description="Penstock's own: lower values are served first."
    )


# ── what goes out ────────────────────────────────────────────────────────────────────────────────────────────────────

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class ReasoningContent(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(TypedDict):
    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[Any]
    content: list[ReasoningContent]


class OutputCall(TypedDict):
    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


class OutputCustomCall(TypedDict):
    id: str
    type: Literal["custom_tool_call"]
    status: Status
    call_id: str
    name: str
    namespace: NotRequired[str]
    input: str


class ShellAction(TypedDict):
    type: Literal["exec"]
    command: list[str]
    env: dict[str, str]
    timeout_ms: NotRequired[int]
    working_directory: NotRequired[str]


class OutputShellCall(TypedDict):
    id: str
    type: Literal["local_shell_call"]
    status: Status
    call_id: str
    action: ShellAction


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall | OutputShellCall


class WhyIncomplete(TypedDict):
    reason: Literal["max_output_tokens", "abort"]
    """`abort`: the server shut down in mid-stream."""


class TextOptions(TypedDict):
    format: dict[str, Any]
    """The requested format; by default the type `text`."""


class InputDetails(TokenDetails):
    cache_write_tokens: int


class OutputDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseObject(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    background: bool
    completed_at: int | None
    error: None
    incomplete_details: WhyIncomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemList(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
