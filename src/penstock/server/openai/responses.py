"""OpenAI's Responses, as far as they are text and calls of functions; nothing is stored."""

from functools import partial

from fastapi import APIRouter
from starlette.responses import Response

from penstock.server.body import renamed_params
from penstock.server.body_route import BodyRoute
from penstock.server.dialect import CallOf, accept_conversation
from penstock.server.openai.answers import Head
from penstock.server.openai.errors import answers_or_errors
from penstock.server.openai.responses_answer import ResponsesAnswer
from penstock.server.openai.responses_body_to_params import conversation, response_params
from penstock.server.openai.responses_schema import ResponseObject, ResponsesBody

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=BodyRoute)

_NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning",
    "structured": "text",
}


@router.post("/responses", response_class=Response, responses=answers_or_errors(ResponseObject))
async def create_response(body: ResponsesBody, call: CallOf) -> Response:
    """Answer a conversation."""
    call.choose_model(body.model)
    head = Head.new("resp_", call.model_name)
    with renamed_params(_NAMES):
        params = response_params(body, call.chat_format)
        accepted, parsers = await accept_conversation(
            call, partial(conversation, body), params, request_id=head.id, priority=body.priority
        )
        answer = ResponsesAnswer(head, body, accepted.request.params, call.engine.prompts.need_tokenizer(), parsers)
        return await call.answer([accepted], answer, stream=bool(body.stream))
