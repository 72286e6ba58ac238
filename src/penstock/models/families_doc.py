"""Generates `docs/models.md` and README's table of families from the registry.

python -m penstock.models.families_doc > docs/models.md
python -m penstock.models.families_doc --short      # for README
"""

import sys

from penstock.gguf.architectures import ARCHITECTURES as GGUF
from penstock.models.encoders import ENCODERS
from penstock.models.registry import ARCHITECTURES

INTRO = """\
# Families

A checkpoint's family is determined by `architectures` in its `config.json`, or by `general.architecture` of a GGUF
file. Of a multimodal checkpoint only the text model is loaded; its other towers are skipped by name. A setting of
`config.json` that changes the computation and is not implemented is refused; an unknown setting is reported when the
model is opened. This page is generated: `python -m penstock.models.families_doc > docs/models.md`.

Each row is tested against `transformers` 5.23 on random checkpoints that exercise its branches: logits in float32
within 2e-4 for whole prompts, for odd chunks of several prompts at once and for decodes, and 64 greedy tokens
(`tests/models/test_families.py`). All of their operations have native kernels, so their steps are recorded and none
runs in plain torch on a machine with the native library. Changing any setting changes the model or is refused, except
for the settings that `tests/models/test_config_keys.py` lists, of training or of other implementations. ERNIE 4.5 and
EXAONE 4 were added last, with one file each and without a change to the layers or kernels.

`python benchmarks/families.py` runs `penstock verify` on such a checkpoint of each in bfloat16, int8 and int4: its
answers are the same, bit for bit, alone and in a batch, with other numbers of threads, in chunks, from the prefix
cache, preempted and speculated. Preemption is left out for models with sliding windows in all layers: such a sequence
frees a block for each that it takes. A running sequence holds the blocks of its windows only: Gemma3-1B's process
grows by no more than the 4,096 bytes per token of its layers without a window (`python benchmarks/window_memory.py
MODEL`); with the prefix cache, blocks that the windows have passed stay, idle, until the pool needs them.

The multi-token prediction heads (`mtp.*`) of DeepSeek V3, GLM 4.5 to 4.7,
Qwen3.5 and Qwen3-Next are used by `--speculation mtp` ([sampling.md](sampling.md#speculation)), from Hugging Face
folders and from GGUF files that contain them (`nextn`).

`longrope` (Phi-3 and later) uses the long factors if `max_model_len` exceeds the context that the model was first
trained for, and otherwise the short ones: the same for all sequences, so that keys can be shared and an answer does not
depend on its current length. `transformers` uses the short factors for short sequences, and recomputes the keys when a
sequence outgrows them. To get its answers for short sequences, set `--max-model-len` to the original context.

[adding-a-model.md](adding-a-model.md) adds another family."""

ENCODERS_INTRO = """\
## Models that embed or score

Decoders, too, embed or score if their folder says so: [embeddings.md](embeddings.md#models). The models below never
generate; each is tested against `sentence-transformers` in float32 within 1e-4 (`tests/models/test_encoders.py`)."""


def describe() -> str:
    """The content of docs/models.md, without the final newline."""
    return "\n".join((INTRO, "", *table(), "", ENCODERS_INTRO, "", *encoder_table()))


def encoder_table() -> list[str]:
    """The lines of the table of encoders, one row per architecture."""
    rows = ["| `architectures` | family |", "|---|---|"]
    return rows + [f"| `{name}` | {_doc(read)} |" for name, read in sorted(ENCODERS.items())]


def table() -> list[str]:
    """The lines of the table, one row per architecture."""
    rows = ["| `architectures` | family | GGUF |", "|---|---|---|"]
    for name, read in sorted(ARCHITECTURES.items()):
        files = ", ".join(f"`{kind}`" for kind, one in GGUF.items() if name in one.families)
        rows.append(f"| `{name}` | {_doc(read)} | {files} |")
    return rows


def short_table() -> list[str]:
    """The lines of README's table, one row per family."""
    families: dict[str, list[str]] = {}
    for name, read in sorted(ARCHITECTURES.items()):
        families.setdefault(_doc(read).split(":")[0].rstrip("."), []).append(name)
    rows = ["| family | `architectures` | GGUF |", "|---|---|---|"]
    for family, names in sorted(families.items()):
        files = any(name in one.families for one in GGUF.values() for name in names)
        rows.append(f"| {family} | {', '.join(f'`{name}`' for name in names)} | {'yes' if files else ''} |")
    return rows


def _doc(read: object) -> str:
    """The first line of a family's module."""
    return (sys.modules[read.__module__].__doc__ or "").splitlines()[0]


if __name__ == "__main__":
    print("\n".join(short_table()) if "--short" in sys.argv[1:] else describe())
