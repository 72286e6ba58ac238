"""Penstock beside a peer, through the kit in `../shared/peers`, which must be set up (its README says how).

    python -m benchmarks.speed.peers MODEL WEIGHTS PEER [--rounds 3] [--scenarios "1x32:64 8x64:64"] [--isa avx2]

MODEL is a folder that the kit's `make_model.py` or `real_shapes.py` wrote; WEIGHTS bf16, int8 or int4, or q8_0,
q4_k_m or q4_0 for the GGUF file that both run; PEER openvino, llamacpp or vllm (bf16 only). Beside int8 and int4,
OpenVINO also runs with the weights that cost it no more quality than these cost Penstock, fp16 and int8, if the folder
has them; beside bf16 a second Penstock runs with a cache of int8, OpenVINO's. Medians of the rounds go to
results/<machine>/peers.json, under "<model> <weights> <peer>"; rows that did not run keep their last values. With --isa
both engines run on a lesser instruction set, under "<weights>/<isa>": llama.cpp by the libraries in --libraries, built
for that set, as for avx2 with

    cmake -S LLAMA_CPP -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=OFF -DGGML_AVX2=ON \
        -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON && cmake --build build --target llama
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import results_file, save

KIT = Path(__file__).parents[3] / "shared" / "peers"
PEERS = {
    "openvino": {"bf16": "openvino-fp16", "int8": "openvino-int8", "int4": "openvino-int4"},
    "llamacpp": {
        "bf16": "llamacpp-bf16",
        "int8": "llamacpp-q8_0",
        "int4": "llamacpp-q4_0",
        "q4_0": "llamacpp-q4_0",
        "q8_0": "llamacpp-q8_0",
        "q4_k_m": "llamacpp-q4_k_m",
    },
    "vllm": {"bf16": "vllm"},
}
BETTER = {"int8": "openvino-fp16", "int4": "openvino-int8"}
"""OpenVINO's weights that cost no more quality than Penstock's (`docs/quantization.md`)."""
Rows = dict[str, dict[str, float]]


def engines(model: str, weights: str, peer: str) -> dict[str, str]:
    """The kit's name of each engine, and the name that results have it under."""
    if weights.startswith("q"):
        return {f"penstock-gguf={weights}": "penstock", PEERS[peer][weights]: peer}
    if weights == "bf16":
        names = {"penstock": "penstock", PEERS[peer][weights]: peer}
        return names | ({"penstock-kv_cache_dtype=int8": "penstock, int8 cache"} if peer == "openvino" else {})
    names = {f"penstock-quantization={weights}": "penstock", PEERS[peer][weights]: peer}
    better = BETTER[weights]
    if peer == "openvino" and (Path(model) / better).exists():
        names[better] = better
    return names


def compare(model: str, names: dict[str, str], rounds: int, scenarios: str, environment: dict[str, str]) -> Rows:
    """The kit's medians; of a scenario with one output token the rate of all tokens, else that of output tokens."""
    with tempfile.TemporaryDirectory() as folder:
        medians = Path(folder) / "medians.json"
        command = [sys.executable, str(KIT / "compare.py"), "--model", model, "--engines", ";".join(names)]
        command += ["--project", sys.executable, "--rounds", str(rounds), "--scenarios", scenarios]
        subprocess.run([*command, "--json", str(medians)], check=True, env=os.environ | environment)
        measured: Rows = json.loads(medians.read_text())
    rows = {}
    for row, values in measured.items():
        scenario, _, unit = row.partition("  ")
        if not unit or (unit == "total tok/s") == scenario.endswith(":1"):
            rows[row] = {names[engine]: round(value, 2) for engine, value in values.items()}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("weights", choices=sorted({weights for names in PEERS.values() for weights in names}))
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scenarios", default="1x32:64 1x1024:1 8x64:64 32x256:64")
    parser.add_argument("--isa", default="", help="of both: avx2, avx_vnni, avx512, ...; default: the best")
    parser.add_argument("--libraries", help="folder of llama.cpp's libraries built for --isa")
    args = parser.parse_args()
    if bool(args.isa) != bool(args.libraries):
        parser.error("--isa and --libraries go together")
    if args.weights not in PEERS[args.peer]:
        parser.error(f"{args.peer} runs {', '.join(PEERS[args.peer])}")
    isa = {"PENSTOCK_ISA": args.isa, "LLAMA_CPP_LIB_PATH": args.libraries} if args.isa else {}
    rows = compare(args.model, engines(args.model, args.weights, args.peer), args.rounds, args.scenarios, isa)
    file = results_file("peers")
    kept = json.loads(file.read_text()) if file.exists() else {}
    weights = f"{args.weights}/{args.isa}" if args.isa else args.weights
    peers = {engine for rates in rows.values() for engine in rates if not engine.startswith("penstock")}
    for peer in peers:
        name = f"{Path(args.model).name} {weights} {peer}"
        shown = {
            row: {engine: rate for engine, rate in rates.items() if engine == peer or engine not in peers}
            for row, rates in rows.items()
        }
        kept[name] = kept.get(name, {}) | shown
    save("peers", kept)


if __name__ == "__main__":
    main()
