"""Numbers out of text, many at a time: a vectorised parser over the bytes of a buffer, with numpy only.

In: bytes of whitespace-separated text. Out: where its tokens are, and columns of them as int64 or float64; or
`BadToken`, which says where the first is that is no such number. Eight digits are read as one 64-bit word and folded
into a number by three multiplications (SWAR); a token of up to 19 digits is up to three words. Decimals are two such
integers and a power of ten. What is left over (nan, inf, more digits than float64 holds exactly) is read by Python.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

PAD = 16
"""Bytes of padding after the text, so that a word may be read at any position of it."""

_U = np.uint64
_INT_POWERS = np.array([10**k for k in range(20)], dtype=np.uint64)
EXACT_POWERS = 10.0 ** np.arange(23)  # those that float64 holds exactly
_EXACT_MANTISSA = 2**53
_MAX_DIGITS = 19  # of a uint64 that cannot overflow


class BadToken(ValueError):
    """Text that is not as asked for.

    Attributes:
        line: how many lines are before its own.
        field: how many tokens of its line are before it; None where the line is at fault.
    """

    def __init__(self, text: Text, at: int, reason: str, whole_line: bool = False) -> None:
        super().__init__(reason)
        before = text.data[:at]
        self.line = before.count(b"\n")
        self.field = None if whole_line else len(before[before.rfind(b"\n") + 1 :].split())


class Text:
    """A block of text, its bytes, and the words starting at each of them."""

    def __init__(self, data: bytes) -> None:
        """``data`` should end in a newline; padding is added here."""
        self.data = data
        padded = np.frombuffer(data + b" " * PAD, dtype=np.uint8)
        self.padded = padded
        self.bytes = padded[: len(data)]
        # one (unaligned) little-endian word per byte: words[s] is the eight bytes from s on
        self.words = np.ndarray((len(data) + PAD - 8,), "<u8", padded.data, 0, (1,))
        control = (self.bytes < 9) | ((self.bytes - np.uint8(14)) < 18)
        if control.any():
            raise BadToken(self, int(np.argmax(control)), "a control character", whole_line=True)
        self.space = self.bytes <= 32
        self.only_digits = bool((((self.bytes - np.uint8(48)) < 10) | self.space).all())

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Return start and end of every token, int64."""
        ends = np.flatnonzero(self.space)
        starts = np.empty_like(ends)
        if ends.size:
            starts[0] = 0
            np.add(ends[:-1], 1, out=starts[1:])
            if not (starts == ends).any():
                return starts, ends  # one separator after each token: no need to look at both edges
        edges = np.flatnonzero(np.diff(self.space, prepend=True, append=True))
        return edges[0::2], edges[1::2]

    def require(self, good: np.ndarray, start: np.ndarray, reason: str) -> None:
        """Raise `BadToken` at the first token for which ``good`` is False."""
        if not good.all():
            raise BadToken(self, int(start[np.argmin(good)]), reason)

    def check_fields(self, start: np.ndarray, end: np.ndarray, fields: int, expected: str) -> None:
        """Raise `BadToken` for a line that is not blank and has not ``fields`` tokens."""
        newline = self.bytes == 10
        last = end[fields - 1 :: fields]
        if start.size == fields * np.count_nonzero(newline) and bool(newline[last].all()):
            return  # as many newlines as lines, each right after a value
        count = np.bincount(np.searchsorted(np.flatnonzero(newline), start))
        wrong = np.flatnonzero((count != fields) & (count != 0))
        if wrong.size:
            first, tokens = int(wrong[0]), int(count[wrong[0]])
            raise BadToken(self, int(start[count[:first].sum()]), f"{expected}, found {tokens}", whole_line=True)


def _eight(text: Text, start: np.ndarray, length: np.ndarray, valid: np.ndarray | None) -> np.ndarray:
    """Parse tokens of 0 to 8 digits to uint64; clears ``valid`` for other bytes (None: all are digits)."""
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
    """Parse tokens of 0 or 1 digits, such as the 0 of 0.25."""
    digit = text.padded[start] - np.uint8(48)
    digit *= length.astype(np.uint8)
    if valid is not None:
        valid &= digit < 10
    return digit.astype(np.uint64)


def _digits(text: Text, start: np.ndarray, length: np.ndarray, valid: np.ndarray | None) -> np.ndarray:
    """Tokens of 0..19 digits as uint64; clears ``valid`` where that is not so (None: known to be so)."""
    longest = int(length.max(initial=0))
    if longest <= 1:
        return _one(text, start, length, valid)
    if longest <= 8:
        return _eight(text, start, length, valid)
    if valid is not None and longest > _MAX_DIGITS:
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


def coordinates(text: Text, start: np.ndarray, end: np.ndarray, size: int = 2**63 - 1) -> np.ndarray:
    """Tokens of digits, from 1 to ``size``, as int64 from 0; BadToken for anything else."""
    length = end - start
    digits_only = text.only_digits and int(length.max(initial=0)) <= _MAX_DIGITS
    valid = None if digits_only else np.ones(start.size, dtype=bool)
    number = _digits(text, start, length, valid)
    number -= _U(1)  # of 0 the largest of all
    if valid is not None or int(number.max(initial=0)) >= size:
        good = number < _U(size) if valid is None else valid & (number < _U(size))
        text.require(good, start, f"is not a whole number from 1 to {'2**63 - 1' if size == 2**63 - 1 else size}")
    return number.view(np.int64)


def _marks(text: Text, start: np.ndarray, end: np.ndarray, character: str) -> np.ndarray:
    """Return for each token the position of its last ``character``, of either case, or the token's end."""
    at = np.flatnonzero((text.bytes | np.uint8(32)) == ord(character))
    if at.size == start.size and bool(((at >= start) & (at < end)).all()):
        return at
    marks = end.copy()
    token = np.searchsorted(end, at, side="right")
    inside = token < start.size
    at, token = at[inside], token[inside]
    inside = at >= start[token]
    marks[token[inside]] = at[inside]
    return marks


def _signs(text: Text, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return True for tokens with a minus, and the starts after any sign. A token may be empty, at ``end``."""
    first = text.padded[start]
    minus = (first == ord("-")) & (start < end)
    return minus, start + (minus | ((first == ord("+")) & (start < end)))


def floats(text: Text, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Parse tokens to the nearest float64. Raise `BadToken` for anything else, and for numbers that overflow.

    Returns:
        The numbers, and the digits of each as uint64, without its point and exponent; the largest uint64 where these
        are more than 19, or none.
    """
    if text.only_digits and int((end - start).max(initial=0)) <= 15:
        mantissa = _digits(text, start, end - start, None)
        return mantissa.astype(np.float64), mantissa
    minus, body = _signs(text, start, end)
    stop = _marks(text, start, end, "e")
    dot = np.minimum(_marks(text, start, end, "."), stop)
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
    if not valid.all():
        mantissa[~valid] = 2**64 - 1
    size = np.abs(power)
    valid &= (size < EXACT_POWERS.size) & (mantissa <= _EXACT_MANTISSA)
    scale = EXACT_POWERS[np.minimum(size, EXACT_POWERS.size - 1)]
    value = mantissa.astype(np.float64)
    value = np.where(power < 0, value / scale, value * scale) if power.any() else value
    np.negative(value, out=value, where=minus)
    if not valid.all():
        rest = np.flatnonzero(~valid)
        value[rest] = _by_python(text, start[rest], end[rest])
    return value, mantissa


def _exponents(text: Text, start: np.ndarray, end: np.ndarray, valid: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Return the int64 exponents of tokens ``which``; clears ``valid`` for one without 1 to 3 digits."""
    minus, body = _signs(text, start, end)
    length = end - body
    good = (length >= 1) & (length <= 3)
    number = _digits(text, body, np.minimum(length, 3), good).astype(np.int64)
    valid[which] &= good
    return np.where(minus, -number, number)


def _by_python(text: Text, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Tokens as float64 by Python's ``float``, which knows nan and inf and rounds correctly."""
    tokens = [text.data[s:e] for s, e in zip(start.tolist(), end.tolist(), strict=True)]
    parsed: list[float] = []
    with suppress(ValueError):
        parsed.extend(map(float, tokens))  # as far as they are numbers
    good = np.ones(start.size, dtype=bool)
    if b"_" in text.data:  # as in 1_000, which Python takes
        good = np.array([b"_" not in token for token in tokens])
    good[len(parsed) :] = False
    text.require(good, start, "is not a number")
    value = np.array(parsed)
    infinite = np.flatnonzero(np.isinf(value))
    written = np.array([b"n" in tokens[at].lower() for at in infinite], dtype=bool)
    text.require(written, start[infinite], "is beyond the largest float64; write inf for an infinity")
    return value


def integers(text: Text, start: np.ndarray, end: np.ndarray, reason: str) -> np.ndarray:
    """Tokens as int64, exactly; ``3.0`` and ``1e3`` will do, 2.5, nan and what is too large are a BadToken."""
    minus, body = _signs(text, start, end)
    valid = body < end
    number = _digits(text, body, end - body, valid)
    valid &= number <= np.where(minus, _U(2**63), _U(2**63 - 1))
    value = number.view(np.int64)
    np.negative(value, out=value, where=minus)
    if not valid.all():
        rest = np.flatnonzero(~valid)
        real, _ = floats(text, start[rest], end[rest])
        text.require((real == np.floor(real)) & (np.abs(real) < _EXACT_MANTISSA), start[rest], reason)
        value[rest] = real.astype(np.int64)
    return value
