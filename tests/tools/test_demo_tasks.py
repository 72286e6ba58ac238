"""The demo model's tasks: answers are right, held-out items stay held out, and training text is the template's text."""

import json
from pathlib import Path
from random import Random
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer

from tools import demo_tasks
from tools.demo_tasks import TASKS, Item, assistant, is_correct, is_held_out, make
from tools.demo_tokenizer import CHAT_TEMPLATE, render

DEMO = Path(__file__).parents[2] / "src/penstock/demo"


def render_template(item: Item, **values: Any) -> str:
    environment = jinja2.Environment()
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(CHAT_TEMPLATE).render(messages=item.messages, tools=item.tools, **values)


def last_words(item: Item) -> str:
    content: str = item.messages[-1]["content"]
    return content


@pytest.mark.parametrize("task", TASKS)
def test_an_items_own_answer_is_correct_and_another_is_not(task: str) -> None:
    item = make(task, Random(1), "held_out")
    assert item.task == task
    assert is_correct(item, item.answer + "\n")
    assert not is_correct(item, item.answer[:-1])


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_makes_the_same_item(task: str) -> None:
    assert make(task, Random(7), "train") == make(task, Random(7), "train")


def test_arithmetic_is_right() -> None:
    rng = Random(2)
    for _ in range(200):
        left, sign, right, _, result = make("arithmetic", rng, "held_out").answer.split()
        assert int(result) == (int(left) + int(right) if sign == "+" else int(left) - int(right))


def test_sorted_numbers_are_the_numbers_asked_for_in_order() -> None:
    rng = Random(3)
    for size in range(3, 9):
        item = make("sort", rng, "train", size)
        answered = [int(number) for number in item.answer.split(", ")]
        asked = [int(word.strip(".,")) for word in last_words(item).split() if word.strip(".,").isdigit()]
        assert len(answered) == size
        assert answered == sorted(asked)


def test_a_copied_text_has_at_least_200_words_and_stands_in_the_request() -> None:
    item = make("copy", Random(4), "held_out")
    assert len(item.answer.split()) >= 200
    assert last_words(item).endswith("\n\n" + item.answer)


def test_a_recalled_fact_lies_at_least_800_words_above_the_question() -> None:
    item = make("recall", Random(5), "held_out")
    assert len(last_words(item).split(item.answer)[1].split()) >= 800


def test_no_subject_is_both_trained_and_held_out() -> None:
    rng = Random(6)
    words = {split: {make("reverse", rng, split, 3).answer for _ in range(400)} for split in ("train", "held_out")}
    assert words["train"].isdisjoint(words["held_out"])
    assert all(is_held_out(f"reverse {word[::-1]}") for word in words["held_out"])


def test_a_tool_call_names_an_offered_tool_and_its_argument() -> None:
    rng = Random(8)
    for _ in range(50):
        item = make("tool_call", rng, "train")
        call = json.loads(item.answer.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        offered = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in item.tools}
        assert offered[call["name"]] == list(call["arguments"])


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("system", [(), ({"role": "system", "content": "Be brief."},)])
def test_training_text_is_the_chat_templates_text(task: str, system: tuple[demo_tasks.Message, ...]) -> None:
    item = make(task, Random(9), "train")
    whole = Item(task, (*system, *item.messages, assistant(item.answer)), "", item.tools)
    assert "".join(text for text, _ in render(whole.messages, whole.tools)) == render_template(whole)


def test_several_tool_results_share_one_user_turn() -> None:
    results = tuple({"role": "tool", "content": content} for content in ("1", "2"))
    shown = render_template(Item("", results, ""), add_generation_prompt=True)
    response = "\n<tool_response>\n{}\n</tool_response>"
    assert shown == f"<|im_start|>user{response.format(1)}{response.format(2)}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "text",
    ["What is 37 + 58?", " leading,  double ", "a\n\n\nb\tc\r\n", "naïve 🙂 你好", "<0x41> <unk>", "▁low", ""],
)
def test_the_shipped_tokenizer_gives_back_every_character(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_shipped_tokenizer_spells_digits_and_quoted_words() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    assert [token.strip() for token in tokenizer.encode('1234 "lantern"').tokens] == [*"1234", '"', *"lantern", '"']


def test_the_shipped_folder_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in DEMO.iterdir() if path.is_file()}
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert needed | {"README.md"} <= files.keys()
    assert sum(files.values()) <= 12 * 2**20
    assert json.loads((DEMO / "config.json").read_text())["max_position_embeddings"] >= 2048
