"""Judge the demo model on held-out items: `python -m tools.eval_demo_model src/penstock/demo`.

Greedy decoding by Hugging Face transformers from the folder as it ships (its tokenizer, its chat template, its rounded
weights), so that the result depends on neither the training script's model nor Penstock's.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.demo_tasks import TASKS, Item, is_correct, make, user

BATCH = 20


@dataclass(frozen=True, slots=True)
class Score:
    task: str
    right: int
    count: int
    shortest_prompt: int  # tokens
    longest_prompt: int
    shortest_answer: int

    @property
    def row(self) -> str:
        cells = (
            self.task,
            f"{self.right} / {self.count}",
            f"{100 * self.right / self.count:.1f} %",
            f"{self.shortest_prompt} to {self.longest_prompt}",
            f"{self.shortest_answer}",
        )
        return f"| {' | '.join(cells)} |"


class Judge:
    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def prompt(self, item: Item) -> str:
        text: str = self.tokenizer.apply_chat_template(
            list(item.messages), tools=list(item.tools) or None, tokenize=False, add_generation_prompt=True
        )
        return text

    def replies(self, items: list[Item]) -> list[str]:
        """Greedy replies, all items in one batch padded on the left."""
        inputs = self.tokenizer([self.prompt(item) for item in items], return_tensors="pt", padding=True)
        longest = max(len(self.tokenizer(item.answer).input_ids) for item in items)
        with torch.no_grad():
            output = self.model.generate(**inputs, do_sample=False, max_new_tokens=longest + 8)
        generated = output[:, inputs.input_ids.shape[1] :]
        texts: list[str] = self.tokenizer.batch_decode(generated, skip_special_tokens=True)
        return texts

    def score(self, task: str, count: int, seed: int, show: int) -> Score:
        rng = Random(f"{seed} {task}")
        items = [make(task, rng, "held_out") for _ in range(count)]
        right = 0
        for start in range(0, count, BATCH):
            batch = items[start : start + BATCH]
            for item, reply in zip(batch, self.replies(batch), strict=True):
                right += is_correct(item, reply)
                if not is_correct(item, reply) and show > 0:
                    show -= 1
                    print(f"  {task}: {item.messages[-1]['content'][-80:]!r}\n    {reply!r}\n    {item.answer!r}")
        prompts = [len(self.tokenizer(self.prompt(item)).input_ids) for item in items]
        answers = [len(self.tokenizer(item.answer).input_ids) for item in items]
        return Score(task, right, count, min(prompts), max(prompts), min(answers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=200, help="items a task")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--show", type=int, default=0, help="wrong replies of a task to print")
    arguments = parser.parse_args()
    judge = Judge(arguments.folder)
    question = "What is 37 + 58?"
    alone = judge.replies([Item("arithmetic", (user(question),), "37 + 58 = 95")])
    system = {"role": "system", "content": "You are a helpful assistant."}
    instructed = judge.replies([Item("arithmetic", (system, user(question)), "37 + 58 = 95")])
    print(f"{question} -> {alone[0]!r}; with a system prompt -> {instructed[0]!r}\n")
    print("| task | exact | share | prompt, tokens | answer, tokens at least |\n| --- | --- | --- | --- | --- |")
    for task in arguments.tasks:
        print(judge.score(task, arguments.count, arguments.seed, arguments.show).row, flush=True)


if __name__ == "__main__":
    main()
