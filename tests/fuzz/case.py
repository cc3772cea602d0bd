"""A case: an einsum, its operands and the circumstance it is called in, as plain data that strategies draw.

Tensors are no part of it: values are named by a kind and a seed, layouts and circumstances by names whose source text
stands here, after what is so of them. In the texts of `MEMORY`, ``{t}`` is the tensor of values; in those of `SPARSE`,
``{c}``, ``{v}`` and ``{shape}`` are the parts of a sparse tensor; in those of `CIRCUMSTANCES`, ``{call}`` and
``{compile}`` are the calls, ``{x}`` is the first sparse operand and ``{dense}`` are the dense ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import prod

import torch

COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}
"""Complex types whose parts are real operands."""
HUGE = 10**6
"""The largest size of a letter that a dense operand may have without being broadcast."""


MEMORY = {
    "plain": ("", "{t}"),
    "transposed": ("matrix", "{t}.permute({reverse}).contiguous().permute({reverse})"),
    "strided": ("", "torch.stack([{t}, {t}], -1)[..., 0]"),
    "padded": ("vector", "torch.cat([{t}, {t}], -1)[..., :{last}]"),
    "offset": ("", "torch.cat([{t}.new_zeros(1), {t}.reshape(-1)])[1:].view({shape})"),
    "expanded": ("vector filled", "{t}.expand({shape})"),
    "conj": ("complex", "{t}.conj()"),
    "negative": ("part", "{t}.conj().imag"),
    "real": ("part", "{t}.real"),
    "numpy": ("array", "{t}.numpy()"),
    "backwards": ("vector array", "{t}.flip(0).numpy()[::-1]"),
}
"""Layouts of dense operands and, but for arrays of numpy, of the values of sparse ones; a "part" is of a complex."""
COO = "torch.sparse_coo_tensor({c}, {v}, {shape})"
SPARSE = {
    "tensor": ("learned modes own", "stc.SparseTensor({c}, {v}, {shape})"),
    "uncoalesced": ("learned modes own", "stc.SparseTensor({c}, {v}, {shape}, coalesce=False)"),
    "lists": ("learned modes own", "stc.SparseTensor({c}.tolist(), {v}, {shape})"),
    "numpy": ("learned own cpu", "stc.SparseTensor({c}.flip(1).numpy()[:, ::-1], {v}, {shape})"),
    "moved": ("learned own", "stc.SparseTensor({c}, {v}, {shape}).permute({reverse}).permute({reverse})"),
    "torch_coo": ("learned modes torch", COO),
    "torch_coalesced": ("learned wide torch", COO + ".coalesce()"),
    "torch_csr": ("rows wide torch", COO + ".coalesce().to_sparse_csr()"),
    "torch_csc": ("rows wide torch", COO + ".coalesce().to_sparse_csc()"),
    "scipy": ("rows wide cpu", "scipy.sparse.coo_array(({v}.numpy(), tuple({c}.numpy())), {shape})"),
}
"""Ways to give a sparse operand: "learned" where autograd reaches the values, "modes" where it may have dense ones,
"own" where it is a `SparseTensor`, "wide" where it takes only types of 32 bits or more."""
POOL = "with ThreadPoolExecutor(4) as pool: found = list(pool.map(lambda n: {%s}, range(%d)))[-1]"
CIRCUMSTANCES = {
    "plain": ("graph bits", "found = {call}"),
    "twice": ("graph bits", "{call}\nfound = {call}"),
    "compiled": ("graph bits", "k = {compile}\n{kept}\nfound = {kept}"),
    "own plan": ("graph bits", "k = {compile}\nfound = {planned}"),
    "options": ("graph bits", "with stc.options({settings}): found = {bare}"),
    "no_grad": ("bits", "with torch.no_grad(): found = {call}"),
    "inference": ("bits", "with torch.inference_mode(): found = {call}"),
    "made under inference": (
        "own bits",
        "with torch.inference_mode(): {x} = stc.SparseTensor({x}.coords.clone(), {x}.values.clone(), {x}.shape); "
        "found = {call}",
    ),
    "autocast": ("graph bits", 'with torch.autocast("{device}", dtype=torch.bfloat16): found = {call}'),
    "default device": ("graph bits", 'with torch.device("meta"): found = {call}'),
    "default dtype": (
        "graph bits",
        "torch.set_default_dtype(torch.float16)\ntry: found = {call}\nfinally: torch.set_default_dtype(torch.float32)",
    ),
    "thread": ("graph bits", POOL % ("call", 1)),
    "threads": ("graph bits threads", POOL % ("call", 6)),
    "crowd": ("graph threads", POOL % ("limited", 72)),
    "with_values": ("own bits doubled", "k = {compile}\nk({dense})\nfound = k.with_values({doubled})({dense})"),
    "other values": ("own bits doubled", "{call}\n{x} = {x}.with_values({x}.values * 2)\nfound = {call}"),
    "in place": ("own changed doubled", "{call}\n{x}.values.mul_(2)\nfound = {call}"),
    "data": ("own changed doubled cpu", "{call}\n{x}.values.data.mul_(2)\nfound = {call}"),
    "of a kernel": ("own changed doubled", "k = {compile}\nk({dense})\n{x}.values.mul_(2)\nfound = k({dense})"),
    "array": ("own changed doubled cpu", "{call}\n{x}.values.numpy()[...] *= 2\nfound = {call}"),
    "a result": ("graph own", '{x} = stc.einsum("{identity}", {x}, output="sparse")\nfound = {call}'),
    "coordinates": ("graph own", "{call}\n{x}_coords.zero_()\nfound = {call}"),
    "pickled": ("own copied bits", "{call}\n{x} = pickle.loads(pickle.dumps({x}))\nfound = {call}"),
    "pickled kernel": ("own copied bits", "k = pickle.loads(pickle.dumps({compile}))\nfound = k({dense})"),
    "copied": ("own copied bits", "{call}\n{x} = copy.deepcopy({x})\nfound = {call}"),
    "saved": (
        "own copied bits",
        "f = io.BytesIO()\ntorch.save({x}, f)\nf.seek(0)\n{x} = torch.load(f)\nfound = {call}",
    ),
}
"""Circumstances of a call: "graph" where gradients can be asked for within, "bits" where a second run gives the same
ones if it is deterministic, "own" where the first sparse operand must be a `SparseTensor`, "changed" where its values
are changed in place, "doubled" where they are twice as large in the end."""


@dataclass(frozen=True)
class Operand:
    """One operand.

    Attributes:
        values: the kind of its numbers, their seed, and how many are NaN or infinite.
        nonzeros: coordinates, a tuple for each nonzero, duplicates allowed; None for a dense operand.
        dense_modes: trailing modes of a sparse operand that its values hold whole.
        dtype: where it is not the case's: under autocast operands may have different ones.
        same_as: the place of an earlier operand that is the same object.
    """

    letters: str
    shape: tuple[int, ...]
    values: tuple[str, int, int] = ("ones", 0, 0)
    nonzeros: tuple[tuple[int, ...], ...] | None = None
    memory: str = "plain"
    form: str = "tensor"
    learned: bool = False
    dense_modes: int = 0
    dtype: str = ""
    same_as: int | None = None

    @property
    def sparse(self) -> bool:
        return self.nonzeros is not None

    @property
    def duplicates(self) -> bool:
        return self.nonzeros is not None and len(set(self.nonzeros)) < len(self.nonzeros)

    @property
    def value_shape(self) -> tuple[int, ...]:
        """Shape of the tensor of its values."""
        split = len(self.shape) - self.dense_modes
        return self.shape if self.nonzeros is None else (len(self.nonzeros), *self.shape[split:])

    def given(self, flags: str, dtype: torch.dtype, device: str) -> bool:
        """Whether such an operand can be given or laid out in a way of which this is so."""
        order = len(self.value_shape)
        fine = {
            "vector": order > 0,
            "matrix": order > 1,
            "rows": len(self.shape) == 2 and max(self.shape) < 10**5,  # which have a pointer each
            "filled": self.value_shape[:1] != (0,),
            "complex": dtype.is_complex,
            "part": dtype in COMPLEX,
            "array": dtype != torch.bfloat16 and device == "cpu" and not self.sparse and not self.learned,
            "cpu": device == "cpu",
            "wide": dtype not in (torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32),
            "torch": prod(self.shape) < 2**62 and (not self.learned or len(self.shape) < 4),
        }
        return all(fine.get(flag, True) for flag in flags.split())

    def formed(self, form: str, dtype: torch.dtype, device: str) -> bool:
        """Whether such a sparse operand can be given in a form."""
        flags = SPARSE[form][0]
        modes = "modes" in flags or not self.dense_modes
        bits = "own" in flags or self.memory not in ("conj", "negative")  # which torch's and scipy's have not
        return modes and bits and ("learned" in flags or not self.learned) and self.given(flags, dtype, device)


@dataclass(frozen=True)
class Case:
    """An einsum, its operands, its options, and the circumstance in which it is called.

    Attributes:
        kind: "einsums", "gradients" or "contractions" (of several sparse operands).
        plan: a name, or the text of a call that makes one, in which ``{plain}`` are the arguments of the einsum.
        memory_limit: bytes, as an option of the call; 0 for none.
        ellipsis: letters that are written as "...".
        second: whether gradients are differentiated once more.
    """

    kind: str
    operands: tuple[Operand, ...]
    output: str
    dtype: str = "float32"
    plan: str = "auto"
    form: str = "auto"
    precision: str = ""
    deterministic: bool = False
    backend: str = "torch"
    device: str = "cpu"
    memory_limit: int = 0
    notation: str = "plain"
    ellipsis: str = ""
    circumstance: str = "plain"
    second: bool = False

    def dtype_of(self, operand: Operand) -> torch.dtype:
        return getattr(torch, operand.dtype or self.dtype)

    @property
    def promoted(self) -> torch.dtype:
        """The widest of the operands' dtypes."""
        return reduce(torch.promote_types, map(self.dtype_of, self.operands))

    @property
    def letters(self) -> str:
        """Every letter once, in the order of first use."""
        return "".join(dict.fromkeys("".join(o.letters for o in self.operands)))

    @property
    def sparse_letters(self) -> str:
        return "".join(dict.fromkeys("".join(o.letters for o in self.operands if o.sparse)))

    @property
    def sizes(self) -> dict[str, int]:
        """Full size of each letter: that of an operand which does not broadcast it."""
        found: dict[str, int] = {}
        for o in self.operands:
            found |= {c: n for c, n in zip(o.letters, o.shape, strict=True) if found.get(c, 1) == 1}
        return found

    @property
    def several(self) -> bool:
        return sum(o.sparse for o in self.operands) > 1

    @property
    def names(self) -> tuple[str, ...]:
        """The variable of each operand."""
        sparse, dense = iter("xyzuvw"), iter("abcdefg")
        return tuple(next(sparse) if o.sparse else next(dense) for o in self.operands)

    @property
    def flags(self) -> list[str]:
        """What is so of its circumstance."""
        return CIRCUMSTANCES[self.circumstance][0].split()
