"""LlamaIndex: OpenAILike, for servers that speak as OpenAI's, and its classes that embed."""

import asyncio

import openai
import pytest
from common import (
    COPY,
    EMBEDDING_MODEL,
    EMBEDDING_URL,
    FILL_IN,
    KEY,
    MODEL,
    NOTED,
    NOTES,
    OPENAI_URL,
    PERSON,
    QUESTION,
    SORT,
    SORT_ANSWER,
    SUM,
    SUM_ANSWER,
    WEATHER,
    WEATHER_ANSWER,
    WEATHER_RESULT,
    leave,
    nearest,
    run,
)
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.program import LLMTextCompletionProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.llms.openai_like import OpenAILike

from models import GetWeather, Person


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    assert city == "Paris"
    return WEATHER_RESULT


TOOL = FunctionTool.from_defaults(get_weather, description="Get the weather of a city.")


def model(**options):
    options = {"model": MODEL, "api_key": KEY, "is_chat_model": True, "is_function_calling_model": True} | options
    return OpenAILike(api_base=OPENAI_URL, temperature=0, context_window=2048, max_retries=0, **options)


def said(text):
    return [ChatMessage(role="user", content=text)]


def test_chat():
    assert model().chat(said(SUM)).message.content == SUM_ANSWER
    assert model().complete(SUM).text == SUM_ANSWER


def test_stream():
    assert "".join(part.delta or "" for part in model().stream_chat(said(SUM))) == SUM_ANSWER
    assert [part.text for part in model().stream_complete(SUM)][-1] == SUM_ANSWER


def test_tools():
    # Required, as LlamaIndex writes the tool's schema in another order than the demo model was trained on.
    answer = model().chat_with_tools([TOOL], user_msg=WEATHER, tool_required=True)
    (call,) = model().get_tool_calls_from_response(answer)
    assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": "Paris"})
    result = ChatMessage(role="tool", content=WEATHER_RESULT, additional_kwargs={"tool_call_id": call.tool_id})
    history = [*said(WEATHER), answer.message, result]
    assert model().chat_with_tools([TOOL], chat_history=history).message.content == WEATHER_ANSWER
    assert model().predict_and_call([TOOL], WEATHER, tool_required=True).response == WEATHER_RESULT


def test_agent():
    async def ask():
        agent = FunctionAgent(tools=[TOOL], llm=model(), streaming=True)
        return str(await agent.run(WEATHER))

    assert run(ask()) == WEATHER_ANSWER


def test_structured_output():
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": Person.model_json_schema()}}
    text = model(additional_kwargs={"response_format": form}).complete(FILL_IN).text
    assert Person.model_validate_json(text) == Person(**PERSON)
    program = LLMTextCompletionProgram.from_defaults(
        output_cls=Person, prompt_template_str=FILL_IN, llm=model(additional_kwargs={"response_format": form})
    )
    assert isinstance(program(), Person), "its prompt says more than the demo model understands"


def test_structured_output_by_a_function():
    prompt = PromptTemplate(WEATHER)
    assert model().structured_predict(GetWeather, prompt) == GetWeather(city="Paris")


def test_usage():
    usage = model().chat(said(SUM)).raw.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 0
    *_, last = model(additional_kwargs={"stream_options": {"include_usage": True}}).stream_chat(said(SUM))
    assert last.raw.usage.completion_tokens == usage.completion_tokens


def test_completions():
    assert model(is_chat_model=False, max_tokens=4).complete("a b c").text


def test_errors():
    with pytest.raises(openai.BadRequestError, match="top_p"):
        model(additional_kwargs={"top_p": 7}).chat(said(SUM))
    with pytest.raises(openai.AuthenticationError):
        model(api_key="wrong").chat(said(SUM))
    with pytest.raises(openai.NotFoundError):
        model(model="gpt-9").chat(said(SUM))


def test_async():
    async def ask():
        llm = model()
        questions = [(SUM, SUM_ANSWER), (SORT, SORT_ANSWER)] * 8
        answers = await asyncio.gather(*(llm.achat(said(question)) for question, _ in questions))
        assert [answer.message.content for answer in answers] == [answer for _, answer in questions]
        text = ""
        async for part in await llm.astream_chat(said(SUM)):
            text += part.delta or ""
        assert text == SUM_ANSWER

    run(ask())


def over_embeddings(**options):
    options = {"model_name": EMBEDDING_MODEL, "api_key": KEY, "max_retries": 0} | options
    return OpenAILikeEmbedding(api_base=f"{EMBEDDING_URL}/v1", **options)


def over_tei():
    return TextEmbeddingsInference(model_name=EMBEDDING_MODEL, base_url=EMBEDDING_URL, auth_token=KEY)


EMBED = pytest.mark.parametrize("make", [over_embeddings, over_tei])


@EMBED
def test_embeddings(make):
    vectors = make().get_text_embedding_batch(NOTES)
    assert nearest(make().get_query_embedding(QUESTION), vectors) == NOTED
    assert make().get_text_embedding_batch(NOTES[::-1]) == vectors[::-1]


@EMBED
def test_an_index_finds_the_note(make):
    index = VectorStoreIndex.from_documents([Document(text=note) for note in NOTES], embed_model=make())
    (found,) = index.as_retriever(similarity_top_k=1).retrieve(QUESTION)
    assert found.text == NOTES[NOTED]


@EMBED
def test_async_embeddings(make):
    async def ask():
        return await make().aget_query_embedding(QUESTION), await make().aget_text_embedding_batch(NOTES)

    assert nearest(*run(ask())) == NOTED


def test_errors_of_embeddings():
    with pytest.raises(openai.BadRequestError, match="too long"):
        over_embeddings().get_text_embedding("water " * 400)
    with pytest.raises(openai.AuthenticationError):
        over_embeddings(api_key="wrong").get_text_embedding("a")
    assert len(over_embeddings(dimensions=100).get_text_embedding("a")) == 100


def test_cancellation():
    async def stream():
        async for part in await model(max_tokens=1000).astream_chat(said(COPY)):
            yield part

    leave(stream)
