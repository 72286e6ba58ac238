"""What importing costs: time, and the libraries that come along."""

import json
import re
import subprocess
import sys

import grimp
import pytest

from penstock.runner.torch_device import num_gpus
from tests.support.needs import needs_native


def modules_after(statement: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_importing_penstock_and_its_core_loads_no_torch_and_no_server() -> None:
    loaded = modules_after(
        "import penstock, penstock.core.scheduler, penstock.config.engine_config, penstock.checkpoint.checkpoint"
    )
    assert not loaded & {"torch", "transformers", "fastapi", "numpy", "uvicorn", "tokenizers"}


def test_the_server_and_the_engines_client_load_no_torch() -> None:
    loaded = modules_after("import penstock.server.serve, penstock.frontend.client, penstock.text.tokenizer")
    assert "torch" not in loaded
    assert "transformers" not in loaded


def test_the_server_process_loads_no_room_that_computes() -> None:
    """The linter checks imports; this is what a process has loaded, by whatever way."""
    server = "app, config, connection, dialects, exposition, http, keys, logs, serve, tracing"
    fleet = "autoscaler, fleet, launch, cluster.ray_cluster"
    modules = [f"penstock.server.{name}" for name in server.split(", ")]
    modules += [f"penstock.fleet.{name}" for name in fleet.split(", ")]
    modules += ["penstock.frontend.client", "penstock.frontend.recovery.journal"]
    loaded = modules_after(f"import {', '.join(modules)}")
    rooms = {name.split(".")[1] for name in loaded if name.startswith("penstock.")}
    assert rooms >= {"server", "frontend", "fleet", "text", "config"}
    computing = {"runner", "sampling", "models", "layers", "quantization", "kernels", "native", "llm", "diagnose"}
    assert not rooms & computing


def test_help_loads_neither_torch_nor_the_server() -> None:
    command = "import penstock.cli\ntry: penstock.cli.main(['--help'])\nexcept SystemExit: pass"
    loaded = modules_after(command)
    assert not loaded & {"torch", "fastapi", "tokenizers", "zmq", "numpy", "rich", "prompt_toolkit", "markdown_it"}


@needs_native
@pytest.mark.skipif(num_gpus() > 0, reason="on a GPU, torch computes")
def test_the_llm_answers_on_native_kernels_without_torch() -> None:
    ask = """
import logging, sys
sys.modules["torch"] = None  # what imports it fails
from penstock import LLM, SamplingParams
with LLM(threads=1, packed_cache="off") as llm:
    many = SamplingParams(max_tokens=4, temperature=0.7, seed=1, logprobs=2, repetition_penalty=1.2, prompt_logprobs=1)
    assert llm.generate(["2 + 2 ="], many)[0].outputs[0].token_ids
del sys.modules["torch"]"""
    assert "torch" not in modules_after(ask)


@needs_native
@pytest.mark.skipif(num_gpus() > 0, reason="on a GPU, torch computes")
def test_an_answer_offline_loads_its_family_alone_and_no_library_that_it_does_not_use() -> None:
    loaded = modules_after("""
from penstock.cli import main
assert main(["generate", "--threads", "1", "--packed-cache", "off", "--max-tokens", "2", "2 + 2 ="]) == 0""")
    assert not loaded & {"torch", "asyncio", "llguidance", "zmq", "numpy.ma", "jinja2", "PIL"}
    families = {name.rpartition(".")[2] for name in loaded if name.startswith("penstock.models.families.")}
    assert "qwen3" in families
    assert not families & {"gemma3", "bamba", "deepseek", "mpnet"}
    assert not loaded & {"msgspec", "tomllib", "importlib.metadata", "typing_extensions"}
    unused = (
        *("checkpoint.gguf.config", "checkpoint.gguf.tokenizer", "checkpoint.gguf.mmproj", "text.vocabularies.convert"),
        *("checkpoint.adapters.folder", "runner.adapters", "parsers.conversation", "frontend.scoring", "api.tools"),
        *("models.encoder", "models.mtp", "models.tower", "models.audio_tower", "models.loading.gguf_spec"),
        *("runner.ranks", "runner.encoder_runner", "runner.image_runner", "runner.audio_runner", "runner.mtp_runner"),
        *("engine.block_tier", "quantization.stored_gguf", "quantization.rounding", "quantization.stored_float8"),
    )
    assert not loaded & {f"penstock.{name}" for name in unused}


TORCH = re.compile(
    r"penstock\.(kernels\.(.*reference\w*|.*triton|arrays)|runner\.(torch_groups|transformers_\w+)|quantization\.gptq|quantizer\.\w+)"
)
"""The modules that cannot be imported without torch: pyproject.toml says for each why."""


def test_without_torch_all_other_modules_can_be_imported() -> None:
    imports = """
import importlib, json, pkgutil, sys
sys.modules["torch"] = None
import penstock
failed = []
for module in pkgutil.walk_packages(penstock.__path__, "penstock."):
    if module.name.startswith("penstock.server.") or module.name.endswith(("__main__", ".libpenstock")):
        continue  # the other tests see to the server's
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        failed += [module.name] * (error.name == "torch")
print(json.dumps(failed))"""
    run = subprocess.run([sys.executable, "-c", imports], capture_output=True, text=True, check=True)
    failed = json.loads(run.stdout)
    assert "penstock.kernels.reference_ops" in failed
    assert [name for name in failed if not TORCH.fullmatch(name)] == []


def test_no_two_modules_import_each_other() -> None:
    graph = grimp.build_graph("penstock", cache_dir=None)
    arrows = {(module, other) for module in graph.modules for other in graph.find_modules_directly_imported_by(module)}
    assert {(one, other) for one, other in arrows if one < other and (other, one) in arrows} == set()


def test_a_command_and_the_process_that_renders_import_what_they_use() -> None:
    loaded = modules_after("import penstock.cli\npenstock.cli.make_parser('cache')")
    assert not loaded & {"penstock.cli.simulate", "penstock.cli.generate", "urllib.request"}
    loaded = modules_after("import penstock.text.chat_worker")
    ours = {f"penstock.{name}" for name in ("api", "checkpoint", "errors", "system.host")}
    assert not loaded & {"asyncio", "msgspec", *ours}
