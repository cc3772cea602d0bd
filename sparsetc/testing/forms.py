"""How operands are laid out and made, and in which circumstances an einsum is called, as source text.

One text serves twice: a case is run by evaluating it, and a reproducer prints it. In the texts of `MEMORY`, ``{t}`` is
the tensor of values; in those of `SPARSE`, ``{c}``, ``{v}`` and ``{shape}`` are the parts of a sparse tensor; in those
of `CIRCUMSTANCES`, ``{call}`` and ``{compile}`` are the calls, ``{x}`` is the first sparse operand, ``{dense}`` are the
dense ones, and ``{x}_coords`` are the coordinates that it was made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from math import prod

import torch

COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}
"""Complex types whose parts are real operands."""


@dataclass(frozen=True)
class MemoryForm:
    """How values lie in memory: a text that makes them of a tensor, and where it applies.

    Attributes:
        complex: True where operands must be complex, False where they are the real or imaginary part of a complex
            tensor.
        first: whether the tensor has one slice, which is expanded along the first mode.
        least: the least order.
    """

    text: str
    complex: bool | None = None
    first: bool = False
    least: int = 0
    numpy: bool = False

    def fits(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether operands of this shape and dtype can lie so."""
        if len(shape) < max(self.least, int(self.first)) or (self.first and shape[0] == 0):
            return False
        if self.numpy and dtype == torch.bfloat16:
            return False
        return self.complex is None or (dtype.is_complex if self.complex else dtype in COMPLEX)

    def base(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the tensor that the text takes."""
        shape = (1, *shape[1:]) if self.first else shape
        return shape, COMPLEX[dtype] if self.complex is False else dtype


MEMORY: dict[str, MemoryForm] = {
    "plain": MemoryForm("{t}"),
    "transposed": MemoryForm("{t}.permute({reverse}).contiguous().permute({reverse})", least=2),
    "strided": MemoryForm("torch.stack([{t}, {t}], -1)[..., 0]"),
    "padded": MemoryForm("torch.cat([{t}, {t}], -1)[..., :{last}]", least=1),
    "offset": MemoryForm("torch.cat([{t}.new_zeros(1), {t}.reshape(-1)])[1:].view({shape})"),
    "expanded": MemoryForm("{t}.expand({shape})", first=True),
    "conj": MemoryForm("{t}.conj()", complex=True),
    "negative": MemoryForm("{t}.conj().imag", complex=False),
    "real": MemoryForm("{t}.real", complex=False),
}
"""Layouts of dense operands, and of the values of sparse ones."""
ARRAYS: dict[str, MemoryForm] = {
    "numpy": MemoryForm("{t}.numpy()", numpy=True),
    "backwards": MemoryForm("{t}.flip(0).numpy()[::-1]", least=1, numpy=True),
}
"""Arrays of numpy as dense operands."""


def memory_text(memory: str, t: str, shape: tuple[int, ...]) -> str:
    """The text that lays out the tensor called `t` as an operand of this shape."""
    form = {**MEMORY, **ARRAYS}[memory]
    reverse = ", ".join(map(str, reversed(range(len(shape)))))
    return form.text.format(t=t, reverse=reverse, shape=tuple(shape), last=shape[-1] if shape else 0)


def magnitude_memory(memory: str) -> str:
    """The layout for absolute values: parts of complex numbers and signs are no matter then."""
    return "plain" if memory in ("conj", "negative", "real", *ARRAYS) else memory


@dataclass(frozen=True)
class SparseForm:
    """A way to give a sparse operand.

    Attributes:
        order: the only order it takes.
        unique: whether duplicates are not allowed.
        learned: whether autograd goes through it to the values.
        narrow: whether it takes float16, bfloat16 and narrow integers.
    """

    text: str
    order: int | None = None
    dense_modes: bool = False
    unique: bool = False
    learned: bool = False
    narrow: bool = True
    on_gpu: bool = True

    @property
    def native(self) -> bool:
        """Whether it is a sparse tensor of torch, which counts positions in 64 bits, and derives those of few modes."""
        return "torch.sparse" in self.text

    def fits(self, shape: tuple[int, ...], dtype: torch.dtype, device: str, dense_modes: int, learned: bool) -> bool:
        """Whether such an operand can be given so."""
        wide = dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128, torch.int64)
        return (
            self.order in (None, len(shape))
            and (self.dense_modes or not dense_modes)
            and (self.learned or not learned)
            and (self.narrow or wide)
            and (self.on_gpu or device == "cpu")
            and (not self.native or (prod(shape) < 2**62 and (not learned or len(shape) < 4)))
            and ("scipy" not in self.text or find_spec("scipy") is not None)
            and (self.order is None or max(shape) < 10**5)  # compressed rows have a pointer each
        )


_COO = "torch.sparse_coo_tensor({c}, {v}, {shape})"
SPARSE: dict[str, SparseForm] = {
    "tensor": SparseForm("stc.SparseTensor({c}, {v}, {shape})", dense_modes=True, learned=True),
    "uncoalesced": SparseForm("stc.SparseTensor({c}, {v}, {shape}, coalesce=False)", dense_modes=True, learned=True),
    "lists": SparseForm("stc.SparseTensor({c}.tolist(), {v}, {shape})", dense_modes=True, learned=True),
    "numpy": SparseForm("stc.SparseTensor({c}.flip(1).numpy()[:, ::-1], {v}, {shape})", on_gpu=False, learned=True),
    "torch_coo": SparseForm(_COO, dense_modes=True, learned=True),
    "torch_coalesced": SparseForm(_COO + ".coalesce()", learned=True, narrow=False),
    "torch_csr": SparseForm(_COO + ".coalesce().to_sparse_csr()", order=2, narrow=False),
    "torch_csc": SparseForm(_COO + ".coalesce().to_sparse_csc()", order=2, narrow=False),
    "scipy": SparseForm(
        "scipy.sparse.coo_array(({v}.numpy(), tuple({c}.numpy())), {shape})", order=2, narrow=False, on_gpu=False
    ),
    "moved": SparseForm("stc.SparseTensor({c}, {v}, {shape}).permute({reverse}).permute({reverse})", learned=True),
}
"""Ways to give a sparse operand; those that come first are plainest."""


def sparse_text(form: str, c: str, v: str, shape: tuple[int, ...]) -> str:
    """The text that makes a sparse operand of its coordinates and values."""
    reverse = ", ".join(map(str, reversed(range(len(shape)))))
    return SPARSE[form].text.format(c=c, v=v, shape=tuple(shape), reverse=reverse)


@dataclass(frozen=True)
class Circumstance:
    """Lines that call an einsum and bind ``found``, and where they apply.

    Attributes:
        factor: what the result is a multiple of, where the lines change values.
        gradients: whether gradients can be asked for within.
        own: whether the first sparse operand must be a `SparseTensor` without dense modes.
        copies: whether operands are copied, which autograd allows of leaves alone: none may be learned.
        changes: whether values are written in place: they must be of plain memory, and not learned.
        bits: whether the bits of a deterministic result can be compared with those of a second run.
    """

    text: str
    factor: int = 1
    gradients: bool = True
    own: bool = False
    copies: bool = False
    changes: bool = False
    bits: bool = True


_changed = partial(Circumstance, factor=2, gradients=False, own=True, changes=True, bits=False)
_copied = partial(Circumstance, gradients=False, own=True, copies=True)
CIRCUMSTANCES: dict[str, Circumstance] = {
    "plain": Circumstance("found = {call}"),
    "twice": Circumstance("{call}\nfound = {call}"),
    "compiled": Circumstance("k = {compile}\n{kept}\nfound = {kept}"),
    "own plan": Circumstance("k = {compile}\nfound = {planned}"),
    "options": Circumstance("with stc.options({settings}): found = {bare}"),
    "no_grad": Circumstance("with torch.no_grad(): found = {call}", gradients=False),
    "inference": Circumstance("with torch.inference_mode(): found = {call}", gradients=False),
    "made under inference": Circumstance(
        "with torch.inference_mode(): {x} = stc.SparseTensor({x}.coords.clone(), {x}.values.clone(), {x}.shape); "
        "found = {call}",
        gradients=False,
        own=True,
    ),
    "autocast": Circumstance('with torch.autocast("{device}", dtype=torch.bfloat16): found = {call}'),
    "default device": Circumstance('with torch.device("meta"): found = {call}'),
    "default dtype": Circumstance(
        "torch.set_default_dtype(torch.float16)\ntry: found = {call}\nfinally: torch.set_default_dtype(torch.float32)"
    ),
    "thread": Circumstance("with ThreadPoolExecutor(1) as pool: found = pool.submit(lambda: {call}).result()"),
    "threads": Circumstance(
        "with ThreadPoolExecutor(4) as pool: found = list(pool.map(lambda _: {call}, range(6)))[-1]"
    ),
    "crowd": Circumstance(
        "with ThreadPoolExecutor(4) as pool: found = list(pool.map(lambda n: {limited}, range(72)))[-1]", bits=False
    ),
    "with_values": Circumstance(
        "k = {compile}\nk({dense})\nfound = k.with_values({doubled})({dense})", 2, gradients=False, own=True
    ),
    "other values": Circumstance(
        "{call}\n{x} = {x}.with_values({x}.values * 2)\nfound = {call}", 2, gradients=False, own=True
    ),
    "in place": _changed("{call}\n{x}.values.mul_(2)\nfound = {call}"),
    "data": _changed("{call}\n{x}.values.data.mul_(2)\nfound = {call}"),
    # which follows torch's count of versions
    "in place of a kernel": _changed("k = {compile}\nk({dense})\n{x}.values.mul_(2)\nfound = k({dense})"),
    "array": _changed("{call}\n{x}.values.numpy()[...] *= 2\nfound = {call}"),
    "a result": Circumstance(
        '{x} = stc.einsum("{identity}", {x}, output="sparse")\nfound = {call}', own=True, bits=False
    ),
    "coordinates": Circumstance("{call}\n{x}_coords.zero_()\nfound = {call}", own=True, bits=False),
    "pickled": _copied("{call}\n{x} = pickle.loads(pickle.dumps({x}))\nfound = {call}"),
    "pickled kernel": _copied("k = pickle.loads(pickle.dumps({compile}))\nfound = k({dense})"),
    "copied": _copied("{call}\n{x} = copy.deepcopy({x})\nfound = {call}"),
    "saved": _copied(
        "{call}\nfile = io.BytesIO()\ntorch.save({x}, file)\nfile.seek(0)\n{x} = torch.load(file)\nfound = {call}"
    ),
}
"""Circumstances of a call; "plain" is none."""
