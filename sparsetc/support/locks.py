"""Locks that outlive a fork.

In: nothing. Out: a lock of this process: in a forked child, the thread that held the parent's does not run.
"""

from __future__ import annotations

import os
import threading


class Lock:
    """A lock for ``with lock.own:``, which the thread that holds it can take again; a forked child gets a new one."""

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.own = threading.RLock()
