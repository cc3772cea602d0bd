"""The one name space of generated programs: what a letter of the equation, or an array of a format, may be called.

In: letters of an equation, or axes that are folds of them. Out: identifiers. A letter stands in an identifier only
behind one of the words of `LETTERED`, or behind a dense operand's name, and no other generated name has that form. So
all 52 letters are free for equations: none can meet an accumulator, a format's array, or a name of Python or Triton.
"""

from __future__ import annotations

import builtins
import re
from keyword import iskeyword, issoftkeyword

LETTERED = ("at", "in", "block", "tile", "side", "first", "past", "most", "scale", "scaled", "unscale")
"""The words that stand before a letter, or before the name of an operand."""

WORDS = frozenset(
    """
    across add_rows along b0 b1 bag before behind below block chunks count counts every expanded fiber fiber_sum
    first full has i0 i1 inside item items kernel lane length n0 n1 nonzeros number ok pair part passed pid place pos
    position programs result row run_products run_sums scaled skipped slot start step steps stop summed term tile
    tiles tl torch total triton within words
    """.split()  # noqa: SIM905 (a list of 60 quoted words is no easier to read)
)
"""What generated programs call things that are no letter's."""
STRUCTURE = frozenset(
    """
    bits block_full block_ptr high_values item_ptr lane_len low_values most value_ptr values
    """.split()  # noqa: SIM905
)
"""The arrays of a packed part that hold no coordinates."""
_LETTERED = re.compile(
    rf"[A-Za-z]|({'|'.join(LETTERED)})_([A-Za-z]|operand)|([a-w]|operand_\d+)_[A-Za-z]+|.*_(bits|high|low)"
)
_NUMBER = re.compile(r"\d*(_\d+)*$")
at = "at_{}".format
"""The name of a mode's coordinate, or of the positions of a dense axis."""
inside = "in_{}".format
"""The name of the condition that a coordinate, or a position of a dense axis, is within its size."""
block = "block_{}".format
"""The name of the block of a dense axis that a program of the grid takes."""
tile = "tile_{}".format
"""The name of a tile's coordinate along a mode."""
side = "side_{}".format
"""The name of the positions within a tile along a mode."""
first = "first_{}".format
"""The name of the first of the positions within a tile that a program has at once."""
rounded = "{}_bf16".format
"""The name of a dense operand, rounded to bfloat16, in a launch that may also take it as it is."""
most = "most_{}".format
"""The name of the largest magnitude of a dense operand."""
scale = "scale_{}".format
"""The name of the power of two that brings a dense operand into the range of halves."""
scaled = "scaled_{}".format
"""The name of rows of a dense operand that were brought there."""
unscale = "unscale_{}".format
"""The name of the power of two that brings an operand back from there."""
past = "past_{}".format
"""The name of the condition that a tile's position lies beyond the end of its mode."""


def is_free(name: str) -> bool:
    """Whether a format may call an array `name`: an identifier that no generated name can be, nor a copy of one."""
    if not name.isidentifier() or not name.isascii() or iskeyword(name) or issoftkeyword(name):
        return False
    if hasattr(builtins, name):
        return False
    own = _NUMBER.sub("", name)  # what a tree makes several of is numbered, and so are steps taken together
    return own not in WORDS | STRUCTURE and not _LETTERED.fullmatch(own)
