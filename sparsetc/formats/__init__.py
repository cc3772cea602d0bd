"""Formats: how nonzeros are stored and divided into parts, and the plans that store them so.

Importing this package registers them, in the order in which ``"auto"`` considers plans::

    coo.py         coo                     runs of an output row
    fiber.py       fiber, rows             fibers along one mode, side by side; an output row a lane
                   coo+rows, fiber+rows    long rows by one method, short ones a lane each
    tiles.py                               the tiles of hls, window and 1-sa
    hls.py         hls                     dense tiles, or tiles as bitmaps, and what they leave as runs or fibers
    window.py      window, 1-sa            groups of rows in dense tiles over their columns, and other rows as runs
    dense.py       dense                   the dense tensor, multiplied by torch (by_torch.py), or nonzeros by positions
                                           in a product of dense operands (``positions``)
    mixed_mode.py  mm-csf                  fibers along every mode, one copy for the einsums of all modes
"""

from sparsetc.formats import fiber, dense, hls, mixed_mode, window  # noqa: F401, I001 (plans are considered so)
from sparsetc.packing.base import Packed
from sparsetc.planner.registry import register_format

__all__ = ["Packed", "register_format"]
