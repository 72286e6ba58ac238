"""Images through the processes that decode them."""

import os
import signal
import sys

import pytest

from penstock.config.engine_config import ImageConfig
from penstock.errors import EngineDeadError, InvalidRequestError
from penstock.frontend.decoders import Decoders
from penstock.frontend.images.reader import _DECODER, ImageReader, KeptPictures, Part, Picture
from penstock.text.content import ImageSource
from tests.support.pictures import INPUT, base64_of, square, url_of

RED = square((200, 10, 30))


@pytest.fixture(scope="module")
def reader():
    limits = ImageConfig(max_image_pixels=10_000, max_image_bytes=5000)
    reader = ImageReader(INPUT, limits, KeptPictures(2000))
    yield reader
    reader.close()


def pids(reader):
    return [one.pid for one in reader._workers._idle.queue if one is not None]


def test_bytes_base64_and_a_data_url_are_one_picture(reader):
    forms = [
        ImageSource("f", RED),
        ImageSource("f", base64_of(RED)),
        ImageSource("f", url_of(RED), is_url=True),
        ImageSource("f", f"data:;base64,{base64_of(RED)}", is_url=True),
    ]
    first, *others = [reader.read(form) for form in forms]
    assert (first.parts[0].height, first.parts[0].width) == (16, 16)
    assert first.parts[0].pixels[:3] == bytes((200, 10, 30))
    assert all(one == first for one in others)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (ImageSource("f", "data:image/png,abc", is_url=True), "must say ;base64"),
        (ImageSource("f", "data:video/mp4;base64,AAAA", is_url=True), "video/mp4 is not supported"),
        (ImageSource("f", "file:///etc/passwd", is_url=True), "must begin with data:image"),
        (ImageSource("f", "data:" + "x" * 300, is_url=True), "must begin with data:image"),
        (ImageSource("f", "é" * 8), "not base64"),
        (ImageSource("f", b"x" * 5001), "more than 5000 bytes"),
        (ImageSource("f", "A" * 8000), "more than 5000 bytes"),
        (ImageSource("f", square("red", 101)), "at most 10000"),
    ],
)
def test_what_is_refused_names_its_field_and_its_fault(reader, source, words):
    with pytest.raises(InvalidRequestError, match=words) as refused:
        reader.read(source)
    assert str(refused.value).startswith("f: ")
    assert refused.value.param == "f"
    assert reader.read(ImageSource("f", RED)).parts[0].pixels


def test_the_latest_pictures_are_kept_within_their_bytes(reader):
    first = reader.read(ImageSource("f", RED))
    assert reader.read(ImageSource("g", RED)) is first
    assert reader.read(ImageSource("f", RED), "another namespace") is not first
    for colour in ("blue", "green", "white"):  # 768 bytes each
        reader.read(ImageSource("f", square(colour)))
    assert reader.read(ImageSource("f", RED)) is not first


def test_a_picture_larger_than_all_that_is_kept_displaces_no_other():
    kept = KeptPictures(10)
    small, large = (Picture((Part(1, 1, b"", bytes(size)),)) for size in (8, 11))
    kept.add("small", small)
    kept.add("large", large)
    assert kept.find("small") is small
    assert kept.find("large") is None


def test_a_process_that_is_killed_from_outside_is_replaced(reader):
    reader.read(ImageSource("f", square("yellow")))
    (pid,) = pids(reader)
    os.kill(pid, signal.SIGKILL)
    assert reader.read(ImageSource("f", square("orange"))).parts[0].pixels
    assert pids(reader) != [pid]


def test_an_image_that_ends_its_process_is_refused():
    for code, words in (
        (-signal.SIGSEGV, "exit code -11"),
        (-signal.SIGPROF, "processor time"),
        (None, "within 140 s"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            Decoders(_DECODER)._blame(code, "f")


def test_a_closed_reader_reads_nothing():
    reader = ImageReader(INPUT, ImageConfig(), KeptPictures(0))
    reader.close()
    with pytest.raises(EngineDeadError):
        reader.read(ImageSource("f", RED))


def test_without_pillow_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    reader = ImageReader(INPUT, ImageConfig(), KeptPictures(0))
    with pytest.raises(InvalidRequestError, match=r"Pillow is needed for images: pip install '\.\[images\]'"):
        reader.read(ImageSource("f", RED))
    reader.close()
