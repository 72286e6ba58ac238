"""The in-flight file: what one process writes before a step, another reads after the first one's death."""

import subprocess
import sys

from penstock.engine.in_flight import MAX_WORDS, InFlightStep


def test_a_step_shows_from_its_begin_to_its_end(tmp_path):
    writer, reader = InFlightStep(tmp_path / "in_flight"), InFlightStep(tmp_path / "in_flight")
    assert (reader.num_tokens(), reader.request_indices()) == (0, None)
    writer.begin_step(300, [7, 2, 1000])
    assert (reader.num_tokens(), reader.request_indices()) == (300, [7, 2, 1000])
    writer.begin_step(1, [5])
    assert (reader.num_tokens(), reader.request_indices()) == (1, [5])
    writer.end_step()
    assert (reader.num_tokens(), reader.request_indices()) == (0, None)
    writer.close()
    reader.close()


def test_it_outlives_a_writer_that_is_killed_in_the_step_and_the_file_itself(tmp_path):
    reader = InFlightStep(tmp_path / "in_flight")
    script = f"""
import os, signal
from pathlib import Path
from penstock.engine.in_flight import InFlightStep
InFlightStep(Path({str(tmp_path / "in_flight")!r})).begin_step(64, range(64))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == -9
    (tmp_path / "in_flight").unlink()
    assert reader.request_indices() == list(range(64))
    reader.close()


def test_its_blocks_are_there_from_the_start(tmp_path):
    """On a disk that is full later, writing to a page without a block would end the process with SIGBUS."""
    in_flight = InFlightStep(tmp_path / "in_flight")
    status = (tmp_path / "in_flight").stat()
    assert status.st_blocks * 512 >= status.st_size
    in_flight.close()


def test_last_words_are_there_until_the_end_whatever_the_steps_write(tmp_path):
    in_flight = InFlightStep(tmp_path / "in_flight")
    assert in_flight.last_words() == b""
    words = bytes(range(256)) * (MAX_WORDS // 256)
    in_flight.leave_words(words)
    in_flight.begin_step(20_000, range(20_000))
    assert in_flight.last_words() == words
    in_flight.close()


def test_more_requests_than_there_is_room_for_are_left_out(tmp_path):
    in_flight = InFlightStep(tmp_path / "in_flight")
    in_flight.begin_step(20_000, range(20_000))
    assert len(in_flight.request_indices()) > 16_000
    in_flight.close()
