"""LangChain: ChatOpenAI over chat completions and over responses, ChatAnthropic, and its classes that embed."""

import anthropic
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
    PERSON_SCHEMA,
    QUESTION,
    SORT,
    SORT_ANSWER,
    SUM,
    SUM_ANSWER,
    URL,
    WEATHER,
    WEATHER_ANSWER,
    WEATHER_RESULT,
    leave,
    nearest,
    run,
)
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

from models import GetWeather


class Person(BaseModel):
    """A person."""

    name: str = Field(description="The person's name.")
    age: int
    city: str


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    assert city == "Paris"
    return WEATHER_RESULT


def over_chat(**options):
    return ChatOpenAI(model=MODEL, base_url=OPENAI_URL, api_key=KEY, temperature=0, **options)


def over_responses(**options):
    return over_chat(use_responses_api=True, **options)


def over_messages(**options):
    return ChatAnthropic(model=MODEL, base_url=URL, api_key=KEY, temperature=0, max_tokens=300, **options)


ALL = pytest.mark.parametrize("make", [over_chat, over_responses, over_messages])


@ALL
def test_chat(make):
    assert make().invoke(SUM).text == SUM_ANSWER
    chain = ChatPromptTemplate.from_messages([("user", "{question}")]) | make() | StrOutputParser()
    assert chain.invoke({"question": SUM}) == SUM_ANSWER


@ALL
def test_stream(make):
    whole = None
    for chunk in make(stream_usage=True).stream(SUM):
        whole = chunk if whole is None else whole + chunk
    assert whole.text == SUM_ANSWER
    assert whole.usage_metadata["output_tokens"] > 0


@ALL
def test_tools(make):
    model = make().bind_tools([get_weather])
    messages = [HumanMessage(WEATHER)]
    messages.append(model.invoke(messages))
    (call,) = messages[-1].tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    messages.append(get_weather.invoke(call))
    assert isinstance(messages[-1], ToolMessage)
    assert model.invoke(messages).text == WEATHER_ANSWER


@ALL
def test_streamed_tools(make):
    whole = None
    for chunk in make().bind_tools([get_weather], tool_choice="get_weather").stream(WEATHER):
        whole = chunk if whole is None else whole + chunk
    assert [call["args"] for call in whole.tool_calls] == [{"city": "Paris"}]


@ALL
def test_structured_output(make):
    assert make().with_structured_output(Person, method="json_schema").invoke(FILL_IN) == Person(**PERSON)
    schema = {"title": "Person", "description": "A person.", **PERSON_SCHEMA}
    assert make().with_structured_output(schema, method="json_schema").invoke(FILL_IN) == PERSON


@ALL
def test_an_agent_with_tools_beside_a_form(make):
    agent = create_agent(make(), tools=[get_weather], response_format=ProviderStrategy(Person))
    assert agent.invoke({"messages": [HumanMessage(FILL_IN)]})["structured_response"] == Person(**PERSON)


@ALL
def test_structured_output_by_a_function(make):
    model = make().with_structured_output(GetWeather, method="function_calling")
    assert model.invoke(WEATHER) == GetWeather(city="Paris")


def test_json_mode():
    assert over_chat().with_structured_output(Person, method="json_mode").invoke(FILL_IN) == Person(**PERSON)


@ALL
def test_usage(make):
    usage = make().invoke(SUM).usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_logprobs():
    answer = over_chat(logprobs=True, top_logprobs=2).invoke(SUM)
    assert all(len(token["top_logprobs"]) == 2 for token in answer.response_metadata["logprobs"]["content"])


def test_completions():
    model = OpenAI(model=MODEL, base_url=OPENAI_URL, api_key=KEY, temperature=0, max_tokens=4)
    assert len(model.generate(["a b c", "d e f"]).generations) == 2
    assert list(model.stream("a b c"))


def test_errors():
    with pytest.raises(openai.BadRequestError, match="top_p"):
        over_chat(top_p=7).invoke(SUM)
    with pytest.raises(anthropic.BadRequestError, match="top_p"):
        over_messages(top_p=7).invoke(SUM)
    with pytest.raises(ContextOverflowError):
        over_chat().invoke(SUM * 1000)
    with pytest.raises(ContextOverflowError):
        over_messages().invoke(SUM * 1000)
    with pytest.raises(openai.AuthenticationError):
        ChatOpenAI(model=MODEL, base_url=OPENAI_URL, api_key="wrong").invoke(SUM)
    with pytest.raises(openai.NotFoundError):
        ChatOpenAI(model="gpt-9", base_url=OPENAI_URL, api_key=KEY).invoke(SUM)


@ALL
def test_async(make):
    async def ask():
        questions = [(SUM, SUM_ANSWER), (SORT, SORT_ANSWER)] * 8
        answers = await make().abatch([question for question, _ in questions])
        assert [answer.text for answer in answers] == [answer for _, answer in questions]
        assert "".join([chunk.text async for chunk in make().astream(SUM)]) == SUM_ANSWER

    run(ask())


def over_embeddings(**options):
    # Texts as they are: by default it sends the tokens that OpenAI's models would make of them.
    options = {"check_embedding_ctx_length": False, "api_key": KEY} | options
    return OpenAIEmbeddings(model=EMBEDDING_MODEL, base_url=f"{EMBEDDING_URL}/v1", **options)


def test_embeddings():
    vectors = over_embeddings().embed_documents(NOTES)
    assert nearest(over_embeddings().embed_query(QUESTION), vectors) == NOTED
    assert over_embeddings().embed_documents(NOTES[::-1]) == vectors[::-1]


def test_a_store_of_vectors_finds_the_note():
    store = InMemoryVectorStore.from_texts(NOTES, over_embeddings())
    (found,) = store.similarity_search(QUESTION, k=1)
    assert found.page_content == NOTES[NOTED]


def test_async_embeddings():
    async def ask():
        return await over_embeddings().aembed_query(QUESTION), await over_embeddings().aembed_documents(NOTES)

    assert nearest(*run(ask())) == NOTED


def test_errors_of_embeddings():
    with pytest.raises(openai.BadRequestError, match="too long"):
        over_embeddings().embed_query("water " * 400)
    with pytest.raises(openai.AuthenticationError):
        over_embeddings(api_key="wrong").embed_query("a")
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        over_embeddings(dimensions=1000).embed_query("a")
    assert len(over_embeddings(dimensions=100).embed_query("a")) == 100


@ALL
def test_cancellation(make):
    leave(lambda: make().astream(COPY))
