"""The wire format of OpenAI's Responses, as far as they are text and calls of functions, without memory."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict

from penstock.sampling_params import MAX_LOGPROBS
from penstock.server.body import Body, Many, Metadata, Neutral
from penstock.server.openai.schema import ChatTokenLogprob, Effort, TokenDetails
from penstock.server.response_format import TextFormat

LOGPROBS = "message.output_text.logprobs"

# ── what comes in ────────────────────────────────────────────────────────────────────────────────────────────────────


class TextBody(Body):
    """Format of an answer's text."""

    NOT_OBEYED: ClassVar[Neutral] = {"verbosity": ("medium",)}

    format: TextFormat | None = None


class TextItem(Body):
    """A piece of a message. What an answer's piece has beside its text may come back, and is not used."""

    NOT_OBEYED: ClassVar[Neutral] = {
        "image_url": (),
        "file_id": (),
        "file_data": (),
        "file_url": (),
        "filename": (),
        "input_audio": (),
        "refusal": (),
        "detail": (),
        "prompt_cache_breakpoint": (),
    }

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class MessageItem(Body):
    """A message; also one of an answer's, as it came."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Many[TextItem] = Field(description="Pieces are concatenated.")
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: str | None = None


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    """The assistant's reasoning, passed to the chat template."""

    NOT_OBEYED: ClassVar[Neutral] = {"encrypted_content": (), "summary": ([],)}

    type: Literal["reasoning"]
    content: Many[ReasoningText] | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class FunctionCallItem(Body):
    """A call that the assistant made."""

    NOT_OBEYED: ClassVar[Neutral] = {"async": (False,), "caller": ({"type": "direct"},), "namespace": ()}

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class FunctionCallOutputItem(Body):
    """The result of a function call."""

    NOT_OBEYED: ClassVar[Neutral] = {"caller": ({"type": "direct"},), "namespace": ()}

    type: Literal["function_call_output"]
    call_id: str
    output: str | Many[TextItem]
    id: str | None = None
    name: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


def _kind_of(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return f"{kind} item"


_NO_ITEM = "an item is of type message, reasoning, function_call or function_call_output here"
Item = Annotated[
    Annotated[MessageItem, Tag("message item")]
    | Annotated[ReasoningItem, Tag("reasoning item")]
    | Annotated[FunctionCallItem, Tag("function_call item")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output item")],
    Discriminator(_kind_of, custom_error_type="no_item", custom_error_message=_NO_ITEM),
]


class FunctionTool(Body):
    """A function of the caller's."""

    NOT_OBEYED: ClassVar[Neutral] = {
        "allowed_callers": (["direct"],),
        "async": (False,),
        "defer_loading": (False,),
        "output_schema": (),
    }

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of an object; default: no arguments.")
    strict: bool | None = Field(None, description="Arguments always validate, even if calls are not required.")


class ToolByName(Body):
    type: Literal["function"]
    name: str


class ToolChoiceObject(Body):
    """One function that must be called, or those that may."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Many[ToolByName] | None = None


class ReasoningOptions(Body):
    NOT_OBEYED: ClassVar[Neutral] = {"summary": (), "generate_summary": (), "context": (), "mode": ()}

    effort: Effort | None = None


class ResponsesStreamOptions(Body):
    """A response's usage always comes in the last event."""

    NOT_OBEYED: ClassVar[Neutral] = {
        "include_obfuscation": (False,),
        "include_usage": (),
        "continuous_usage_stats": (False,),
    }


class ResponsesBody(Body):
    """The body of `POST /v1/responses`. Nothing is stored: a conversation is sent whole each time."""

    NOT_OBEYED: ClassVar[Neutral] = {
        "access_programs": (),
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "truncation": ("disabled",),
    }

    model: str
    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: str | None = Field(None, description="System message, placed before the input.")
    include: Many[Literal["message.output_text.logprobs"]] | None = None
    max_output_tokens: int | None = Field(None, ge=0, lt=2**31)
    metadata: Metadata | None = Field(None, description="Returned with the answer.")
    prompt_cache_key: str | None = Field(
        None, description="Accepted without effect: prefixes are cached by their tokens."
    )
    safety_identifier: str | None = Field(None, description="Accepted without effect.")
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy.")
    text: TextBody | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description=f"Needs {LOGPROBS} in `include`.")
    top_p: float | None = Field(None, gt=0, le=1)
    tools: Many[FunctionTool] | None = Field(None, description="Functions that the model may call.")
    tool_choice: Literal["auto", "none", "required"] | ToolChoiceObject | None = Field(
        None, description="Arguments of required calls always validate."
    )
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call.")
    reasoning: ReasoningOptions | None = None
    user: str | None = Field(None, description="Accepted without effect.")
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
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


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
    previous_response_id: None
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
