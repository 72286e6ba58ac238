"""Adapters whose files are damaged or hostile: refused by name, within bounds."""

import contextlib
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from penstock.checkpoint.adapters import folder
from penstock.checkpoint.adapters.adaptable import Adaptable, AdaptableExperts
from penstock.checkpoint.adapters.folder import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from penstock.checkpoint.adapters.name_pattern import NamePattern
from penstock.errors import AdapterError

MODULE = "model.layers.0.self_attn.q_proj"
MODEL = Adaptable({MODULE: (16, 8)} | {MODULE.replace("0", str(i)): (16, 8) for i in range(1, 40)})
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["0.self_attn.q_proj"]}
A, B = (f"base_model.model.{MODULE}.lora_{part}.weight" for part in "AB")
HEADER = {
    A: {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]},
    B: {"dtype": "F32", "shape": [16, 4], "data_offsets": [128, 384]},
}
BOMB = "(.*.*)*(.*.*)*(.*.*)*Z"


def read(folder, config=CONFIG, header=HEADER, values=bytes(384), dtype="float32"):
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    (folder / CONFIG_FILE).write_bytes(text)
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / WEIGHTS_FILE).write_bytes(len(head).to_bytes(8, "little") + head + values)
    return read_adapter("a", str(folder), replace(MODEL, dtype=dtype))


def test_a_sound_adapter_is_read(tmp_path):
    assert [lora_map.scale for lora_map in read(tmp_path).maps] == [2.0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"rank_pattern": {"(?i)q_proj": 4}}, "rank_pattern has"),
        ({"rank_pattern": {"q(_proj": 4}}, "missing \\)"),
        ({"rank_pattern": {r"(q)\1": 4}}, "rank_pattern has"),
        ({"alpha_pattern": {"(?<=q)_proj": 4}}, "alpha_pattern has"),
        ({"target_modules": "(" * 5000 + "q" + ")" * 5000}, "nested too deeply"),
        ({"target_modules": "(((q{999}){999}){999}){999}"}, "too long"),
        ({"rank_pattern": {f"q{i}.*": 4 for i in range(999)}}, "rank_pattern has expressions of"),
        ({"exclude_modules": [f"q{i}" for i in range(5000)]}, "exclude_modules has 5000 entries"),
    ],
)
def test_a_config_that_cannot_be_obeyed_is_refused_by_its_key(tmp_path, changes, words):
    with pytest.raises(AdapterError, match=words):
        read(tmp_path, CONFIG | changes)


@pytest.mark.parametrize("config", [b"\xff\xfe{}", b"[" * 400_000, b'{"r": 1e999, "peft_type": "LORA"}', b"[]"])
def test_a_config_that_cannot_be_read_is_refused(tmp_path, config):
    with pytest.raises(AdapterError, match="the adapter 'a' cannot be used"):
        read(tmp_path, config)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [4, 1e400]},
        {"shape": [4, 8.0]},
        {"shape": [4, -8]},
        {"data_offsets": [0, 120]},
        {"data_offsets": [128, 256]},
        {"data_offsets": [0, 9999]},
        {"data_offsets": [0]},
        {"dtype": "F16"},
        {"dtype": ["F32"]},
        {"dtype": "I8"},
    ],
)
def test_weights_that_cannot_be_loaded_are_refused(tmp_path, changes):
    with pytest.raises(AdapterError, match="the adapter 'a' cannot be used"):
        read(tmp_path, header=HEADER | {A: HEADER[A] | changes})


def test_a_hole_between_tensors_is_refused(tmp_path):
    header = HEADER | {B: HEADER[B] | {"shape": [16, 4], "data_offsets": [132, 388]}}
    with pytest.raises(AdapterError, match="is damaged"):
        read(tmp_path, header=header, values=bytes(388))


VALUES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


@pytest.mark.parametrize(
    ("stored", "dtype", "value", "taken"),
    [
        ("F32", "float32", np.nan, False),
        ("F32", "float32", -np.inf, False),
        ("F32", "float32", 3.4e38, True),
        ("F32", "bfloat16", 3.4e38, False),
        ("F32", "bfloat16", 3.38e38, True),
        ("F32", "float16", 65520, False),
        ("F32", "float16", -65519, True),
        ("F16", "bfloat16", np.nan, False),
        ("F16", "float16", 65504, True),
        ("BF16", "float32", 0x7FC0, False),
        ("BF16", "float32", 0xFF80, False),
        ("BF16", "float32", 0xFF7F, True),
        ("BF16", "float16", 0x4780, False),
        ("BF16", "float16", 0x477F, True),
    ],
)
def test_weights_that_are_no_finite_numbers_of_the_models_type_are_refused(tmp_path, stored, dtype, value, taken):
    size = np.dtype(VALUES[stored]).itemsize
    header = {
        A: {"dtype": stored, "shape": [4, 8], "data_offsets": [0, 32 * size]},
        B: {"dtype": stored, "shape": [16, 4], "data_offsets": [32 * size, 96 * size]},
    }
    values = np.zeros(96, VALUES[stored])
    values[77] = value
    with contextlib.nullcontext() if taken else pytest.raises(AdapterError, match=f"lora_B.weight .* for {dtype}"):
        read(tmp_path, header=header, values=values.tobytes(), dtype=dtype)


def test_two_names_of_one_linear_map_are_refused(tmp_path):
    twice = {name.removeprefix("base_model.model."): of for name, of in HEADER.items()}
    twice = {name: of | {"data_offsets": [at + 384 for at in of["data_offsets"]]} for name, of in twice.items()}
    with pytest.raises(AdapterError, match="which are the same linear map"):
        read(tmp_path, header=HEADER | twice, values=bytes(768))


EXPERTS = "model.layers.0.mlp.experts"
MIXTURE = Adaptable({}, experts={EXPERTS: AdaptableExperts(2, {"gate": (6, 8), "up": (6, 8), "down": (8, 6)})})


def read_experts(folder, shapes, *, model=MIXTURE, **changes):
    tensors = {f"base_model.model.{name}": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / WEIGHTS_FILE)
    config = CONFIG | {"target_modules": [], "target_parameters": ["experts.down_proj"]} | changes
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return [(lora_map.part, lora_map.swapped, lora_map.rank) for lora_map in read_adapter("a", str(folder), model).maps]


STACKED = {f"{EXPERTS}.lora_A.weight": (8, 6), f"{EXPERTS}.lora_B.weight": (8, 8)}
SWAPPED = {f"{EXPERTS}.lora_A.weight": (8, 12), f"{EXPERTS}.lora_B.weight": (8, 8)}
SINGLE = {f"{EXPERTS}.1.down.lora_A.weight": (4, 6), f"{EXPERTS}.1.down.lora_B.weight": (8, 4)}
LISTED = {"target_parameters": []}


def test_the_shapes_tell_which_parameter_of_all_experts_is_adapted(tmp_path):
    assert read_experts(tmp_path, STACKED) == [("down", False, 4)]
    gate_up = {"target_parameters": ["experts.gate_up_proj"]}
    assert read_experts(tmp_path, SWAPPED, **gate_up) == [("gate_up", True, 4)]
    listed = LISTED | {"target_modules": ["1.down"]}
    assert read_experts(tmp_path, SINGLE, **listed) == [("linear", False, 4)]


SQUARE = Adaptable({}, experts={EXPERTS: AdaptableExperts(2, {"gate": (4, 8), "up": (4, 8), "down": (8, 4)})})
UNGATED = Adaptable({}, experts={EXPERTS: AdaptableExperts(2, {"up": (6, 8), "down": (8, 6)})})


def stacked(rows, columns, *, above=""):
    """A and B of rank 4 of both experts."""
    module = f"{EXPERTS}{above}"
    return {f"{module}.lora_A.weight": (8, columns), f"{module}.lora_B.weight": (rows, 8)}


@pytest.mark.parametrize("swapped", [False, True])
def test_a_square_parameter_has_the_layout_of_the_files_other_parameter(tmp_path, swapped):
    down = stacked(4, 8) if swapped else stacked(8, 4)
    both = {"target_parameters": ["gate_up_proj", "down_proj"]}
    found = read_experts(tmp_path, stacked(8, 8, above=".base_layer") | down, model=SQUARE, **both)
    assert sorted(found) == [("down", swapped, 4), ("gate_up", swapped, 4)]


def test_a_square_parameter_alone_is_refused(tmp_path):
    with pytest.raises(AdapterError, match=r"experts is ambiguous: its shapes are those of gate_up as it is and of"):
        read_experts(tmp_path, stacked(8, 8), model=SQUARE, target_parameters=["experts.gate_up_proj"])


def test_experts_without_a_gate_are_told_apart_by_what_the_config_names(tmp_path):
    for name, part in (("up_proj", "gate_up"), ("down_proj", "down")):
        for rows, columns in ((6, 8), (8, 6)):
            found = read_experts(tmp_path, stacked(rows, columns), model=UNGATED, target_parameters=[f"experts.{name}"])
            assert found == [(part, (rows == 6) != (part == "gate_up"), 4)]
    both = {"target_parameters": ["up_proj", "down_proj"]}
    found = read_experts(tmp_path, stacked(6, 8, above=".base_layer") | stacked(8, 6), model=UNGATED, **both)
    assert sorted(found) == [("down", False, 4), ("gate_up", False, 4)]


@pytest.mark.parametrize(
    ("shapes", "changes", "words"),
    [
        (STACKED, {"r": 2}, "shapes are of none of the experts' maps"),
        (STACKED, {"use_dora": True}, "use_dora: True, which is not supported for the experts"),
        (STACKED, {"target_parameters": ["down_proj", "gate_up_proj"]}, "target_parameters names .*gate_up_proj, for"),
        (
            SINGLE,
            LISTED | {"target_modules": ["down"]},
            "target_modules names .*0.down, for which the file has no weights",
        ),
        (
            {name.replace("1", "2"): shape for name, shape in SINGLE.items()},
            LISTED,
            "2.down, which this model does not",
        ),
        (
            {name.replace("1", "01"): shape for name, shape in SINGLE.items()},
            LISTED,
            "01.down, which this model does not",
        ),
    ],
)
def test_experts_that_do_not_fit_are_refused(tmp_path, shapes, changes, words):
    with pytest.raises(AdapterError, match=words):
        read_experts(tmp_path, shapes, **changes)


def test_magnitudes_and_dora_go_together(tmp_path):
    magnitude = {f"base_model.model.{MODULE}.lora_magnitude_vector": np.ones(16, np.float32)}
    tensors = {A: np.ones((4, 8), np.float32), B: np.ones((16, 4), np.float32)}
    for found, dora, words in (
        (tensors | magnitude, False, "lora_magnitude_vector, though use_dora"),
        (tensors, True, "with use_dora it needs .*lora_magnitude_vector of the shape"),
    ):
        (tmp_path / CONFIG_FILE).write_text(json.dumps(CONFIG | {"use_dora": dora}))
        save_file(found, tmp_path / WEIGHTS_FILE)
        with pytest.raises(AdapterError, match=words):
            read_adapter("a", str(tmp_path), MODEL)


def test_a_scale_beyond_float32_is_refused(tmp_path):
    with pytest.raises(AdapterError, match=r"lora_alpha of .* is too large"):
        read(tmp_path, CONFIG | {"lora_alpha": 1e300})


@pytest.mark.parametrize("header", [b"[" * 400_000, b"{}", b"[]", b"\xff", b'{"a": 1}'])
def test_a_header_that_cannot_be_read_is_refused(tmp_path, header):
    with pytest.raises(AdapterError, match="the adapter 'a' cannot be used"):
        read(tmp_path, header=header)


@pytest.mark.parametrize(
    "changes",
    [
        {"rank_pattern": {BOMB: 8}},
        {"alpha_pattern": {BOMB: 8}},
        {"target_modules": BOMB},
        {"exclude_modules": BOMB},
        {"layers_pattern": BOMB, "target_modules": ["q_proj"], "layers_to_transform": [0]},
        {"exclude_modules": r"(\w+\.?)*!"},
        {"exclude_modules": "|".join([".*.*.*.*!"] * 70)},
    ],
)
def test_an_expression_takes_bounded_time(tmp_path, changes):
    begin = time.thread_time()
    with contextlib.suppress(AdapterError):
        read(tmp_path, CONFIG | changes)
    assert time.thread_time() - begin < 10  # it never ended


UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|mlp).*?(?:q_proj|k_proj|gate_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj|gate_proj)))"
)


@pytest.mark.parametrize(
    "text", [UNSLOTH, r".*\.(q|k)_proj", r"^model\.layers\.[0-3]\..*$", r"model.layers.\d+.*proj", "q_proj", r".*q.*"]
)
def test_expressions_in_use_match_what_re_matches(text):
    pattern = NamePattern("target_modules", text)
    names = [
        MODULE,
        "model.layers.12.mlp.gate_proj",
        "language_model.model.layers.3.mlp.gate_proj",
        "lm_head",
        "q_proj",
    ]
    for name in names:
        assert pattern.matches(name) == bool(re.fullmatch(text, name))
        assert pattern.matches_end(name) == bool(re.match(rf"(?:.*\.)?(?:{text})$", name))


EXPRESSIONS = st.recursive(
    st.sampled_from(["a", "b", ".", r"\.", r"\d", r"\w", "[ab]", "[^a.]", "^", "$", r"\b"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{1,}", "*?"])).map(
            lambda two: f"({two[0]}){two[1]}"
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=500, deadline=None)
@given(text=EXPRESSIONS, name=st.text(alphabet="ab.1", max_size=8))
@example(text=r"(a*)*b|", name="aab")
def test_an_expression_matches_what_re_matches(text, name):
    pattern = NamePattern("target_modules", text)
    assert pattern.matches(name) == bool(re.fullmatch(text, name))
    assert pattern.matches_end(name) == bool(re.match(rf"(?:.*\.)?(?:{text})\Z", name))


def test_without_a_network_a_cached_adapter_is_used_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(folder, "hub_answers", lambda: False)
    monkeypatch.setattr(folder, "cached_folder", lambda repository, revision: tmp_path)
    assert folder.adapter_path("some/adapter") == tmp_path
