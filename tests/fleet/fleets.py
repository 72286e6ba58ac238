"""Dispatchers of small fleets for tests."""

from dataclasses import replace

from penstock.api.request import SequenceOutput
from penstock.fleet.dispatch import Dispatcher
from penstock.fleet.placement import Capacity
from penstock.fleet.router import ROUTERS
from tests.core.fakes import make_request

ROOM = Capacity(
    num_blocks=100, block_size=4, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=100, arithmetic="one"
)
PREFILL, DECODE = (
    replace(ROOM, max_num_seqs=4, max_num_batched_tokens=512, max_model_len=500, role=role)
    for role in ("prefill", "decode")
)


def dispatcher(*capacities, router="least-loaded", policy="fair"):
    made = Dispatcher(ROUTERS[router](), policy)
    for number, capacity in enumerate(capacities):
        made.add_replica(number, capacity)
    return made


def add(fleet, *names, length=2, **options):
    for name in names:
        fleet.add_request(make_request(name, range(length), **options))


def due(fleet):
    """What is handed over now, by name."""
    return sorted(fleet.due(), key=lambda pair: pair[1])


def token(name):
    return SequenceOutput(name, 0, [1], first_scheduled=0.0)


def prove(fleet, replica, *names):
    for step in (1, 2):
        for name in names:
            assert fleet.record_output(replica, token(name), step)
