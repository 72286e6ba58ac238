"""`docs/models.md` and README's table, from the registry itself.

python -m penstock.models.families_doc > docs/models.md
python -m penstock.models.families_doc --short      # for README
"""

import sys

from penstock.gguf.architectures import ARCHITECTURES as GGUF
from penstock.models.encoders import ENCODERS
from penstock.models.registry import ARCHITECTURES

INTRO = """\
# Families

A checkpoint's family is found by `architectures` of its `config.json`, or `general.architecture` of a GGUF file. Of a
multimodal checkpoint the text model is computed; its other towers are skipped by name. A setting of `config.json` that
would change what is computed and that we do not implement is refused; one that is unknown is reported when the model is
opened. This page is generated: `python -m penstock.models.families_doc > docs/models.md`.

Each row is tested against `transformers` 5.23 on random checkpoints that exercise its branches: logits in float32
within 2e-4 for whole prompts, for odd chunks of several texts at once and for decodes, and 64 greedy tokens
(`tests/models/test_families.py`). The steps of all of them are recorded: no operation of theirs lacks a native kernel,
and none runs in plain torch where the native library is. Another value of any setting makes another model or is
refused, but for those that `tests/models/test_config_keys.py` names: of training, or of other implementations. ERNIE
4.5 and EXAONE 4 were added last, by a file each, without a change of anything that computes.

`python benchmarks/families.py` runs `penstock verify` on such a checkpoint of each in bfloat16, int8 and int4: its
answers are the same, bit for bit, alone and in company, with other threads, in chunks, from the prefix cache, preempted
and speculated. Preemption is left out where all layers slide: such a text gives back a block for each that it takes.
The heads that guess further tokens of DeepSeek V3, GLM 4.5 to 4.7, Qwen3.5 and Qwen3-Next (`mtp.*`) are used by
`--speculation mtp` ([sampling.md](sampling.md#speculation)), from Hugging Face folders and from
GGUF files that hold them (`nextn`).

Of `longrope` (Phi-3 and later) the long factors are taken where `max_model_len` is beyond the context that the model
was first trained for, and the short ones where it is not: for all texts alike, so that keys can be shared and an
answer does not depend on how far its text has come. `transformers` takes the short ones for texts that are still
short, and computes them anew as they outgrow that. To have its answers for short texts, set `--max-model-len` to the
original context.

[adding-a-model.md](adding-a-model.md) adds another family."""

ENCODERS_INTRO = """\
## Models that embed or score

Of decoders, too, those embed or score whose folder says so: [embeddings.md](embeddings.md#models). These never
generate; each is tested against `sentence-transformers` in float32 within 1e-4 (`tests/models/test_encoders.py`)."""


def describe() -> str:
    """The page, without the newline at its end."""
    return "\n".join((INTRO, "", *table(), "", ENCODERS_INTRO, "", *encoder_table()))


def encoder_table() -> list[str]:
    """The lines of the table of those that never generate, a row an architecture."""
    rows = ["| `architectures` | family |", "|---|---|"]
    return rows + [f"| `{name}` | {_doc(read)} |" for name, read in sorted(ENCODERS.items())]


def table() -> list[str]:
    """The lines of the table, a row an architecture."""
    rows = ["| `architectures` | family | GGUF |", "|---|---|---|"]
    for name, read in sorted(ARCHITECTURES.items()):
        files = ", ".join(f"`{kind}`" for kind, one in GGUF.items() if name in one.families)
        rows.append(f"| `{name}` | {_doc(read)} | {files} |")
    return rows


def short_table() -> list[str]:
    """The lines of README's table, a row a family."""
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
