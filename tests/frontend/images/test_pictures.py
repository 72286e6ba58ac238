"""What the decoding process makes of pictures of every kind, and of hostile ones."""

import io
import struct
import zlib
from dataclasses import asdict

import pytest
from PIL import Image

from penstock.frontend.decoder_frames import DECODED, REFUSED, pack, unpack
from penstock.frontend.images.worker import answer
from tests.support.pictures import INPUT, base64_of, file_of, square

RED = (200, 10, 30)


def read(content, *, is_base64=False, wants_pixels=True, max_pixels=10_000):
    header = {
        "image_input": asdict(INPUT),
        "is_base64": is_base64,
        "is_low": False,
        "max_pixels": max_pixels,
        "wants_pixels": wants_pixels,
    }
    made = answer(pack(header, content))
    if made[:1] == REFUSED:
        return made[1:].decode()
    assert made[:1] == DECODED
    about, pixels = unpack(memoryview(made)[1:])
    return about["sizes"], bytes(pixels)


def first_pixel(content):
    return tuple(read(content)[1][:3])


@pytest.mark.parametrize("format", ["PNG", "BMP", "GIF", "WEBP"])
def test_each_format_is_read(format):
    options = {"lossless": True} if format == "WEBP" else {}
    assert first_pixel(square(RED, format=format, **options)) == RED
    near = first_pixel(square(RED, format="JPEG"))
    assert all(abs(a - b) < 8 for a, b in zip(near, RED, strict=True))


def test_every_kind_of_pixel_becomes_8_bit_rgb():
    assert first_pixel(square((*RED, 0), mode="RGBA")) == (255, 255, 255), "white is behind what is transparent"
    assert first_pixel(square((*RED, 255), mode="RGBA")) == RED
    assert first_pixel(file_of(Image.new("RGB", (16, 16), RED).quantize(4))) == RED
    assert first_pixel(file_of(Image.new("I;16", (16, 16), 65_535 // 5))) == (51, 51, 51)
    assert first_pixel(file_of(Image.new("1", (16, 16), 1))) == (255, 255, 255)
    cmyk = first_pixel(square((0, 255, 255, 0), mode="CMYK", format="JPEG"))
    assert cmyk[0] > 240
    assert max(cmyk[1:]) < 15


def test_the_orientation_of_a_photo_is_obeyed():
    image = Image.new("RGB", (32, 16), "blue")
    image.paste(Image.new("RGB", (16, 16), "white"), (16, 0))  # the right half
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    for format, options in (("PNG", {}), ("JPEG", {"quality": 95})):
        ((height, width),), pixels = read(file_of(image, format, exif=exif, **options))
        assert (height, width) == (32, 16)
        assert pixels[2] > 200 > pixels[0], "what was left is on top"
        assert pixels[-3] > 200
        assert read(file_of(image, format, exif=exif), wants_pixels=False)[0] == [[32, 16]]


def test_an_animation_is_its_first_frame():
    frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, "blue", "green")]
    for format in ("GIF", "PNG", "WEBP"):
        options = {"lossless": True} if format == "WEBP" else {}
        moving = file_of(frames[0], format, save_all=True, append_images=frames[1:], **options)
        assert first_pixel(moving) == RED


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width, height, content):
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", content) + chunk(b"IEND", b"")


WHOLE = file_of(Image.effect_noise((64, 64), 50).convert("RGB"))
JPEG = file_of(Image.effect_noise((64, 64), 50), "JPEG")
HOSTILE = {
    "a bomb": (png(60_000, 60_000, zlib.compress(b"\0" * 10**6)), "60000 x 60000 pixels; at most 10000"),
    "a strip": (file_of(Image.new("L", (1, 5000))), "200 times the shorter"),
    "nothing wide": (png(0, 5, b""), "damaged"),
    "cut off": (WHOLE[: len(WHOLE) // 2], "damaged or incomplete"),
    "cut off jpeg": (JPEG[: len(JPEG) // 2], "damaged or incomplete"),
    "a header that lies": (png(90, 90, zlib.compress(b"\0" * 100)), "damaged or incomplete"),
    "a header alone": (WHOLE[:40], "damaged"),
    "empty": (b"", "the image is empty"),
    "noise": (b"\x00\x01\x02" * 50, "of no known format"),
    "a pdf": (b"%PDF-1.7 \xff\xd8\xff", "a PDF; JPEG, PNG, WebP, GIF and BMP are read"),
    "a page": (b"<html><img src='x'></html>", "HTML"),
    "svg": (b"  <svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
    "tiff": (file_of(Image.new("RGB", (8, 8)), "TIFF"), "a TIFF"),
    "heic": (b"\0\0\0\x18ftypheic" + b"\0" * 40, "HEIC"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0", "of no known format"),
    "a gif with a large frame": (
        b"GIF89a\x08\0\x08\0\0\0\0,\0\0\0\0\x60\xea\x60\xea\0\x02\x02\x44\x01\0;",
        "60000 x 60000 pixels; at most",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_picture_is_refused_with_its_fault(name):
    content, words = HOSTILE[name]
    assert words in read(content)


def test_what_follows_a_picture_is_no_part_of_it():
    assert first_pixel(square(RED) + b"<script>alert(1)</script>PK\x03\x04") == RED


def test_sizes_are_known_without_the_pixels():
    assert read(WHOLE, wants_pixels=False) == ([[64, 64]], b"")
    assert read(WHOLE[:60], wants_pixels=False) == ([[64, 64]], b""), "the header alone is read"


def test_base64_may_have_line_breaks_and_nothing_else():
    text = base64_of(square(RED))
    assert read("\n".join([text[:20], text[20:]]).encode(), is_base64=True) == read(square(RED))
    assert "not valid base64" in read(text[:-5].encode(), is_base64=True)
    assert "not valid base64" in read(b"!" + text.encode(), is_base64=True)


def test_no_picture_changes_the_next():
    before = read(square(RED))
    for content, _ in HOSTILE.values():
        read(content)
    assert read(square(RED)) == before


def test_large_notes_beside_the_pixels_do_no_harm():
    notes = Image.Exif()
    notes[0x9286] = b"x" * 60_000
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), RED).save(buffer, "JPEG", exif=notes, comment=b"../../etc/passwd", quality=100)
    near = first_pixel(buffer.getvalue())
    assert all(abs(a - b) < 4 for a, b in zip(near, RED, strict=True))
