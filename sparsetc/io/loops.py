"""Loops over text: Python, which `support.compiled` makes machine code of where numba is installed.

In: numpy arrays, those that are written to included. Out: how much was written, or that the text is for `digits`, which
reads whatever is a number and says what is none.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def table(text: Any, sizes: Any, coords: Any, reals: Any, powers: Any, found: Any) -> int:
    """Read lines of coordinates from 1 and decimal numbers; return how many lines have any, or -1.

    A number is read if float64 has its digits and its power of ten, so that one division rounds it. Anything else makes
    the result -1: a sign of a coordinate, a field too many, an infinity.

    Args:
        text: bytes, of which the last is that of a newline.
        sizes: largest coordinate of each mode.
        coords: (modes, lines) to write coordinates to, from 0.
        reals: (columns, lines) float64 to write numbers to.
        powers: of ten, those that float64 holds.
        found: (2,) to write to how many lines there are, blank ones too, and how many numbers have digits that float32
            does not hold: more than six, unless it is that number exactly.
    """
    at = line = lines = lost = 0
    modes, fields = len(coords), len(coords) + len(reals)
    tiny, huge = np.float64(np.finfo(np.float32).tiny), np.float64(np.finfo(np.float32).max)
    while at < len(text):
        field = 0
        while True:
            while text[at] == 32 or text[at] == 9:
                at += 1
            if text[at] == 10 or field == fields:
                break
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
                if digits == 0 or digits > 18 or mantissa < 1 or mantissa > sizes[field]:
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
                if digits == 0 or digits > 18 or mantissa > 1 << 53:
                    return -1
                power = -places
                if text[at] == 101 or text[at] == 69:
                    at += 1
                    down = text[at] == 45
                    if down or text[at] == 43:
                        at += 1
                    exponent, length = 0, 0
                    while 48 <= text[at] <= 57:
                        exponent = exponent * 10 + text[at] - 48
                        length += 1
                        at += 1
                    if length == 0 or length > 3:
                        return -1
                    power += -exponent if down else exponent
                if power < -22 or power > 22:
                    return -1
                number = np.float64(mantissa)
                number = number / powers[-power] if power < 0 else number * powers[power]
                if number >= 1 << 53:
                    return -1
                short = mantissa <= 999_999 and tiny <= number <= huge
                lost += not short and np.float64(np.float32(number)) != number
                reals[field - modes, line] = -number if negative else number
            if text[at] > 32:
                return -1
            field += 1
        if text[at] != 10 or (field != fields and field != 0):
            return -1
        line += field != 0
        lines += 1
        at += 1
    found[0] = lines
    found[1] = lost
    return line


def lines(first: int, coords: Any, reals: Any, whole: bool, powers: Any, text: Any, found: Any) -> int:
    """Write lines of coordinates, printed from 1, and of numbers; return the number of the next line.

    A number has the fewest digits that float32 reads back, as numpy and Python print it. One for which a rounding of
    float64 might decide which digits these are ends the lines before its own, as does one beyond 1e-13 to 1e20.

    Args:
        first: the line to begin with.
        coords: (modes, lines) from 0.
        reals: (columns, lines) float64, that float32 has, or whole numbers.
        whole: whether all are, which are printed without a point.
        powers: of ten, those that float64 holds.
        text: bytes to write to.
        found: (1,) to write to how many bytes whole lines take.
    """
    at = 0
    for line in range(first, coords.shape[1]):
        found[0] = at
        for mode in range(len(coords)):
            left = coords[mode, line] + 1
            end = at + 1
            more = left // 10
            while more:
                end += 1
                more //= 10
            for place in range(end - 1, at - 1, -1):
                text[place] = 48 + left % 10
                left //= 10
            text[end] = 32
            at = end + 1
        for column in range(len(reals)):
            number = reals[column, line]
            size = abs(number)
            if number < 0 or (number == 0 and math.copysign(1.0, number) < 0):
                text[at] = 45
                at += 1
            scale, digits_of = 0, size
            if size != 0 and not whole:
                if not 1e-13 < size < 1e20:
                    return line
                magnitude = math.floor(math.log10(size))
                exact = False
                for digits in range(6, 10):
                    scale = digits - 1 - magnitude
                    scaled = size * powers[scale] if scale > 0 else size / powers[-scale]
                    digits_of = math.floor(scaled)
                    if abs(scaled - digits_of - 0.5) < 1e-6 or (digits > 6 and math.frexp(size)[0] == 0.5):
                        return line
                    digits_of += scaled - digits_of > 0.5
                    near = digits_of / powers[scale] if scale > 0 else digits_of * powers[-scale]
                    low, high = np.float32(near * (1 - 4e-16)), np.float32(near * (1 + 4e-16))
                    exact = np.float32(near) == size and (scale <= 0 or (low == size and high == size))
                    if exact:
                        break
                if not exact:
                    return line
            mantissa = np.int64(digits_of)
            while mantissa and mantissa % 10 == 0 and not whole:
                mantissa //= 10
                scale -= 1
            count = 1
            more = mantissa // 10
            while more:
                count += 1
                more //= 10
            power = count - 1 - scale if size != 0 else 0
            scientific = size != 0 and not (whole or 1e-4 <= size < 1e6)
            # the digits, those before the point and zeros behind them
            before = 1 if scientific else power + 1
            if before <= 0:
                for place in range(2 - before):
                    text[at + place] = 46 if place == 1 else 48
                at += 2 - before
            end = at + max(count, before) + (0 < before < count)
            place = end - 1
            for digit in range(max(count, before) - 1, -1, -1):
                if digit < count:
                    text[place] = 48 + mantissa % 10
                    mantissa //= 10
                else:
                    text[place] = 48
                place -= 1
                if digit == before:
                    text[place] = 46
                    place -= 1
            at = end
            if before >= count and not (scientific or whole):
                text[at] = 46
                text[at + 1] = 48
                at += 2
            if scientific:
                text[at] = 101
                text[at + 1] = 45 if power < 0 else 43
                text[at + 2] = 48 + abs(power) // 10
                text[at + 3] = 48 + abs(power) % 10
                at += 4
            text[at] = 32
            at += 1
        text[at - 1] = 10
    found[0] = at
    return coords.shape[1]
