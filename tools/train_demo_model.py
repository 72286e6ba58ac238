"""Train the demo model that ships inside the package: `python -m tools.train_demo_model`.

The model is that of `demo_model.py`, from scratch; it learns the conversations of `demo_data.py`. A run that was
interrupted goes on from its last checkpoint, and ends with the weights of an unbroken one.

Needs torch, tokenizers and safetensors; runs on two CPU cores in some four hours.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from tools import demo_tasks
from tools.demo_data import IGNORED, Conversation, batches, encode, vocabulary_texts
from tools.demo_model import DemoModel, Shape, export
from tools.demo_tokenizer import TURN_END, build_tokenizer

Forward = Callable[[Tensor], Tensor]

WARMUP = 100  # steps, over which the learning rate rises
# A step by which the learning rate is 0, and over how many it fell; after each it begins anew.
FALLS = (
    (5000, 1300),
    (6200, 1200),
    (7400, 1200),
    (9000, 1600),
    (10500, 1500),
    (12500, 2000),
    (14500, 1400),
    (15500, 4000),  # it begins anew at a quarter
)


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest matrices with equal singular values, by Newton-Schulz steps; matrices: [count, rows, columns].

    The quintic and its coefficients are Keller Jordan's (Muon, 2024). float32, since this CPU has no bfloat16 units.
    """
    x: Tensor = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, all matrices of one size at a time (torch's own takes one at a time)."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_size: dict[tuple[int, ...], list[nn.Parameter]] = {}
            for parameter in group["params"]:
                by_size.setdefault(tuple(sorted(parameter.shape)), []).append(parameter)
            for (rows, columns), parameters in by_size.items():
                wide = [self.direction(p, group["momentum"]) for p in parameters]
                wide = [update if tuple(update.shape) == (rows, columns) else update.T for update in wide]
                for parameter, update in zip(parameters, orthogonalise(torch.stack(wide)), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    oriented = update if tuple(parameter.shape) == (rows, columns) else update.T
                    scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                    parameter.add_(oriented, alpha=-group["lr"] * scale)

    def direction(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """Nesterov momentum."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        average: Tensor = state["momentum"]
        average.lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(average, momentum)


def make_optimizers(model: DemoModel, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Two Muons, so that each of two threads can step one, and AdamW for the embedding and the norms."""
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(hidden[::2], lr=muon_lr), Muon(hidden[1::2], lr=muon_lr), adam]


def learning_rate_scale(step: int) -> float:
    """Up, level, then straight down to nothing, once for each of FALLS."""
    end, length = next(fall for fall in FALLS if step < fall[0])
    return min((step + 1) / WARMUP, 1.0, (end - step) / length)


@torch.no_grad()
def accuracy(model: DemoModel, tokenizer: Tokenizer, task: str, count: int) -> float:
    """The share of held-out items answered exactly.

    Greedy decoding writes the answer if and only if every token of it is the likeliest after those before it, so one
    pass over question and answer judges an item without generating.
    """
    rng = Random(f"judge {task}")
    right = 0
    for _ in range(count):
        item = demo_tasks.make(task, rng, "held_out")
        ids, _ = encode(tokenizer, Conversation(item.messages, item.tools))
        head = tokenizer.encode("<|im_start|>assistant\n").ids
        answer = tokenizer.encode(item.answer + TURN_END).ids
        hidden = model(torch.tensor([ids + head + answer[:-1]]))[0, -len(answer) :]
        right += bool((model.logits(hidden).argmax(-1) == torch.tensor(answer)).all())
    return right / count


def gradients(model: DemoModel, forward: Forward, batch: tuple[Tensor, Tensor]) -> tuple[float, tuple[Tensor, ...]]:
    """The mean loss over learned tokens (the output matrix is applied to those alone), and its gradients."""
    tokens, labels = batch
    learned = labels != IGNORED
    logits = model.logits(forward(tokens)[learned])
    loss = F.cross_entropy(logits, labels[learned], reduction="sum") / learned.sum().clamp(min=1)
    return loss.item(), torch.autograd.grad(loss, tuple(model.parameters()))


class Trainer:
    """The state of a run.

    The step's two batches, and then the two Muons, run in two threads of one core each: on two busy cores that is
    nearly twice as fast as one batch on both, whose threads wait for each other at every operation.
    """

    def __init__(self, arguments: argparse.Namespace, tokenizer: Tokenizer) -> None:
        self.arguments = arguments
        self.work: Path = arguments.work
        self.work.mkdir(parents=True, exist_ok=True)
        self.tokenizer = tokenizer
        self.model = DemoModel(Shape(tokenizer.get_vocab_size()))
        self.forward: Forward = torch.compile(self.model, dynamic=True) if arguments.compile else self.model
        self.optimizers = make_optimizers(self.model, arguments.muon_lr, arguments.adam_lr)
        self.rates = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        self.pool = ThreadPoolExecutor(2)
        self.step = 0
        self.seen = 0  # tokens
        if self.checkpoint.exists():
            self.resume()

    @property
    def checkpoint(self) -> Path:
        return self.work / "checkpoint.pt"

    def resume(self) -> None:
        saved = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.step, self.seen = saved["step"], saved["seen"]

    def save(self) -> None:
        state = {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers]}
        unfinished = self.work / "checkpoint.unfinished"
        torch.save({**state, "step": self.step, "seen": self.seen}, unfinished)
        unfinished.replace(self.checkpoint)
        export(self.model, self.tokenizer, self.work / "model")

    def advance(self) -> list[float]:
        """One step; the losses of its batches."""
        drawn = batches(self.tokenizer, self.arguments.seed, self.step, self.arguments.batch_tokens)
        results = list(self.pool.map(lambda batch: gradients(self.model, self.forward, batch), drawn))
        for parameter, *parts in zip(self.model.parameters(), *(parts for _, parts in results), strict=True):
            parameter.grad = torch.stack(parts).sum(0)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        scale = learning_rate_scale(self.step)
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * scale
        list(self.pool.map(lambda optimizer: optimizer.step(), self.optimizers))
        self.step += 1
        self.seen += sum(tokens.numel() for tokens, _ in drawn)
        return [loss for loss, _ in results]

    def judge(self) -> str:
        scores = {task: accuracy(self.model, self.tokenizer, task, 20) for task in demo_tasks.TASKS}
        return " ".join(f"{task} {score:.2f}" for task, score in scores.items())

    def run(self) -> None:
        count = sum(parameter.numel() for parameter in self.model.parameters())
        print(f"{count:,} parameters, vocabulary {self.model.shape.vocab_size}, from step {self.step}", flush=True)
        losses: list[list[float]] = []
        started, seen_before = time.time(), self.seen
        while self.step < self.arguments.steps:
            losses.append(self.advance())
            if self.step % 50 == 0:
                short, long = (sum(column) / len(losses) for column in zip(*losses, strict=True))
                speed = (self.seen - seen_before) / (time.time() - started)
                clock = time.strftime("%H:%M:%S")
                print(f"{clock} step {self.step} short {short:.4f} long {long:.4f} {speed:.0f} tok/s", flush=True)
                losses, started, seen_before = [], time.time(), self.seen
            if self.step % self.arguments.judge_every == 0 or self.step == self.arguments.steps:
                self.save()
                print(f"  {self.seen:,} tokens: {self.judge()}", flush=True)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("demo-train"), help="checkpoint and exported model go here")
    parser.add_argument("--steps", type=int, default=FALLS[-1][0], help="stop at this step (default: the last)")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens of each of a step's two batches")
    parser.add_argument("--muon-lr", type=float, default=0.02, help="learning rate of the hidden matrices")
    parser.add_argument("--adam-lr", type=float, default=0.003, help="learning rate of the embedding and the norms")
    parser.add_argument("--judge-every", type=int, default=250, help="steps between checkpoints")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile (faster)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(words)
    if arguments.steps > FALLS[-1][0]:
        parser.error(f"--steps: the learning rate is 0 from step {FALLS[-1][0]} on; no more than that")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    Trainer(arguments, build_tokenizer(vocabulary_texts(arguments.seed))).run()


if __name__ == "__main__":
    main()
