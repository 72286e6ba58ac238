"""Stored responses, by OpenAI's real client: continued, referred to, retrieved, listed and deleted."""

import itertools
import json

import httpx
import openai
import pytest

from penstock.frontend.recovery.recent_responses import RESPONSE_BYTES
from penstock.server.config import ServerConfig
from penstock.server.keys import load_keys
from tests.server.echoing import HERMES, SHOW, echoing, write_checkpoint
from tests.server.in_process import with_app

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
SMALL = 4 * RESPONSE_BYTES + 6000


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    templates = {"hermes": HERMES, "show": SHOW}
    return {name: write_checkpoint(tmp_path_factory.mktemp(name), one) for name, one in templates.items()}


@pytest.fixture(scope="module")
def ask(folders):
    with echoing(folders) as run:
        yield run


def shown(response):
    """The messages that the template got."""
    return json.loads(response.output_text)


async def create(client, says, **options):
    return await client.responses.create(**{"model": "rule", "input": says} | options)


async def final(client, says, **options):
    """The response at the end of a stream."""
    async with client.responses.stream(**{"model": "rule", "input": says} | options) as stream:
        return await stream.get_final_response()


async def parse(client, says, **options):
    return await client.responses.parse(**{"model": "rule", "input": says} | options)


WAYS = pytest.mark.parametrize("answer", [create, final, parse])


@WAYS
def test_a_conversation_goes_on_by_the_last_responses_id(ask, answer):
    async def talk(client, http):
        first = await answer(client, "one", instructions="Be brief.")
        second = await answer(client, "two", previous_response_id=first.id)
        third = await answer(client, "three", previous_response_id=second.id, instructions="Be kind.")
        assert shown(first) == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
        said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": first.output_text}]
        assert shown(second) == [*said, {"role": "user", "content": "two"}], "instructions are not carried over"
        said = [*shown(second), {"role": "assistant", "content": second.output_text}]
        kind = {"role": "system", "content": "Be kind."}
        assert shown(third) == [kind, *said, {"role": "user", "content": "three"}]
        assert [one.previous_response_id for one in (first, second, third)] == [None, first.id, second.id]
        assert [one.store for one in (first, second, third)] == [True] * 3

    ask("show", talk)


@WAYS
def test_a_tool_loop_goes_on_by_the_last_responses_id(ask, answer):
    async def talk(client, http):
        first = await answer(client, "<think>hm</think>Look:" + CALL, tools=[TOOL])
        call = first.output[-1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
        second = await answer(client, [result], previous_response_id=first.id, tools=[TOOL])
        assert second.output_text == "5"
        return first.id, result

    first, result = ask("hermes", talk)
    assert first.startswith("resp_")

    async def look(client, http):
        with pytest.raises(openai.BadRequestError):
            await answer(client, [result], previous_response_id=first)

    ask("show", look)


@WAYS
def test_a_tool_loop_goes_on_by_references_to_the_items(ask, answer):
    async def talk(client, http):
        user = {"role": "user", "content": "Look:" + CALL}
        first = await answer(client, [user], tools=[TOOL])
        references = [{"type": "item_reference", "id": item.id} for item in first.output]
        call = first.output[-1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
        second = await answer(client, [user, *references, result], tools=[TOOL])
        assert second.output_text == "5"
        whole = [item async for item in client.responses.input_items.list(second.id, order="asc")]
        assert [item.type for item in whole] == ["message", "message", "function_call", "function_call_output"]
        assert (whole[2].id, whole[2].call_id, whole[2].arguments) == (call.id, call.call_id, call.arguments)
        third = await answer(client, [{"id": item.id} for item in whole], tools=[TOOL])
        assert third.output_text == "5", "items of an input can be referred to, too"

    ask("hermes", talk)


def test_an_item_that_is_referred_to_reaches_the_template(ask):
    async def talk(client, http):
        first = await create(client, "one")
        again = [{"role": "user", "content": "x"}, {"id": first.output[0].id}, {"role": "user", "content": "y"}]
        assert shown(await create(client, again))[1] == {"role": "assistant", "content": first.output_text}

    ask("show", talk)


def test_an_item_is_referred_to_once(ask):
    async def talk(client, http):
        first = await create(client, "one")
        with pytest.raises(openai.BadRequestError, match="Duplicate item found with id") as caught:
            await create(client, [{"id": first.output[0].id}] * 1000)
        assert caught.value.param == "input"

    ask("show", talk)


@WAYS
def test_a_stored_response_is_retrieved_as_it_was_and_deleted(ask, answer):
    async def talk(client, http):
        made = await answer(client, "one", metadata={"a": "b"})
        found = await client.responses.retrieve(made.id)
        assert (found.output_text, found.usage, found.metadata) == (made.output_text, made.usage, {"a": "b"})
        assert (found.status, found.created_at, found.id) == (made.status, made.created_at, made.id)
        deleted = await http.delete(f"/v1/responses/{made.id}")
        assert deleted.json() == {"id": made.id, "object": "response", "deleted": True}
        for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError, match="not stored here, or not any more"):
                await call(made.id)

    ask("hermes", talk)


def test_the_input_is_listed_in_pages_in_either_order(ask):
    async def talk(client, http):
        turns = [
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "2"},
            {"role": "developer", "content": [{"type": "input_text", "text": "3"}]},
            {"type": "message", "id": "msg_mine", "role": "user", "content": "4"},
        ]
        made = await create(client, turns)

        async def texts(**options):
            pages = client.responses.input_items.list(made.id, **options)
            return [item.content[0].text async for item in pages]

        assert await texts() == ["4", "3", "2", "1"]
        assert await texts(order="asc", limit=3) == ["1", "2", "3", "4"]
        page = await client.responses.input_items.list(made.id, limit=2)
        assert (page.has_more, [item.role for item in page.data]) == (True, ["user", "developer"])
        (text,) = page.data[0].content
        assert (page.data[0].id, page.data[0].status, text.to_dict()) == (
            "msg_mine",
            "completed",
            {"type": "input_text", "text": "4"},
        )
        assert len({item.id async for item in client.responses.input_items.list(made.id)}) == 4
        follow = await create(client, "5", previous_response_id=made.id)
        listed = [item async for item in client.responses.input_items.list(follow.id)]
        assert [item.content[0].text for item in listed] == ["5"], "its own"
        with pytest.raises(openai.NotFoundError):
            await client.responses.input_items.list(made.id, after="msg_other")

    ask("hermes", talk)


@pytest.mark.parametrize(
    ("change", "status", "param", "code"),
    [
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id", "previous_response_not_found"),
        ({"input": [{"type": "item_reference", "id": "fc_1"}]}, 404, "input", None),
        ({"input": [{"id": "fc_1"}]}, 404, "input", None),
    ],
)
def test_what_is_not_stored_is_refused_with_the_way_out(ask, change, status, param, code):
    async def talk(client, http):
        answer = await http.post("/v1/responses", json={"model": "rule", "input": "x"} | change)
        assert answer.status_code == status
        error = answer.json()["error"]
        assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
        assert "not stored here" in error["message"]
        assert "send the whole conversation" in error["message"]
        assert code or "store is false" in error["message"]

    ask("hermes", talk)


@pytest.mark.parametrize("depth", [100, 250, 700])
def test_what_is_nested_deeply_can_be_continued_if_it_was_accepted(ask, depth):
    async def talk(client, http):
        nested = json.loads("[" * depth + "]" * depth)
        turns = [
            {"role": "user", "content": "x"},
            {"type": "unknown", "data": nested},
            {"role": "user", "content": "y"},
        ]
        made = await create(client, turns)
        assert (await create(client, "z", previous_response_id=made.id)).output_text == "z"
        listed = (await http.get(f"/v1/responses/{made.id}/input_items")).json()["data"]
        assert listed[1]["data"] == nested

    ask("hermes", talk)


def test_store_false_stores_nothing(ask):
    async def talk(client, http):
        made = await create(client, "x", store=False)
        assert made.store is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError, match="not stored"):
            await create(client, "y", previous_response_id=made.id)

    ask("hermes", talk)


def test_a_chain_without_a_deleted_response_cannot_be_continued(ask):
    async def talk(client, http):
        first = await create(client, "x")
        second = await create(client, "y", previous_response_id=first.id)
        await client.responses.delete(first.id)
        assert (await client.responses.retrieve(second.id)).id == second.id
        with pytest.raises(openai.BadRequestError, match="a response that it continues"):
            await create(client, "z", previous_response_id=second.id)

    ask("hermes", talk)


def test_items_of_one_id_are_listed_one_after_the_other(ask):
    async def talk(client, http):
        turns = [{"type": "message", "id": "msg_1", "role": "user", "content": str(number)} for number in range(5)]
        made = await create(client, turns)
        pages = client.responses.input_items.list(made.id, order="asc", limit=1)
        listed = [item async for item in pages]
        assert [item.content[0].text for item in listed] == ["0", "1", "2", "3", "4"]
        assert len({item.id for item in listed}) == 5

    ask("hermes", talk)


def test_a_response_is_stored_before_its_last_event_is_sent(ask):
    async def talk(client, http):
        async with client.responses.stream(model="rule", input="x") as stream:
            async for event in stream:
                if event.type == "response.completed":
                    assert (await client.responses.retrieve(event.response.id)).output_text == "x"
                    return
        raise AssertionError("it did not complete")

    ask("hermes", talk)


def test_a_cut_response_is_stored_as_it_is(ask):
    async def talk(client, http):
        made = await create(client, "12345678", max_output_tokens=4)
        found = await client.responses.retrieve(made.id)
        assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert found.output_text == "1234"

    ask("hermes", talk)


def test_a_stored_response_is_not_streamed(ask):
    async def talk(client, http):
        made = await create(client, "x")
        with pytest.raises(openai.BadRequestError, match="not streamed"):
            await client.responses.retrieve(made.id, stream=True)

    ask("hermes", talk)


def test_the_least_recently_used_make_room_and_the_metrics_tell(folders):
    async def talk(client, http):
        first, second = await create(client, "first"), await create(client, "second")
        for number in range(20):
            await create(client, f"{number}" * 100)
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(second.id)
        metrics = (await http.get("/metrics")).text.split("\n")
        values = {line.split()[0]: float(line.split()[1]) for line in metrics if line.startswith("penstock_stored")}
        assert 0 < values["penstock_stored_response_bytes"] <= SMALL
        assert 1 < values["penstock_stored_responses"] < 8

    with echoing(folders, ServerConfig(max_stored_response_bytes=SMALL)) as ask:
        ask("hermes", talk)


def test_a_server_that_stores_none_says_so(folders):
    async def talk(client, http):
        answer = await http.post("/v1/responses", json={"input": "x", "store": True})
        assert answer.json()["store"] is False
        assert answer.headers["penstock-ignored"] == "store"
        assert "penstock-ignored" not in (await http.post("/v1/responses", json={"input": "x"})).headers
        assert (await http.get(f"/v1/responses/{answer.json()['id']}")).status_code == 404

    with echoing(folders, ServerConfig(max_stored_response_bytes=0)) as ask:
        ask("hermes", talk)


def test_each_key_has_its_own_responses(tiny_llama, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nname = "a"\nsecret = "key-of-a"\n[[key]]\nname = "b"\nsecret = "key-of-b"\n')

    async def talk(http: httpx.AsyncClient, engine, app):
        def client(name):
            options = {"base_url": "http://penstock/v1", "http_client": http, "max_retries": 0}
            return openai.AsyncOpenAI(api_key=f"key-of-{name}", **options)

        made = await create(client("a"), "x", max_output_tokens=2)
        assert (await client("a").responses.retrieve(made.id)).id == made.id
        for call in (client("b").responses.retrieve, client("b").responses.delete):
            with pytest.raises(openai.NotFoundError):
                await call(made.id)
        with pytest.raises(openai.BadRequestError):
            await create(client("b"), "y", previous_response_id=made.id)
        with pytest.raises(openai.NotFoundError):
            await create(client("b"), [{"type": "item_reference", "id": made.output[0].id}])
        assert (await create(client("a"), "y", previous_response_id=made.id, max_output_tokens=2)).store

    with_app(talk, tiny_llama, keys=load_keys(None, str(keys), private_cache=False))


def test_a_conversation_of_many_turns_costs_no_copies(folders):
    async def talk(client, http):
        last, sizes = None, []
        for _ in range(12):
            options = {} if last is None else {"previous_response_id": last}
            last = (await create(client, "x" * 50, **options)).id
            samples = [
                line for line in (await http.get("/metrics")).text.split("\n") if "stored_response_bytes " in line
            ]
            sizes.append(float(samples[-1].split()[1]))
        growth = [after - before for before, after in itertools.pairwise(sizes)]
        assert max(growth) - min(growth) < 50

    with echoing(folders) as ask:
        ask("hermes", talk)


def test_a_resumed_stream_has_the_id_and_items_of_the_one_that_broke(tiny_llama):
    body = {"model": "rule", "input": "the quick", "stream": True, "max_output_tokens": 8, "temperature": 0}

    def read(text):
        blocks = [dict(line.split(": ", 1) for line in block.split("\n")) for block in text.strip().split("\n\n")]
        return [(block.get("id"), json.loads(block["data"])) for block in blocks]

    async def talk(http, engine, app):
        events = read((await http.post("/v1/responses", json=body)).text)
        place = [index for index, (id, _) in enumerate(events) if id][2]
        resumed = await http.post("/v1/responses", json=body, headers={"last-event-id": events[place][0]})
        rest = read(resumed.text)
        whole, again = events[-1][1]["response"], rest[-1][1]["response"]
        assert again["output"] == whole["output"]
        assert again["id"] == whole["id"] == events[0][1]["response"]["id"]
        assert rest[0][1]["sequence_number"] == events[place][1]["sequence_number"] + 1
        listed = await http.get(f"/v1/responses/{whole['id']}")
        assert listed.json()["output"] == whole["output"]

    with_app(talk, tiny_llama, config=ServerConfig(resumable_streams=True))


def test_stored_responses_survive_the_server(tiny_llama, tmp_path):
    journal = tmp_path / "journal"
    ids = []

    async def before(http, engine, app):
        for text in ("one", "two"):
            previous = {"previous_response_id": ids[-1]} if ids else {}
            answer = await http.post("/v1/responses", json={"input": text, "max_output_tokens": 2} | previous)
            ids.append(answer.json()["id"])
        texts.append((await http.get(f"/v1/responses/{ids[-1]}")).json())

    async def after(http, engine, app):
        assert (await http.get(f"/v1/responses/{ids[-1]}")).json() == texts[0]
        body = {"input": "three", "max_output_tokens": 2, "previous_response_id": ids[-1]}
        assert (await http.post("/v1/responses", json=body)).status_code == 200
        assert (await http.delete(f"/v1/responses/{ids[0]}")).status_code == 200

    async def at_last(http, engine, app):
        found = [(await http.get(f"/v1/responses/{id}")).status_code for id in ids]
        assert found == [404, 200]

    texts = []
    for talk in (before, after, at_last):
        with_app(talk, tiny_llama, journal=journal)
