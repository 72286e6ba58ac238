"""OpenAI's Responses: text in, text out, nothing stored."""

from fastapi import APIRouter
from starlette.responses import Response

from penstock.errors import InvalidRequestError
from penstock.request import SamplingParams
from penstock.server.body import check_text, in_words
from penstock.server.dialect import CallOf
from penstock.server.openai.answers import Head
from penstock.server.openai.errors import answers_or_errors
from penstock.server.openai.responses_answer import ResponsesAnswer
from penstock.server.openai.responses_schema import LOGPROBS, MessageItem, ResponseObject, ResponsesBody

router = APIRouter(prefix="/v1", tags=["OpenAI"])

_NAMES = {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}


@router.post("/responses", response_class=Response, responses=answers_or_errors(ResponseObject))
async def create_response(body: ResponsesBody, call: CallOf) -> Response:
    """Answer a conversation."""
    call.check_model(body.model)
    head = Head.new("resp_", call.model_name)
    with in_words(_NAMES):
        params = _params(body)
        tokenizer = call.need_tokenizer()
        token_ids = await call.engine.encode_chat(_messages(body))
        accepted = await call.accept(token_ids, params, request_id=head.id, priority=body.priority)
    answer = ResponsesAnswer(head, body, accepted.request.params, tokenizer)
    return await call.answer([accepted], answer, stream=bool(body.stream))


def _params(body: ResponsesBody) -> SamplingParams:
    wanted = LOGPROBS in (body.include or ())
    if body.top_logprobs and not wanted:
        raise InvalidRequestError(f"top_logprobs needs {LOGPROBS!r} in include", "top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream to be true", "stream_options")
    if body.stream_options is not None and body.stream_options.include_usage is not None:
        raise InvalidRequestError("stream_options.include_usage has no effect here: leave it out", "stream_options")
    return SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        max_tokens=body.max_output_tokens,
        logprobs=body.top_logprobs or 0 if wanted else None,
    )


def _messages(body: ResponsesBody) -> list[dict[str, str]]:
    """The conversation as chat templates know it."""
    messages = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": check_text(body.instructions, "instructions")})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": check_text(body.input, "input")}]
    return [*messages, *(_message(item, place) for place, item in enumerate(body.input))]


def _message(item: MessageItem, place: int) -> dict[str, str]:
    content = item.content
    text = content if isinstance(content, str) else "".join(piece.text for piece in content)
    check_text(text, f"input[{place}].content")
    return {"role": "system" if item.role == "developer" else item.role, "content": text}
