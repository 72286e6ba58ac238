"""Lines for people, lines for machines, and a reader of the log that does not read."""

import io
import json
import logging
import re
import threading

from penstock.server.logs import FIELDS, logging_to

logger = logging.getLogger("penstock.test")


def logged(as_json, *calls, level="info"):
    stream = io.StringIO()
    with logging_to(stream, level, as_json=as_json):
        for call in calls:
            call()
    return stream.getvalue().splitlines()


def test_a_line_for_people_has_the_message_and_its_facts():
    facts = {"id": "a1", "status": 200, "text": 'two "words"\n', "none": None}
    (line,) = logged(False, lambda: logger.info("%s done", "all", extra={FIELDS: facts}))
    time, rest = line.split(" ", 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time)
    assert rest == 'INFO penstock.test: all done id=a1 status=200 text="two \\"words\\"\\n"'


def test_a_line_for_machines_is_an_object():
    (line,) = logged(True, lambda: logger.warning("odd\nnews", extra={FIELDS: {"id": "a1", "seconds": 0.5}}))
    told = json.loads(line)
    assert told.pop("time").endswith("Z")
    assert told == {
        "level": "warning",
        "logger": "penstock.test",
        "message": "odd\nnews",
        "id": "a1",
        "seconds": 0.5,
    }


def test_a_failure_brings_its_traceback_in_one_line():
    def fail():
        try:
            raise ValueError("deep down")
        except ValueError:
            logger.exception("it failed")

    (line,) = logged(True, fail)
    assert "ValueError: deep down" in json.loads(line)["exception"]


def test_below_the_level_nothing_is_logged():
    assert logged(False, lambda: logger.info("no"), level="warning") == []


def test_who_does_not_read_the_log_holds_up_nobody_and_is_told_what_is_missing():
    class Stuck(io.StringIO):
        def write(self, text):
            may_write.wait(10)
            return super().write(text)

    stream, may_write = Stuck(), threading.Event()
    with logging_to(stream, "info", as_json=False, capacity=4):
        for i in range(20):
            logger.info("line %d", i)
        may_write.set()
        while "line 3" not in stream.getvalue():
            pass
        logger.info("last")
    lines = stream.getvalue().splitlines()
    assert len(lines) <= 7
    assert any("lines of the log were dropped: its reader is too slow" in line for line in lines)
    assert lines[-1].endswith("last")
