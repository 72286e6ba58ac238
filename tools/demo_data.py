"""What the demo model learns from: conversations made of the tasks of `demo_tasks.py`, and the order of their batches.

Each step sees a batch of short conversations (several tasks a conversation) and a batch of long ones (copying, and
recalling facts over filler) whose length grows in the course of training. Only the assistant's tokens are learned.
Every batch depends on the seed and the step's number alone, so a resumed run sees the data that an unbroken one would.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools import demo_tasks
from tools.demo_model import CONTEXT
from tools.demo_tasks import SYSTEM_PROMPTS, USUAL_FORM, Fact, Item, Message, Tool, assistant
from tools.demo_tokenizer import render

IGNORED = -100  # the label of a token that is not learned


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


def system_turn(rng: Random) -> tuple[Message, ...]:
    """Mostly none or a usual one; now and then words that mean nothing, so that no system prompt throws the model."""
    kind = rng.random()
    if kind < 0.5:
        return ()
    text = rng.choice(SYSTEM_PROMPTS) if kind < 0.85 else demo_tasks.random_text(rng, rng.randint(2, 15))
    return ({"role": "system", "content": text},)


def turns(item: Item) -> tuple[Message, ...]:
    return (*item.messages, assistant(item.answer))


NUMBERS = ("code", "room")
# Ways to state a fact, from name and value side by side to as far apart as in the usual one, which is judged.
FORMS = (
    "{0.name} {0.value}.",
    "{0.name}: {0.value}.",
    "{0.name} is {0.value}.",
    "{0.name} has {0.attribute} {0.value}.",
    USUAL_FORM,
    USUAL_FORM,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What the batches hold from a step on; found by looking at what the judged tasks still lacked."""

    first_step: int
    parts: dict[str, float]  # of the short items, by task
    digits: tuple[int, ...] = (1, 2, 2, 2, 2, 2, 2, 2)  # the largest number of digits of a sum, drawn from these
    lengths: tuple[int, ...]  # tokens of a long conversation
    is_long: Callable[[int], bool] = lambda step: True  # whether a step's second batch is long conversations, not short
    tools: float = 0.25  # the share of short batches that offer tools
    copies: float = 0.5  # the share of long conversations that copy; the others recall
    confusable: float = 0.0  # the share of long conversations with many numbers and marks
    alike: bool = False  # whether numbers to recall are of one kind, told apart by names alone, in any of FORMS

    def draw_facts(self, rng: Random, count: int, confusable: bool) -> list[Fact]:
        """What a conversation recalls."""
        if not confusable:
            return demo_tasks.draw_facts(rng, "train", count)
        if not self.alike:
            return demo_tasks.draw_facts(rng, "train", count, NUMBERS)
        form = rng.choice(FORMS)
        return [replace(fact, form=form) for fact in demo_tasks.draw_facts(rng, "train", count, (rng.choice(NUMBERS),))]


ALL_PARTS = {"arithmetic": 10, "reverse": 2, "sort": 4, "json": 4, "refer_back": 10, "small_talk": 0.4}

STAGES = (
    Stage(  # attention learns to copy, on short texts first
        first_step=0,
        parts={"arithmetic": 8, "reverse": 3, "sort": 4, "json": 3, "refer_back": 3, "small_talk": 0.3},
        digits=(1, 2, 2, 2, 2, 2, 2, 3),
        lengths=(128, 256, 256, 512, 1024, 1536),
    ),
    Stage(  # sums and sorting
        first_step=1000,
        parts={"arithmetic": 18, "reverse": 2, "sort": 6, "json": 3, "refer_back": 3, "small_talk": 0.4},
        lengths=(256, 512, 1024, 1024, 1536, 2048),
        is_long=lambda step: step % 3 == 0,
    ),
    Stage(  # long copies, spelling, earlier turns
        first_step=1750,
        parts={"arithmetic": 10, "reverse": 2, "sort": 4, "json": 6, "refer_back": 6, "small_talk": 0.4},
        lengths=(256, 512, 1024, 1024, 1536, 2048),
        is_long=lambda step: step % 3 != 0,
        tools=0.3,
        copies=0.65,
    ),
    Stage(  # a copy is right only if each of its 250 tokens is
        first_step=2500,
        parts={"arithmetic": 10, "reverse": 3, "sort": 4, "json": 5, "refer_back": 6, "small_talk": 0.4},
        lengths=(512, 1024, 1024, 2048),
        tools=0.3,
        copies=0.8,
    ),
    Stage(  # what is still wrong now and then: sums, and "your first answer"
        first_step=2750,
        parts={"arithmetic": 18, "reverse": 2, "sort": 3, "json": 3, "refer_back": 10, "small_talk": 0.4},
        lengths=(512, 1024, 1024, 2048),
        is_long=lambda step: step % 2 == 0,
        tools=0.2,
        copies=0.8,
    ),
    Stage(  # everything, for as long as it takes, and facts far above as often as copies
        first_step=3400,
        parts={"arithmetic": 10, "reverse": 2, "sort": 4, "json": 4, "refer_back": 12, "small_talk": 0.4},
        lengths=(512, 1024, 1024, 1536, 2048),
        is_long=lambda step: step % 3 != 0,
        tools=0.15,
        copies=0.5,
    ),
    Stage(  # which of several facts is asked for, more often and nearer; the learning rate begins anew here
        first_step=5000,
        parts={"arithmetic": 10, "reverse": 2, "sort": 4, "json": 4, "refer_back": 8, "small_talk": 0.4},
        lengths=(128, 256, 512, 1024, 1024, 2048),
        tools=0.15,
        copies=0.35,
    ),
    Stage(  # which digit and which word after a mark: those were the errors left; the learning rate begins anew here
        first_step=7400,
        parts=ALL_PARTS,
        lengths=(256, 512, 1024, 1024, 2048),
        tools=0.15,
        copies=0.5,
        confusable=0.5,
    ),
    Stage(  # facts as far above as they are judged at
        first_step=9000,
        parts=ALL_PARTS,
        lengths=(1024, 2048, 2048, 2048),
        tools=0.15,
        copies=0.25,
        confusable=0.5,
    ),
    Stage(  # whose number: many facts that differ in the name alone
        first_step=10500,
        parts=ALL_PARTS,
        lengths=(512, 512, 1024, 2048),
        tools=0.15,
        copies=0.15,
        confusable=0.85,
    ),
    Stage(  # the same, and the kind tells nothing; the learning rate begins anew here
        first_step=12500,
        parts=ALL_PARTS,
        lengths=(512, 512, 1024, 2048),
        tools=0.15,
        copies=0.15,
        confusable=0.85,
        alike=True,
    ),
    Stage(  # copies again, of which some were lost on the way; the learning rate begins at a quarter
        first_step=14500,
        parts=ALL_PARTS,
        lengths=(512, 1024, 1024, 2048),
        tools=0.15,
        copies=0.6,
        confusable=0.4,
        alike=True,
    ),
)


def stage_at(step: int) -> Stage:
    return [stage for stage in STAGES if stage.first_step <= step][-1]


def short_item(rng: Random, stage: Stage) -> Item:
    task = rng.choices(list(stage.parts), list(stage.parts.values()))[0]
    if task == "small_talk":
        return demo_tasks.small_talk(rng)
    size = rng.choice(stage.digits) if task == "arithmetic" else None
    return demo_tasks.make(task, rng, "train", size)


def tool_turns(rng: Random, tools: tuple[Tool, ...]) -> tuple[Message, ...]:
    exchange = demo_tasks.tool_exchange(rng, "train", tools)
    question, reply = demo_tasks.user(exchange.question), assistant(exchange.reply)
    return (question, exchange.call_message, exchange.result_message, reply)


def short_conversation(rng: Random, num_items: int, with_tools: bool, stage: Stage) -> Conversation:
    tools = demo_tasks.offer_tools(rng) if with_tools else ()
    messages = list(system_turn(rng))
    for _ in range(num_items):
        if tools and rng.random() < 0.8:
            messages += tool_turns(rng, tools)
        else:
            messages += turns(short_item(rng, stage))
    return Conversation(tuple(messages), tools)


def copy_conversation(rng: Random, length: int, confusable: bool = False) -> Conversation:
    """Copies of growing variety until about `length` tokens are full (a word is some 1.3 tokens, and comes twice)."""
    messages = list(system_turn(rng))
    left = length
    while left > 40:
        words = rng.randint(5, max(6, min(300, int(left / 2.9) - 12)))
        if rng.random() < 0.5:
            words = max(5, min(300, int(left / 2.9) - 12))
        messages += turns(demo_tasks.copy(rng, "train", words, confusable))
        left -= int(words * 2.7) + 20
    return Conversation(tuple(messages))


def recall_conversation(rng: Random, length: int, stage: Stage, confusable: bool = False) -> Conversation:
    """Notes with facts strewn in (half of the time all at the start, as in the task), then a question for each."""
    facts = stage.draw_facts(rng, rng.randint(3, 6 if length < 400 else 12), confusable)
    words = max(5, int((length - 48 * len(facts)) / 1.3))
    parts = [demo_tasks.random_text(rng, n) for n in split_sum(rng, words, 1 if rng.random() < 0.5 else 4)]
    statements = [fact.statement for fact in facts]
    notes = statements + parts if len(parts) == 1 else rng.sample(statements + parts, len(statements) + len(parts))
    messages = list(system_turn(rng))
    rng.shuffle(facts)
    for number, fact in enumerate(facts):
        question = fact.question(rng)
        asked = question if number else f"Read these notes.\n\n{' '.join(notes)}\n\n{question}"
        messages += [demo_tasks.user(asked), assistant(fact.statement)]
    return Conversation(tuple(messages))


def split_sum(rng: Random, total: int, parts: int) -> list[int]:
    cuts = sorted(rng.randint(0, total) for _ in range(parts - 1))
    return [max(1, high - low) for low, high in zip([0, *cuts], [*cuts, total], strict=True)]


def encode(tokenizer: Tokenizer, conversation: Conversation) -> tuple[list[int], list[int]]:
    """Token ids, and the label of each (the same id where it is learned)."""
    segments = render(conversation.messages, conversation.tools)
    encoded = tokenizer.encode_batch([text for text, _ in segments])
    ids, labels = [], []
    for (_, learned), piece in zip(segments, encoded, strict=True):
        ids += piece.ids
        labels += piece.ids if learned else [IGNORED] * len(piece.ids)
    return ids, labels


def collate(rows: list[tuple[list[int], list[int]]], length: int) -> tuple[Tensor, Tensor]:
    """Cut to `length`, pad to the longest; tokens and next-token labels, both [rows, tokens]."""
    width = min(length, CONTEXT, max(len(ids) for ids, _ in rows))
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), IGNORED)
    for row, (ids, targets) in enumerate(rows):
        ids, targets = ids[:width], targets[1 : width + 1]
        tokens[row, : len(ids)] = torch.tensor(ids)
        labels[row, : len(targets)] = torch.tensor(targets)
    return tokens, labels


def longest_at(step: int) -> int:
    """The curriculum: short texts until attention has learned to copy, then the whole context."""
    return 256 if step < 600 else 512 if step < 1000 else 1024 if step < 1200 else CONTEXT


def short_batch(tokenizer: Tokenizer, rng: Random, step: int, size: int) -> tuple[Tensor, Tensor]:
    stage = stage_at(step)
    with_tools, items = rng.random() < stage.tools, rng.choice([1, 12, 12])
    width = 256 if items > 1 else 160 if with_tools else 48  # a longer row is cut: little is lost, and little is padded
    conversations = [short_conversation(rng, items, with_tools, stage) for _ in range(size // width)]
    return collate([encode(tokenizer, conversation) for conversation in conversations], width)


def long_batch(tokenizer: Tokenizer, rng: Random, step: int, size: int) -> tuple[Tensor, Tensor]:
    stage = stage_at(step)
    length = rng.choice([length for length in stage.lengths if length <= longest_at(step)])
    copies = [rng.random() < stage.copies for _ in range(size // length)]
    confusable = [stage.confusable > 0 and rng.random() < stage.confusable for _ in copies]  # stages without: no draw
    conversations = [
        copy_conversation(rng, length, hard) if copy else recall_conversation(rng, length, stage, hard)
        for copy, hard in zip(copies, confusable, strict=True)
    ]
    return collate([encode(tokenizer, conversation) for conversation in conversations], length * 5 // 4)


def batches(tokenizer: Tokenizer, seed: int, step: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """The step's two batches of about `size` tokens each."""
    rng = Random(f"{seed} {step}")
    second = long_batch if stage_at(step).is_long(step) else short_batch
    return [short_batch(tokenizer, rng, step, size), second(tokenizer, rng, step, size)]


def vocabulary_texts(seed: int) -> Iterator[str]:
    rng = Random(f"{seed} vocabulary")
    for _ in range(4000):
        drawn = (
            short_conversation(rng, 4, with_tools=False, stage=STAGES[0]),
            short_conversation(rng, 2, with_tools=True, stage=STAGES[0]),
            recall_conversation(rng, 400, STAGES[0]),
            copy_conversation(rng, 300),
        )
        yield from (text for conversation in drawn for text, _ in render(conversation.messages, conversation.tools))
