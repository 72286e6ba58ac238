"""A model's summary comes from the headers of its files, in both formats."""

from pathlib import Path

from penstock.checkpoint.summary import summary_of
from tests.support.gguf_files import write_gguf


def test_a_summary_comes_from_the_headers_of_the_files(tiny_llama: Path, tmp_path: Path) -> None:
    nothing = summary_of(str(tmp_path / "nothing"))
    assert (nothing.num_bytes, nothing.parameters) == (0, "")
    folder = summary_of(str(tiny_llama))
    assert folder.parameters.endswith("K")
    assert folder.num_bytes == (tiny_llama / "model.safetensors").stat().st_size
    write_gguf(tmp_path / "model.gguf", tiny_llama, "F16")
    packed = summary_of(str(tmp_path / "model.gguf"))
    assert (packed.format, packed.quantization, packed.family) == ("gguf", "F16", folder.family)
    assert packed.sizes == folder.sizes
    assert packed.digest != folder.digest
