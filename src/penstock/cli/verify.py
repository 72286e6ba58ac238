"""`penstock verify`: tests that answers depend on the request alone, on this machine and with this model."""

import argparse
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.cli.flags import engine_options
from penstock.cli.loading import loading_shown
from penstock.cli.parser import Parser
from penstock.cli.topics import add_options
from penstock.config.engine_config import iter_options

if TYPE_CHECKING:
    from penstock.diagnose.verify import SelfTest


def add_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "verify",
        usage="%(prog)s [options]",
        help="test that answers depend on the request alone",
        description="Answer a few requests alone, in a batch, in chunks, from the prefix cache, preempted and "
        "speculated, as far as the model permits, and compare token ids and log-probabilities bit for bit. The exit "
        "code is 1 if anything differs or a situation was not reached.",
    )
    add_options(parser, iter_options())
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from penstock.checkpoint.checkpoint import open_model
    from penstock.diagnose.verify import SelfTest, self_test_config
    from penstock.engine.build import build_engine

    config = self_test_config(**engine_options(args))
    whole = replace(config, model=replace(config.model, tensor_parallel_size=1))
    make_whole = partial(build_engine, whole) if config.model.tensor_parallel_size > 1 else None
    with loading_shown(open_model(config.model)):
        core = build_engine(config)
    return report(SelfTest(core, make_whole))


def report(test: "SelfTest") -> int:
    """Run a self-test, and print a line for each of its findings. Returns the exit code."""
    try:
        print(test.describe())
        findings = []
        for finding in test.findings():
            outcome = "same" if finding.clean else finding.difference or "NOT REACHED"
            print(f"{finding.situation:32} {finding.evidence:22} {outcome}", flush=True)
            findings.append(finding)
    finally:
        test.close()
    failed = sum(not finding.clean for finding in findings)
    print(f"{failed} of {len(findings)} situations failed" if failed else "every answer is the same, bit for bit")
    return 1 if failed else 0
