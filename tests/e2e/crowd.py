"""A crowd of requests for the demo model: mixed tasks and lengths, shared beginnings, some that leave early."""

from dataclasses import dataclass
from random import Random

from penstock.api.sampling_params import SamplingParams
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.models.registry import read_facts
from penstock.text.tokenizer import Tokenizer
from tools.demo_tasks import make

TASKS = ("arithmetic", "reverse", "sort", "copy", "recall", "json", "tool_call", "refer_back")
NUM_REQUESTS = 64
NUM_ITEMS = 24
WORDS = {"copy": 120, "recall": 450}
BLOCK_SIZE = 16
NUM_BLOCKS = 48  # a little more than the longest request needs, for up to 24 at a time


@dataclass(frozen=True)
class Visitor:
    """A request, when it comes, and when (if at all) its client goes away."""

    prompt: list[int]
    params: SamplingParams
    comes: int
    leaves: int | None


def make_visitors(tokenizer: Tokenizer, seed: int) -> list[Visitor]:
    rng = Random(seed)
    systems = [None, "You are the Penstock demo model.", "Answer in one line."]
    visitors = []
    for i in range(NUM_REQUESTS):
        task = TASKS[i % len(TASKS)]
        item = make(task, Random(f"{seed} {i % NUM_ITEMS}"), "held_out", WORDS.get(task))  # asked by several
        messages = list(item.messages)
        system = systems[i % NUM_ITEMS % len(systems)]
        if system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        prompt = tokenizer.encode_chat(messages, tools=list(item.tools) or None)
        params = SamplingParams(
            temperature=0.8 if i % 4 == 3 else 0.0,
            seed=i,
            max_tokens=rng.randint(1, 120),
            ignore_eos=i % 3 == 0,  # goes on to max_tokens, and outgrows the blocks of its prompt
        )
        comes = rng.randrange(60)
        visitors.append(Visitor(prompt, params, comes, comes + rng.randrange(30) if i % 9 == 8 else None))
    return visitors


def small_pool() -> dict[str, int | str]:
    """Options of an engine whose pool is far too small for the crowd."""
    facts = read_facts(open_checkpoint(None))
    block_bytes = sum(kept.block_bytes(BLOCK_SIZE, "float32") for kept in facts.caches if kept is not None)
    return {
        "dtype": "float32",
        "threads": 1,
        "block_size": BLOCK_SIZE,
        "kv_cache_memory": NUM_BLOCKS * block_bytes,
        "max_model_len": NUM_BLOCKS * BLOCK_SIZE,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 256,
    }
