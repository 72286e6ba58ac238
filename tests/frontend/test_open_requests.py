"""The table of open requests, without engines."""

import asyncio

from penstock.api.request import Adapter, FinishReason, Request, SequenceOutput
from penstock.api.sampling_params import SamplingParams
from penstock.fleet.fleet import Fleet, FleetOptions
from penstock.frontend.limits import Admission, QueueLimits
from penstock.frontend.meter import Meter
from penstock.frontend.metrics import Metrics
from penstock.frontend.open_requests import AdapterUse, OpenRequest, OpenRequests
from penstock.frontend.output_processor import OutputProcessor
from tests.support.params import NEUTRAL


def open_requests(metrics: Metrics) -> OpenRequests:
    admission = Admission(QueueLimits(), 4, lambda request_id: None)
    return OpenRequests(Fleet(FleetOptions(), "fair"), Meter(metrics), admission, None)


def open_request(name: str, adapter: str | None = None) -> OpenRequest:
    request = Request(name, (1,), NEUTRAL, 0.0, adapter=Adapter(adapter, "", "", 0) if adapter else None)
    return OpenRequest(request, output_processor=OutputProcessor(request, SamplingParams(), None, None))


def test_adapters_in_use_are_those_of_open_requests_by_whether_they_run() -> None:
    metrics = Metrics()
    table = open_requests(metrics)
    requests = [open_request(*names) for names in (("a", "sql"), ("b", "sql"), ("c", "poem"), ("d", None))]
    for request in requests:
        table.begin_request(request)
    assert table.adapter_use() == AdapterUse([], ["poem", "sql"])
    scheduled = SequenceOutput("a", 0, [7], first_scheduled=1.0)
    Meter(metrics).output(requests[0].request, requests[0].progress, scheduled, None, 2.0)
    assert table.adapter_use() == AdapterUse(["sql"], ["poem", "sql"])
    table.end_request(requests[1], FinishReason.ABORT)
    assert table.adapter_use() == AdapterUse(["sql"], ["poem"])
    table.abort_all("closing")
    assert table.adapter_use() == AdapterUse([], [])
    assert metrics.success.values["abort"] == 4


def test_a_series_counts_as_open_between_its_requests_and_ends_with_all() -> None:
    async def scene() -> None:
        table = open_requests(Metrics())
        with table.series() as series:
            drained = asyncio.ensure_future(table.drained())
            await asyncio.sleep(0)
            series.may_go_on = True
            table.abort_all("closing")
            assert not series.may_go_on
            assert not drained.done()
        await drained

    asyncio.run(scene())
