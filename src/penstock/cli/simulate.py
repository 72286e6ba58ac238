"""`penstock simulate`: the performance of a fleet under a workload, and the size it needs."""

import argparse
import json
import math
import re
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from penstock.cli.flags import add_flags
from penstock.cli.parser import Parser
from penstock.config.engine_config import EngineConfig, iter_options, parse_value
from penstock.config.settings import resolve
from penstock.errors import ConfigError
from penstock.frontend.limits import QueueLimits
from penstock.simulator.chats import LARGEST, Chats

if TYPE_CHECKING:
    from penstock.config.settings import Settings
    from penstock.simulator.costs import StepCosts
    from penstock.simulator.simulation import Failure, Fleet
    from penstock.simulator.summary import Summary
    from penstock.simulator.sweep import Objective
    from penstock.simulator.workload import Workload

DESCRIPTION = """
Run the server's own scheduler, cache, limits, queue and router on a virtual clock, for one engine or thousands, with a
cost model of steps. The workload is a trace or synthetic chats; costs are calibrated on this machine, or derived from a
data sheet. Lists (1,2,4 or 1-8) are simulated in all combinations.
"""
ENGINE_FLAGS = {
    "dtype", "max_model_len", "block_size", "kv_cache_memory", "kv_cache_dtype", "enable_prefix_caching", "policy",
    "quantization", "threads",
}  # fmt: skip
LIMIT_FLAGS = {"max_queued", "max_queued_tokens", "queue_timeout"}
LARGEST_RANGE = 100_000


def add_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "simulate",
        usage="%(prog)s [options] [TRACE]",
        help="compute how many engines a workload needs",
        description=DESCRIPTION,
    )
    parser.add_argument(
        "trace",
        nargs="?",
        metavar="TRACE",
        type=Path,
        help="requests to replay: JSON lines in Mooncake's schema, or a journal of penstock serve; default: synthetic "
        "chats",
    )
    _add_cost_flags(parser.add_argument_group("costs"))
    _add_fleet_flags(parser.add_argument_group("fleet"))
    replay = parser.add_argument_group("trace")
    replay.add_argument("--speed", type=float, help="replay the trace this many times as fast; default: 1")
    replay.add_argument("--requests", type=int, metavar="N", help="replay only the first N requests")
    add_flags(parser.add_argument_group("synthetic chats, without a trace"), _chat_options())
    results = parser.add_argument_group("results")
    results.add_argument(
        "--objective", action="append", default=[], metavar="BOUND", help="for example 'p90 ttft <= 1s' or 'p99 itl "
        "<= 50ms'; may be given several times; the smallest fleet that meets all of them is printed",
    )  # fmt: skip
    results.add_argument("--price", type=float, help="price of an engine per hour")
    results.add_argument("--json", type=Path, metavar="FILE", help="write all results as JSON; -: standard output")
    results.add_argument(
        "--plot", type=Path, metavar="FILE", help="plot the results as SVG, PNG or PDF (needs the extra plots)"
    )
    results.add_argument(
        "--jobs", type=int, default=1, help="simulations at the same time, each in its own process; default: 1"
    )
    engine = [f for _, f in iter_options() if f.name in ENGINE_FLAGS]
    add_flags(parser.add_argument_group("engine, with --calibrate or --hardware"), engine)
    parser.set_defaults(run=run)


def _add_cost_flags(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--costs", type=Path, metavar="FILE", help="calibrated costs of steps")
    group.add_argument(
        "--calibrate", metavar="MODEL", help="measure a model on this machine (demo: the built-in one), write the "
        "costs to the file given with --costs, and exit",
    )  # fmt: skip
    group.add_argument("--calibrate-seconds", type=float, default=60.0, help="duration of the measurement; default: 60")
    group.add_argument(
        "--hardware", metavar="NAME", help="derive the costs of --model from a data sheet; list: print all"
    )
    group.add_argument("--model", help="folder with a model's config.json, or a GGUF file; weights are not needed")
    group.add_argument("--devices", type=int, help="devices per engine, with --hardware; default: 1")


def _add_fleet_flags(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--engines", default="1", metavar="LIST", help="number of engines; default: 1")
    group.add_argument(
        "--router", default="prefix", metavar="LIST", help="prefix (default), least-loaded or round-robin"
    )
    group.add_argument("--max-num-batched-tokens", metavar="LIST", help="maximum tokens computed in a step")
    group.add_argument("--max-num-seqs", metavar="LIST", help="maximum sequences that run together in an engine")
    group.add_argument(
        "--fail",
        action="append",
        default=[],
        metavar="SECONDS:ENGINE",
        help="kill an engine (0: the first) at this time",
    )
    group.add_argument(
        "--restart-seconds", type=float, default=5.0, help="time until a killed engine is replaced; default: 5"
    )
    add_flags(group, [field for field in fields(QueueLimits) if field.name in LIMIT_FLAGS])


def _chat_options() -> "list[Any]":
    return [field for field in fields(Chats) if "help" in field.metadata]


def run(args: argparse.Namespace) -> int:
    if args.hardware == "list":
        return _list_hardware()
    _check(args)
    if args.calibrate is not None:
        return _calibrate(args)
    from penstock.simulator.summary import table
    from penstock.simulator.sweep import Objective, cheapest, run_all, variants

    objectives = [Objective.parse(text) for text in args.objective]
    base = _fleet(args)
    workload = _workload(args, base.settings.max_model_len)
    fleets = variants(
        base,
        parse_list("engines", args.engines),
        [name.strip() for name in args.router.split(",")],
        parse_list("max_num_batched_tokens", args.max_num_batched_tokens),
        parse_list("max_num_seqs", args.max_num_seqs),
    )
    summaries = []
    for summary in run_all(fleets, workload, args.price, args.jobs):
        summaries.append(summary)
        if len(fleets) > 1:
            print(f"{len(summaries)} of {len(fleets)} simulated", file=sys.stderr)
    best = cheapest(summaries, objectives) if objectives else None
    out = sys.stderr if args.json == Path("-") else sys.stdout
    print(f"{workload.describe()}\n\n{table(summaries, _width(out))}", file=out)
    for line in _notes(summaries, objectives, best):
        print(line, file=out)
    _write(args, workload, summaries, objectives, best)
    return 0 if best is not None or not objectives else 1


def _width(out: TextIO) -> int | None:
    """Columns of the terminal; None: output is no terminal, and lines have no maximum length."""
    return shutil.get_terminal_size().columns if out.isatty() else None


def _check(args: argparse.Namespace) -> None:
    """Refuse numbers out of range, options without effect and missing folders, before anything is measured."""
    for name, least in (("jobs", 1), ("requests", 1), ("devices", 1), ("price", 0), ("restart_seconds", 0)):
        value = getattr(args, name)
        if value is not None and not value >= least:  # NaN is not
            raise ConfigError(f"{name} must be at least {least}, not {value:g}")
    if not args.calibrate_seconds > 0:
        raise ConfigError(f"calibrate_seconds must be above 0, not {args.calibrate_seconds:g}")
    for name in ("jobs", "devices", "price", "restart_seconds", "calibrate_seconds"):
        if (getattr(args, name) or 0) > LARGEST:
            raise ConfigError(f"{name} must be at most {LARGEST:,.0f}, not {getattr(args, name):g}")
    for name in ("speed", "requests"):
        if getattr(args, name) is not None and args.trace is None:
            raise ConfigError(f"{name} is for a trace, and there is none: name its file, or leave {name} out")
    if args.devices is not None and args.hardware is None:
        raise ConfigError("devices has no effect without --hardware: give both, or leave it out")
    if args.plot is not None:
        from penstock.simulator.plots import check_plots

        check_plots()
    written = [args.json, args.plot] if args.calibrate is None else [args.costs]
    for path in written:
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")


def _notes(summaries: "list[Summary]", objectives: "list[Objective]", best: "Summary | None") -> list[str]:
    refused = {f"{count} requests refused: {why}" for summary in summaries for why, count in summary.refused.items()}
    notes = sorted(refused) if len(summaries) == 1 else []
    if objectives:
        wanted = " and ".join(map(str, objectives))
        if best is None:
            notes.append(f"no fleet meets {wanted} without refusing a request")
        else:
            notes.append(
                f"{wanted}: {best.engines} engine{'s' if best.engines > 1 else ''} with the {best.router} router, "
                f"{best.max_num_batched_tokens} tokens a step and {best.max_num_seqs} sequences"
            )
    return notes


def _write(
    args: argparse.Namespace,
    workload: "Workload",
    summaries: "list[Summary]",
    objectives: "list[Objective]",
    best: "Summary | None",
) -> None:
    if args.json is not None:
        content = {
            "workload": workload.describe(),
            "objectives": [str(objective) for objective in objectives],
            "simulations": [summary.as_json() for summary in summaries],
            "best": None if best is None else summaries.index(best),
        }
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        if args.json == Path("-"):
            print(text, end="")
        else:
            try:
                args.json.write_text(text, encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"the results cannot be written to {args.json}: {error}") from None
    if args.plot is not None:
        from penstock.simulator.plots import plot

        plot(summaries, objectives, args.plot)


def _list_hardware() -> int:
    from penstock.simulator.hardware import HARDWARE

    for hardware in HARDWARE.values():
        sizes = (
            f"{hardware.memory / 1e9:.0f} GB, {hardware.bandwidth / 1e9:,.0f} GB/s, {hardware.flops / 1e12:,.0f} TFLOPS"
        )
        print(f"{hardware.name:12} {sizes:36} {hardware.source}")
    return 0


def _calibrate(args: argparse.Namespace) -> int:
    from penstock.diagnose.calibrate import calibrate

    if args.costs is None:
        raise ConfigError("give the file to write with --costs")
    limits = {name: getattr(args, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
    options = _engine_options(args) | {name: value for name, value in limits.items() if value is not None}
    model = None if args.calibrate == "demo" else args.calibrate
    found = calibrate(EngineConfig.from_options(**options | {"model": model}), args.calibrate_seconds)
    found.write(args.costs)
    print(found.describe())
    return 0


def _fleet(args: argparse.Namespace) -> "Fleet":
    """The largest fleet; lists of options make variants of it."""
    from penstock.simulator.simulation import Fleet

    if (args.costs is None) == (args.hardware is None):
        raise ConfigError(
            "give the costs of steps: --costs with a file that `penstock simulate --calibrate MODEL --costs FILE` "
            "wrote, or --hardware with --model"
        )
    asked = {f: getattr(args, f.name, None) for f in fields(QueueLimits)}
    limits = {f.name: parse_value(f, value) for f, value in asked.items() if value is not None}
    if args.costs is not None:
        from penstock.simulator.cost_file import read_cost_file

        given = ", ".join(_engine_options(args))
        if given or args.model is not None:
            raise ConfigError(f"--costs has the settings of the calibrated engine: leave out {given or 'model'}")
        found = read_cost_file(args.costs)
        settings: Settings = found.settings
        costs: StepCosts = found.costs
    else:
        settings, costs = _hardware(args)
    return Fleet(
        settings,
        costs,
        max(parse_list("engines", args.engines)),
        limits=QueueLimits(**limits),
        failures=tuple(map(_failure, args.fail)),
        restart_seconds=args.restart_seconds,
    )


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in sorted(ENGINE_FLAGS) if hasattr(args, name)}


def _hardware(args: argparse.Namespace) -> "tuple[Settings, StepCosts]":
    """Settings and costs of an engine on other hardware."""
    from penstock.checkpoint.checkpoint import open_checkpoint
    from penstock.config.machine import Machine
    from penstock.models.registry import read_facts
    from penstock.simulator.hardware import HARDWARE, roofline

    hardware = HARDWARE.get(args.hardware)
    if hardware is None:
        raise ConfigError(f"unknown hardware {args.hardware!r}; known are {', '.join(HARDWARE)}")
    if args.model is None:
        raise ConfigError("--hardware needs --model with a folder that has a config.json")
    hardware = hardware.times(args.devices or 1)
    facts = read_facts(open_checkpoint(args.model), with_weights=False)
    config = EngineConfig.from_options(model=args.model, **_engine_options(args))
    settings = resolve(config, facts, Machine("cuda", 1, int(hardware.memory)))
    return settings, roofline(facts, settings, hardware)


def _workload(args: argparse.Namespace, max_model_len: int) -> "Workload":
    given = {f.name: getattr(args, f.name) for f in _chat_options() if hasattr(args, f.name)}
    if args.trace is None:
        given.setdefault("max_context", max_model_len)
        return Chats(**{f.name: parse_value(f, given[f.name]) for f in _chat_options() if f.name in given})
    if given:
        raise ConfigError(f"these options are for synthetic chats, not for a trace: leave out {', '.join(given)}")
    from penstock.simulator.traces import read_trace

    return read_trace(args.trace, speed=1.0 if args.speed is None else args.speed, most=args.requests)


def _failure(text: str) -> "Failure":
    from penstock.simulator.simulation import Failure

    found = re.fullmatch(r"([0-9.]+):([0-9]+)", text)
    try:
        if found is None:
            raise ValueError
        failure = Failure(float(found[1]), int(found[2]))
        if not math.isfinite(failure.time):
            raise ValueError
        return failure
    except ValueError:
        raise ConfigError(f"fail must be SECONDS:ENGINE, such as 300:0; not {text!r}") from None


def parse_list(name: str, text: str | None) -> list[int]:
    """Parse a list of numbers and ranges, such as 1,2,4-8; empty for None.

    Raises:
        ConfigError: the text is not such a list.
    """
    found: list[int] = []
    for part in [] if text is None else text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part)
        if match is None:
            raise ConfigError(f"{name} must be numbers or ranges, such as 1,2,4-8; not {text!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last < first + LARGEST_RANGE:
            raise ConfigError(f"{name}: {part.strip()} is not a range of numbers from 1 up")
        found += range(first, last + 1)
    return found
