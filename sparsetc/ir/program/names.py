"""Identifiers of generated programs for letters of the equation and for dense operands.

In: letters of an equation, or axes that are folds of them, or names of operands. Out: identifiers, of the forms that
`support.checks` keeps for them.
"""

at = "at_{}".format
"""The name of a mode's coordinate, or of the positions of a dense axis."""
size = "size_{}".format
"""The name of the size of a mode that coordinates may reach."""
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
"""The name of the largest magnitude of a dense operand, or of each part of it."""
scale = "scale_{}".format
"""The name of the power of two that brings a dense operand into the range of halves."""
scaled = "scaled_{}".format
"""The name of rows of a dense operand that were brought there."""
unscale = "unscale_{}".format
"""The name of the power of two that brings an operand back from there."""
split = "split_{}".format
"""The name of the kernel that makes halves of a dense operand."""
IN_HALVES = "_high", "_low"
"""The ends of the names of a tile, or of a table, that is in halves."""
past = "past_{}".format
"""The name of the condition that a tile's position lies beyond the end of its mode."""
