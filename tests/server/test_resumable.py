"""Streams that broke off at one server, and go on at another that knows nothing but the last event's id."""

import pytest

from tests.server.running import running_server
from tests.server.test_calls import CALLS, events_of, post, said


@pytest.fixture(scope="module")
def cells(tiny_llama):
    """Two servers of one model; the second one guesses ahead, so that its steps give several tokens at a time."""
    flags = ("--model", str(tiny_llama), "--served-model-name", "tiny", "--threads", "1", "--resumable-streams")
    with running_server(*flags, "--seed", "1") as first, running_server(*flags, "--speculation", "ngram") as second:
        yield first, second


def unseeded(body):
    """The body without its seed: the server draws one."""
    if "parameters" in body:
        return body | {"parameters": unseeded(body["parameters"])}
    return {name: value for name, value in body.items() if name != "seed"}


@pytest.mark.parametrize("name", CALLS)
def test_another_server_goes_on_exactly_where_the_first_broke_off(cells, name):
    first, second = cells
    path, body = CALLS[name][0], unseeded(CALLS[name][1])
    whole = events_of(post(first, path, body))
    places = [place for place, (event_id, _) in enumerate(whole) if event_id]
    assert len(places) > 3
    for place in (places[0], places[len(places) // 2], places[-1]):
        rest = events_of(post(second, path, body, **{"last-event-id": whole[place][0]}))
        assert said(rest) == said(whole[place + 1 :])
        assert [data for _, data in rest if data == "[DONE]"] == [data for _, data in whole if data == "[DONE]"]
    ids = {event_id for event_id, _ in rest if event_id} | {whole[places[-1]][0]}
    assert len({event_id.split("/")[0] for event_id in ids}) == 1, "it stays the same call, for a third server"


def test_several_prompts_with_log_probabilities_go_on_each_with_its_own_seed(cells):
    body = {"prompt": ["the quick", "fox"], "n": 2, "logprobs": 2, "echo": True, "stream": True}
    body |= {"max_tokens": 12, "temperature": 1.0, "ignore_eos": True}

    def told(events):
        entries = {}
        for _, data in events:
            for choice in data["choices"] if data != "[DONE]" else ():
                logprobs = choice["logprobs"] or {"tokens": [], "token_logprobs": []}
                kept = entries.setdefault(choice["index"], [])
                kept += [(choice["text"], logprobs["tokens"], logprobs["token_logprobs"], choice["finish_reason"])]
        return {index: [one for one in kept if any(one)] for index, kept in entries.items()}

    def joined(*parts):
        texts = {}
        for part in parts:
            for index, entries in told(part).items():
                text, tokens, logprobs, reasons = texts.setdefault(index, ("", [], [], []))
                for more, names, values, reason in entries:
                    text += more
                    tokens += names
                    logprobs += values
                    reasons += [reason] if reason else []
                texts[index] = (text, tokens, logprobs, reasons)
        return texts

    whole = events_of(post(cells[0], "/v1/completions", body))
    places = [place for place, (event_id, _) in enumerate(whole) if event_id]
    for place in places[len(places) // 4 :: len(places) // 3]:
        rest = events_of(post(cells[1], "/v1/completions", body, **{"last-event-id": whole[place][0]}))
        assert joined(whole[: place + 1], rest) == joined(whole)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda event_id: event_id.rpartition("~")[0] + "~0123456789abcdef",
            "another model, instruction set or version",
        ),
        (lambda event_id: event_id.rpartition("~")[0], "not the id of an event"),
        (lambda event_id: event_id.replace("~", "~9", 1).replace("~", "~" + "9" * 30, 1), "not the id of an event"),
        (lambda event_id: event_id.split("~")[0], "names no known call"),
    ],
)
def test_an_id_that_would_not_give_the_same_answer_is_refused(cells, change, words):
    path, body = CALLS["completions"]
    event_id = [event_id for event_id, _ in events_of(post(cells[0], path, body)) if event_id][2]
    answer = post(cells[1], path, body, **{"last-event-id": change(event_id)})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
