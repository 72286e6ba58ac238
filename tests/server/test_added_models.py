"""Changes of the served models on their way to the file."""

import asyncio
from functools import partial

from penstock.checkpoint.added import Added, AddedFile
from penstock.checkpoint.data_folder import locked
from penstock.server.added_models import AddedModels, added_file
from penstock.server.config import ServerConfig


def test_changes_are_written_in_the_order_in_which_they_were_made(tmp_path):
    file = AddedFile(tmp_path / "added.json")

    async def change():
        added = AddedModels(file)
        changes = [Added.with_model, Added.without_model] * 10 + [Added.with_model]
        await asyncio.gather(*(added.record(partial(change, name="a")) for change in changes))
        assert file.read() == Added(("a",))
        assert [await added.forget(name) for name in ("a", "a")] == [True, False]

    asyncio.run(change())


def test_a_change_is_written_even_if_its_client_leaves(tmp_path):
    file = AddedFile(tmp_path / "added.json")

    async def change():
        added = AddedModels(file)
        with locked(tmp_path / "added.json.lock"):  # by another server
            first, second = (
                asyncio.ensure_future(added.record(partial(Added.with_model, name=name))) for name in ("a", "b")
            )
            await asyncio.sleep(0)
            for call in (first, second):
                call.cancel()
            await asyncio.wait({first, second})
        await added.record(partial(Added.with_model, name="c"))
        assert file.read().models == ("a", "b", "c")

    asyncio.run(change())


def test_a_change_that_cannot_be_written_is_named_and_its_call_goes_on(tmp_path, caplog):
    (tmp_path / "file").touch()
    asyncio.run(AddedModels(AddedFile(tmp_path / "file" / "added.json")).record(partial(Added.with_model, name="a")))
    assert "ends with this server: the list of added models cannot be written" in caplog.text


def test_the_file_is_that_of_the_address_or_of_the_option_or_none(tmp_path):
    assert added_file(ServerConfig.from_options(port=11434)).path.name == "port-11434.json"
    assert added_file(ServerConfig.from_options(port=0)) is None
    assert added_file(ServerConfig.from_options(added_models="none")) is None
    (tmp_path / "link.json").symlink_to(tmp_path / "a.json")
    assert added_file(ServerConfig.from_options(added_models=str(tmp_path / "link.json"))).path == tmp_path / "a.json"
    named = ServerConfig.from_options(port=0, added_models=str(tmp_path / "a.json"))
    assert added_file(named).path == tmp_path / "a.json"
