"""TGI's wire format: schemas of bodies and answers."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag
from typing_extensions import NotRequired, TypedDict

from penstock.server.body import Body, IgnoredValues, Many
from penstock.server.openai.schema import ChatBody, CompletionBody
from penstock.server.response_format import TgiGrammar
from penstock.server.tei.routes import EmbedBody, ModelType, TeiRerankBody

# ── what comes in ────────────────────────────────────────────────────────────────────────────────────────────────────

_INT32, _UINT64 = 2**31, 2**64


class GenerateParameters(Body):
    """Types of the parameters; `validation.py` checks ranges, in TGI's order and with its messages."""

    UNSUPPORTED: ClassVar[IgnoredValues] = {"watermark": (False,)}

    best_of: int | None = Field(
        None,
        ge=0,
        lt=_INT32,
        description="Sample this many answers, 1 to 128, and return the one with the highest mean log-probability.",
    )
    temperature: float | None = None
    repetition_penalty: float | None = Field(None, description="For tokens of prompt and answer; 1: none.")
    frequency_penalty: float | None = Field(
        None, description="Multiplied by the token's share of prompt and answer, as in TGI; 0: none."
    )
    top_k: int | None = Field(None, ge=-_INT32, lt=_INT32)
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool = Field(False, description="If false, and without temperature, top_k, top_p and typical_p: greedy.")
    max_new_tokens: int | None = Field(None, ge=0, lt=_INT32, description="Default: as many as the context holds.")
    return_full_text: bool | None = None
    stop: Many[str] = Field(default_factory=list)
    truncate: int | None = Field(
        None, ge=0, lt=_INT32, description="Keep only this many tokens at the end of the prompt."
    )
    details: bool = False
    decoder_input_details: bool = Field(
        False, description="Return the prompt's tokens with their log-probabilities; not streamed."
    )
    seed: int | None = Field(None, ge=0, lt=_UINT64)
    top_n_tokens: int | None = Field(None, ge=0, lt=_INT32)
    adapter_id: str | None = Field(None, description="Name of the adapter that answers.")
    grammar: TgiGrammar | None = Field(None, description="Form of the answer: a JSON schema or a regular expression.")


def _sampling() -> GenerateParameters:
    return GenerateParameters.model_validate({"do_sample": True})


class GenerateBody(Body):
    """The body of `POST /generate` and `/generate_stream`. Without `parameters`, TGI samples."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"inputs": "Once upon a time", "parameters": {"max_new_tokens": 50}}]}
    )

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"model", "options"})

    inputs: str
    parameters: GenerateParameters = Field(default_factory=_sampling)


class CompatBody(GenerateBody):
    """The body of `POST /`, which serves both."""

    stream: bool | None = None


class TokenizeBody(Body):
    """The body of `POST /tokenize`, which is that of `/generate`."""

    inputs: str
    parameters: GenerateParameters | None = Field(None, description="Checked, but without effect, as with TGI.")


class ChatTokenizeBody(ChatBody):
    """The body of `POST /chat_tokenize`, which is that of a chat."""

    OBEYED: ClassVar[frozenset[str]] = frozenset(
        (
            *("messages", "model", "tools", "tool_choice", "tool_prompt", "chat_template_kwargs"),
            *("reasoning_effort", "reasoning", "thinking", "enable_thinking"),
            *("add_generation_prompt", "continue_final_message"),
        )
    )
    """Fields on which the prompt depends. Other parameters are validated but have no effect, as in TGI."""


def _kind_of(body: Any) -> str:
    given = body if isinstance(body, dict) else getattr(body, "__pydantic_fields__", ())
    return "chat" if "messages" in given else "completion" if "prompt" in given else "generation"


Invocation = Annotated[
    Annotated[CompatBody, Tag("generation")]
    | Annotated[ChatBody, Tag("chat")]
    | Annotated[CompletionBody, Tag("completion")],
    Discriminator(_kind_of),
]
"""The body of `POST /invocations`: a chat if it has `messages`, a completion if `prompt`, otherwise a generation."""


_OF_EMBED = {"normalize", "truncate", "truncation_direction", "prompt_name", "dimensions"}


def _kind_at_root(body: Any) -> str:
    if not isinstance(body, dict):
        return "rerank" if isinstance(body, TeiRerankBody) else "embed" if isinstance(body, EmbedBody) else "generation"
    if "query" in body:
        return "rerank"
    return "embed" if isinstance(body.get("inputs"), list) or body.keys() & _OF_EMBED else "generation"


RootBody = Annotated[
    Annotated[CompatBody, Tag("generation")]
    | Annotated[EmbedBody, Tag("embed")]
    | Annotated[TeiRerankBody, Tag("rerank")],
    Discriminator(_kind_at_root),
]
"""The body of `POST /`: `query` makes it TEI's rerank, several inputs or options of it TEI's embed, else TGI's."""


# ── what goes out ────────────────────────────────────────────────────────────────────────────────────────────────────

FinishedBy = Literal["length", "eos_token", "stop_sequence"]


class Token(TypedDict):
    id: int
    text: str
    logprob: float
    special: bool


class PrefillToken(TypedDict):
    """A token of the prompt; the first has no log-probability."""

    id: int
    text: str
    logprob: float | None


class AnswerDetails(TypedDict):
    finish_reason: FinishedBy
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: NotRequired[list[list[Token]]]


class BestOfSequence(AnswerDetails):
    generated_text: str


class Details(AnswerDetails):
    best_of_sequences: NotRequired[list[BestOfSequence]]


class Generated(TypedDict):
    generated_text: str
    details: NotRequired[Details]


class StreamDetails(TypedDict):
    finish_reason: FinishedBy
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamEvent(TypedDict):
    """One token; the last also has the whole text and, if asked for, the details."""

    index: int
    token: Token
    top_tokens: NotRequired[list[Token]]
    generated_text: str | None
    details: StreamDetails | None


class SimpleToken(TypedDict):
    id: int
    text: str
    start: int
    stop: int


class ChatTokenized(TypedDict):
    tokenize_response: list[SimpleToken]
    templated_text: str


class Info(TypedDict):
    model_id: str
    model_sha: str | None
    model_pipeline_tag: str
    max_best_of: int
    max_stop_sequences: int
    max_top_n_tokens: int
    max_input_tokens: int
    max_total_tokens: int
    max_batch_total_tokens: int | None
    router: str
    version: str
    sha: str | None
    docker_label: str | None
    model_dtype: NotRequired[str]
    """This and what follows are TEI's, of models that embed or score."""
    model_type: NotRequired[ModelType]
    max_input_length: NotRequired[int]
    max_batch_tokens: NotRequired[int]
    max_client_batch_size: NotRequired[int]
