"""How the Python API shows itself to editors and `help`; the names of other engines that it knows.

What type checkers see of it is in `typed_options.py`.
"""

import inspect
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock import LLM, AsyncLLM
from penstock.config.engine_config import iter_options
from penstock.config.signatures import advises_names
from penstock.errors import InvalidRequestError
from tools import llm_options

SOURCE = Path(penstock.__file__).parent


def test_the_types_of_the_options_are_generated_from_the_configuration() -> None:
    assert (SOURCE / "config" / "llm_options.py").read_text() == llm_options.source(), "run python -m tools.llm_options"


@pytest.mark.parametrize("api", [LLM, AsyncLLM])
def test_the_signature_and_help_list_every_option_with_its_default(api: type) -> None:
    parameters, shown = inspect.signature(api).parameters, pydoc.plain(pydoc.render_doc(api))
    for _, field in iter_options():
        assert parameters[field.name].default == field.default
        if field.name != "model":
            assert f"{field.name} (default: {field.default!r})" in shown
    assert "One of fair, fcfs, priority." in shown


def test_the_package_shows_its_public_names_alone() -> None:
    command = "import penstock, penstock.engine; print(*(n for n in dir(penstock) if not n.startswith('_')))"
    shown = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout.split()
    assert sorted(shown) == sorted(penstock.__all__)
    assert all(hasattr(penstock, name) for name in dir(penstock))


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("sampling_params", "here it is params"),
        ("use_tqdm", "here it is progress"),
        ("temperature", r"it belongs into params: SamplingParams\(temperature=\.\.\.\)"),
    ],
)
def test_arguments_of_other_engines_are_answered_with_the_ones_here(argument: str, told: str) -> None:
    @advises_names
    def chat(**template: object) -> object:
        return template

    with pytest.raises(InvalidRequestError, match=f"chat has no argument '{argument}'; {told}"):
        chat(**{argument: 0})
    assert chat(enable_thinking=False) == {"enable_thinking": False}
    assert all(hasattr(api.chat, "__wrapped__") for api in (LLM, AsyncLLM))
    assert all(hasattr(api.generate, "__wrapped__") for api in (LLM, AsyncLLM))
