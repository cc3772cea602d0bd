"""Formats: how a part's nonzeros are stored. One file each; importing this package registers them."""

from sparsetc.formats import coo, cut_tiles, dense, fiber, windows
from sparsetc.formats.base import FORMATS, Format, Packed, get_format, pack, register_format

__all__ = [
    "FORMATS",
    "Format",
    "Packed",
    "coo",
    "cut_tiles",
    "dense",
    "fiber",
    "get_format",
    "pack",
    "register_format",
    "windows",
]
