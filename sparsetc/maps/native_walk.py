"""Walks as native loops over the entries of rows, on a CPU: graphs, and patterns that leave most of their tiles empty.

In: a `Walk`, the entries of rows, and tensors. Out: a function of tensors by name, whose rows threads share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsetc.codegen import cache
from sparsetc.codegen.native import RANGES, ends, functions, in_threads
from sparsetc.ir.plan import MOST_THREADS
from sparsetc.maps.body import Walk
from sparsetc.maps.kernel import Heads
from sparsetc.maps.native_text import NativeText
from sparsetc.maps.row_tiles import RowEntries
from sparsetc.maps.text import Layout, number_arguments
from sparsetc.tensor.dtypes import dtype_name

ENOUGH = 1 << 18
"""Multiplications of a call from which it is worth compiling loops, which takes a second or two once. Not measured."""


class NativeWalk:
    """A walk over the entries of rows, generated and bound to what does not change between calls.

    Attributes:
        source: the generated text and its arguments.
        path: of the text's copy for readers.
    """

    def __init__(
        self,
        walk: Walk,
        entries: RowEntries,
        tensors: Mapping[str, Tensor],
        heads: Heads,
        cache_dir: Path | None,
        name: str,
    ) -> None:
        """Generate and bind.

        Args:
            walk: what is computed.
            entries: of the rows that it goes along.
            tensors: by name: tables (heads, rows, size), vectors (heads, rows) or (heads, entries), and results, of
                the sizes and strides of every call.
            heads: of them.
            cache_dir: folder of generated sources.
            name: what the file is named after.
        """
        rows, self.ptr, far, order = entries
        sizes = walk.sizes({table: t.shape[-1] for table, t in tensors.items()})
        layout = Layout(sizes, order is not None, group=heads.group, stacked=heads.patterns > 1)
        number = dtype_name(tensors[walk.targets[-1]].dtype)
        self.source = NativeText(walk, layout)
        by_head = any(tensors[table].stride(0) > tensors[table].stride(1) for table in self.source.other)
        self.source.print(name, number, by_head)
        module, self.path = cache.load(self.source.text, cache_dir, name)
        (self.function,) = functions(module, ["walk"], self.source.text, self.path.parent)
        names = self.source.arguments
        constants: dict[str, Any] = {"rows": rows, "parts": heads.parts // (heads.group if walk.mode else 1)}
        constants |= {**heads.steps(), "longest": int(self.ptr.diff().max()) if len(self.ptr) > 1 else 0}
        constants |= {"ptr": self.ptr.numpy(), "far": far.numpy(), "order": None if order is None else order.numpy()}
        constants |= number_arguments(tensors, {})
        self.fixed = [constants.get(name) for name in names]
        self.places = {name: place for place, name in enumerate(names) if name not in constants}
        self.shared = [name for _, vector, name in walk.stored if vector]  # threads add to sums of their own

    def __call__(self, tensors: Mapping[str, Tensor]) -> None:
        """Compute, with inputs and results by name."""
        arguments = [*self.fixed]
        for name, place in self.places.items():
            arguments[place] = _flat(tensors[name])
        threads, lines = min(MOST_THREADS, torch.get_num_threads()), len(self.ptr) - 1
        if threads == 1:
            self.function(0, lines, *arguments)
            return
        jobs, parts = list[Callable[[], Any]](), [*pairwise(ends(self.ptr, threads * RANGES))]
        shared = {name: tensors[name].new_zeros(len(parts), *tensors[name].shape) for name in self.shared}
        for number, part in enumerate(parts):
            own = [*arguments]
            for name, sums in shared.items():
                own[self.places[name]] = _flat(sums[number])
            jobs.append(partial(self.function, *part, *own))
        in_threads(threads, jobs)
        for name, sums in shared.items():
            tensors[name].copy_(sums.sum(0))


def _flat(tensor: Tensor) -> Any:
    """Return the elements of a tensor, and those between them, as an array of one mode."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1).numpy()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((extent,), (1,)).numpy()
