"""A picture of who sat where as a PNG, written byte by byte: the same on every machine.

It stands in for the player where scripts are removed. A drawing library would write other bytes with another
version, and so would another build of zlib; a saved notebook is compared with a fresh run byte for byte.
"""

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence

from cbresearch.trace import StepRecord
from cbresearch.viz.seating import sittings
from cbresearch.viz.style import HATCH_COLOR, PADDING_COLOR, REQUEST_COLORS

_ROW, _GAP = 14, 2
_FIXED = ("#ffffff", "#ececec", "#333333", PADDING_COLOR, HATCH_COLOR)
_PAPER, _EMPTY, _INK, _PADDING, _HATCH = range(len(_FIXED))
_MAX_RUN = 258


def strip_png(
    steps: Sequence[StepRecord],
    seats: int,
    duration: float,
    colors: Mapping[str, int],
    width: int = 720,
    max_seats: int = 32,
) -> str:
    """Return a run as a data URI: a row a seat, time to the right, a colour a request, padding hatched.

    Args:
        steps: The records to draw.
        seats: Number of seats; beyond `max_seats` the first ones are drawn.
        duration: Seconds that the whole width stands for.
        colors: Each request's index into `REQUEST_COLORS`.
        width: Pixels.
        max_seats: Rows at most.
    """
    seats = min(seats, max_seats)
    scale = width / duration if duration else 0.0
    edges = [min(width, round(record.start * scale)) for record in steps]
    ends = [min(width, round(record.end * scale)) for record in steps]
    last = ends[-1] if ends else 0
    rows = [bytearray([_EMPTY]) * last + bytearray(width - last) for _ in range(seats)]
    hatched = [row[:] for row in rows]
    for sitting in sittings(steps):
        if sitting.seat >= seats:
            continue
        fill = len(_FIXED) + colors[sitting.request_id]
        for span in sitting.spans:
            begin, end = edges[span.first], ends[span.end - 1]
            is_padding = span.kind == "padding"
            for pixel in range(begin, end):
                color = _PADDING if is_padding else fill
                rows[sitting.seat][pixel] = hatched[sitting.seat][pixel] = color
                if is_padding and pixel % 6 < 2:
                    hatched[sitting.seat][pixel] = _HATCH
        begin = edges[sitting.first]
        if begin < width:
            rows[sitting.seat][begin] = hatched[sitting.seat][begin] = _INK
    lines: list[bytes] = []
    for plain, marked in zip(rows, hatched, strict=True):
        lines += [bytes(marked if line % 4 < 2 else plain) for line in range(_ROW)]
        lines += [bytes(width)] * _GAP
    palette = bytes.fromhex("".join(color[1:] for color in (*_FIXED, *REQUEST_COLORS)))
    return "data:image/png;base64," + base64.b64encode(_png(lines, width, palette)).decode("ascii")


def _png(lines: Sequence[bytes], width: int, palette: bytes) -> bytes:
    """Return an image of palette indices as a PNG (PNG specification, third edition)."""
    above = bytes(width)
    raw = bytearray()
    for line in lines:
        # Filter 2: less the line above, so that a line like the one above is all zeros.
        raw.append(2)
        raw += bytes((value - other) & 255 for value, other in zip(line, above, strict=True))
        above = line
    header = struct.pack(">IIBBBBB", width, len(lines), 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", palette), (b"IDAT", _deflated(bytes(raw))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )


def _deflated(data: bytes) -> bytes:
    """Return data as a zlib stream of one block in which only repeated bytes are shortened (RFC 1951)."""
    out, number, held = bytearray(b"\x78\x01"), 0, 0

    def put(value: int, size: int) -> None:
        nonlocal number, held
        number |= value << held
        held += size
        while held >= 8:
            out.append(number & 255)
            number >>= 8
            held -= 8

    def put_code(symbol: int) -> None:
        # Fixed Huffman codes, whose first bit comes first.
        if symbol < 144:
            code, size = 0x30 + symbol, 8
        elif symbol < 256:
            code, size = 0x190 + symbol - 144, 9
        elif symbol < 280:
            code, size = symbol - 256, 7
        else:
            code, size = 0xC0 + symbol - 280, 8
        put(int(f"{code:0{size}b}"[::-1], 2), size)

    put(0b011, 3)
    place = 0
    while place < len(data):
        run = 1
        while place + run < len(data) and run <= _MAX_RUN and data[place + run] == data[place]:
            run += 1
        put_code(data[place])
        place += 1
        run -= 1
        while run >= 3:
            # The longest run, or one of 3 to 10, whose length codes have no further bits.
            length = _MAX_RUN if run >= _MAX_RUN else min(run, 10)
            put_code(285 if length == _MAX_RUN else 254 + length)
            put(0, 5)
            place += length
            run -= length
    put_code(256)
    put(0, 7)
    return bytes(out) + struct.pack(">I", zlib.adler32(data))
