"""Metrics of requests."""

from penstock.api.request import Adapter, Request, SequenceOutput
from penstock.api.sampling_params import SamplingParams
from penstock.frontend.history import AdapterUse, Meter
from penstock.frontend.metrics import Metrics

PARAMS = SamplingParams(max_tokens=4)


def test_adapters_in_use_are_those_of_open_requests_by_whether_they_run() -> None:
    meter = Meter(Metrics())
    requests = [
        Request(name, (1,), PARAMS, 0.0, adapter=Adapter(adapter, "", "", 0) if adapter else None)
        for name, adapter in (("a", "sql"), ("b", "sql"), ("c", "poem"), ("d", None))
    ]
    for request in requests:
        meter.accepted(request)
    assert meter.adapter_use() == AdapterUse([], ["poem", "sql"])
    meter.output(requests[0], SequenceOutput("a", 0, [7], first_scheduled=1.0), None, 2.0)
    assert meter.adapter_use() == AdapterUse(["sql"], ["poem", "sql"])
    meter.dropped(requests[1])
    assert meter.adapter_use() == AdapterUse(["sql"], ["poem"])
    meter.finished(requests[0], 3.0)
    meter.dropped(requests[2])
    assert meter.adapter_use() == AdapterUse([], [])
