"""safetensors files by views of their mapping: the package's values, and headers that lie are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock.checkpoint.safetensors import MappedTensors, read_header
from penstock.errors import CheckpointError
from penstock.kernels.arrays import tensor_of

TYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "uint8", "int8", "int16", "int32", "int64")


def write(file: Path, header: object, size: int, *, padding: int = 0) -> None:
    text = json.dumps(header).encode() + b" " * padding
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(size)))


def test_tensors_of_every_type_are_those_that_the_package_wrote(tmp_path: Path) -> None:
    file, bits = tmp_path / "model.safetensors", torch.arange(48, dtype=torch.uint8)
    stored = {name: bits.view(getattr(torch, name)).view(2, -1).clone() for name in TYPES}
    stored |= {"bool": torch.tensor([[True], [False]]), "empty": torch.zeros(0, 3), "number": torch.tensor(2.5)}
    save_file(stored, file, metadata={"format": "pt"})
    mapped = MappedTensors(file, read_header(file))
    for name, tensor in stored.items():
        read = tensor_of(mapped.read(name))
        assert read.dtype == tensor.dtype
        assert read.view(tensor.shape).view(-1).view(torch.uint8).tolist() == tensor.view(-1).view(torch.uint8).tolist()
        if tensor.dim() == 2 and len(tensor):
            assert mapped.read(name, 1, 2).tobytes() == read[1:2].clone().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("padding", range(4))
def test_tensors_at_any_offset_are_aligned(tmp_path: Path, padding: int) -> None:
    file = tmp_path / "model.safetensors"
    write(file, {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}, 16, padding=padding)
    read = MappedTensors(file, read_header(file)).read("a")
    assert read.flags.aligned
    assert read.tobytes() == bytes(range(16))


def entry(first: int, last: int, **changes: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [last - first], "data_offsets": [first, last]} | changes


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": entry(0, 8), "b": entry(4, 16, shape=[12])}, "'b' overlaps another tensor"),
        ({"a": entry(0, 4), "b": entry(8, 16)}, "'b' follows a gap"),
        ({"a": entry(0, 8)}, "8 of its bytes belong to no tensor"),
        ({"a": entry(0, 17)}, "'a' lies beyond its end"),
        ({"a": entry(0, 16, shape=[17])}, r"16 bytes for the shape \[17\] of U8"),
        ({"a": entry(0, 16, shape=[2**62, 2**62])}, "16 bytes for the shape"),
        ({"a": entry(0, 16, shape=[True, 16])}, r"wrong shape \[True, 16\]"),
        ({"a": entry(0, 16, shape=[1] * 17)}, "wrong shape"),
        ({"a": entry(0, 16, shape="16")}, "wrong shape '16'"),
        ({"a": entry(0, 16, dtype="F5")}, "unknown type 'F5'"),
        ({"a": entry(0, 16, dtype=["U8"])}, "cannot be read"),
        ({"a": entry(0, 16, data_offsets=[16, 0])}, "-16 bytes for the shape"),
        ({"a": entry(0, 16, data_offsets=[0, 8, 16])}, "cannot be read"),
        ({"a": 3}, "cannot be read"),
        ([], "cannot be read"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: object, words: str) -> None:
    file = tmp_path / "model.safetensors"
    write(file, header, 16)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors is damaged or truncated: .*{words}"):
        read_header(file)


def test_a_type_that_is_not_supported_is_named_when_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write(file, {"a": entry(0, 8), "b": entry(8, 16, dtype="F4", shape=[16])}, 16)
    mapped = MappedTensors(file, read_header(file))
    assert mapped.read("a").tolist() == list(range(8))
    with pytest.raises(CheckpointError, match=r"has the type F4, which is not supported; supported: .*BF16"):
        mapped.read("b")


def test_a_file_that_became_shorter_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write(file, {"a": entry(0, 16)}, 16)
    header = read_header(file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="it has become shorter"):
        MappedTensors(file, header)
