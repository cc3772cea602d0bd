"""See `sparsetc.support.atomic`."""

from sparsetc.support.atomic import regular, replacing

__all__ = ["regular", "replacing"]
