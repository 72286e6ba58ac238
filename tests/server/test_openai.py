"""OpenAI's dialect, through OpenAI's own client, against a real server."""

import asyncio
import itertools
from dataclasses import replace

import openai
import pytest

from penstock.api.sampling_params import SamplingParams
from penstock.server.openai.body_to_params import chat_params, completion_params, tools_of
from penstock.server.openai.schema import ChatBody, CompletionBody
from penstock.text.tokenizer import Tokenizer
from tests.server.running import parse_events

HELLO = [{"role": "user", "content": "the quick brown fox"}]
OPTIONS = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


def chat(client, **options):
    return client.chat.completions.create(**{"messages": HELLO, "max_completion_tokens": 12} | OPTIONS | options)


def complete(client, **options):
    return client.completions.create(**{"prompt": "the quick", "max_tokens": 12} | OPTIONS | options)


def collect_chat(stream):
    """Text and finish reason of each choice, and the chunks themselves."""
    texts, reasons, chunks = {}, {}, list(stream)
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                assert choice.index not in reasons, "a choice ends once"
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, chunks


# ── chat completions ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_chat_is_answered_with_its_usage(client):
    answer = chat(client)
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_streamed_chat_is_the_same_chat_in_pieces(client):
    whole = chat(client, n=3, temperature=1.0, seed=5)
    stream = chat(client, n=3, temperature=1.0, seed=5, stream=True, stream_options={"include_usage": True})
    texts, reasons, chunks = collect_chat(stream)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == dict.fromkeys(range(3), "length")
    assert len(set(texts.values())) == 3
    assert chunks[-1].choices == []
    assert chunks[-1].usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("include_usage", [True, False])
def test_each_chunk_of_a_chat_tells_the_usage_so_far_if_it_is_to(client, include_usage):
    options = {"include_usage": include_usage, "continuous_usage_stats": True}  # guidellm's
    first, *chunks = chat(client, n=2, temperature=1.0, stream=True, stream_options=options)
    prompt_tokens = chat(client).usage.prompt_tokens
    assert first.choices[0].delta.role == "assistant"
    assert first.usage.completion_tokens == 0, "the role came before any token"
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 24
    assert all(chunk.usage.prompt_tokens == prompt_tokens for chunk in chunks)
    assert all(chunk.usage.total_tokens == prompt_tokens + chunk.usage.completion_tokens for chunk in chunks)
    assert (chunks[-1].choices == []) is include_usage


def test_each_chunk_of_completions_tells_the_usage_so_far_if_it_is_to(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    prompts = [[5, 6, 7], [8, 9]]
    chunks = list(complete(client, prompt=prompts, stream=True, stream_options=options, max_tokens=6))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0] > 0, counts[-1]) == (True, 12)
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {5}
    assert chunks[-1].usage.prompt_tokens_details is not None
    quiet = complete(client, prompt=prompts, stream=True, stream_options={"continuous_usage_stats": False})
    assert all(chunk.usage is None for chunk in quiet)


def test_a_stream_ends_with_the_usage_also_in_openrouters_words(client):
    body = OPTIONS["extra_body"] | {"usage": {"include": True}}  # LiteLLM's provider for OpenRouter always sends it
    *chunks, last = chat(client, stream=True, extra_body=body)
    assert all(chunk.usage is None for chunk in chunks)
    assert (last.choices, last.usage.completion_tokens) == ([], 12)
    assert chat(client, extra_body=body).usage.completion_tokens == 12


def test_a_turn_of_the_assistants_may_come_back_as_litellm_sends_it(client):
    def ask(**more):
        messages = [*HELLO, {"role": "assistant", "content": "jumps"} | more, *HELLO]
        return chat(client, messages=messages, temperature=0).choices[0].message.content

    assert ask(provider_specific_fields={"refusal": None}) == ask()


def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for(client, server):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, messages=[{"role": "user", "content": "!" * 5000}])
    assert refused.value.code == "context_length_exceeded"
    told = server.post("/v1/messages", messages=[{"role": "user", "content": "!" * 5000}], max_tokens=5)
    for message in (refused.value.message, told.json()["error"]["message"]):
        assert "this model's maximum context length is" in message  # OpenAI's, for LiteLLM and others
        assert "prompt is too long" in message  # Anthropic's, for LangChain and others


def test_hints_of_what_to_cache_change_nothing(client):
    hint = {"type": "ephemeral", "ttl": "1h"}
    function = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    plain, hinted = (
        [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."} | part]},
            {"role": "user", "content": "the quick brown fox"} | part,
        ]
        for part in ({}, {"cache_control": hint})
    )
    options = {"temperature": 0, "max_tokens": 12, "model": "tiny"}
    same = client.chat.completions.create(messages=plain, **options)
    answer = client.chat.completions.create(messages=hinted, extra_body={"cache_control": hint}, **options)
    assert answer.choices[0].message.content == same.choices[0].message.content
    plain, *hinted = (
        ChatBody.model_validate({"model": "tiny", "messages": HELLO, "tools": [{"type": "function"} | tool]}).tools
        for tool in (
            {"function": function},
            {"function": function, "cache_control": hint},
            {"function": function | {"cache_control": hint}},
        )
    )
    assert all(tools_of(tools, None, None) == tools_of(plain, None, None) for tools in hinted)


def test_a_stream_opens_with_the_role_and_closes_with_the_reason(client):
    chunks = list(chat(client, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].choices[0].delta.content is None
    assert all(chunk.usage is None for chunk in chunks)


def test_events_are_framed_by_the_letter(server):
    body = {"messages": HELLO, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    answer = server.post("/v1/chat/completions", **body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    events = parse_events(answer.content)
    assert [("usage" in event, event.get("usage") is None) for event in events[:-1]] == [(True, True)] * (
        len(events) - 1
    )
    assert events[-1]["usage"]["completion_tokens"] <= 4


def test_the_same_seed_gives_the_same_answer_and_another_seed_another(client):
    texts = [chat(client, temperature=1.5, seed=seed).choices[0].message.content for seed in (7, 7, 8, -1, -1)]
    assert texts[0] == texts[1]
    assert texts[3] == texts[4]
    assert len(set(texts)) == 3


def test_chat_logprobs_name_each_token_with_its_bytes(client):
    choice = chat(client, logprobs=True, top_logprobs=3).choices[0]
    assert len(choice.logprobs.content) == 12
    for entry in choice.logprobs.content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob, "greedy takes the likeliest"
        assert entry.bytes is not None
    raw = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert raw.decode("utf-8", "replace") == choice.message.content


def test_streamed_logprobs_are_those_of_the_whole_answer(client):
    whole = chat(client, logprobs=True, top_logprobs=1).choices[0].logprobs.content
    chunks = list(chat(client, logprobs=True, top_logprobs=1, stream=True))
    pieces = [chunk.choices[0].logprobs.content for chunk in chunks if chunk.choices[0].logprobs]
    assert list(itertools.chain.from_iterable(pieces)) == whole


def test_logprobs_without_top_ones_have_the_chosen_only(client):
    entries = chat(client, logprobs=True).choices[0].logprobs.content
    assert all(entry.top_logprobs == [] for entry in entries)
    assert chat(client).choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_is_never_shown(client, stream):
    full = chat(client, max_completion_tokens=40).choices[0].message.content
    stop = full[20:23]
    expected = full[: full.index(stop)]
    answer = chat(client, max_completion_tokens=40, stop=[stop, "never seen"], stream=stream)
    if stream:
        texts, reasons, _ = collect_chat(answer)
        assert (texts[0], reasons[0]) == (expected, "stop")
    else:
        assert answer.choices[0].message.content == expected
        assert answer.choices[0].finish_reason == "stop"


def test_a_stop_token_ends_the_answer(client, tiny_llama):
    tokenizer = Tokenizer.from_path(tiny_llama)
    third = bytes(chat(client, logprobs=True).choices[0].logprobs.content[2].bytes)
    token = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == third)
    answer = chat(client, extra_body={"ignore_eos": True, "stop_token_ids": [token]})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens <= 3


def test_parts_of_a_text_and_a_developers_message_are_taken(client):
    parts = [{"type": "text", "text": "the quick"}, {"type": "text", "text": "brown fox"}]
    split = chat(client, messages=[{"role": "developer", "content": "a"}, {"role": "user", "content": parts}])
    joined = chat(
        client, messages=[{"role": "system", "content": "a"}, {"role": "user", "content": "the quick\nbrown fox"}]
    )
    assert split.choices[0].message.content == joined.choices[0].message.content


def test_an_answer_can_be_sent_back_as_it_came(client):
    said = chat(client).choices[0].message
    assert chat(client, messages=[*HELLO, said, *HELLO]).choices[0].finish_reason == "length"


@pytest.mark.parametrize("max_tokens", [0, 1, 7])
def test_exactly_as_many_tokens_as_asked_for(client, max_tokens):
    for stream in (False, True):
        options = {"stream_options": {"include_usage": True}} if stream else {}
        answer = chat(client, max_completion_tokens=max_tokens, stream=stream, **options)
        usage = list(answer)[-1].usage if stream else answer.usage
        assert usage.completion_tokens == max_tokens


def test_without_a_limit_a_chat_runs_to_the_end_of_the_context(client):
    answer = chat(client, max_completion_tokens=None)
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


NEUTRAL = {
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "store": False,
    "user": "me",
    "metadata": {"a": "b"},
    "tools": [],
    "tool_choice": "none",
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "top_p": 1,
}


def test_every_control_of_sampling_reaches_the_engine():
    body = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "typical_p": 0.8,
        "frequency_penalty": 0.3,
        "presence_penalty": -0.2,
        "repetition_penalty": 1.2,
        "logit_bias": {"5": -100, "60": 1.5},
        "bad_words": ["fox"],
        "bad_token_ids": [3],
        "allowed_token_ids": [1, 2],
        "seed": 4,
        "min_tokens": 2,
    }
    expected = SamplingParams(**(body | {"logit_bias": {5: -100, 60: 1.5}}), max_tokens=16)
    assert completion_params(CompletionBody(model="m", prompt="x", **body)) == expected
    chat_body = ChatBody(model="m", messages=[{"role": "user", "content": "x"}], **body)
    assert chat_params(chat_body) == replace(expected, max_tokens=None)


def test_a_bias_of_a_hundred_decides_and_one_of_minus_a_hundred_rules_out(client):
    forced = complete(client, logit_bias={"70": 100}, logprobs=0, max_tokens=3).choices[0].logprobs.tokens
    assert len(forced) == 3
    assert len(set(forced)) == 1
    without = complete(client, logit_bias={"70": -100}, logprobs=0, max_tokens=3).choices[0].logprobs.tokens
    assert forced[0] not in without


def test_values_that_ask_for_nothing_are_taken(client):
    assert chat(client, **NEUTRAL).choices[0].message.content == chat(client).choices[0].message.content


# ── completions ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_text_is_continued_by_sixteen_tokens_unless_told_otherwise(client):
    answer = client.completions.create(prompt="the quick", **OPTIONS)
    assert answer.object == "text_completion"
    assert answer.usage.completion_tokens == 16


def test_several_prompts_as_text_or_tokens_are_answered_in_their_order(client):
    alone = [complete(client, prompt=prompt, n=2, temperature=1, seed=3) for prompt in ("the quick", "a request")]
    both = complete(client, prompt=["the quick", "a request"], n=2, temperature=1, seed=3)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in both.choices] == [choice.text for one in alone for choice in one.choices]
    assert both.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone)
    tokens = complete(client, prompt=[[5, 6, 7], [8]])
    assert len(tokens.choices) == 2
    assert complete(client, prompt=[5, 6, 7]).choices[0].text == tokens.choices[0].text


def test_several_prompts_are_streamed_together(client):
    whole = complete(client, prompt=["the quick", "a request"], n=2, temperature=1, seed=3, logprobs=1)
    texts, offsets = {}, {}
    for chunk in complete(
        client, prompt=["the quick", "a request"], n=2, temperature=1, seed=3, logprobs=1, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.logprobs:
                offsets.setdefault(choice.index, []).extend(choice.logprobs.text_offset)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert offsets == {choice.index: choice.logprobs.text_offset for choice in whole.choices}


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_puts_the_prompt_before_each_answer(client, stream):
    plain = complete(client, n=2)
    echoed = complete(client, n=2, echo=True, stream=stream)
    texts = {}
    for answer in echoed if stream else [echoed]:
        for choice in answer.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {choice.index: "the quick" + choice.text for choice in plain.choices}


def test_token_ids_are_echoed_as_their_text_and_nothing_may_follow_it(client, tiny_llama):
    token_ids = Tokenizer.from_path(tiny_llama).encode("the quick")
    answer = complete(client, prompt=token_ids, echo=True, max_tokens=0).choices[0]
    assert (answer.text, answer.finish_reason) == ("the quick", "length")


def test_completion_logprobs_are_columns_with_character_offsets(client):
    choice = complete(client, logprobs=2).choices[0]
    table = choice.logprobs
    assert len(table.tokens) == len(table.token_logprobs) == len(table.text_offset) == len(table.top_logprobs) == 12
    assert table.text_offset[0] == 0
    assert table.text_offset == sorted(table.text_offset)
    for token, logprob, offset, top in zip(
        table.tokens, table.token_logprobs, table.text_offset, table.top_logprobs, strict=True
    ):
        assert top[token] == logprob
        if not token.startswith("bytes:"):
            assert choice.text[offset:].startswith(token)


def test_no_top_logprobs_where_none_were_asked_for(client):
    assert complete(client, logprobs=0).choices[0].logprobs.top_logprobs is None


def test_the_best_of_several_are_shown(client):
    def mean(choice):
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    options = {"temperature": 2.0, "seed": 3, "prompt": ["the quick", "brown"]}
    every = complete(client, n=6, logprobs=0, **options)
    best = complete(client, n=2, best_of=6, logprobs=0, **options)
    for place in (0, 1):
        ranked = sorted(every.choices[6 * place : 6 * place + 6], key=mean, reverse=True)
        shown = best.choices[2 * place : 2 * place + 2]
        assert [choice.text for choice in shown] == [choice.text for choice in ranked[:2]]
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert best.usage.completion_tokens == every.usage.completion_tokens, "the work is told, not the show"
    plain = complete(client, n=2, best_of=6, **options)
    assert [choice.text for choice in plain.choices] == [choice.text for choice in best.choices]
    assert plain.choices[0].logprobs is None


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_model_is_listed_and_found_by_name(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").model_dump()["max_model_len"] == 512
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


# ── many at once ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_many_streams_run_together_and_each_is_what_it_is_alone(client, server):
    prompts = [f"request {i}: the quick brown fox jumps"[: 10 + i] for i in range(32)]
    alone = [complete(client, prompt=prompt, max_tokens=24).choices[0].text for prompt in prompts]

    async def one(aclient, prompt):
        stream = await aclient.completions.create(prompt=prompt, max_tokens=24, stream=True, **OPTIONS)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as aclient:
            return await asyncio.gather(*(one(aclient, prompt) for prompt in prompts))

    assert asyncio.run(all_of_them()) == alone
