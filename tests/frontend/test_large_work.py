"""Work on large inputs: how much of it at a time, and in which order."""

import asyncio
import threading
import time

import pytest

from penstock.errors import ShuttingDownError
from penstock.frontend.large_work import LargeWork

MB = 2**20


class Jobs:
    """Jobs that last until they are told to end."""

    def __init__(self, work):
        self._work = work
        self._ends = {}
        self.began = []

    def start(self, name, size, tenant=""):
        end = self._ends[name] = threading.Event()

        def job():
            self.began.append(name)
            assert end.wait(20)
            return name

        return asyncio.ensure_future(self._work.run(size, job, tenant))

    def end(self, name):
        self._ends[name].set()

    async def until(self, *names):
        for _ in range(2000):
            if self.began == list(names):
                return
            await asyncio.sleep(0.005)
        raise AssertionError(self.began)


def run(talk, max_bytes=8 * MB, **more):
    async def main():
        work = LargeWork(max_bytes, **more)
        try:
            await asyncio.wait_for(talk(Jobs(work), work), 30)
        finally:
            work.close()

    asyncio.run(main())


def test_the_largest_inputs_are_worked_on_one_at_a_time_and_small_ones_beside_them():
    async def talk(jobs, work):
        first, second = jobs.start("first", 100 * MB), jobs.start("second", 4 * MB)
        await jobs.until("first")
        small = jobs.start("small", MB)
        await jobs.until("first", "small")
        jobs.end("small")
        assert await small == "small"
        assert jobs.began == ["first", "small"], "the second has no room"
        jobs.end("first")
        await jobs.until("first", "small", "second")
        jobs.end("second")
        assert [await first, await second] == ["first", "second"]

    run(talk)


def test_a_small_input_goes_first_until_a_large_one_has_waited_for_its_size():
    now = [0.0]

    async def talk(jobs, work):
        tasks = [jobs.start("running", 4 * MB)]
        await jobs.until("running")
        tasks.append(jobs.start("large", 4 * MB))
        tasks += [jobs.start(f"two {i}", 2 * MB) for i in range(2)]
        await jobs.until("running", "two 0")
        now[0] = 1000.0
        tasks.append(jobs.start("late", 2 * MB))
        for name in ("running", "two 0", "two 1"):
            jobs.end(name)
        await jobs.until("running", "two 0", "two 1", "large", "late")
        jobs.end("large")
        jobs.end("late")
        await asyncio.gather(*tasks)

    run(talk, clock=lambda: now[0])


def test_a_caller_that_leaves_gives_its_place_to_others_but_not_before_its_thread_is_done():
    async def talk(jobs, work):
        running, waiting = jobs.start("running", 4 * MB), jobs.start("waiting", 4 * MB)
        await jobs.until("running")
        running.cancel()
        waiting.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        last = jobs.start("last", 4 * MB)
        await asyncio.sleep(0)
        assert jobs.began == ["running"]
        jobs.end("running")
        jobs.end("last")
        assert await last == "last"
        assert jobs.began == ["running", "last"]

    run(talk)


def test_work_that_waits_when_the_server_ends_is_refused():
    async def talk(jobs, work):
        running, waiting = jobs.start("running", 4 * MB), jobs.start("waiting", 4 * MB)
        await jobs.until("running")
        jobs.end("running")
        await asyncio.to_thread(work.close)
        with pytest.raises(ShuttingDownError):
            await waiting
        assert await running == "running"

    run(talk)


def test_a_failure_is_the_callers_and_frees_its_room():
    async def talk(jobs, work):
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await work.run(4 * MB, lambda: 1 // 0)

    run(talk)


def test_a_tenants_many_inputs_hold_no_other_tenant_up():
    async def talk(jobs, work):
        tasks = [jobs.start("running", 4 * MB, "a")]
        await jobs.until("running")
        tasks += [jobs.start(f"a{i}", 4 * MB, "a") for i in range(3)]
        tasks.append(jobs.start("b", 4 * MB, "b"))
        began = ["running"]
        for name in ("a0", "b", "a1", "a2"):
            jobs.end(began[-1])
            began.append(name)
            await jobs.until(*began)
        jobs.end("a2")
        await asyncio.gather(*tasks)

    run(talk)


def test_work_that_holds_the_interpreters_lock_runs_alone_and_rests_as_long_as_it_took():
    async def talk(jobs, work):
        first, second = jobs.start("first", MB), jobs.start("second", MB)
        await jobs.until("first")
        await asyncio.sleep(0.3)
        jobs.end("first")
        assert await first == "first"
        ended = time.monotonic()
        assert jobs.began == ["first"]
        await jobs.until("first", "second")
        assert time.monotonic() - ended > 0.25
        jobs.end("second")
        await second

    run(talk, holds_lock=True)
