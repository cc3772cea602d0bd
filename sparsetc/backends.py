"""Backends: the facts about generated programs by which the compiler decides, in place of a backend's name.

A new backend is an entry here, a printer in `codegen/`, and a profile of what it runs on (`device/profile.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backend:
    """A kind of generated programs.

    Attributes:
        name: by which users ask for it.
        at_once: a program takes all rows of a level, and whole axes, at once, as functions of arrays do: it has neither
            lanes nor blocks of axes, and no grid. Else each work item runs by itself.
        atomics: work items add to one row at the same time, so that sums have no order.
        narrow: index words of 8 and 16 bits are read.
        widens: values and operands are converted to the type of sums before a call; else a program does it, as it loads
            them.
        addressed: a program reads memory from an address on, by strides that it knows; else it is given tensors, in
            the shape and strides that it expects.
        tensor_cores: a dot has the precision that its schedule names; else that of a library's product.
        complex: complex numbers are multiplied.
        gpu: programs are compiled for a GPU, and have an assembly.
        loops: programs are native loops over contiguous arrays of the host.
    """

    name: str
    at_once: bool = False
    atomics: bool = False
    narrow: bool = False
    widens: bool = False
    addressed: bool = False
    tensor_cores: bool = False
    complex: bool = False
    gpu: bool = False
    loops: bool = False


TRITON = Backend("triton", atomics=True, narrow=True, addressed=True, tensor_cores=True, gpu=True)
TORCH = Backend("torch", at_once=True, widens=True, complex=True)
NUMBA = Backend("numba", at_once=True, widens=True, addressed=True, loops=True)
"""Loops over what torch's programs compute. No plan is made for it: plans for torch say which parts are printed so, and
these are lowered like torch's, so `at_once` is true."""
BACKENDS = {backend.name: backend for backend in (TRITON, TORCH, NUMBA)}
