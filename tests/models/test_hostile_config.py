"""A config.json that is hostile or broken: refused by file and key, quickly, and in little memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, resource, sys
from pathlib import Path
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.errors import CheckpointError
from penstock.models.registry import read_facts
resource.setrlimit(resource.RLIMIT_AS, (256 * 2**20,) * 2)  # bytes
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))  # seconds, for all of them
folder = Path(sys.argv[1])
base = json.loads((folder / "config.json").read_text())
refusals = []
for changes in json.loads(sys.argv[2]):
    (folder / "config.json").write_text(json.dumps(base | changes))
    try:
        read_facts(open_checkpoint(str(folder)))
        refusals.append("accepted")
    except CheckpointError as error:
        refusals.append(str(error))
print(json.dumps(refusals))
"""

SIZES = [
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings"),
]
NO_SIZES = [10**9 * 64, -1, 0, True, "8", 2.5, float("nan"), float("inf"), 10**400, [8], {"a": 8}]
NUMBERS = ["rms_norm_eps", "rope_theta", "partial_rotary_factor"]
NO_NUMBERS = [-1.0, True, "1e-6", float("nan"), float("-inf"), 10**400, [1e-6]]
GROWING = ["num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "head_dim"]

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
ROPES = [
    ("factor", {"type": "linear", "factor": 0}),
    ("factor", {"type": "linear", "factor": float("nan")}),
    ("factor", {"type": "yarn", **YARN, "factor": 1e30}),
    ("factor", {"type": "yarn", **YARN, "factor": True}),
    ("original_max_position_embeddings", {"type": "yarn", **YARN, "original_max_position_embeddings": "x"}),
    ("original_max_position_embeddings", {"type": "yarn", **YARN, "original_max_position_embeddings": 0}),
    ("truncate", {"type": "yarn", **YARN, "truncate": 1}),
    ("beta_fast", {"type": "yarn", **YARN, "beta_fast": 0}),
    ("rope_theta", {"type": "yarn", **YARN, "rope_theta": 1}),
    ("rope_theta", {"type": "default", "rope_theta": "x"}),
    ("partial_rotary_factor", {"type": "default", "partial_rotary_factor": "x"}),
    ("low_freq_factor", {"type": "llama3", **LLAMA3, "low_freq_factor": 4.5}),
    ("high_freq_factor", {"type": "llama3", **LLAMA3, "high_freq_factor": float("inf")}),
    ("type", {"type": ["linear"]}),
    ("rope_type", {"rope_type": 3}),
]


def refusals(folder: Path, configs: list[dict[str, object]]) -> list[str]:
    command = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(configs)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    told: list[str] = json.loads(run.stdout)
    return told


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A checkpoint whose config.json may be written to."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny_llama / name).read_bytes())
    return tmp_path


def test_values_that_are_no_sizes_or_no_numbers_are_refused_by_file_and_key(folder: Path) -> None:
    cases: list[tuple[str, dict[str, object]]] = [(key, {key: value}) for key in SIZES for value in NO_SIZES]
    cases += [(key, {key: value}) for key in NUMBERS for value in NO_NUMBERS]
    cases += [(key, {"rope_scaling": settings}) for key, settings in ROPES]
    cases += [
        ("architecture", {"architectures": [["LlamaForCausalLM"]]}),
        ("architectures", {"architectures": "LlamaForCausalLM"}),
        ("torch_dtype", {"torch_dtype": ["float32"]}),
        ("tie_word_embeddings", {"tie_word_embeddings": 1}),
        ("is_encoder_decoder", {"is_encoder_decoder": True}),
        ("eos_token_id", {"eos_token_id": -1}),
        ("quantization_config", {"quantization_config": [1]}),
    ]
    for (key, changes), told in zip(cases, refusals(folder, [changes for _, changes in cases]), strict=True):
        assert key in told, (changes, told)
        assert str(folder / "config.json") in told, (changes, told)
        assert len(told) < 1000


def test_a_model_that_the_weight_files_cannot_hold_is_refused_before_it_is_made(folder: Path) -> None:
    assert refusals(folder, [{}]) == ["accepted"]
    sizes = [{key: 9_999} for key in GROWING] + [{"num_hidden_layers": 10**9}]
    for changes, told in zip(sizes, refusals(folder, sizes), strict=True):
        (key,) = changes
        assert f"{folder / 'config.json'}" in told
        assert key in told


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["deep", "deep objects", "large"])
def test_json_that_nests_deeply_or_is_large_is_refused(folder: Path, name: str, kind: str) -> None:
    (folder / "model.safetensors").unlink()
    if kind == "large":
        with (folder / name).open("wb") as file:
            file.truncate(2**31)
    else:
        opening, closing = ("[", "]") if kind == "deep" else ('{"a":', "}")
        (folder / name).write_text('{"a":' + opening * 10**6 + closing * 10**6 + "}")
    code = f"""
import resource
from penstock.checkpoint.checkpoint import open_checkpoint, weight_files
from penstock.errors import CheckpointError
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
try:
    open_checkpoint({str(folder)!r})
    weight_files(Path({str(folder)!r}))
except CheckpointError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert name in run.stdout
