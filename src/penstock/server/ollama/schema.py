"""Ollama's wire format: schemas of bodies and answers."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field
from typing_extensions import NotRequired, TypedDict

from penstock.api.sampling_params import MAX_LOGPROBS
from penstock.server.body import Body, HistoryItem, IgnoredValues, Many

# ── what comes in ────────────────────────────────────────────────────────────────────────────────────────────────────

_LEVELS = Literal["low", "medium", "high", "max"]
KeepAlive = Annotated[
    float | str | None,
    Field(
        description="Time without requests after which the model is unloaded, in seconds or as `5m`; below 0: never. "
        "Without effect on a server whose model stays loaded."
    ),
]


class Options(Body):
    """Ollama's `options`."""

    UNSUPPORTED: ClassVar[IgnoredValues] = {
        "mirostat": (0,),
        "penalize_newline": (True,),
        "rope_frequency_base": (),
        "rope_frequency_scale": (),
        "tfs_z": (1,),
    }
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {
            *("draft_num_predict", "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "mirostat_eta"),
            *("mirostat_tau", "num_batch", "num_gpu", "num_gqa", "num_keep", "num_thread", "numa", "use_mlock"),
            *("use_mmap", "vocab_only"),
        }
    )

    num_predict: int | None = Field(
        None, ge=-2, description="Maximum tokens of the answer; -1, -2 or left out: as many as the context holds."
    )
    num_ctx: int | None = Field(
        None,
        ge=1,
        description="Size of the context, for prompt and answer together; at most the server's. A prompt that exceeds "
        "it is refused, never truncated.",
    )
    temperature: float | None = Field(
        None, description="Default: the server's or checkpoint's; 0.8 if they set none of the controls of sampling."
    )
    top_k: int | None = Field(None, description="0 or less keeps all; default: likewise, 40.")
    top_p: float | None = Field(None, description="Default: likewise, 0.9.")
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = Field(None, description="For tokens of prompt and answer; 1: none.")
    repeat_last_n: int | None = Field(
        None,
        ge=-1,
        description="0 turns all penalties off; -1: they count the whole context, as if left out. With a penalty, any "
        "window smaller than the context is refused.",
    )
    presence_penalty: float | None = Field(None, description="For tokens of the answer.")
    frequency_penalty: float | None = Field(None, description="For tokens of the answer.")
    seed: int | None = Field(None, description="-1 or left out: random.")
    stop: str | Many[str] | None = None


class GenerationBody(Body):
    """Fields of both routes that generate."""

    UNSUPPORTED: ClassVar[IgnoredValues] = {"_debug_render_only": (False,), "shift": (False,), "template": ("",)}
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"truncate"})

    model: str | None = Field(None, description="Default: the served model.")
    stream: bool = Field(True, description="Send the answer in pieces, as lines of JSON.")
    format: Literal["", "json"] | dict[str, Any] | None = Field(
        None, description="`json`: any JSON object; a JSON schema: JSON that validates against it."
    )
    options: Options | None = Field(None, description="See below.")
    keep_alive: KeepAlive = None
    think: bool | _LEVELS | None = Field(
        None,
        description="Whether a model that can reason does so, and how much; default: as its chat template says. True "
        "and the levels are refused for other models.",
    )
    logprobs: bool | None = Field(None, description="Return the log-probability of each token.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Alternatives at each token; needs `logprobs`."
    )


class CalledFunction(HistoryItem):
    """A function's name and arguments, in a call of an earlier turn."""

    name: str = ""
    arguments: Any = None


class CallMade(HistoryItem):
    """A call of an earlier turn."""

    id: str = ""
    function: CalledFunction


class Message(HistoryItem):
    """A turn."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: Many[str] | None = None
    tool_calls: Many[CallMade] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ToolFunction(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of an object; default: no arguments.")
    strict: bool | None = None


class Tool(Body):
    """A function of the caller's."""

    type: Literal["function"] = "function"
    function: ToolFunction


class ChatBody(GenerationBody):
    """The body of `POST /api/chat`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}]}
    )

    messages: Many[Message] = Field(
        default_factory=list,
        description="A final message of the assistant is continued. Without messages: `load`, as the model always is.",
    )
    tools: Many[Tool] | None = None


class GenerateBody(GenerationBody):
    """The body of `POST /api/generate`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "Why is the sky blue?"}]})

    prompt: str = Field("", description="Without it: `load`, as the model always is.")
    system: str | None = Field(None, description="The system message of the chat template.")
    suffix: str | None = Field(
        None, description="Text after the answer, for models whose tokenizer has marks for that; others refuse it."
    )
    raw: bool | None = Field(None, description="The prompt is tokenized as it is, without the chat template.")
    context: Many[int] | None = Field(
        None, description="`context` of an earlier answer, which precedes the prompt as it is."
    )
    images: Many[str] | None = Field(None, description="Images before the prompt, in base64, if the model takes them.")


class EmbedBody(Body):
    """The body of `POST /api/embed`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"input": ["Hello", "Good morning"]}]})

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"options"})

    model: str | None = Field(None, description="Default: the served model.")
    input: str | Many[str] = Field(description="At most 2,048 texts.")
    truncate: bool = Field(False, description="Truncate texts that are too long at their end; default: refuse them.")
    keep_alive: KeepAlive = None
    dimensions: int | None = Field(
        None, ge=1, description="Keep this many elements of the vectors, for models trained for that."
    )


class EmbeddingsBody(Body):
    """The body of `POST /api/embeddings`."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"options"})

    model: str | None = Field(None, description="Default: the served model.")
    prompt: str
    keep_alive: KeepAlive = None


class NameBody(Body):
    """The name of a model."""

    model: str | None = None
    name: str | None = Field(None, description="The old name of `model`.")


class ShowBody(NameBody):
    """The body of `POST /api/show`."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"options", "system", "template", "verbose"})


class PullBody(NameBody):
    """The body of `POST /api/pull`."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"insecure", "password", "username"})

    stream: bool = True


class CopyBody(Body):
    """The body of `POST /api/copy`."""

    source: str
    destination: str


class Parameters(Body):
    """Defaults of a created model."""

    UNSUPPORTED: ClassVar[IgnoredValues] = {
        **Options.UNSUPPORTED,
        **dict.fromkeys(("frequency_penalty", "presence_penalty"), (0,)),
        **dict.fromkeys(("repeat_last_n", "seed"), (-1,)),
    }
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = Options.WITHOUT_EFFECT

    num_predict: int | None = Field(None, ge=-2, description="-1 and -2: as many as the context holds.")
    num_ctx: int | None = Field(
        None, ge=1, description="Size of the context, unless the server is given one; at most the model's own."
    )
    temperature: float | None = Field(None, ge=0)
    top_k: int | None = Field(None, description="0 or less keeps all.")
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    repeat_penalty: float | None = Field(None, gt=0)
    stop: str | Many[str] | None = None


class PresetMessage(Body):
    """A message that precedes every conversation."""

    UNSUPPORTED: ClassVar[IgnoredValues] = {"images": ([],), "thinking": ("",), "tool_calls": ([],)}

    role: Literal["system", "user", "assistant"]
    content: str = ""


class CreateBody(NameBody):
    """The body of `POST /api/create`."""

    UNSUPPORTED: ClassVar[IgnoredValues] = {
        **dict.fromkeys(("draft_files", "info"), ({},)),
        **dict.fromkeys(("draft_quantize", "parser", "quantization", "quantize", "remote_host", "renderer"), ("",)),
    }
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"requires"})

    source: str | None = Field(
        None,
        alias="from",
        description="A model to start from: the served one, a created one, or one of `penstock list`.",
    )
    files: dict[str, str] = Field(
        default_factory=dict,
        description="Digests of uploaded GGUF files (`/api/blobs`), by file name.",
        max_length=1000,
    )
    adapters: dict[str, str] = Field(
        default_factory=dict,
        description="Digests of an adapter's `adapter_config.json` and `adapter_model.safetensors`; with `from`, the "
        "served model, and no settings.",
        max_length=2,
    )
    template: str | None = Field(None, description="Chat template, in Jinja; default: the model's own.")
    system: str | None = Field(None, description="System message of conversations that have none.")
    parameters: Parameters | None = Field(None, description="Defaults of sampling, and the size of the context.")
    messages: Many[PresetMessage] = Field(
        default_factory=list, description="Messages that precede every conversation, after its system message."
    )
    license: str | Many[str] | None = None
    stream: bool = True

    @property
    def has_settings(self) -> bool:
        """Whether the new model differs from its base."""
        given = (self.template, self.parameters, self.messages, self.license)
        return any(given) or self.system is not None


# ── what goes out ────────────────────────────────────────────────────────────────────────────────────────────────────

DoneReason = Literal["stop", "length", "load", "unload"]


class FunctionCall(TypedDict):
    index: int
    name: str
    arguments: dict[str, Any]


class ToolCallAnswer(TypedDict):
    id: str
    function: FunctionCall


class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class Logprob(TokenLogprob):
    top_logprobs: NotRequired[list[TokenLogprob]]


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallAnswer]]


class _Line(TypedDict):
    """Fields of all lines; the last line also has `done_reason`, counts, and durations in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[DoneReason]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    """Time before the first step: tokenising and the queue."""
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    logprobs: NotRequired[list[Logprob]]


class Chat(_Line):
    message: AnswerMessage


class Generated(_Line):
    response: str
    thinking: NotRequired[str]
    context: NotRequired[list[int]]
    """The tokens of prompt and answer."""


class Embedded(TypedDict):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddedPrompt(TypedDict):
    embedding: list[float]


class ModelDetails(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(TypedDict):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails
    capabilities: list[str]


class LoadedModel(TypedDict):
    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str
    size_vram: int
    context_length: int


class ListedModels(TypedDict):
    models: list[ListedModel]


class LoadedModels(TypedDict):
    models: list[LoadedModel]


class ShownMessage(TypedDict):
    role: str
    content: str


class ShownModel(TypedDict):
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    system: NotRequired[str]
    license: NotRequired[str]
    messages: NotRequired[list[ShownMessage]]


class Version(TypedDict):
    version: str


class Progress(TypedDict):
    status: str
    digest: NotRequired[str]
    total: NotRequired[int]
    """Bytes of the file of this digest."""
    completed: NotRequired[int]
