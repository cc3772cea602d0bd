"""Partitions: how nonzeros are dealt to the parts of a plan. One file a rule; importing this package registers them."""

from sparsetc.partition import run_length, threshold
from sparsetc.partition.base import PARTITIONS, register_partition
from sparsetc.partition.dealing import deal, shares

__all__ = ["PARTITIONS", "deal", "register_partition", "run_length", "shares", "threshold"]
