"""A scheduler over small pools, and a runner that computes nothing but checks that every plan is sound."""

import math
import random
from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from dataclasses import replace

from penstock.api.request import FinishReason, Image, Request, SequenceOutput, TokenLogprob
from penstock.api.sampling_params import Beams
from penstock.config.image_settings import ImageSettings
from penstock.core.block_tier import BlockTier
from penstock.core.fairness import QUEUE_POLICIES
from penstock.core.kv_manager import CacheGroup, KVManager
from penstock.core.plan import BlockCopy, ForwardPlan, SampledSequence, StepPlan, StepResult
from penstock.core.policies import AdmissionPolicy
from penstock.core.scheduler import Scheduler
from penstock.core.speculation import Speculation
from penstock.runner.device_runner import BlockTables
from tests.support.params import GREEDY

STOP_TOKEN = 7


def make_request(
    request_id: str,
    prompt: Tokens[int],
    max_tokens: int = 4,
    *,
    n: int = 1,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (STOP_TOKEN,),
    priority: int = 0,
    namespace: str = "",
    tenant: str = "",
    beams: Beams | None = None,
    prompt_logprobs: int | None = None,
    images: tuple[Image, ...] = (),
    seed: int = 0,
) -> Request:
    params = replace(
        GREEDY,
        seed=seed,
        n=n,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        beams=beams,
        prompt_logprobs=prompt_logprobs,
    )
    return Request(
        request_id,
        tuple(prompt),
        params,
        0.0,
        priority=priority,
        namespace=namespace,
        tenant=tenant,
        images=images,
    )


def make_scheduler(
    *,
    num_blocks: int = 16,
    groups: tuple[CacheGroup, ...] | None = None,
    block_size: int = 4,
    max_num_seqs: int = 4,
    budget: int = 16,
    policy: str = "fcfs",
    caching: bool = True,
    admission: AdmissionPolicy | None = None,
    speculation: Speculation | None = None,
    images: ImageSettings | None = None,
    make_tier: Callable[[KVManager], BlockTier] | None = None,
) -> Scheduler:
    kv = KVManager(groups or (CacheGroup(num_blocks),), block_size, max_num_seqs, enable_prefix_caching=caching)
    return Scheduler(
        kv,
        QUEUE_POLICIES[policy](),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        admission=admission,
        speculation=speculation,
        tier=None if make_tier is None else make_tier(kv),
        images=images,
        clock=lambda: 0.0,
    )


class FakeRunner:
    """Keeps for each slot of each pool a digest of the prefix that its content stands for, as a real cache would.

    Whoever reads a slot that was never written, or was written for another prefix, is found out at once; so is a group
    that lacks a slot within its window. A block of a group of states has the tokens that the state sums up; tables of
    such blocks are walked as the kernels do, all sequences of a step at one time.

    The token that it "samples" depends on the whole prefix and the sequence's index alone, so answers must not depend
    on company.
    """

    blocks = None

    def __init__(self, groups: int | tuple[CacheGroup, ...], block_size: int, vocab: int = 20) -> None:
        self.groups = (CacheGroup(groups),) if isinstance(groups, int) else groups
        self.block_size = block_size
        self.vocab = vocab
        self.slots: list[list[list[tuple[int, list[int]] | None]]] = [
            [[None] * block_size for _ in range(group.num_blocks)] for group in self.groups
        ]
        self.states: list[list[list[int] | None]] = [[None] * group.num_blocks for group in self.groups]
        self.block_tables = BlockTables(len(self.groups), 128)

    def execute(self, plan: StepPlan) -> StepResult:
        forward = plan.forward
        self.block_tables.update(forward.new_blocks)
        tables = self.block_tables.of(forward.slots)
        assert len(set(forward.slots)) == len(forward.slots), "two sequences have one slot"
        self._copy(forward.block_copies, tables)
        digests: list[int] = []  # of the prefixes up to each token of the step, and with it
        position = 0
        chunks: list[list[int]] = []
        contents = self.contents_of(forward)
        for i, count in enumerate(forward.query_lens):
            chunks.append(contents[position : position + count])
            position += count
            digests += self._compute([list(group[i]) for group in tables], forward.starts[i], chunks[i])
        assert position == len(forward.token_ids)
        for group, of_sequences in enumerate(tables):
            if self.groups[group].checkpoint_every is not None:
                branches = {
                    branch.seq_index: (branch.block, branch.after)
                    for branch in forward.branches
                    if branch.group == group
                }
                self._walk(group, of_sequences, forward.starts, chunks, digests, branches)
        samples, rows = plan.samples, forward.sampled_rows
        for row, place, seq in zip(rows, samples.positions, samples.sequences, strict=True):
            assert digests[row] == digest(self.contents(seq, place)), "a row is sampled after other tokens than it says"
        tokens = [self.next_token(digests[r], i) for r, i in zip(rows, samples.indices, strict=True)]
        asked = [seq.params.logprobs for seq in samples.sequences]
        told = [
            None if count is None else self.entry(digests[row], token, count)
            for row, token, count in zip(rows, tokens, asked, strict=True)
        ]
        batch = plan.prompt_logprobs
        columns = zip(batch.rows, batch.token_ids, batch.counts, strict=True)
        entries = [self.entry(digests[row], token, count) for row, token, count in columns]
        return StepResult([*tokens], told, entries)

    def contents_of(self, forward: ForwardPlan) -> list[int]:
        """What the keys of each token in a step stand for."""
        return list(forward.token_ids)

    def prompt_contents(self, request: Request) -> list[int]:
        """The same of a prompt's tokens."""
        return list(request.prompt_token_ids)

    def contents(self, seq: SampledSequence, count: int) -> list[int]:
        """The same of a sequence's first `count` tokens."""
        return list(seq.tokens[:count])

    def _copy(self, copies: list[BlockCopy], tables: "list[list[array[int]]]") -> None:
        targets = [(group, target) for group, _, target in copies]
        assert len(set(targets)) == len(targets), "two blocks are copied to one"
        for group, source, target in copies:
            assert any(target in table for table in tables[group]), "a block is copied for nobody in the step"
            self.slots[group][target] = self.slots[group][source][:]
            self.states[group][target] = self.states[group][source]

    def _walk(
        self,
        group: int,
        tables: "list[array[int]]",
        starts: list[int],
        chunks: list[list[int]],
        digests: list[int],
        branches: dict[int, tuple[int, int]],
    ) -> None:
        """Let each sequence's state take in its chunk, the end of it in its branch, if it has one.

        What one of them writes, none of the others may use.
        """
        states, size = self.states[group], self.block_size
        found: list[list[int]] = []
        users: dict[int, set[int]] = {}  # of each block, by their places in the step
        for i, start in enumerate(starts):
            state = states[tables[i][(start - 1) // size]] if start else []
            assert state is not None, "a state is read that was never written"
            assert len(state) == start, "a state is read that sums up fewer tokens, or more"
            found.append(state)
            if start:
                users.setdefault(tables[i][(start - 1) // size], set()).add(i)
        place = 0
        for i, chunk in enumerate(chunks):
            for at, token in enumerate(chunk, starts[i]):
                branch, after = branches.get(i, (0, len(chunk)))
                block = tables[i][at // size] if at < starts[i] + after else branch
                assert users.setdefault(block, {i}) == {i}, "a state is written that another sequence reads or writes"
                states[block] = found[i] = [*found[i], token]
                assert digest(found[i]) == digests[place], "a state is read that was written for another prefix"
                place += 1

    def _compute(self, tables: list[list[int]], start: int, chunk: list[int]) -> list[int]:
        """The digests up to each token of the chunk, after what the groups have within their windows was checked."""
        before = self._last(tables[0], start)
        tables = [table for table, group in zip(tables, self.groups, strict=True) if group.checkpoint_every is None]
        windows = [group.window for group in self.groups if group.checkpoint_every is None]
        for group, (table, window) in enumerate(zip(tables, windows, strict=True)):
            expected = before
            for at in range(start - 1, -1 if window is None else max(-1, start - window), -1):
                previous, token = self._read(group, table, at)
                assert digest(token, previous) == expected, "a slot is read that was written for another prefix"
                expected = previous
        digests = []
        for at, token in enumerate(chunk, start):
            for group, table in enumerate(tables):
                self.slots[group][table[at // self.block_size]][at % self.block_size] = (before, [token])
            before = digest([token], before)
            digests.append(before)
        return digests

    def _last(self, table: list[int], start: int) -> int:
        """The digest of the `start` tokens before a chunk."""
        if not start:
            return digest([])
        previous, token = self._read(0, table, start - 1)
        return digest(token, previous)

    def _read(self, group: int, table: list[int], at: int) -> tuple[int, list[int]]:
        content = self.slots[group][table[at // self.block_size]][at % self.block_size]
        assert content is not None, "a slot is read that was never written"
        return content

    def next_token(self, prefix: int, index: int) -> int:
        """After a prefix with this digest."""
        return random.Random(f"{prefix} {index}").randrange(self.vocab)

    def logprobs(self, prefix: int) -> list[float]:
        """Of every token after a prefix with this digest, whoever asks."""
        rng = random.Random(prefix)
        weights = [rng.random() ** 3 for _ in range(self.vocab)]
        return [math.log(weight / sum(weights)) for weight in weights]

    def entry(self, prefix: int, token: int, count: int) -> TokenLogprob:
        logprobs = self.logprobs(prefix)
        likeliest = sorted(range(self.vocab), key=lambda one: -logprobs[one])[:count]
        return TokenLogprob(token, logprobs[token], tuple((one, logprobs[one]) for one in likeliest))


def digest(tokens: Iterable[int], before: int = 0) -> int:
    """Of a prefix: of these tokens after those whose digest is `before`."""
    for token in tokens:
        before = hash((before, token)) % 2**40
    return before


def expected_answer(runner: FakeRunner, request: Request, index: int) -> tuple[list[int], FinishReason]:
    """What the request must answer, whatever else runs."""
    params, tokens = request.params, runner.prompt_contents(request)
    answer: list[int] = []
    while len(answer) < params.max_tokens:
        answer.append(runner.next_token(digest(tokens + answer), index))
        if answer[-1] in params.stop_token_ids and len(answer) > params.min_tokens:
            return answer, FinishReason.STOP
    return answer, FinishReason.LENGTH


def expected_beams(runner: FakeRunner, request: Request) -> list[tuple[list[int], float, FinishReason]]:
    """The hypotheses of a beam search, looking at all tokens, from the definition."""
    params, prompt = request.params, runner.prompt_contents(request)
    assert params.beams is not None
    width, penalty, early = params.beams.num_beams, params.beams.length_penalty, params.beams.early_stopping
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[list[int], float, FinishReason]] = []
    for length in range(1, params.max_tokens + 1):
        options = [
            (score + logprob, [*answer, token])
            for score, answer in running
            for token, logprob in enumerate(runner.logprobs(digest(prompt + answer)))
            if length > params.min_tokens or token not in params.stop_token_ids
        ]
        options.sort(key=lambda option: -option[0])
        stops = [answer[-1] in params.stop_token_ids for _, answer in options]
        for (score, answer), stop in list(zip(options, stops, strict=True))[:width]:
            if stop or length == params.max_tokens:
                ended.append((answer, score / length**penalty, FinishReason.STOP if stop else FinishReason.LENGTH))
        ended = sorted(ended, key=lambda one: -one[1])[:width]
        running = [option for option, stop in zip(options, stops, strict=True) if not stop][:width]
        if len(ended) == width:
            hoped_for = params.max_tokens if early == "never" and penalty > 0 else length
            if early is True or running[0][0] / hoped_for**penalty <= ended[-1][1]:
                break
    return ended[: params.n]


def run_step(scheduler: Scheduler, runner: FakeRunner) -> list[SequenceOutput]:
    plan = scheduler.schedule()
    if plan is None:
        return scheduler.drain()
    outputs = scheduler.update(runner.execute(plan))
    scheduler.check_integrity()
    return outputs


class Collected:
    """The outputs of many steps, by request and sequence."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.endings: dict[tuple[str, int], list[FinishReason]] = {}
        self.scores: dict[tuple[str, int], float] = {}
        self.prompts: dict[str, dict[int, TokenLogprob]] = {}
        """Of each request what was told of its prompt, by the place in it."""

    def add(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            key = (output.request_id, output.index)
            assert key not in self.endings, f"{key} has an output after its ending"
            self.tokens.setdefault(key, []).extend(output.token_ids)
            if output.prompt is not None:
                assert not self.tokens[key], "something of the prompt is told after the first token"
                known = self.prompts.setdefault(output.request_id, {})
                for place, entry in enumerate(output.prompt.logprobs, output.prompt.start):
                    assert known.setdefault(place, entry) == entry, "it is told differently the second time"
            if output.score is not None:
                self.scores[key] = output.score
            if output.finish_reason is not None:
                self.endings.setdefault(key, []).append(output.finish_reason)


def run_to_end(scheduler: Scheduler, runner: FakeRunner, max_steps: int = 10_000) -> Collected:
    collected = Collected()
    for _ in range(max_steps):
        if not scheduler.has_work:
            return collected
        collected.add(run_step(scheduler, runner))
    raise AssertionError(f"still at work after {max_steps} steps")
