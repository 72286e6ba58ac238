"""Quantizes a whole checkpoint, with progress on the terminal."""

import shlex
from pathlib import Path

from tqdm import tqdm

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.errors import ConfigError, InvalidRequestError
from penstock.kernels.tables import make_ops
from penstock.llm import LLM
from penstock.models.registry import read_facts, read_spec
from penstock.native import set_num_threads
from penstock.quantizer.calibration import read_texts, write_texts
from penstock.quantizer.job import Job
from penstock.text.tokenizer import Tokenizer


def quantize(model: str, out: Path, recipe: str, calibration: Path | None, threads: int | None) -> None:
    """Write the checkpoint `out` by a recipe of `CHECKPOINT_RECIPES`.

    Raises:
        ConfigError, CheckpointError, InvalidRequestError: see `Job` and `calibration`.
    """
    if threads is not None and threads < 1:
        raise ConfigError(f"threads must be at least 1, not {threads}")
    if calibration is not None and not calibration.is_file():
        raise InvalidRequestError(f"there is no calibration text {calibration}")
    checkpoint = open_checkpoint(model)
    spec = read_spec(checkpoint)
    read_facts(checkpoint)  # the files hold what config.json says
    job = Job(checkpoint, spec, recipe, out, calibration)
    job.check()
    given = None
    if calibration is not None:
        given = read_texts(calibration, Tokenizer.load(checkpoint.path), spec.max_position)

    def make_texts() -> list[list[int]]:
        if given is not None:
            return given
        # in int8, which writes twice as fast, and likely the same
        with LLM(model, threads=threads, quantization="int8", packed_cache="off") as llm:
            return write_texts(llm, spec.vocab_size, spec.max_position)

    with job.begin():
        texts = job.texts(make_texts)
        if threads is not None:
            set_num_threads(threads)
        layers = job.layers(texts, make_ops("cpu"))
        for _ in tqdm(layers, total=spec.num_layers, desc="layers", unit="layer"):
            pass
        job.finish()
    print(f"wrote {job.describe()}; try: penstock chat --model {shlex.quote(str(out))}")
