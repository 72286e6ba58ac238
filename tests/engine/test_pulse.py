"""The pulse: what one process writes before a step, another reads after the first one's death."""

import subprocess
import sys

from penstock.engine.pulse import MAX_WORDS, Pulse


def test_a_step_shows_from_its_begin_to_its_end(tmp_path):
    writer, reader = Pulse(tmp_path / "pulse"), Pulse(tmp_path / "pulse")
    assert (reader.num_tokens(), reader.under_way()) == (0, None)
    writer.begin(300, [7, 2, 1000])
    assert (reader.num_tokens(), reader.under_way()) == (300, [7, 2, 1000])
    writer.begin(1, [5])
    assert (reader.num_tokens(), reader.under_way()) == (1, [5])
    writer.end()
    assert (reader.num_tokens(), reader.under_way()) == (0, None)
    writer.close()
    reader.close()


def test_it_outlives_a_writer_that_is_killed_in_the_step_and_the_file_itself(tmp_path):
    reader = Pulse(tmp_path / "pulse")
    script = f"""
import os, signal
from pathlib import Path
from penstock.engine.pulse import Pulse
Pulse(Path({str(tmp_path / "pulse")!r})).begin(64, range(64))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == -9
    (tmp_path / "pulse").unlink()
    assert reader.under_way() == list(range(64))
    reader.close()


def test_its_blocks_are_there_from_the_start(tmp_path):
    """On a disk that is full later, writing to a page without a block would end the process with SIGBUS."""
    pulse = Pulse(tmp_path / "pulse")
    status = (tmp_path / "pulse").stat()
    assert status.st_blocks * 512 >= status.st_size
    pulse.close()


def test_last_words_are_there_until_the_end_whatever_the_steps_write(tmp_path):
    pulse = Pulse(tmp_path / "pulse")
    assert pulse.last_words() == b""
    words = bytes(range(256)) * (MAX_WORDS // 256)
    pulse.leave_words(words)
    pulse.begin(20_000, range(20_000))
    assert pulse.last_words() == words
    pulse.close()


def test_more_requests_than_there_is_room_for_are_left_out(tmp_path):
    pulse = Pulse(tmp_path / "pulse")
    pulse.begin(20_000, range(20_000))
    assert len(pulse.under_way()) > 16_000
    pulse.close()
