"""What would hold up a forked child: locks, and imports, of threads that it does not have.

In: nothing. Out: a lock that each process has anew. A fork waits until no other thread is importing a module of this
package, since the child could not import that module.
"""

from __future__ import annotations

import importlib
import os
import threading
from typing import Any


class Lock:
    """A lock for ``with lock.own:``, which the thread that holds it can take again; a forked child gets a new one."""

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.own = threading.RLock()


def _finish_imports() -> None:
    importing: Any = vars(importlib)["_bootstrap"]

    def names() -> list[str]:
        return [name for name in importing._module_locks.copy() if name.startswith("sparsetc")]

    before, modules = None, names()
    while modules != before:  # an import of the thread that forks does not end here
        for name in modules:
            importing._lock_unlock_module(name)  # as an import of a module waits for another thread's import of it
        before, modules = modules, names()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_finish_imports)
