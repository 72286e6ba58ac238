"""Models on this machine by name."""

import json

import pytest

from penstock.checkpoint import local
from penstock.errors import CheckpointError


def test_a_model_whose_download_was_broken_off_is_not_whole(tiny_llama, tmp_path, monkeypatch):
    (tmp_path / "config.json").symlink_to(tiny_llama / "config.json")
    parts = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(parts))
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    monkeypatch.setattr(local, "find_local", lambda name: tiny_llama if name == "whole" else tmp_path)
    assert local.find_whole("whole") == str(tiny_llama)
    assert local.find_whole("some/repo") is None
    with pytest.raises(CheckpointError, match="00002-of-00002"):
        local.find_whole("alias")
