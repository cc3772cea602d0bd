"""Loops over text: Python, which `support.files` makes machine code of where numba is installed.

In: numpy arrays, those that are written to included. Out: how much was written, or that the text is for `table`, which
says what is wrong with it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

POWERS = 10.0 ** np.arange(23)
"""The powers of ten that float64 holds."""


def table(text: Any, sizes: Any, coords: Any, reals: Any, ends: Any, powers: Any, found: Any) -> int:
    """Read lines of coordinates from 1 and decimal numbers; return how many lines have any, or -1.

    A number is read if float64 has its digits, and it has no exponent, so that one division rounds it. Of any other its
    begin is written in the place of the number. A line that is not as it should be makes the result -1.

    Args:
        text: bytes, of which the last is that of a newline.
        sizes: largest coordinate of each mode.
        coords: (modes, lines) to write coordinates to, from 0.
        reals: (columns, lines) float64 to write numbers to.
        ends: (columns, lines) zeros, to write to where numbers end that are not read.
        powers: `POWERS`.
        found: (2,) to write to how many lines there are, blank ones too, and how many numbers have digits that float32
            does not hold: more than six, unless it is that number exactly.
    """
    at = line = lines = lost = 0
    modes, fields = len(coords), len(coords) + len(reals)
    while at < len(text):
        field = 0
        while True:
            while text[at] == 32 or text[at] == 9:
                at += 1
            if text[at] == 10 or field == fields:
                break
            begin = at
            negative = False
            if field >= modes and (text[at] == 45 or text[at] == 43):
                negative = text[at] == 45
                at += 1
            mantissa = np.int64(0)
            digits = 0
            places = 0
            while 48 <= text[at] <= 57:
                mantissa = mantissa * 10 + text[at] - 48
                digits += 1
                at += 1
            if field < modes:
                if digits == 0 or digits > 18 or mantissa < 1 or mantissa > sizes[field] or text[at] > 32:
                    return -1
                coords[field, line] = mantissa - 1
            else:
                if text[at] == 46:
                    at += 1
                    while 48 <= text[at] <= 57:
                        mantissa = mantissa * 10 + text[at] - 48
                        places += 1
                        at += 1
                    digits += places
                if 0 < digits <= 18 and mantissa < 1 << 53 and text[at] <= 32:
                    number = mantissa / powers[places]
                    lost += mantissa > 999_999 and np.float64(np.float32(number)) != number
                    reals[field - modes, line] = -number if negative else number
                else:
                    while text[at] > 32:
                        at += 1
                    reals[field - modes, line] = begin
                    ends[field - modes, line] = at
            field += 1
        if text[at] != 10 or (field != fields and field != 0):
            return -1
        line += field != 0
        lines += 1
        at += 1
    found[0] = lines
    found[1] = lost
    return line
