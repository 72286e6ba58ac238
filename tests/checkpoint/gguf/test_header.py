"""The header's reader against the package `gguf`, and against damage: told by an error, without much memory."""

import random
import struct
import tracemalloc
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.gguf import header, types
from penstock.checkpoint.gguf.header import Header, StringArray, read_header
from penstock.errors import CheckpointError
from tests.support.gguf_files import finish

KEYS = st.text("abcdefg.", min_size=1, max_size=12).map(lambda text: "x." + text)
TEXTS = st.text(max_size=20)
VALUES = st.one_of(
    st.tuples(st.just("add_bool"), st.booleans()),
    st.tuples(st.just("add_uint8"), st.integers(0, 255)),
    st.tuples(st.just("add_int16"), st.integers(-(2**15), 2**15 - 1)),
    st.tuples(st.just("add_uint32"), st.integers(0, 2**32 - 1)),
    st.tuples(st.just("add_int64"), st.integers(-(2**63), 2**63 - 1)),
    st.tuples(st.just("add_float32"), st.floats(width=32, allow_nan=False)),
    st.tuples(st.just("add_float64"), st.floats(allow_nan=False)),
    st.tuples(st.just("add_string"), TEXTS.filter(bool)),  # the writer leaves empty ones out
    st.tuples(st.just("add_array"), st.lists(TEXTS, min_size=1, max_size=5)),
    st.tuples(st.just("add_array"), st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5)),
    st.tuples(st.just("add_array"), st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5)),
)
TYPES = [GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K")]
TENSORS = st.dictionaries(
    st.text(min_size=1, max_size=12),
    st.tuples(st.sampled_from(TYPES), st.integers(1, 5), st.integers(1, 2)),
    max_size=5,
)


def plain(value: Any) -> Any:
    if isinstance(value, StringArray):
        return value.decode()
    return value.tolist() if isinstance(value, array) else value


@given(st.dictionaries(KEYS, VALUES, max_size=8), TENSORS, st.sampled_from([None, 64]))
def test_what_the_package_writes_is_read_as_it_reads_it(
    tmp_path_factory: pytest.TempPathFactory, entries: dict[str, tuple[str, Any]], tensors: Any, alignment: int | None
) -> None:
    path = tmp_path_factory.mktemp("written") / "model.gguf"
    writer = GGUFWriter(None, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, (method, value) in entries.items():
        getattr(writer, method)(key, value)
    for name, (kind, rows, blocks) in tensors.items():
        size = blocks * GGML_QUANT_SIZES[kind][1]
        writer.add_tensor(name, np.full((rows, size), len(name), dtype=np.uint8), raw_dtype=kind)
    finish(writer, path)
    header = read_header(path)
    assert {key: plain(header.metadata[key]) for key in entries} == {key: value for key, (_, value) in entries.items()}
    for strings in (one for one in header.metadata.values() if isinstance(one, StringArray)):
        for text in [*strings.decode(), "no such text"]:
            assert strings.find(text) == (strings.decode().index(text) if text in strings.decode() else None)
    theirs = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    assert header.tensors.keys() == theirs.keys()
    for name, info in header.tensors.items():
        tensor = theirs[name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.type.name, info.first, info.nbytes) == (
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )


def test_a_long_array_of_short_and_long_strings_is_read(tmp_path: Path) -> None:
    others = ["", "x" * 255, "é" * 128, "y" * 70_000, "a" + "\0" * 7 + "b"]
    texts = [*["abc"] * 600, *others, *["de"] * 300, *others * 60, *["f"] * 40_000, *others]
    writer = GGUFWriter(None, "llama")
    writer.add_array("x.texts", texts)
    writer.add_uint8("x.last", 7)
    finish(writer, tmp_path / "model.gguf")
    header = read_header(tmp_path / "model.gguf")
    assert plain(header.metadata["x.texts"]) == texts
    assert header.metadata["x.last"] == 7


@given(st.lists(st.text("aé \n", max_size=4), max_size=6))
def test_strings_of_two_parts_are_decoded_as_pairs(texts: list[str]) -> None:
    parts = [text.encode() for text in texts]
    firsts = array("Q", [0])
    for part in parts:
        firsts.append(firsts[-1] + 8 + len(part))
    found = StringArray(b"".join(struct.pack("<Q", len(part)) + part for part in parts), firsts)
    assert found.decode() == texts
    pairs = [tuple(text.split(" ")) for text in texts]
    are_pairs = all(len(pair) == 2 and all(pair) for pair in pairs) and "\n" not in "".join(texts)
    assert found.decode_pairs() == (pairs if are_pairs else None)


def test_the_types_are_those_of_the_package() -> None:
    assert {
        int(kind): (kind.name, *size) for kind, size in GGML_QUANT_SIZES.items() if int(kind) in types.TYPES
    } == types.TYPES


# A header by hand, so that any part of it can be wrong.


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def entry(key: str | bytes, type_id: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", type_id) + value


def tensor(name: str, shape: tuple[int, ...], type_id: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], type_id, offset)


def file_of(
    path: Path,
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    *,
    data: int = 0,
    start: bytes = b"GGUF" + struct.pack("<I", 3),
    counts: tuple[int, int] | None = None,
) -> Path:
    num_tensors, num_entries = counts or (len(tensors), len(entries))
    content = start + struct.pack("<QQ", num_tensors, num_entries) + b"".join(entries) + b"".join(tensors)
    path.write_bytes(content + bytes(-len(content) % 32) + bytes(data))
    return path


F32, Q4_K = 0, 12
ONE = [tensor("a", (2, 8), F32, 0)]
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "another format": ({"start": b"\x80PK\x03" + bytes(4)}, "not a GGUF file: it does not begin with GGUF"),
    "version 1": ({"start": b"GGUF" + struct.pack("<I", 1)}, "has GGUF version 1; supported: 2 and 3"),
    "version 4": ({"start": b"GGUF" + struct.pack("<I", 4)}, "has GGUF version 4"),
    "big-endian": ({"start": b"GGUF" + struct.pack(">I", 3)}, "big-endian"),
    "absurdly many tensors": ({"counts": (2**63, 0)}, "9223372036854775808 tensors; the limit is"),
    "absurdly many entries": ({"counts": (0, 2**40)}, "metadata entries; the limit is"),
    "more entries than it has": ({"counts": (0, 9)}, "header extends past the end"),
    "more tensors than it has": ({"counts": (2, 0), "tensors": ONE}, "header extends past the end|twice|dimensions"),
    "a long key": ({"entries": [struct.pack("<Q", 2**62) + b"ab"]}, "a metadata key has 4611686018427387904 bytes"),
    "a key that is no UTF-8": ({"entries": [entry(b"\xff\xfe", 4, bytes(4))]}, "a metadata key is not valid UTF-8"),
    "a key twice": ({"entries": [entry("a", 4, bytes(4))] * 2}, "the metadata key 'a' twice"),
    "an unknown type of value": ({"entries": [entry("a", 13, bytes(8))]}, "'a' has the unknown type 13"),
    "a truth value of 2": ({"entries": [entry("a", 7, b"\x02")]}, "'a' is neither true nor false"),
    "a long text": ({"entries": [entry("a", 8, struct.pack("<Q", 2**40))]}, "'a' has 1099511627776 bytes"),
    "a text past the end": ({"entries": [entry("a", 8, struct.pack("<Q", 2**20))]}, "header extends past the end"),
    "a text that is no UTF-8": ({"entries": [entry("a", 8, text(b"\xc3"))]}, "'a' is not valid UTF-8"),
    "an array of arrays": ({"entries": [entry("a", 9, struct.pack("<IQ", 9, 1))]}, "'a' is an array of type 9"),
    "an absurd array": ({"entries": [entry("a", 9, struct.pack("<IQ", 4, 2**60))]}, "elements of .* 'a'; the limit is"),
    "an array past the end": ({"entries": [entry("a", 9, struct.pack("<IQ", 12, 2**20))]}, "past the end"),
    "texts past the end": ({"entries": [entry("a", 9, struct.pack("<IQQ", 8, 2, 2**63))]}, "past the end"),
    "an alignment of 48": ({"entries": [entry("general.alignment", 4, struct.pack("<I", 48))]}, "a power of two"),
    "an alignment of 0": ({"entries": [entry("general.alignment", 4, bytes(4))]}, "a power of two"),
    "a text as alignment": ({"entries": [entry("general.alignment", 8, text("32"))]}, "a power of two"),
    "a tensor without dimensions": ({"tensors": [tensor("a", (), F32, 0)]}, "0 dimensions, not 1 to 4"),
    "a tensor of many dimensions": ({"tensors": [tensor("a", (1,) * 9, F32, 0)]}, "9 dimensions, not 1 to 4"),
    "an empty tensor": ({"tensors": [tensor("a", (4, 0), F32, 0)]}, r"has the shape \[4, 0\]"),
    "a tensor twice": ({"tensors": ONE * 2, "data": 64}, "the tensor 'a' twice"),
    "a tensor of an unknown type": ({"tensors": [tensor("a", (8,), 99, 0)]}, "has the unknown type 99"),
    "half a block": ({"tensors": [tensor("a", (1, 128), Q4_K, 0)]}, "128 columns, not a multiple of 256"),
    "a tensor past the end": ({"tensors": ONE, "data": 63}, "is truncated: its tensor 'a' needs bytes"),
    "a tensor far past the end": ({"tensors": [tensor("a", (8,), F32, 2**64 - 32)], "data": 64}, "is truncated"),
    "an absurd tensor": ({"tensors": [tensor("a", (2**63, 2**63), F32, 0)], "data": 64}, "is truncated"),
    "a tensor that is not aligned": ({"tensors": [tensor("a", (8,), F32, 8)], "data": 64}, "is not aligned"),
    "tensors that overlap": (
        {"tensors": [*ONE, tensor("b", (8,), F32, 32)], "data": 64},
        "the tensors 'a' and 'b' overlap",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_with_a_header_is_told(tmp_path: Path, case: str) -> None:
    parts, told = BAD[case]
    file = file_of(tmp_path / "model.gguf", **parts)
    with pytest.raises(CheckpointError, match=told) as caught:
        read_header(file)
    assert str(file) in str(caught.value)


def test_a_hostile_name_is_shown_shortened_and_escaped(tmp_path: Path) -> None:
    file = file_of(tmp_path / "model.gguf", tensors=[tensor("\x1b[2J" + "x" * 5000, (8,), 99, 0)])
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("size", [0, 3, 23])
def test_a_file_of_a_few_bytes_is_none(tmp_path: Path, size: int) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF"[:size].ljust(size, b"\0"))
    with pytest.raises(CheckpointError, match=f"not a GGUF file: it has {size} bytes"):
        read_header(tmp_path / "model.gguf")


def small_file(path: Path) -> Path:
    writer = GGUFWriter(None, "llama")
    writer.add_context_length(64)
    writer.add_token_list(["a", "b", "é"])
    writer.add_token_scores([0.0, -1.0, -2.0])
    for index in range(3):
        writer.add_tensor(f"blk.{index}.ffn_up.weight", np.zeros((2, 32), dtype=np.float32))
    finish(writer, path)
    return path


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    content = small_file(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in range(0, len(content), 7):
        cut.write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            read_header(cut)


@pytest.mark.parametrize(
    "strings",
    [[""], ["a", ""], ["ab"] * 20 + [""], ["ab"] * 300 + [""], ["ab"] * 3000 + ["long" * 100]],
    ids=["empty", "alternating", "few short", "many short", "a window of short"],
)
def test_no_byte_of_strings_is_parsed_many_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strings: list[str]
) -> None:
    parsed, parse = 0, header._ends_of_short

    def count(window: bytes) -> Any:
        nonlocal parsed
        parsed += len(window)
        return parse(window)

    monkeypatch.setattr(header, "_ends_of_short", count)
    many = (strings * 2**16)[: 2**16]
    content = b"".join(map(text, many))
    array = entry("a", 9, struct.pack("<IQ", 8, len(many)) + content)
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array + bytes(2**18))
    found = read_header(file).metadata["a"]
    assert isinstance(found, StringArray)
    assert found.decode() == many
    assert parsed < 4 * len(content)


def read_or_refuse(file: Path) -> Header | None:
    try:
        return read_header(file)
    except CheckpointError:
        return None


@given(st.integers(0, 2**32), st.integers(1, 6))
def test_flipped_bytes_give_a_header_or_an_error_in_little_memory(
    tmp_path_factory: pytest.TempPathFactory, seed: int, flips: int
) -> None:
    folder = tmp_path_factory.mktemp("flipped")
    content = bytearray(small_file(folder / "whole.gguf").read_bytes())
    rng = random.Random(seed)
    header_bytes = len(content) - 3 * 256
    for _ in range(flips):
        content[rng.randrange(header_bytes)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    (folder / "flipped.gguf").write_bytes(content)
    tracemalloc.start()
    read = read_or_refuse(folder / "flipped.gguf")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    if read is not None:
        assert all(info.first + info.nbytes <= len(content) for info in read.tensors.values())
