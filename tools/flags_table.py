"""The table of other programs' flags in docs/coming-from.md: python -m tools.flags_table

It is what the command line answers to such a flag.
"""

from pathlib import Path

from penstock.cli.parser import FOREIGN_FLAGS

PAGE = Path(__file__).parents[1] / "docs" / "coming-from.md"
BEGIN, END = "<!-- flags: python -m tools.flags_table -->", "<!-- end of flags -->"
NOTES = {
    "--max-model-len": "of one request; llama.cpp divides `--ctx-size` among its slots",
    "--kv-cache-memory": "bytes of the KV cache (`8GiB`), not a share of the memory",
    "--device": "the whole model runs on one kind of device: no layers are offloaded",
    "--max-num-batched-tokens": "tokens of all sequences that one step computes",
    "--max-num-seqs": "sequences that run together; others wait",
    "--quantization": "`int8` or `int4`; quantized checkpoints and GGUF files need no flag",
    "--adapter": "`name=PATH`",
    "--model": "a folder, a GGUF file, or a hub id; `serve` and `chat` take it as an argument, too",
    "--default-sampling": 'JSON: `{"temperature": 0.7}`',
}


def table() -> str:
    """The lines of the table, one row per flag of ours."""
    rows: dict[str, list[str]] = {}
    for theirs, ours in FOREIGN_FLAGS.items():
        rows.setdefault(ours, []).append(f"`{theirs}`")
    lines = ["| elsewhere | here | |", "|---|---|---|"]
    for ours, theirs in sorted(rows.items(), key=lambda row: row[0].lstrip("-")):
        here = f"`{ours}`" if ours.startswith("-") else ours
        lines.append(f"| {', '.join(theirs)} | {here} | {NOTES.get(ours, '')} |")
    return "\n".join(lines)


def updated(page: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
