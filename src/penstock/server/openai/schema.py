"""OpenAI's wire format: what a body may hold, and what answers look like."""

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from penstock.sampling_params import MAX_BIAS, MAX_LOGPROBS, MAX_N, MAX_PENALTY
from penstock.server.body import Body, Many, Metadata, Neutral
from penstock.server.openai.tools_schema import (
    CacheControl,
    OtherFields,
    ToolCallAnswer,
    ToolCallDelta,
    ToolCallMade,
    ToolChoice,
    ToolDefinition,
)
from penstock.server.response_format import FormatBody

T = TypeVar("T")

NOT_OBEYED_ANYWHERE: Neutral = {
    "truncate_prompt_tokens": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_special_tokens": (),
    "cache_salt": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}


# ── what comes in ────────────────────────────────────────────────────────────────────────────────────────────────────


class StreamOptions(Body):
    NOT_OBEYED: ClassVar[Neutral] = {"include_obfuscation": (False,)}

    include_usage: bool | None = Field(None, description="End the stream with a chunk that holds the usage.")
    continuous_usage_stats: bool | None = Field(
        None, description="vLLM's: each chunk holds the tokens of the call so far."
    )


class UsageOption(Body):
    """OpenRouter's, which LiteLLM's provider for it always sends. A whole answer has its usage in any case."""

    include: bool | None = Field(None, description="As `stream_options.include_usage`.")


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]


class GenerationBody(FormatBody):
    """Fields that chat and text completions share."""

    model: str
    n: int | None = Field(None, ge=1, le=MAX_N, description="Answers to each prompt; 1 if left out.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="The same seed gives the same answer.")
    stop: str | Many[str] | None = None
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    usage: UsageOption | None = Field(
        None, description="OpenRouter's: with `include`, a stream ends with the usage as well."
    )
    user: str | None = Field(None, description="Taken and not used.")
    metadata: Metadata | None = Field(None, description="Taken and not used.")
    prompt_cache_key: str | None = Field(None, description="Taken and not used: prefixes are cached by their tokens.")
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="Keep the k most likely tokens; 0 or -1 keeps all.")
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    presence_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, description="Of prompt and answer; 1 is none, as in `transformers`."
    )
    logit_bias: dict[TokenKey, Bias] | None = Field(None, description="What to add to tokens' logits, by their ids.")
    bad_words: Many[str] | None = Field(None, description="Words that the answer must not have.")
    bad_token_ids: Many[TokenId] | None = Field(None, description="Tokens that the answer must not have.")
    allowed_token_ids: Many[TokenId] | None = Field(None, description="The only tokens that the answer may have.")
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    stop_token_ids: Many[TokenId] | None = None
    ignore_eos: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="Lower is served first.")
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Of each token of the prompt, with the k most likely; not streamed."
    )
    num_beams: int | None = Field(
        None,
        ge=1,
        le=MAX_N,
        description="Above 1: beam search, for the `n` best hypotheses; not streamed. At most `--max-num-seqs`.",
    )
    use_beam_search: bool | None = Field(None, description="Beam search with `num_beams`, or else `n`, beams.")
    length_penalty: float | None = Field(
        None, ge=-10, le=10, description="Of beam search: the exponent of the length that scores are divided by; 1."
    )
    early_stopping: bool | Literal["never"] | None = Field(
        None, description="Of beam search, as transformers has it; false if left out."
    )


class TextPart(Body):
    NOT_OBEYED: ClassVar[Neutral] = {"image_url": (), "input_audio": (), "file": (), "refusal": (), "video_url": ()}

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None


class Message(Body):
    NOT_OBEYED: ClassVar[Neutral] = {
        "function_call": (),
        "audio": (),
        "refusal": (),
        "annotations": ([],),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[TextPart] | None = Field(None, description="Text parts are joined by line breaks.")
    name: str | None = Field(None, description="Given to the chat template.")
    reasoning_content: str | None = Field(None, description="What the assistant thought; given to the chat template.")
    cache_control: CacheControl = None
    provider_specific_fields: OtherFields = None
    tool_calls: Many[ToolCallMade] | None = Field(None, description="The assistant's.")
    tool_call_id: str | None = Field(None, description="The call whose result a tool's message is.")


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ChatBody(GenerationBody):
    """The body of `POST /v1/chat/completions`."""

    NOT_OBEYED: ClassVar[Neutral] = {
        **NOT_OBEYED_ANYWHERE,
        "audio": (),
        "best_of": (),
        "chat_template": (),
        "continue_final_message": (False,),
        "add_generation_prompt": (True,),
        "documents": (),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(
        None, ge=0, lt=2**31, description="If left out: as many as the context holds. `max_tokens` is its old name."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    safety_identifier: str | None = Field(None, description="Taken and not used.")
    cache_control: CacheControl = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")
    tools: Many[ToolDefinition] | None = Field(None, description="Functions that the model may call.")
    tool_choice: str | ToolChoice | None = Field(
        None,
        description="`auto`, `none`, `required`, one function by an object or by its name, or `allowed_tools`. A call "
        "that must be has arguments that validate.",
    )
    parallel_tool_calls: bool | None = Field(None, description="False: one call at most.")
    tool_prompt: str | None = Field(None, description="TGI's: goes at the end of the last message, if there are tools.")
    reasoning_effort: Effort | None = Field(
        None, description="Goes to the chat template, if it knows it; `none` turns reasoning off where that can be."
    )


MAX_PROMPTS = 1024
Prompts = Annotated[list[T], Field(fail_fast=True, max_length=MAX_PROMPTS)]


class CompletionBody(GenerationBody):
    """The body of `POST /v1/completions`. `max_tokens` is 16 if left out."""

    NOT_OBEYED: ClassVar[Neutral] = {**NOT_OBEYED_ANYWHERE, "suffix": ("",)}

    prompt: str | Prompts[str] | Many[int] | Prompts[Many[int]] = Field(
        description=f"One or up to {MAX_PROMPTS}, as text or token ids."
    )
    echo: bool | None = Field(
        None, description="Put the prompt before the answer; with `logprobs`, its tokens' log-probabilities, too."
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(
        None, ge=1, le=MAX_N, description="Of so many answers, the `n` with the best mean logprob; not streamed."
    )


# ── what goes out ────────────────────────────────────────────────────────────────────────────────────────────────────


class TokenDetails(TypedDict):
    cached_tokens: int


class CompletionDetails(TypedDict):
    reasoning_tokens: int


class TokenCounts(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Usage(TokenCounts):
    prompt_tokens_details: TokenDetails
    completion_tokens_details: NotRequired[CompletionDetails]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatTokenLogprob]
    refusal: None


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallAnswer]]


FinishedBy = Literal["stop", "length", "abort"]
"""`abort`, as vLLM has it: the server shut down in mid-stream."""
ChatFinishedBy = Literal["stop", "length", "abort", "tool_calls"]


class ChatChoice(TypedDict):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishedBy


class PromptToken(TypedDict):
    logprob: float
    rank: int | None
    """Rank among the most likely tokens; None if it is not one of the `top_logprobs`."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]
"""As vLLM has them: a token a row, by token ids; null for the first."""


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs]


class Delta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishedBy | None


class ChatCompletionChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[TokenCounts | None]


class LegacyLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: FinishedBy | None
    prompt_logprobs: NotRequired[PromptLogprobs]


class Completion(TypedDict):
    """Also a chunk of a stream: there, a piece of text a choice, and the usage at the end if it was asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[TokenCounts | None]


class ModelCard(TypedDict):
    """A model's card with the fields of OpenAI's and Anthropic's clients, as both ask at the same path."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    type: Literal["model"]
    display_name: str
    created_at: str
    root: str
    """As vLLM has it: where it is."""
    parent: str | None
    """As vLLM has it: of an adapter the model that it adds to."""


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]
    has_more: bool
    first_id: str
    last_id: str
