"""The page of the families."""

from pathlib import Path

from penstock.models.architectures import ARCHITECTURES
from penstock.models.families_doc import describe
from tests.support.families import CASES, MULTIMODAL, class_name
from tests.support.sounds import FAMILIES as LISTENERS
from tests.support.vision import FAMILIES

ROOT = Path(__file__).parents[2]


def test_the_documentation_is_what_the_registry_says() -> None:
    assert (ROOT / "docs" / "models.md").read_text() == describe() + "\n"


def test_each_row_is_held_to_transformers() -> None:
    tested = {class_name(family) for family, _ in CASES.values()} | {family for family, _ in MULTIMODAL.values()}
    tested |= {family.architecture for family in (*FAMILIES.values(), *LISTENERS.values())}
    elsewhere = {  # in modules of their own
        *("BailingMoeV2ForCausalLM", "Gemma3nForConditionalGeneration", "WhisperForConditionalGeneration"),
        *("Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel", "Qwen3OmniMoeForConditionalGeneration"),
    }
    assert set(ARCHITECTURES) - tested == elsewhere
