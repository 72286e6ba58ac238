"""Routes are functions of a body and a call: they can be called without HTTP."""

import asyncio
import json

import pytest

from penstock.errors import NotPermittedError
from penstock.frontend.limits import Caller
from penstock.server.anthropic.routes import create_message
from penstock.server.anthropic.schema import MessagesBody
from penstock.server.call_context import CallContext, context_of
from penstock.server.calls import look_up
from penstock.server.dialect import Call
from penstock.server.openai.responses import create_response
from penstock.server.openai.responses_schema import ResponsesBody
from penstock.server.openai.routes import chat_completions, completions
from penstock.server.openai.schema import ChatBody, CompletionBody
from penstock.server.request_account import timeline, why
from penstock.server.tgi.routes import generate
from penstock.server.tgi.schema import GenerateBody
from tests.server.in_process import with_app

HELLO = [{"role": "user", "content": "Hello"}]
ROUTES = [
    (chat_completions, ChatBody, {"messages": HELLO, "max_tokens": 3}, lambda told: told["usage"]["completion_tokens"]),
    (completions, CompletionBody, {"prompt": [5], "max_tokens": 3}, lambda told: told["usage"]["completion_tokens"]),
    (create_response, ResponsesBody, {"input": "Hello"}, lambda told: told["usage"]["output_tokens"]),
    (create_message, MessagesBody, {"messages": HELLO, "max_tokens": 3}, lambda told: told["usage"]["output_tokens"]),
    (generate, GenerateBody, {"inputs": "Hello"}, lambda told: len(told["generated_text"])),
]


@pytest.mark.parametrize(("route", "body", "content", "read"), ROUTES, ids=lambda one: getattr(one, "__name__", None))
def test_a_route_of_each_dialect_answers_a_call_that_came_without_http(tiny_llama, route, body, content, read):
    async def talk(http, engine, app):
        serving = app.state.serving
        named = {} if body is GenerateBody else {"model": serving.names.own}
        context = CallContext(request_id="mine", caller=Caller("somebody"))
        answer = await asyncio.wait_for(route(body(**named, **content), Call(context, serving)), 60)
        assert read(json.loads(answer.body)) > 0
        assert context.request_stream is not None
        (account,) = (await why("mine", context, serving))["requests"]
        assert (account["tenant"], account["state"]) == ("somebody", "ended")

    with_app(talk, tiny_llama)


def test_a_client_that_leaves_ends_a_call_that_came_without_http(tiny_llama):
    async def talk(http, engine, app):
        async def leave():
            await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        call = Call(CallContext(receive=leave), app.state.serving)
        body = CompletionBody(model=call.model_name, prompt=[5], max_tokens=400, ignore_eos=True)
        with pytest.raises(Exception, match="the client has gone"):
            await completions(body, call)
        assert engine.admission.num_open == 0

    with_app(talk, tiny_llama)


def test_routes_about_calls_go_by_the_caller_in_the_context(tiny_llama, tmp_path):
    async def talk(http, engine, app):
        serving = app.state.serving
        mine, other = CallContext(caller=Caller("me")), CallContext(caller=Caller("other"))
        call = Call(CallContext(request_id="mine", caller=Caller("me")), serving)
        await completions(CompletionBody(model=call.model_name, prompt=[5], max_tokens=2), call)
        assert (await look_up("mine", mine, serving))["finished"]
        with pytest.raises(Exception, match="no request 'mine'"):
            await look_up("mine", other, serving)
        with pytest.raises(NotPermittedError):
            await timeline(mine, serving)
        operator = CallContext(caller=Caller(operator=True))
        assert json.loads((await timeline(operator, serving)).body)["traceEvents"]

    with_app(talk, tiny_llama, journal=tmp_path / "journal")


def test_connection_and_middleware_share_one_context_of_a_call():
    scope = {"type": "http"}
    context_of(scope).request_id = "mine"
    assert context_of(scope).request_id == "mine"
