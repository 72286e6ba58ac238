"""What `/v1/completions` tells of prompts, and of answers that are known only at their end."""

import pytest

from penstock import native
from tests.server.running import parse_events

PROMPT = "the quick brown fox 🙂"
EXTRA = {"ignore_eos": True}

exact = pytest.mark.skipif(native.library() is None, reason="the reference kernels are not exact across batches")


def complete(client, *, extra_body=EXTRA, **options):
    return client.completions.create(
        **{"model": "tiny", "prompt": PROMPT, "max_tokens": 5, "temperature": 0} | options, extra_body=extra_body
    )


def refusal(answer):
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def columns_of(chunks):
    """The text and the columns of each choice of a stream, put together."""
    found = {}
    for chunk in chunks:
        for choice in chunk.choices:
            text, columns = found.setdefault(choice.index, [[], {}])
            text.append(choice.text)
            for name, column in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                columns.setdefault(name, []).extend(column)
    return {index: ("".join(text), columns) for index, (text, columns) in found.items()}


@exact
def test_an_echo_with_logprobs_has_a_row_for_each_token_of_prompt_and_answer(client):
    echoed = complete(client, echo=True, logprobs=2).choices[0]
    table, answer = echoed.logprobs, complete(client, logprobs=2).choices[0]
    assert echoed.text == PROMPT + answer.text
    assert table.token_logprobs[0] is table.top_logprobs[0] is None, "nothing is before the first token"
    assert table.token_logprobs[-5:] == answer.logprobs.token_logprobs
    assert table.tokens[-5:] == answer.logprobs.tokens
    assert table.top_logprobs[-5:] == answer.logprobs.top_logprobs
    assert [offset - len(PROMPT) for offset in table.text_offset[-5:]] == answer.logprobs.text_offset
    for token, logprob, offset, top in list(
        zip(table.tokens, table.token_logprobs, table.text_offset, table.top_logprobs, strict=True)
    )[1:]:
        assert logprob < 0
        assert top[token] == logprob
        assert len(top) in (2, 3)
        if not token.startswith("bytes:"):
            assert echoed.text[offset:].startswith(token)


@exact
def test_a_prompt_alone_can_be_scored(client):
    scored = complete(client, echo=True, logprobs=0, max_tokens=0).choices[0]
    assert (scored.text, scored.finish_reason) == (PROMPT, "length")
    assert (
        scored.logprobs.token_logprobs
        == complete(client, echo=True, logprobs=0).choices[0].logprobs.token_logprobs[:-5]
    )
    one = complete(client, prompt=[5], echo=True, logprobs=1, max_tokens=0).choices[0]
    assert one.logprobs.token_logprobs == [None]


@exact
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_a_streamed_echo_is_the_same_in_pieces(client, max_tokens):
    options = {
        "prompt": [PROMPT, "a request"],
        "n": 2,
        "seed": 3,
        "temperature": 1,
        "echo": True,
        "logprobs": 2,
        "max_tokens": max_tokens,
    }
    whole = {c.index: (c.text, c.logprobs.model_dump()) for c in complete(client, **options).choices}
    assert columns_of(complete(client, stream=True, **options)) == whole


@exact
def test_prompt_logprobs_are_told_as_vllm_does(server, client):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "temperature": 0, "prompt_logprobs": 2}
    choice = server.post("/v1/completions", **body).json()["choices"][0]
    first, *rows = choice["prompt_logprobs"]
    table = complete(client, echo=True, logprobs=2, max_tokens=3).choices[0].logprobs
    assert first is None
    assert choice["logprobs"] is None
    assert len(rows) == len(table.tokens) - 3 - 1
    for row, logprob in zip(rows, table.token_logprobs[1:], strict=False):
        assert logprob in [entry["logprob"] for entry in row.values()]
        assert [entry["rank"] for entry in row.values()][:2] == [1, 2]
        assert len(row) in (2, 3)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "prompt_logprobs": 0}
    answer = server.post("/v1/chat/completions", **chat).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


@exact
def test_the_same_prompt_is_scored_the_same_however_much_of_it_is_cached(client):
    prompt = [7, 8, 9, 10] * 40
    tables = [
        complete(client, prompt=prompt, echo=True, logprobs=3, max_tokens=1).choices[0].logprobs for _ in range(2)
    ]
    assert tables[0] == tables[1]


def test_beam_search_gives_the_best_hypotheses_first(server, client):
    beams = complete(client, n=3, logprobs=0, extra_body={"num_beams": 3, "ignore_eos": True, "length_penalty": 0.0})
    totals = [sum(choice.logprobs.token_logprobs) for choice in beams.choices]
    greedy = complete(client, logprobs=0).choices[0]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] >= sum(greedy.logprobs.token_logprobs)
    assert [choice.index for choice in beams.choices] == [0, 1, 2]
    vllm = complete(client, n=3, extra_body={"use_beam_search": True, "ignore_eos": True, "length_penalty": 0.0})
    assert [choice.text for choice in vllm.choices] == [choice.text for choice in beams.choices]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "num_beams": 2}
    assert len(server.post("/v1/chat/completions", **chat).json()["choices"]) == 1


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"num_beams": 2, "stream": True}, "num_beams"),
        ({"num_beams": 2, "temperature": 0.7}, "temperature"),
        ({"num_beams": 2, "stop": "x"}, "stop"),
        ({"num_beams": 2, "n": 3}, "n"),
        ({"num_beams": 65}, "num_beams"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"use_beam_search": False, "num_beams": 2}, "use_beam_search"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "echo": True, "logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_what_does_not_go_together_is_refused_by_the_parameter(server, change, param):
    assert refusal(server.post("/v1/completions", **{"model": "tiny", "prompt": PROMPT} | change))["param"] == param


def test_a_stream_of_an_echo_has_nothing_before_its_first_token(server):
    answer = server.post(
        "/v1/completions", model="tiny", prompt=PROMPT, max_tokens=2, echo=True, logprobs=0, stream=True
    )
    first = parse_events(answer.content)[0]["choices"][0]
    assert first["text"].startswith(PROMPT)
    assert len(first["logprobs"]["tokens"]) > 2
