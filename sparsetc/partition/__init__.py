"""Partitions: how nonzeros are dealt to the parts of a plan. One file a rule; importing this package registers them."""

from sparsetc.partition import mixed_mode, row_similarity, run_length, threshold
from sparsetc.partition.base import PARTITIONS, get_partition, register_partition
from sparsetc.partition.dealing import deal, shares
from sparsetc.partition.stored import storage_keys, stored_parts

__all__ = [
    "PARTITIONS",
    "deal",
    "get_partition",
    "mixed_mode",
    "register_partition",
    "row_similarity",
    "run_length",
    "shares",
    "storage_keys",
    "stored_parts",
    "threshold",
]
