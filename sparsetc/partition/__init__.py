"""Partitions: how nonzeros are dealt to the parts of a plan. One file a rule; importing this package registers them."""

from sparsetc.partition import rules
from sparsetc.partition.base import (
    PARTITIONS,
    deal,
    get_partition,
    register_partition,
    shares,
    storage_keys,
    stored_parts,
)

__all__ = [
    "PARTITIONS",
    "deal",
    "get_partition",
    "register_partition",
    "rules",
    "shares",
    "storage_keys",
    "stored_parts",
]
