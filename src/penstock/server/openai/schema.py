"""OpenAI's wire format: schemas of bodies and answers."""

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import ConfigDict, Field
from typing_extensions import NotRequired, TypedDict

from penstock.api.sampling_params import MAX_BIAS, MAX_LOGPROBS, MAX_N, MAX_PENALTY
from penstock.fleet.model_broker import LoadStage
from penstock.server.body import AS_INTEGER, Body, HistoryItem, IgnoredValues, Many
from penstock.server.openai.tools_schema import (
    CalledFunction,
    ToolCallAnswer,
    ToolCallDelta,
    ToolCallMade,
    ToolChoice,
    ToolDefinition,
)
from penstock.server.response_format import FormatBody

T = TypeVar("T")

UNSUPPORTED_ANYWHERE: IgnoredValues = {
    "add_special_tokens": (),
    "cache_salt": (),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "format": (),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "logits_processors": ([],),
    "max_length": (),
    "max_output_tokens": (),
    "mirostat": (0,),
    "n_predict": (),
    "num_predict": (),
    "options": ({},),
    "plugins": ([],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "safe_prompt": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": (),
    "top_a": (0,),
    "transforms": ([],),
    "truncate_prompt_tokens": (),
    "xtc_probability": (0,),
}
"""Unsupported controls of OpenAI's API and other servers, which would change the answer."""
WITHOUT_EFFECT_ANYWHERE = frozenset(
    {
        *("cache_control", "cache_prompt", "client_metadata", "id_slot", "keep_alive", "metadata", "models"),
        *("prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "provider", "request_id"),
        *("safety_identifier", "service_tier", "session_id", "store", "user", "verbosity"),
    }
)
"""Hints of OpenAI's API and of other servers about caching, storage, billing, users and speed. Prefixes are cached by
their tokens, whatever the hints say."""


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class StreamOptions(Body):
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool | None = Field(None, description="End the stream with a chunk that contains the usage.")
    continuous_usage_stats: bool | None = Field(None, description="vLLM's: each chunk contains the usage so far.")


class UsageOption(Body):
    """OpenRouter's, always sent by LiteLLM's provider for it. An answer that is not streamed has its usage anyway."""

    include: bool | None = Field(None, description="Same as `stream_options.include_usage`.")


TokenId = Annotated[int, Field(ge=0, lt=2**31), AS_INTEGER]
TokenKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]


class GenerationBody(FormatBody):
    """Fields that chat and text completions share."""

    model: str | None = Field(None, description="Default: the served model.")
    n: int | None = Field(None, ge=1, le=MAX_N, description="Answers per prompt; default: 1.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**64, description="The same seed gives the same answer; default: random."
    )
    stop: str | Many[str] | None = None
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    usage: UsageOption | None = Field(
        None, description="OpenRouter's: with `include`, a stream also ends with the usage."
    )
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="Keep the k most likely tokens; 0 or -1 keeps all.")
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    presence_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, description="For tokens of prompt and answer, as in `transformers`; 1: none."
    )
    logit_bias: dict[TokenKey, Bias] | None = Field(
        None, description="Values added to the logits of tokens, by token id."
    )
    bad_words: Many[str] | None = Field(None, description="Words that the answer must not contain.")
    bad_token_ids: Many[TokenId] | None = Field(None, description="Tokens that the answer must not contain.")
    allowed_token_ids: Many[TokenId] | None = Field(None, description="The only tokens that the answer may contain.")
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    stop_token_ids: Many[TokenId] | None = None
    ignore_eos: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="Lower values are served first.")
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Log-probabilities of the prompt's tokens and of the k most likely at each position; not streamed.",
    )
    num_beams: int | None = Field(
        None,
        ge=1,
        le=MAX_N,
        description="Above 1: beam search for the `n` best hypotheses; not streamed. At most `--max-num-seqs`.",
    )
    use_beam_search: bool | None = Field(
        None, description="Beam search with `num_beams` beams, or `n` if that is not set."
    )
    length_penalty: float | None = Field(
        None, ge=-10, le=10, description="Beam search: scores are divided by length ** this; default: 1."
    )
    early_stopping: bool | Literal["never"] | None = Field(
        None, description="Beam search: as in `transformers`; default: false."
    )


class ContentPart(HistoryItem):
    """A part of a message's content: text, and images or sounds if the model takes them."""

    type: str = "text"
    text: str | None = None
    image_url: Any = Field(None, description="A data URL, or an object with `url` and `detail`.")
    detail: Any = None
    input_audio: Any = Field(None, description="A sound: an object with `data`, in base64, and `format`.")
    audio_url: Any = Field(None, description="As in vLLM: a data URL, or an object with it as `url`.")
    refusal: str | None = None


class ReasoningPart(HistoryItem):
    """A part of an earlier answer's reasoning, as OpenRouter (`text`) and LiteLLM (`thinking`) return it."""

    text: str | None = None
    thinking: str | None = None


class Message(HistoryItem):
    """A message of the conversation; one of an earlier answer may come back as any server or client returned it."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Many[ContentPart] | None = Field(None, description="Text parts are joined by line breaks.")
    name: str | None = Field(None, description="Passed to the chat template.")
    reasoning_content: str | None = Field(None, description="The assistant's reasoning, passed to the chat template.")
    reasoning: Any = Field(None, description="Another name of `reasoning_content`.")
    reasoning_details: Many[ReasoningPart] | None = Field(None, description="Another form of `reasoning_content`.")
    thinking_blocks: Many[ReasoningPart] | None = Field(None, description="Another form of `reasoning_content`.")
    tool_calls: Many[ToolCallMade] | None = Field(None, description="Calls made by the assistant.")
    function_call: CalledFunction | None = Field(None, description="The older form of one call.")
    tool_call_id: str | None = Field(None, description="Id of the call whose result a tool's message has.")

    @property
    def thoughts(self) -> str:
        """The assistant's reasoning, in whichever field it came."""
        for given in (self.reasoning_content, self.reasoning):
            if isinstance(given, str) and given:
                return given
        parts = self.reasoning_details or self.thinking_blocks or ()
        return "".join(part.text or part.thinking or "" for part in parts)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningOption(Body):
    """OpenRouter's."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"max_tokens"})

    effort: Effort | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class ThinkingOption(Body):
    """DeepSeek's, GLM's and Kimi's; also Anthropic's, as LiteLLM passes it on."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"budget_tokens", "display"})

    type: Literal["enabled", "disabled", "adaptive", "auto"]


class ChatBody(GenerationBody):
    """The body of `POST /v1/chat/completions`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"messages": [{"role": "user", "content": "What is 37 + 58?"}], "max_tokens": 50}]
        }
    )

    UNSUPPORTED: ClassVar[IgnoredValues] = {
        **UNSUPPORTED_ANYWHERE,
        "audio": (),
        "best_of": (1,),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "mm_processor_kwargs": ({},),
        "modalities": (["text"],),
        "moderation": (),
        "reasoning_format": ("auto", "deepseek"),
        "separate_reasoning": (True,),
        "thinking_token_budget": (),
        "web_search_options": (),
    }
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = WITHOUT_EFFECT_ANYWHERE

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(
        None, ge=0, lt=2**31, description="Default: as many as the context holds. `max_tokens` is its old name."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = Field(None, description="False: only with `continue_final_message`.")
    continue_final_message: bool | None = Field(
        None, description="vLLM's and TGI's: the assistant's last message begins the answer."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")
    tools: Many[ToolDefinition] | None = Field(None, description="Functions that the model may call.")
    tool_choice: str | ToolChoice | None = Field(
        None,
        description="`auto`, `none`, `required`, one function by an object or by its name, or `allowed_tools`. "
        "Arguments of required calls always validate.",
    )
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call.")
    tool_prompt: str | None = Field(None, description="TGI's: appended to the last message if there are tools.")
    reasoning_effort: Effort | None = Field(
        None,
        description="Passed to the chat template, if it has a variable for it; else `none` turns reasoning off and "
        "others turn it on, if the model has a switch; otherwise without effect.",
    )
    reasoning: ReasoningOption | None = Field(
        None, description="OpenRouter's: `effort`, `enabled`, and `exclude`, which leaves the reasoning out."
    )
    thinking: ThinkingOption | None = Field(None, description="DeepSeek's: turns reasoning on or off, if possible.")
    enable_thinking: bool | None = Field(None, description="Qwen's: turns reasoning on or off, if possible.")
    include_reasoning: bool | None = Field(None, description="False leaves the reasoning out of the answer.")


MAX_PROMPTS = 1024
Prompts = Annotated[list[T], Field(fail_fast=True, max_length=MAX_PROMPTS)]


class CompletionBody(GenerationBody):
    """The body of `POST /v1/completions`. `max_tokens` defaults to 16."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "Once upon a time", "max_tokens": 50}]})

    UNSUPPORTED: ClassVar[IgnoredValues] = {**UNSUPPORTED_ANYWHERE, "suffix": ("",)}
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = WITHOUT_EFFECT_ANYWHERE

    prompt: str | Prompts[str] | Many[int] | Prompts[Many[int]] = Field(
        description=f"One prompt or up to {MAX_PROMPTS}, as text or token ids."
    )
    echo: bool | None = Field(
        None, description="Prepend the prompt to the answer; with `logprobs`, also the log-probabilities of its tokens."
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(
        None,
        ge=1,
        le=MAX_N,
        description="Sample this many answers, and return the `n` with the highest mean log-probability; not streamed.",
    )


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class TokenDetails(TypedDict):
    cached_tokens: int
    image_tokens: NotRequired[int]
    """Of a prompt with images."""
    audio_tokens: NotRequired[int]
    """Of a prompt with sounds."""


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
"""`abort`, as in vLLM: the server shut down during the stream."""
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
"""As in vLLM: an entry per token of the prompt, by token ids; null for the first."""


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
    """Also a chunk of a stream: then with a piece of text per choice, and the usage at the end if requested."""

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
    max_model_len: int | None
    """None until the model is loaded for the first time."""
    type: Literal["model"]
    display_name: str
    created_at: str
    root: str
    """As in vLLM: the path."""
    parent: str | None
    """As in vLLM: the base model of an adapter."""
    capabilities: list[str]
    """As in Ollama: `completion`, `embedding` or `rerank`, and `vision` or `audio` if it takes images or sounds; none
    until the model is loaded for the first time."""
    status: "ModelStatus"


class ModelStatus(TypedDict):
    """A model's state; `value` as in llama.cpp's router."""

    value: Literal["unloaded", "loading", "loaded", "unloading"]
    progress: float
    """Share of the weights that have been read, 0 to 1."""
    stage: LoadStage | None
    """What its load is at; None: none is under way."""
    error: str | None
    """Why it could not be loaded last time."""


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]
    has_more: bool
    first_id: str | None
    last_id: str | None
