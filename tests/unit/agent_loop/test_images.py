"""Images at the door: what is whole is taken, what no model server could read is not."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.agent_loop.domain import images
from tests.fakes.images import GIF, IMAGES, PNG, WEBP, chunk, jpeg, png

HEAD, END = PNG[:33], chunk(b"IEND")
LOSSLESS = b"VP8L\x05\0\0\0\x2f" + (11 | 6 << 14).to_bytes(4, "little") + b"\0"
EXTENDED = b"VP8X\x0a\0\0\0" + bytes(4) + b"\x0b\0\0\x06\0\0"


def riff(*chunks: bytes) -> bytes:
    body = b"WEBP" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    ("data", "size"),
    [
        *((data, (1, 1)) for data in IMAGES.values()),
        (png(12, 7), (12, 7)),
        (jpeg(12, 7), (12, 7)),
        (jpeg().replace(b"\xff\xc0", b"\xff\x01\xff\xff\xc2"), (1, 1)),
        (GIF[:25] + b"\x21\xfe\x01a\x00" + GIF[25:], (1, 1)),
        (riff(LOSSLESS), (12, 7)),
        (riff(EXTENDED, LOSSLESS), (12, 7)),
        (riff(EXTENDED, b"ICCP\x01\0\0\0a\0", b"ANMF\0\0\0\0"), (12, 7)),
    ],
)
def test_an_image_is_read_with_its_size_whatever_stands_behind_it(data: bytes, size: tuple[int, int]) -> None:
    for whole in (data, data + bytes(9)):
        read = images.read(whole)
        assert (read.width, read.height) == size


@pytest.mark.parametrize("kind", IMAGES)
@given(data=st.data())
def test_an_image_that_is_cut_off_is_refused(kind: str, data: st.DataObject) -> None:
    whole = IMAGES[kind]
    end = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(images.BadImage):
        images.read(whole[:end])


@given(st.sampled_from([b"", *(data[:12] for data in IMAGES.values())]), st.binary(max_size=60))
def test_any_bytes_are_an_image_or_refused(head: bytes, rest: bytes) -> None:
    with suppress(images.BadImage):
        assert images.read(head + rest).media_type in IMAGES


@pytest.mark.parametrize(
    "data",
    [
        HEAD + END,
        HEAD + chunk(b"IDAT") + END,
        PNG[:8] + PNG[33:],
        PNG.replace(b"IDAT", b"IDAU"),
        HEAD[:-1] + b"\0" + PNG[33:],
        HEAD + chunk(b"teXt") * 20_000 + PNG[33:],
        jpeg().replace(b"\xff\xc0", b"\xff\xe1"),
        jpeg().replace(b"\xff\xc0", b"\x00\xc0"),
        jpeg().replace(b"\xff\xe0", b"\xff\xd9"),
        b"\xff\xd8" + b"\xff\xe0\x00\x02" * 20_000 + jpeg()[2:],
        GIF[:13] + bytes(12) + b"\x3b",
        WEBP[:12] + b"EXIF" + WEBP[16:],
        WEBP.replace(b"\x9d\x01\x2a", b"\x9d\x01\x2b"),
        riff(EXTENDED),
        riff(LOSSLESS.replace(b"\x2f", b"\x2e")),
    ],
)
def test_an_image_without_what_decoders_need_is_refused(data: bytes) -> None:
    with pytest.raises(images.BadImage, match="cut off or damaged"):
        images.read(data)


@pytest.mark.parametrize(
    "data",
    [
        png(0, 1),
        png(1, 0),
        png(16_385, 1),
        jpeg(0, 5),
        jpeg(5, 16_385),
        GIF[:6] + struct.pack("<HH", 0, 1) + GIF[10:],
        GIF[:6] + struct.pack("<HH", 1, 20_000) + GIF[10:],
        riff(EXTENDED[:-3] + b"\0\0\1", LOSSLESS),
    ],
)
def test_a_size_that_no_model_server_takes_is_refused(data: bytes) -> None:
    with pytest.raises(images.BadImage, match=r"\d+ x \d+ pixels: an image has 1 to 16384 a side"):
        images.read(data)


def test_the_largest_size_is_taken() -> None:
    assert images.read(png(images.SIDE_PIXELS_MAX, 1)).width == images.SIDE_PIXELS_MAX
