"""Numbers out of text, many at a time: a vectorised parser over the bytes of a buffer, with numpy only.

In: bytes of whitespace-separated text. Out: where its tokens are, and columns of them as uint64, int64 or float64.
Eight digits are read as one 64-bit word and folded into a number by three multiplications (SWAR); a token of up to 19
digits is up to three words. Decimals are two such integers and a power of ten. What is left over (nan, inf, more
digits than float64 holds exactly) goes through numpy's own conversion of strings.
"""

from __future__ import annotations

import re

import numpy as np

from sparsetc.io import bounds
from sparsetc.support.lru import cached_property

PAD = 16
"""Bytes of padding after the text, so that a word may be read at any position of it."""

_U = np.uint64
_POWERS = 10.0 ** np.arange(301)
_INT_POWERS = np.array([10**k for k in range(20)], dtype=np.uint64)
_EXACT_POWER = 22  # 10**22 is the largest power of ten that float64 holds exactly
_EXACT_MANTISSA = 2**53
_MAX_DIGITS = 19  # of a uint64 that cannot overflow
_WIDE = 64  # characters of tokens that are converted side by side
_TABLE = 2**22  # bytes of a table of tokens
_FLOAT_BYTES = np.zeros(256, dtype=bool)
_FLOAT_BYTES[list(b"0123456789+-.eEnNaAiIfFtTyY\0")] = True


class BadToken(ValueError):
    """Some token is not a number of the kind asked for; the caller finds out which."""


def without(comment: bytes, data: bytes, keep_length: bool = False) -> bytes:
    """Lines without what follows ``comment`` in each; blanks in its place where positions should stay."""
    if comment not in data:
        return data
    return re.sub(re.escape(comment) + rb"[^\n]*", (lambda found: b" " * len(found[0])) if keep_length else b"", data)


class Text:
    """A block of text, its bytes, and the words starting at each of them."""

    def __init__(self, data: bytes) -> None:
        """``data`` should end in a newline; padding is added here."""
        self.size = len(data)
        padded = np.frombuffer(data + b" " * PAD, dtype=np.uint8)
        self.padded = padded
        self.bytes = padded[: self.size]
        # one (unaligned) little-endian word per byte: words[s] is the eight bytes from s on
        self.words = np.ndarray((self.size + PAD - 8,), "<u8", padded.data, 0, (1,))
        space = self.bytes <= 32
        if ((self.bytes < 9) | ((self.bytes - np.uint8(14)) < 18)).any():
            raise BadToken("control characters")
        self.space = space
        self.only_digits = bool((((self.bytes - np.uint8(48)) < 10) | space).all())

    @cached_property
    def lines(self) -> int:
        """The number of lines, blank ones included."""
        return int(np.count_nonzero(self.bytes == 10))

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Start and end of every token, int64."""
        ends = np.flatnonzero(self.space)
        starts = np.empty_like(ends)
        if ends.size:
            starts[0] = 0
            np.add(ends[:-1], 1, out=starts[1:])
            if not (starts == ends).any():
                return starts, ends  # one separator after each token: no need to look at both edges
        edges = np.flatnonzero(np.diff(self.space, prepend=True, append=True))
        return edges[0::2], edges[1::2]

    def positions(self, *characters: bytes) -> np.ndarray:
        """Where any of ``characters`` stands."""
        found = self.bytes == ord(characters[0])
        for other in characters[1:]:
            found |= self.bytes == ord(other)
        return np.flatnonzero(found)


def is_table(text: Text, start: np.ndarray, end: np.ndarray, fields: int) -> bool:
    """Whether every line that is not blank has ``fields`` tokens; their number is already a multiple of it."""
    newline = text.bytes == 10  # held no longer than here: a block and what is made of it should stay in cache
    text.lines = int(np.count_nonzero(newline))
    last = end[fields - 1 :: fields]
    if text.lines == last.size and bool(newline[last].all()):
        return True  # as many newlines as lines, each right after a value
    line = np.searchsorted(np.flatnonzero(newline), start)
    first_line, last_line = line[0::fields], line[fields - 1 :: fields]
    return bool((first_line == last_line).all() and (first_line[1:] > last_line[:-1]).all())


def _eight(text: Text, start: np.ndarray, length: np.ndarray, valid: np.ndarray | None) -> np.ndarray:
    """Tokens of 0..8 digits as uint64; clears ``valid`` where a byte is not a digit (None: known to be digits)."""
    # The first byte is the lowest of the word. Shifting the token to the top leaves zero bytes below, which count as
    # leading zeros; an empty token shifts by 64, which numpy defines as 0.
    shift = (8 - length).astype(np.uint64)
    shift <<= _U(3)
    word = text.words[start]
    word <<= shift
    if valid is not None:
        digits = np.left_shift(_U(0x3030303030303030), shift)
        valid &= (word & _U(0xF0F0F0F0F0F0F0F0)) == digits
        valid &= ((word + _U(0x0606060606060606)) & _U(0xF0F0F0F0F0F0F0F0)) == digits
    word &= _U(0x0F0F0F0F0F0F0F0F)
    for bits, scale, mask in ((8, 10, 0x00FF00FF00FF00FF), (16, 100, 0x0000FFFF0000FFFF), (32, 10000, 0xFFFFFFFF)):
        upper = word >> _U(bits)
        word *= _U(scale)
        word += upper
        word &= _U(mask)
    return word


def _one(text: Text, start: np.ndarray, length: np.ndarray, valid: np.ndarray | None) -> np.ndarray:
    """Tokens of 0 or 1 digits, such as the 0 of 0.25: no need for a word of eight."""
    digit = text.padded[start] - np.uint8(48)
    digit *= length.astype(np.uint8)
    if valid is not None:
        valid &= digit < 10
    return digit.astype(np.uint64)


def _digits(text: Text, start: np.ndarray, length: np.ndarray, valid: np.ndarray | None) -> np.ndarray:
    """Tokens of 0..19 digits as uint64; clears ``valid`` where that is not so."""
    if length.size == 0:
        return np.zeros(0, dtype=np.uint64)
    longest = int(length.max())
    if longest <= 1:
        return _one(text, start, length, valid)
    if longest <= 8:
        return _eight(text, start, length, valid)
    if longest > _MAX_DIGITS:
        if valid is None:
            raise BadToken("too many digits")
        valid &= length <= _MAX_DIGITS
        length = np.minimum(length, _MAX_DIGITS)
    low = np.minimum(length, 8)
    number = _eight(text, start + length - low, low, valid)
    long = np.flatnonzero(length > 8)
    upper_valid = None if valid is None else np.ones(long.size, dtype=bool)
    number[long] += _digits(text, start[long], length[long] - 8, upper_valid) * _U(10**8)
    if valid is not None and upper_valid is not None:
        valid[long] &= upper_valid
    return number


def coordinates(text: Text, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Tokens of digits as int64; BadToken if one is anything else, or does not fit."""
    valid = None if text.only_digits else np.ones(start.size, dtype=bool)
    number = _digits(text, start, end - start, valid)
    if valid is not None and not valid.all():
        raise BadToken("not an integer")
    if number.size and int(number.max()) >= 2**63:
        raise BadToken("too large")
    return number.view(np.int64)


def _marks(text: Text, start: np.ndarray, end: np.ndarray, *characters: bytes) -> np.ndarray:
    """For each token the position of (the last of) ``characters`` in it, or its end."""
    at = text.positions(*characters)
    if at.size == start.size and bool(((at >= start) & (at < end)).all()):
        return at
    found = end.copy()
    token = np.searchsorted(end, at, side="right")
    inside = token < start.size
    at, token = at[inside], token[inside]
    inside = at >= start[token]
    found[token[inside]] = at[inside]
    return found


def _signs(text: Text, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens begin with a minus, and the starts after any sign. A token may be empty, at ``end``."""
    first = text.padded[start]
    minus = (first == ord("-")) & (start < end)
    return minus, start + (minus | ((first == ord("+")) & (start < end)))


def begins_with_digit(text: Text, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Which tokens are digits or a decimal point after any sign, as all numbers are but nan and inf."""
    _, body = _signs(text, start, end)
    first = text.padded[body]
    return ((first - np.uint8(48)) < 10) | (first == ord("."))


def floats(text: Text, start: np.ndarray, end: np.ndarray, exact: bool = True) -> np.ndarray:
    """Tokens as float64: integers, decimals, exponents, nan and inf; BadToken if one is no number.

    ``exact``: every value is the float64 nearest to the text; otherwise some are one unit in the last place off.
    """
    if text.only_digits and start.size and int((end - start).max()) <= 15:
        return _digits(text, start, end - start, None).astype(np.float64)
    minus, body = _signs(text, start, end)
    stop = _marks(text, start, end, b"e", b"E")
    dot = np.minimum(_marks(text, start, end, b"."), stop)
    valid = np.ones(start.size, dtype=bool)
    places = np.maximum(stop - dot - 1, 0)
    whole = np.maximum(dot - body, 0)
    valid &= (whole + places > 0) & (whole + places <= _MAX_DIGITS)
    mantissa = _digits(text, body, whole, valid)
    if places.any():
        mantissa *= _INT_POWERS[np.minimum(places, _MAX_DIGITS)]
        mantissa += _digits(text, dot + 1, places, valid)
    power = -places
    scaled = np.flatnonzero(stop != end)
    if scaled.size:
        power[scaled] += _exponents(text, stop[scaled] + 1, end[scaled], valid, scaled)
    limit = _EXACT_POWER if exact else 250
    valid &= (power <= limit) & (power >= -limit)
    if exact:
        valid &= mantissa <= _EXACT_MANTISSA
    scale = _POWERS[np.minimum(np.abs(power), limit)]
    value = mantissa.astype(np.float64)
    value = np.where(power < 0, value / scale, value * scale) if power.any() else value
    np.negative(value, out=value, where=minus)
    if not valid.all():
        rest = np.flatnonzero(~valid)
        value[rest] = _by_numpy(text, start[rest], end[rest])
    return value


def _exponents(text: Text, start: np.ndarray, end: np.ndarray, valid: np.ndarray, which: np.ndarray) -> np.ndarray:
    """What stands after the e of tokens ``which``, as int64; clears ``valid`` there if it is not 1 to 3 digits."""
    minus, body = _signs(text, start, end)
    length = end - body
    good = (length >= 1) & (length <= 3)
    number = _digits(text, body, np.minimum(length, 3), good).astype(np.int64)
    valid[which] &= good
    return np.where(minus, -number, number)


def _by_numpy(text: Text, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Tokens as float64 by numpy's conversion of strings, which knows nan and inf and rounds correctly."""
    length = end - start
    if int(length.max()) > bounds.TOKEN:
        raise BadToken(f"a number of more than {bounds.TOKEN:,} characters")
    value = np.empty(start.size)
    # a table of all would be mostly padding where some are long
    for which, width in ((length <= _WIDE, _WIDE), (length > _WIDE, bounds.TOKEN)):
        rows = np.flatnonzero(which)
        for at in range(0, rows.size, _TABLE // width):
            few = rows[at : at + _TABLE // width]
            value[few] = _converted(text, start[few], length[few])
    return value


def _converted(text: Text, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Tokens of similar length, through a table of their characters."""
    width = int(length.max())
    column = np.arange(width)
    table = text.bytes[np.minimum(start[:, None] + column, text.size - 1)]
    table[column >= length[:, None]] = 0
    if not _FLOAT_BYTES[table].all():  # Python's float would take 1_000
        raise BadToken("not a number")
    try:
        with np.errstate(over="ignore"):  # what is too large is infinite, as Python has it
            return table.view(f"S{width}").ravel().astype(np.float64)
    except ValueError as error:
        raise BadToken(str(error)) from None


def integers(text: Text, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Tokens as int64, exactly; ``3.0`` and ``1e3`` will do, BadToken for 2.5, for nan and for what does not fit."""
    minus, body = _signs(text, start, end)
    valid = body < end
    number = _digits(text, body, end - body, valid)
    valid &= number <= np.where(minus, _U(2**63), _U(2**63 - 1))
    value = number.view(np.int64)
    np.negative(value, out=value, where=minus)
    if not valid.all():
        rest = np.flatnonzero(~valid)
        real = floats(text, start[rest], end[rest])
        if not ((real == np.floor(real)) & (np.abs(real) < _EXACT_MANTISSA)).all():
            raise BadToken("not an integer, or one beyond 2**53 that is not written as digits alone")
        value[rest] = real.astype(np.int64)
    return value
