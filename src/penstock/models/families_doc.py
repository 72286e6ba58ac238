"""Generates `docs/models.md` from the registry.

python -m penstock.models.families_doc > docs/models.md
"""

import sys

from penstock.checkpoint.gguf.architectures import ARCHITECTURES as GGUF
from penstock.checkpoint.gguf.mmproj import FAMILIES as WITH_ENCODERS
from penstock.models.architectures import ARCHITECTURES, ENCODERS, FamilyReader, Read

INTRO = """\
# Models

A model is a Hugging Face folder, a [GGUF file](gguf.md) or the hub id of either. The families below are supported;
the name to look for is `architectures` in the model's `config.json` ([all of them](#architectures)), or
`general.architecture` of a GGUF file. Many models share an architecture under other names.

These take images: SmolVLM and Idefics 3, Gemma 3 and 4, InternVL 2.5 to 3.5, LFM2-VL, Llama 4, Pixtral 12B, Mistral
Small 3 and Ministral 3, Qwen2-VL and 2.5, Qwen3-VL, Qwen3.5 and 3.6. These take [sounds](sounds.md): Voxtral,
Qwen2-Audio and Audio Flamingo 3. The thinkers of Qwen2.5-Omni and Qwen3-Omni take both. All are read from Hugging Face
folders and from GGUF files with their [`mmproj` files](gguf.md#vision-and-audio-files). [Whisper](transcription.md)
transcribes audio, from Hugging Face folders. Of another multimodal checkpoint only the text model is loaded.

A setting of `config.json` that changes the computation and is not implemented is refused; an unknown setting is
reported when the model is opened. Embedding models and rerankers have [their own table](#models-that-embed-or-score).
[adding-a-model.md](adding-a-model.md) adds another family. This page is generated: `python -m
penstock.models.families_doc > docs/models.md`."""

ARCHITECTURES_INTRO = """\
## Architectures

- The multi-token prediction heads (`mtp.*`) of DeepSeek V3, GLM 4.5 to 4.7, Qwen3.5 and Qwen3-Next are used by
  `--speculation mtp` ([sampling.md](sampling.md#speculation)), from Hugging Face folders and from GGUF files that
  contain them (`nextn`).
- `longrope` (Phi-3 and later) uses the long factors if `max_model_len` exceeds the context that the model was first
  trained for, and otherwise the short ones: the same for all sequences, so that keys can be shared and an answer does
  not depend on its current length. `transformers` uses the short factors for short sequences, and recomputes the keys
  when a sequence outgrows them. To get its answers for short sequences, set `--max-model-len` to the original
  context."""

ENCODERS_INTRO = """\
## Models that embed or score

Decoders, too, embed or score if their folder says so: [embeddings.md](embeddings.md#models). The models below never
generate."""

OTHERS = """\
## Other architectures

`--backend transformers` (`pip install '.[transformers]'`) runs a decoder by the class that `transformers` has for it:
Persimmon, BioGPT and many others. Batches, the paged cache with its prefixes, grammars,
log-probabilities and `--speculation ngram` work as usual. It is slower, torch's kernels compute, and an answer may
depend on what else is in its batch; a line at the start says so. It is never chosen by itself.

A run of the class without memory at the start shows whether the paged cache serves its attention. Refused by name:
classes that do not use the attention interface of `transformers` (CodeGen, XGLM), layers that keep anything but
keys and values (Mamba), masks or scores of a class's own, rotary embeddings that depend on the longest text of a batch,
encoders, quantized checkpoints, GGUF files, and with it `--quantization`, adapters, draft models and
`--tensor-parallel-size`. Images are not taken, and code in a checkpoint is not run."""

TESTS = """\
## How they are tested

Each architecture is tested against `transformers` 5.23 on random checkpoints that exercise its branches: logits in
float32 within 2e-4 for whole prompts, for odd chunks of several prompts at once and for decodes, and 64 greedy tokens
(`tests/models/test_families.py`). Those that take images are also tested with two pictures in a prompt, their features
within 2e-5 (`tests/models/test_towers.py`), those that take sounds with two sounds
(`tests/models/test_audio_encoder.py`), and those that take both with an image, a sound and an image
(`tests/models/test_omni.py`). Those that embed or score are tested against `sentence-transformers` in
float32 within 1e-4 (`tests/models/test_encoders.py`). Where the native library is installed, all of them run entirely
on native kernels. No setting of a config is silently ignored, apart from those of training or of other
implementations, which `tests/models/test_config_keys.py` lists.

`python -m benchmarks.quality.families` runs `penstock verify` on such a checkpoint of each in bfloat16, int8 and int4:
its answers are the same, bit for bit, alone and in a batch, with other numbers of threads, in chunks, from the prefix
cache, preempted and speculated. If all layers of a model have sliding windows, a running sequence never needs more
blocks than it frees, so preemption is not tested for such models.

A running sequence holds only the blocks of its windows: Gemma3-1B's process grows by no more than the 4,096 bytes per
token of its layers without a window (`python -m benchmarks.speed.window_memory MODEL`). With the prefix cache, blocks
that the windows have passed stay, idle, until the pool needs them."""


def describe() -> str:
    """The content of docs/models.md, without the final newline."""
    families = (INTRO, "", *short_table(), "", ARCHITECTURES_INTRO, "", *table())
    return "\n".join((*families, "", ENCODERS_INTRO, "", *encoder_table(), "", OTHERS, "", TESTS))


def encoder_table() -> list[str]:
    """The lines of the table of encoders, one row per architecture."""
    rows = ["| `architectures` | family |", "|---|---|"]
    return rows + [f"| `{name}` | {_doc(read)} |" for name, read in sorted(ENCODERS.items())]


def table() -> list[str]:
    """The lines of the table, one row per architecture."""
    rows = ["| `architectures` | family | GGUF |", "|---|---|---|"]
    for name, read in sorted(ARCHITECTURES.items()):
        files = ", ".join(f"`{kind}`" for kind, architecture in GGUF.items() if name in architecture.families)
        rows.append(f"| `{name}` | {_doc(read)} | {files} |")
    return rows


def short_table() -> list[str]:
    """The lines of the first table, one row per family."""
    families: dict[str, list[str]] = {}
    stored = {name for architecture in GGUF.values() for name in architecture.families}
    stored |= {architecture for family in WITH_ENCODERS.values() for _, architecture in family.values()}
    for name, read in sorted(ARCHITECTURES.items()):
        families.setdefault(_doc(read).split(":")[0].rstrip("."), []).append(name)
    rows = ["| family | `architectures` | GGUF |", "|---|---|---|"]
    for family, names in sorted(families.items()):
        files = any(name in stored for name in names)
        rows.append(f"| {family} | {', '.join(f'`{name}`' for name in names)} | {'yes' if files else ''} |")
    return rows


def _doc(read: Read) -> str:
    """The first line of a family's module."""
    assert isinstance(read, FamilyReader)
    return (sys.modules[read.load().__module__].__doc__ or "").splitlines()[0]


if __name__ == "__main__":
    print(describe())
