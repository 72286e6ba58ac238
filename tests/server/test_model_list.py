"""The models that options name, and what each reserves."""

from pathlib import Path

import pytest

from penstock.checkpoint.added import Added, AddedAdapter
from penstock.checkpoint.checkpoint import DEMO_FOLDER
from penstock.config.engine_config import EngineConfig
from penstock.errors import ConfigError
from penstock.server import model_list
from penstock.server.config import ServerConfig, seconds_of
from penstock.server.model_list import listed_models, serves_several, with_added, with_broker


def listed(model: str | None = None, **options: object) -> list[tuple[str, str | None]]:
    config = ServerConfig.from_options(**options)
    models = listed_models(EngineConfig.from_options(model=model), config)
    return [(one.name, one.config.model.model) for one in models]


def test_named_models_keep_their_order() -> None:
    assert listed("b=/x/y, a=org/repo:Q4_K_M") == [("b", "/x/y"), ("a", "org/repo:Q4_K_M")]


def test_a_folder_of_models_is_served_by_the_names_of_its_folders_and_files(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    for name in ("tiny.gguf", "large-00001-of-00002.gguf", "large-00002-of-00002.gguf", "mmproj-tiny.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    names = [name for name, _ in listed(None, models_dir=str(tmp_path))]
    assert names == ["large", "llama", "tiny"]
    assert listed("org/repo", models_dir=str(tmp_path))[0] == ("org/repo", "org/repo")


def test_a_path_with_an_equals_sign_is_one_model(tmp_path: Path) -> None:
    odd = tmp_path / "a=b"
    odd.mkdir()
    assert not serves_several(EngineConfig.from_options(model=str(odd)), ServerConfig())
    assert serves_several(EngineConfig.from_options(model="a=b"), ServerConfig())


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("a=x,a=y", {}, "two models have the name 'a'"),
        ("a=x,y", {}, "each must be NAME=MODEL"),
        ("a=x,b=y", {"served_model_name": "c"}, "served_model_name names a single model"),
        ("a=x,b=y", {"cluster": "auto"}, "cluster is not supported with several models"),
        (None, {"models_dir": "/nowhere"}, "models_dir /nowhere cannot be read"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    model: str | None, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        listed(model, **options)


def test_adapters_belong_to_the_first_model() -> None:
    config = EngineConfig.from_options(model="a=x,b=y", adapter="l=/l")
    first, second = (one.config for one in listed_models(config, ServerConfig()))
    assert first.adapters.paths == {"l": "/l"}
    assert second.adapters.paths == {}


def test_each_model_plans_its_memory_within_what_it_reserves() -> None:
    config = EngineConfig.from_options(model=f"a={DEMO_FOLDER},b=org/repo", max_memory="1GiB")
    server = ServerConfig.from_options(engines=2)
    planned, broker, plan = with_broker(listed_models(config, server), server)
    assert [one.config.cache.max_memory for one in planned] == [2**28, 2**28]
    assert [model.needed for model in broker.models.values()] == [2**29, 2**29]
    assert broker.models["a"].keep_alive == 300.0
    added, needed = plan("/folder", 5)
    assert (added.model.model, added.cache.max_memory, needed) == ("/folder", 2**30 // 3 // 2, 2**30 // 3)


def test_durations_are_those_of_ollama() -> None:
    assert seconds_of("1h30m") == 5400.0
    assert seconds_of("0") == seconds_of(0) == seconds_of("0s") == 0.0
    assert seconds_of(-1) == seconds_of("-1m") == float("inf")
    with pytest.raises(ConfigError, match="load_timeout must be above 0"):
        ServerConfig.from_options(load_timeout="0")
    for wrong in ("soon", "5 m", "nan", "", "1x"):
        with pytest.raises(ValueError, match=r"could not convert|nan"):
            seconds_of(wrong)


def test_added_models_follow_those_of_the_options_which_keep_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_list, "find_whole", lambda name: None if name == "gone" else f"/found/{name}")
    adapters = {"sql": AddedAdapter("a", "/sql"), "l": AddedAdapter("x", "/l"), "own": AddedAdapter("x", "/own")}
    added = Added(("x", "gone", "a"), {"chat": "a", "small": "x", "x": "a", "b": "a"}, adapters)
    config = EngineConfig.from_options(model=f"a={DEMO_FOLDER}", adapter="l=/l", revision="main")
    server = ServerConfig.from_options(served_model_name=None)
    models, warnings = with_added(listed_models(config, server), added, config, server)
    assert [(one.name, one.other_names, dict(one.adapters)) for one in models] == [
        ("a", ("chat", "b"), {"sql": "/sql"}),
        ("x", ("small",), {"own": "/own"}),
    ]
    assert (models[1].config.model.model, models[1].config.model.revision) == ("/found/x", None)
    (warning,) = warnings
    assert warning.startswith("the model gone, which was added to an earlier server, is not served")
    empty = ServerConfig.from_options(models_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="has no models"):
        with_added(listed_models(EngineConfig.from_options(), empty), Added(), EngineConfig(), empty)
    models, _ = with_added(listed_models(EngineConfig.from_options(), empty), Added(("x",)), EngineConfig(), empty)
    assert [one.name for one in models] == ["x"]


def test_one_model_that_is_unloaded_when_idle_has_all_its_names() -> None:
    server = ServerConfig.from_options(served_model_name="a,b", keep_alive="5m")
    (model,) = listed_models(EngineConfig.from_options(model="org/repo"), server)
    assert (model.name, model.other_names) == ("a", ("b",))
