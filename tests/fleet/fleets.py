"""Dispatchers of small fleets for tests, which name requests and replicas."""

from dataclasses import replace

from penstock.api.request import SequenceOutput
from penstock.fleet.dispatch import Dispatcher
from penstock.fleet.placement import Capacity
from penstock.fleet.request import FleetRequest
from penstock.fleet.router import ROUTERS
from tests.core.fakes import make_request

ROOM = Capacity(
    num_blocks=100, block_size=4, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=100, arithmetic="one"
)
PREFILL, DECODE = (
    replace(ROOM, max_num_seqs=4, max_num_batched_tokens=512, max_model_len=500, role=role)
    for role in ("prefill", "decode")
)


class NamedFleet:
    """A dispatcher and its owner's table, for tests that speak of requests by their names."""

    def __init__(self, router, policy):
        self.dispatcher = Dispatcher(ROUTERS[router](), policy)
        self.open = {}
        self.statuses = {}  # also of replicas that were removed: their engines may still send outputs
        for name in ("release", "engine_up", "is_needed", "remove_replica"):
            setattr(self, name, getattr(self.dispatcher, name))

    num_queued = property(lambda self: self.dispatcher.num_queued)
    has_waiting = property(lambda self: self.dispatcher.has_waiting)

    def add_replica(self, number, capacity):
        self.statuses[number] = self.dispatcher.add_replica(number, capacity)

    def status(self, replica):
        return self.statuses[replica]

    def load_of(self, replica):
        return self.status(replica).load

    def num_at(self, replica):
        return self.status(replica).num_requests

    def num_in_engine(self, replica):
        return self.status(replica).blame.num_in_engine

    def add_request(self, request):
        self.open[request.request_id] = FleetRequest(request)
        self.dispatcher.add_request(self.open[request.request_id])

    def remove_request(self, name, answers=()):
        self.dispatcher.remove_request(self.open.pop(name), answers)

    def record_output(self, replica, output, step):
        one = self.open.get(output.request_id)
        return one is not None and self.dispatcher.record_output(self.status(replica), one, output, step)

    def due(self):
        return ((replica, one.request_id) for replica, one in self.dispatcher.due())

    def take_leaving(self, replica):
        return [entry.request_id for entry in self.dispatcher.take_leaving(self.status(replica))]

    def handed_over(self, replica, name, source):
        return name in self.open and self.dispatcher.handed_over(replica, self.open[name], source)

    def take_source(self, name):
        return self.open[name].take_source()

    def replica_of(self, name):
        return self.open[name].replica

    def is_in_engine(self, name):
        return self.open[name].is_in_engine

    def has_begun(self, name):
        return self.open[name].has_begun

    def unservable(self):
        return [entry.request_id for entry in self.dispatcher.unservable()]

    def drain(self, replica):
        return [entry.request_id for entry in self.dispatcher.drain(replica)]

    def engine_died(self, replica, indices, **how):
        convict = self.dispatcher.engine_died(replica, indices, **how)
        return None if convict is None else convict.request_id


def dispatcher(*capacities, router="least-loaded", policy="fair"):
    made = NamedFleet(router, policy)
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
