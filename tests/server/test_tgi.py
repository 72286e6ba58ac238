"""TGI's dialect, through Hugging Face's own client, against a real server."""

import json
import re
import typing
from dataclasses import replace

import jsonschema
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import ValidationError
from huggingface_hub.inference._generated.types import TextGenerationInputGenerateParameters

from penstock.server.tgi.schema import GenerateParameters
from penstock.server.tgi.validation import sampling_params
from tests.frontend.test_input_processor import INFO
from tests.support import fetch
from tests.support.bodies import known_fields

PROMPT = "the quick brown fox"
ANIMAL = {
    "type": "object",
    "properties": {"kind": {"enum": ["fox", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def hf(server):
    with InferenceClient(model=server.url, provider="hf-inference", token="none") as opened:
        yield opened


def generate(server, path="/generate", /, inputs=PROMPT, **parameters):
    body = {"inputs": inputs, "parameters": {"max_new_tokens": 12} | parameters}
    content = json.dumps(body)  # ASCII, so that an unpaired surrogate can be sent
    return fetch.post(f"{server.url}{path}", content=content, headers={"content-type": "application/json"}, timeout=60)


def events_of(answer):
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.text.endswith("\n\n")
    parts = answer.text[:-2].split("\n\n")
    assert all(part.startswith("data:") and "\n" not in part for part in parts)
    return [json.loads(part.removeprefix("data:")) for part in parts]


def text_of(tokens):
    """Special tokens have a name, which is no text."""
    return re.sub(r"<\|\w+\|>", "", "".join(token["text"] for token in tokens))


def refusal(answer, status=422):
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error", "error_type"}
    assert body["error_type"] == "validation"
    return body["error"]


# ── the client ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_client_gets_text_and_details_and_streams_of_them(hf):
    text = hf.text_generation(PROMPT, max_new_tokens=12)
    whole = hf.text_generation(PROMPT, max_new_tokens=12, details=True)
    assert whole.generated_text == text
    assert (whole.details.finish_reason, whole.details.generated_tokens) == ("length", 12)
    *pieces, last = hf.text_generation(PROMPT, max_new_tokens=12, stream=True, details=True)
    assert text_of(vars(one.token) for one in (*pieces, last)) == text
    assert (last.generated_text, last.details.generated_tokens) == (text, 12)


def test_the_client_chats_completes_and_lists(hf, client, server):
    messages = [{"role": "user", "content": PROMPT}]
    answer = hf.chat_completion(messages, max_tokens=12, temperature=0)
    same = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0)
    assert answer.choices[0].message.content == same.choices[0].message.content
    pieces = hf.chat_completion(messages, max_tokens=12, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    assert text == same.choices[0].message.content
    assert hf.get_endpoint_info()["model_id"] == "tiny"
    assert hf.health_check()


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"schema": ANIMAL}},  # the client sends it as json_object with a value
        {"type": "json_object", "value": ANIMAL},
        {"type": "json", "value": {name: ANIMAL[name] for name in ANIMAL if name != "type"}},
    ],
)
def test_the_client_gets_an_answer_by_its_schema(hf, form):
    messages = [{"role": "user", "content": PROMPT}]
    answer = hf.chat_completion(messages, max_tokens=64, temperature=1.5, seed=3, response_format=form)
    jsonschema.validate(json.loads(answer.choices[0].message.content), ANIMAL)


def test_the_client_gets_an_answer_by_its_pattern(hf):
    form = {"type": "regex", "value": "(cat|dog)s"}
    answer = hf.chat_completion([{"role": "user", "content": PROMPT}], max_tokens=9, response_format=form)
    assert answer.choices[0].message.content in ("cats", "dogs")


def test_the_client_reads_a_refusal_as_what_it_is(hf):
    with pytest.raises(ValidationError, match="`temperature` must be strictly positive"):
        hf.text_generation(PROMPT, temperature=-1.0)
    with pytest.raises(ValidationError, match="best_of"):
        list(hf.text_generation(PROMPT, best_of=2, do_sample=True, stream=True))


def test_the_asynchronous_client_works_as_well(server):
    import asyncio

    async def talk():
        async with AsyncInferenceClient(model=server.url, token="none") as aclient:
            return await aclient.text_generation(PROMPT, max_new_tokens=4)

    assert asyncio.run(talk())


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_details_name_each_token_and_together_they_are_the_text(server):
    body = generate(server, details=True, top_n_tokens=3).json()
    details = body["details"]
    assert text_of(details["tokens"]) == body["generated_text"]
    assert len(details["tokens"]) == len(details["top_tokens"]) == details["generated_tokens"] == 12
    assert details["prefill"] == []
    assert details["seed"] is None, "nothing was drawn"
    for token, top in zip(details["tokens"], details["top_tokens"], strict=True):
        assert len(top) == 3
        assert (top[0]["id"], top[0]["logprob"]) == (token["id"], token["logprob"]), "greedy takes the likeliest"
    assert "details" not in generate(server).json()


def test_a_stream_has_an_event_a_token_and_the_whole_in_the_last(server):
    whole = generate(server, details=True, do_sample=True, seed=5).json()
    *events, last = events_of(generate(server, "/generate_stream", details=True, do_sample=True, seed=5))
    assert [event["index"] for event in (*events, last)] == list(range(1, 13))
    assert [event["token"] for event in (*events, last)] == whole["details"]["tokens"]
    assert all(event["generated_text"] is event["details"] is None for event in events)
    assert last["generated_text"] == whole["generated_text"]
    assert last["details"] == {"finish_reason": "length", "generated_tokens": 12, "seed": 5, "input_length": 4}


def test_an_end_of_text_token_is_told_as_special_and_is_no_text(server):
    seeds = (
        generate(server, do_sample=True, temperature=5.0, max_new_tokens=400, details=True, seed=s) for s in range(9)
    )
    ended = (answer.json() for answer in seeds)
    body = next(one for one in ended if one["details"]["finish_reason"] == "eos_token")
    *tokens, last = body["details"]["tokens"]
    assert (last["text"], last["special"]) == ("<|end|>", True)
    assert text_of(tokens) == body["generated_text"]


def test_a_stop_sequence_ends_the_text_and_stays_in_it(server):
    text = generate(server).json()["generated_text"]
    stop = text[4:6]
    body = generate(server, stop=[stop], details=True).json()
    assert body["details"]["finish_reason"] == "stop_sequence"
    assert body["generated_text"] == text[: text.index(stop) + 2]
    *_, last = events_of(generate(server, "/generate_stream", stop=[stop]))
    assert last["generated_text"] == body["generated_text"]


def test_the_best_of_several_comes_first(server):
    body = generate(server, best_of=4, temperature=2.0, details=True).json()
    details = body["details"]
    answers = [details, *details["best_of_sequences"]]
    means = [sum(token["logprob"] for token in answer["tokens"]) / answer["generated_tokens"] for answer in answers]
    assert len(answers) == 4
    assert len({answer["tokens"][0]["id"] for answer in answers}) > 1
    assert means == sorted(means, reverse=True)


def test_the_prompts_tokens_are_told_with_their_logprobs(server):
    details = generate(server, decoder_input_details=True).json()["details"]
    first, *rest = details["prefill"]
    assert "".join(token["text"] for token in details["prefill"]) == PROMPT
    assert first["logprob"] is None
    assert all(token["logprob"] < 0 and set(token) == {"id", "text", "logprob"} for token in rest)
    several = generate(server, decoder_input_details=True, best_of=2, temperature=1.0).json()["details"]
    assert several["prefill"] == several["best_of_sequences"][0]["prefill"] == details["prefill"]


def test_the_full_text_begins_with_the_prompt(server):
    text = generate(server).json()["generated_text"]
    assert generate(server, return_full_text=True).json()["generated_text"] == PROMPT + text
    *_, last = events_of(generate(server, "/generate_stream", return_full_text=True))
    assert last["generated_text"] == PROMPT + text


def test_a_prompt_is_truncated_to_its_last_tokens(server):
    short = generate(server, inputs=" brown fox")
    cut = generate(server, truncate=2)
    assert cut.headers["x-prompt-tokens"] == short.headers["x-prompt-tokens"] == "2"
    assert cut.json() == short.json()


def test_whether_tokens_are_drawn_follows_tgi(server):
    def seed_of(body):
        answer = fetch.post(f"{server.url}/generate", json=body)
        return answer.json().get("details", {}).get("seed")

    base = {"max_new_tokens": 2, "details": True}
    assert seed_of({"inputs": PROMPT, "parameters": base}) is None
    for drawn in ({"do_sample": True}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.9}):
        assert seed_of({"inputs": PROMPT, "parameters": base | drawn}) is not None
    texts = {fetch.post(f"{server.url}/generate", json={"inputs": "a"}, timeout=60).text for _ in range(2)}
    assert len(texts) == 2, "without any parameters, it draws"


def test_headers_say_what_it_took(server):
    headers = generate(server).headers
    assert headers["x-prompt-tokens"] == "4"
    assert headers["x-generated-tokens"] == "12"
    assert headers["x-compute-characters"] == str(len(PROMPT))
    parts = [int(headers[f"x-{name}-time"]) for name in ("validation", "queue", "inference")]
    assert abs(sum(parts) - int(headers["x-total-time"])) <= 3
    assert int(headers["x-time-per-token"]) <= int(headers["x-inference-time"])
    assert float(headers["x-compute-time"]) > 0
    assert headers["x-compute-type"] == "cpu"
    streamed = generate(server, "/generate_stream").headers
    assert streamed["x-accel-buffering"] == "no"
    assert streamed["x-compute-characters"] == str(len(PROMPT))


def test_one_route_serves_whole_and_streamed_answers(server):
    text = generate(server).json()["generated_text"]
    assert generate(server, "/").json() == [{"generated_text": text}]
    for path in ("/", "/invocations"):
        body = {"inputs": PROMPT, "stream": True, "parameters": {"max_new_tokens": 12}}
        assert events_of(fetch.post(server.url + path, json=body))[-1]["generated_text"] == text


def test_invocations_are_generations_chats_and_completions(server):
    messages = [{"role": "user", "content": PROMPT}]
    for path, body in (
        ("/", {"inputs": PROMPT, "parameters": {"max_new_tokens": 4}}),
        ("/v1/chat/completions", {"messages": messages, "model": "tgi", "max_tokens": 4, "temperature": 0}),
        ("/v1/completions", {"prompt": PROMPT, "model": "tgi", "max_tokens": 4, "temperature": 0}),
    ):
        own, invoked = (fetch.post(server.url + one, json=body).json() for one in (path, "/invocations"))
        if isinstance(own, dict):
            own, invoked = own["choices"], invoked["choices"]
        assert own == invoked


def test_sagemaker_finds_health_by_its_own_name(server):
    assert fetch.get(f"{server.url}/ping").json() == fetch.get(f"{server.url}/health").json()


def test_tokens_know_their_place_in_the_text(server):
    text = "the größer 🙂 fox"
    tokens = fetch.post(f"{server.url}/tokenize", json={"inputs": text}).json()
    assert [token["id"] for token in tokens]
    assert all(token["text"] == text[token["start"] : token["stop"]] for token in tokens)
    messages = [{"role": "user", "content": "fox"}]
    chat = fetch.post(f"{server.url}/chat_tokenize", json={"messages": messages}).json()
    assert chat["templated_text"] == "<|user|>fox<|end|><|assistant|>"
    assert chat["tokenize_response"][0]["text"] == "<|user|>"


def test_info_tells_the_limits_that_hold(server):
    info = fetch.get(f"{server.url}/info").json()
    assert (info["max_total_tokens"], info["max_input_tokens"]) == (512, 511)
    stops = [f"never {i}" for i in range(info["max_stop_sequences"] + 1)]
    assert "stop" in refusal(generate(server, stop=stops))
    assert "stop" in refusal(generate(server, stop=["x" * 4097]))
    assert generate(server, stop=stops[1:]).status_code == 200


def test_controls_of_sampling_mean_what_they_mean_to_tgi():
    info = replace(INFO, max_num_seqs=4)
    plain = sampling_params("x", GenerateParameters(), info)
    assert (plain.temperature, plain.typical_p, plain.repetition_penalty, plain.share_penalty) == (0, 1, 1, 0)
    given = GenerateParameters(typical_p=0.9, repetition_penalty=1.2, frequency_penalty=0.5, top_n_tokens=3)
    asked = sampling_params("x", given, info)
    assert (asked.temperature, asked.typical_p, asked.repetition_penalty, asked.logprobs) == (1, 0.9, 1.2, 3)
    assert (asked.share_penalty, asked.frequency_penalty) == (0.5, 0)  # TGI's goes by shares, not by counts


@pytest.mark.parametrize(
    "controls",
    [{"repetition_penalty": 5.0}, {"frequency_penalty": 2.0}, {"typical_p": 0.2}, {"typical_p": 0.9, "top_k": 5}],
)
def test_each_control_changes_the_answer_and_a_seed_repeats_it(server, controls):
    sampled = {"do_sample": True, "seed": 5, "max_new_tokens": 40}
    plain, first, again = (
        generate(server, **sampled, **some).json()["generated_text"] for some in ({}, controls, controls)
    )
    assert first == again != plain


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_parameter_that_tgi_documents_is_obeyed_or_refused_by_name():
    names = set(typing.get_type_hints(TextGenerationInputGenerateParameters))
    assert names <= known_fields(GenerateParameters)


REFUSED = [
    ({"best_of": 0}, "`best_of` must be > 0 and <= 128. Given: 0"),
    ({"best_of": 129, "do_sample": True}, "`best_of` must be > 0 and <= 128. Given: 129"),
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"temperature": 0}, "`temperature` must be strictly positive"),
    ({"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
    ({"frequency_penalty": 2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"typical_p": 1.0}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"top_k": 0}, "`top_k` must be strictly positive"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"stop": ["x"] * 17}, "`stop` supports up to 16 stop sequences. Given: 17"),
    ({"seed": 1, "best_of": 2, "do_sample": True}, "`seed` must not be set when `best_of` > 1"),
    ({"top_n_tokens": 21}, "`top_n_tokens` must be >= 0 and <= 20. Given: 21"),
    ({"inputs": ""}, "`inputs` cannot be empty"),
    ({"truncate": 0}, "`truncate` must be strictly positive and less than 511. Given: 0"),
    ({"truncate": 512}, "`truncate` must be strictly positive and less than 511. Given: 512"),
    ({"inputs": "!" * 600, "max_new_tokens": None}, "`inputs` must have less than 511 tokens. Given: 600"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_tgi_refuses_is_refused_in_its_words(server, change, message):
    assert refusal(generate(server, **change)) == message


def test_of_several_mistakes_the_one_that_tgi_looks_for_first_is_told(server):
    mistakes = [(change, message) for change, message in REFUSED[3:15] if "seed" not in change]
    while mistakes:
        together = {name: value for change, _ in mistakes for name, value in change.items()}
        assert refusal(generate(server, **together)) == mistakes.pop(0)[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"repetition_penalty": 101}, "repetition_penalty must be from 0.01"),
        ({"watermark": True}, "watermark is not supported here"),
        ({"grammar": {"type": "regex", "value": "(a"}}, "unclosed group"),
        ({"grammar": {"type": "json", "value": 3}}, "needs a JSON schema"),
        ({"adapter_id": "x"}, "there is no adapter 'x' here"),
        ({"max_token": 3}, "did you mean 'max_new_tokens'?"),
        ({"temperature": "warm"}, "parameters.temperature"),
        ({"inputs": "\ud800"}, "inputs"),
        ({"stop": [""]}, "stop"),
    ],
)
def test_what_this_server_cannot_do_is_refused_by_name(server, change, words):
    assert words in refusal(generate(server, **change))


def test_a_stream_that_is_refused_never_begins(server):
    for change, words in (
        ({"best_of": 2, "do_sample": True}, "`best_of` != 1 is not supported when streaming tokens"),
        ({"decoder_input_details": True}, "`decoder_input_details` == true is not supported when streaming tokens"),
        ({"temperature": 0}, "`temperature` must be strictly positive"),
    ):
        assert refusal(generate(server, "/generate_stream", **change)) == words


def test_wrong_methods_are_told_in_tgis_shape(server):
    assert "GET" in refusal(fetch.get(f"{server.url}/generate"), 405)
