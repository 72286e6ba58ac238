"""Time from a request with an image to its first token, beside llama.cpp (mtmd) and OpenVINO (VLMPipeline).

    python -m benchmarks.speed.images make FOLDER       (random models; --openvino too: takes some minutes)
    python -m benchmarks.speed.images compare FOLDER [--rounds 5]
    python -m benchmarks.speed.images gap FOLDER        (what an image does to another stream's pace)

`make` writes SmolVLM-256M's shape as a GGUF file with its vision file, which llama.cpp reads too, and a Qwen2-VL with
half of 2B's layers as a folder, which OpenVINO converts. A request has one image of 512 x 512 pixels and 100 tokens of
text. The second turn repeats them with 100 tokens more. Each engine runs as it does by default, with as many threads as
processors; all are alive at once, and take turns. Medians of the rounds. Peers: `../shared/peers/setup.sh`; OpenVINO's
exporter also needs `pip install 'transformers<5'` there.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

PEERS = Path(os.environ.get("PEERS_HOME", Path.home() / ".cache" / "penstock-peers"))
SIDE = 512
WORDS = 100
ROUNDS = 4
TURN = tuple[float, float, int]
"""Seconds to the first token, of the first and of the second turn, and the prompt's tokens."""
BARS = {"llamacpp": 0.7, "openvino": 1.0}
MODELS = {"llamacpp": "smolvlm/text.gguf", "openvino": "qwen2-vl"}


def pixels(seed: int) -> Any:
    """A random image, uint8 [SIDE, SIDE, 3]: flat tiles, which no size of a file depends on."""
    import numpy as np

    tiles = np.random.default_rng(seed).integers(0, 255, (SIDE // 16, SIDE // 16, 3), dtype=np.uint8)
    return np.ascontiguousarray(np.kron(tiles, np.ones((16, 16, 1), np.uint8)))


def texts() -> tuple[str, str]:
    return " time" * WORDS, " time" * WORDS + " and" + " then" * (WORDS - 1)


def penstock(model: str) -> Callable[[int], TURN]:
    from PIL import Image

    from penstock import LLM, SamplingParams

    llm = LLM(model, max_model_len=4096)
    placeholder = "<image>" if model.endswith(".gguf") else "<|vision_start|><|image_pad|><|vision_end|>"
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)

    def turn(seed: int) -> TURN:
        times, image = [], Image.fromarray(pixels(seed))
        for text in texts():
            begin = time.perf_counter()
            (output,) = llm.generate({"prompt": placeholder + text, "multi_modal_data": {"image": image}}, params)
            times.append(time.perf_counter() - begin)
        return times[0], times[1], len(output.prompt_token_ids)

    return turn


def llamacpp(model: str) -> Callable[[int], TURN]:
    import ctypes

    ll: Any = importlib.import_module("llama_cpp")  # of the peers' environments, like OpenVINO
    mtmd: Any = importlib.import_module("llama_cpp.mtmd_cpp")

    threads = len(os.sched_getaffinity(0))
    quiet = ll.llama_log_callback(lambda level, text, data: None)
    ll.llama_backend_init()
    ll.llama_log_set(quiet, ctypes.c_void_p())
    loaded = ll.llama_model_load_from_file(model.encode(), ll.llama_model_default_params())
    params = ll.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 4096, 512, 512
    params.n_threads = params.n_threads_batch = threads
    context = ll.llama_init_from_model(loaded, params)
    options = mtmd.mtmd_context_params_default()
    options.use_gpu, options.n_threads, options.warmup, options.print_timings = False, threads, False, False
    tower = mtmd.mtmd_init_from_file(str(Path(model).parent / "mmproj-F16.gguf").encode(), loaded, options)

    def first_token(image: Any, text: str) -> int:
        data = image.tobytes()
        bitmap = mtmd.mtmd_bitmap_init(SIDE, SIDE, (ctypes.c_ubyte * len(data)).from_buffer_copy(data))
        chunks, given = mtmd.mtmd_input_chunks_init(), mtmd.mtmd_input_text()
        prompt = b"<__media__>" + text.encode()
        given.text, given.text_len, given.add_special, given.parse_special = prompt, len(prompt), True, True
        if mtmd.mtmd_tokenize(tower, chunks, ctypes.byref(given), (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap), 1):
            sys.exit("mtmd_tokenize failed")
        past = ctypes.c_int32()
        ll.llama_memory_clear(ll.llama_get_memory(context), True)
        if mtmd.mtmd_helper_eval_chunks(tower, context, chunks, 0, 0, 512, True, ctypes.byref(past)):
            sys.exit("mtmd_helper_eval_chunks failed")
        ll.llama_get_logits_ith(context, -1)
        mtmd.mtmd_input_chunks_free(chunks)
        mtmd.mtmd_bitmap_free(bitmap)
        return past.value

    def turn(seed: int) -> TURN:
        times, tokens, image = [], 0, pixels(seed)
        for text in texts():
            begin = time.perf_counter()
            tokens = first_token(image, text)
            times.append(time.perf_counter() - begin)
        _ = quiet  # C holds the pointer
        return times[0], times[1], tokens

    return turn


def openvino(model: str) -> Callable[[int], TURN]:
    ov: Any = importlib.import_module("openvino")
    openvino_genai: Any = importlib.import_module("openvino_genai")
    pipe = openvino_genai.VLMPipeline(f"{model}/openvino", "CPU", ATTENTION_BACKEND="SDPA")  # its other refuses images

    def turn(seed: int) -> TURN:
        times, tokens, image = [], 0, ov.Tensor(pixels(seed)[None])
        for text in texts():
            begin = time.perf_counter()
            done = pipe.generate(text, images=[image], max_new_tokens=1, do_sample=False)
            times.append(time.perf_counter() - begin)
            tokens = done.perf_metrics.get_num_input_tokens()
        return times[0], times[1], tokens

    return turn


ENGINES = {"penstock": penstock, "llamacpp": llamacpp, "openvino": openvino}


def serve(engine: str, model: str) -> None:
    """Answer each line of the input, a seed, with the times of its two turns."""
    turn = ENGINES[engine](model)
    turn(0)
    for line in sys.stdin:
        print(json.dumps(turn(int(line))), flush=True)


class Engine:
    """One engine's process."""

    def __init__(self, name: str, model: Path) -> None:
        python = sys.executable if name == "penstock" else str(PEERS / name / "bin" / "python")
        command = [python, __file__, "serve", name, str(model)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def turn(self, seed: int) -> TURN:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(seed, file=self._process.stdin, flush=True)
        for line in self._process.stdout:  # mtmd writes here, too
            if line.startswith("["):
                first, second, tokens = json.loads(line)
                return first, second, tokens
        sys.exit("an engine ended")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def compare(folder: Path, rounds: int) -> int:
    from benchmarks.report import report

    missed = 0
    for peer, model in MODELS.items():
        if not (folder / model).exists():
            continue
        rows: dict[str, tuple[float, float | None]] = {}
        engines = {name: Engine(name, folder / model) for name in ("penstock", peer)}
        times: dict[str, list[TURN]] = {name: [] for name in engines}
        for seed in range(1, rounds + 1):
            for name in sorted(engines, reverse=seed % 2 == 0):
                times[name].append(engines[name].turn(seed))
        for engine in engines.values():
            engine.close()
        firsts = {name: statistics.median(turn[0] for turn in turns) for name, turns in times.items()}
        for name, turns in times.items():
            about = f"{model.partition('/')[0]}, {name}, {turns[0][2]} tokens"
            rows[f"{about}: first token, s"] = (firsts[name], None)
            rows[f"{about}: second turn, s"] = (statistics.median(turn[1] for turn in turns), None)
        ratio = firsts["penstock"] / firsts[peer]
        rows[f"{model.partition('/')[0]}: first token, as a multiple of {peer}'s"] = (ratio, BARS[peer])
        missed |= report("images", rows, beside=True)
    return missed


def gap(folder: Path) -> int:
    """The longest pause of a stream while an image, or as long a text, is worked on beside it."""
    import asyncio

    from PIL import Image

    from benchmarks.report import report
    from penstock import AsyncLLM, SamplingParams

    async def longest(llm: AsyncLLM, beside: Any) -> float:
        times: list[float] = []
        note = times.append

        async def stream() -> None:
            params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
            async for _ in llm.stream([7, 8, 9], params):
                note(time.perf_counter())

        async def other() -> None:
            while len(times) < 20:
                await asyncio.sleep(0.01)
            async for _ in llm.stream(beside, SamplingParams(max_tokens=1, ignore_eos=True)):
                pass

        await asyncio.gather(stream(), other())
        return max(after - before for before, after in pairwise(times[5:]))

    async def measure() -> dict[str, tuple[float, float | None]]:
        found: dict[str, list[float]] = {"text": [], "image": []}
        prompt = "<|vision_start|><|image_pad|><|vision_end|>" + " time" * WORDS
        async with AsyncLLM(str(folder / MODELS["openvino"]), max_model_len=8192) as llm:
            for seed in range(ROUNDS):
                image = {"image": Image.fromarray(pixels(seed))}
                text = [100 + (17 * seed + 7 * at) % 5000 for at in range(2048)]
                found["text"].append(await longest(llm, text))
                found["image"].append(await longest(llm, {"prompt": prompt, "multi_modal_data": image}))
        beside_text, beside_image = (statistics.median(found[kind][1:]) for kind in ("text", "image"))
        return {
            "longest gap beside a text of 2,048 tokens, s": (beside_text, None),
            "longest gap beside an image, s": (beside_image, None),
            "the image's, as a multiple of the text's": (beside_image / beside_text, 2.0),
        }

    return report("images", asyncio.run(measure()), beside=True)


def make(folder: Path, for_openvino: bool) -> None:
    from benchmarks.speed import image_models

    image_models.write_smolvlm(folder / "smolvlm")
    image_models.write_qwen2_vl(folder / "qwen2-vl")
    if for_openvino:
        export = [str(PEERS / "openvino" / "bin" / "optimum-cli"), "export", "openvino", "--task", "image-text-to-text"]
        model = folder / MODELS["openvino"]
        subprocess.run([*export, "-m", str(model), "--weight-format", "fp16", str(model / "openvino")], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("make", "compare", "gap"):
        commands.add_parser(name).add_argument("folder", type=Path)
    commands.choices["make"].add_argument("--openvino", action="store_true")
    commands.choices["compare"].add_argument("--rounds", type=int, default=5)
    server = commands.add_parser("serve", help="what `compare` starts")
    server.add_argument("engine", choices=ENGINES)
    server.add_argument("model")
    args = parser.parse_args()
    if args.command == "serve":
        serve(args.engine, args.model)
        return 0
    if args.command == "make":
        make(args.folder, args.openvino)
        return 0
    return compare(args.folder, args.rounds) if args.command == "compare" else gap(args.folder)


if __name__ == "__main__":
    sys.exit(main())
