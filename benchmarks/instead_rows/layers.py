"""Pruned weights: `nn.SparseLinear`, and a kernel that is held, beside `F.linear` on the dense matrix."""

from __future__ import annotations

from functools import partial
from itertools import product

import common
import torch
from torch.nn.functional import linear

import sparsetc as stc
from instead_rows.calls import quiet, with_tf32
from instead_rows.operands import generator, normal
from instead_rows.row import CPU, GPU, LIMIT, TF32, Call, Row, Task

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "float32": torch.float32}
SQUARE, WIDE = (4096, 4096), (11008, 4096)
SPARSITY, TOKENS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98), (1, 16, 256, 4096)


def pruned(shape: tuple[int, int], sparsity: float, dtype: torch.dtype, side: int = 1) -> torch.Tensor:
    """A dense weight (outputs, inputs) with zeros, in blocks of a side."""
    grid = [size // side for size in shape]
    kept = torch.rand(grid, generator=generator(1), device=common.DEVICE) >= sparsity
    kept = kept.repeat_interleave(side, 0).repeat_interleave(side, 1)
    return (normal(*shape) * shape[1] ** -0.5).to(dtype) * kept


def product_in_blocks(side: int, shape: tuple[int, int], sparsity: float, tokens: int, kind: str) -> Task:
    """The product of a layer in blocks, without gradients."""
    dtype = TYPES[kind]
    weight, x = pruned(shape, sparsity, dtype, side), normal(tokens, shape[1], dtype=dtype, seed=2)
    layer, bsr = stc.nn.SparseLinear.from_dense(weight, blocksize=(side, side)), weight.to_sparse_bsr((side, side))
    instead = {
        "F.linear on the dense matrix": lambda: linear(x, weight),
        "F.linear on torch's BSR": lambda: linear(x, bsr),
    }
    return Task(quiet(lambda: layer(x)), instead, lambda: x.double() @ weight.double().T, LIMIT[dtype])


def product_of(form: str, shape: tuple[int, int], sparsity: float, tokens: int, kind: str) -> Task:
    """The layer's product, without gradients: by the module, or by a kernel whose values are packed once."""
    dtype, precision = TYPES[kind], "high" if kind == "tf32" else "highest"
    weight, x = pruned(shape, sparsity, dtype), normal(tokens, shape[1], dtype=dtype, seed=2)
    dense: Call = lambda: linear(x, weight)  # noqa: E731
    if form == "module":
        layer = stc.nn.SparseLinear.from_dense(weight, precision=precision)
        ours: Call = lambda: layer(x)  # noqa: E731
    else:
        operand = stc.SparseTensor.from_dense(weight)
        kernel = stc.compile("oi,bi->bo", operand, x, output="dense", precision=precision)
        ours = lambda: kernel(x)  # noqa: E731
    return Task(
        quiet(ours),
        {"F.linear on the dense matrix": with_tf32(dense) if kind == "tf32" else dense},
        lambda: x.double() @ weight.double().T,
        TF32 if kind == "tf32" else LIMIT[dtype],
    )


def trained(shape: tuple[int, int], sparsity: float, tokens: int, kind: str, side: int = 1) -> Task:
    """Forward, and gradients of activations and weights, beside a dense weight that is masked as `prune` does."""
    dtype = TYPES[kind]
    weight = pruned(shape, sparsity, dtype, side)
    x, g = normal(tokens, shape[1], dtype=dtype, seed=2).requires_grad_(), normal(tokens, shape[0], dtype=dtype, seed=3)
    layer = stc.nn.SparseLinear.from_dense(weight, blocksize=None if side == 1 else (side, side))
    mask, whole = (weight != 0).to(dtype), weight.clone().requires_grad_()

    def ours() -> tuple[object, ...]:
        out = layer(x)
        of_x, of_values = torch.autograd.grad(out, (x, layer.values), g)
        return out, of_x, layer.weight.with_values(of_values)

    def dense() -> tuple[object, ...]:
        out = linear(x, whole * mask)
        return out, *torch.autograd.grad(out, (x, whole), g)

    def expected() -> tuple[torch.Tensor, ...]:
        of_weight = g.double().T @ x.detach().double()
        return x.detach().double() @ weight.double().T, g.double() @ weight.double(), of_weight * mask

    return Task(ours, {"F.linear on the masked matrix": dense}, expected, LIMIT[dtype])


def _name(form: str, shape: tuple[int, int], sparsity: float, tokens: int, kind: str) -> str:
    return f"{form}, {shape[0]} x {shape[1]}, sparsity {sparsity:g}, {tokens} tokens, {kind}"


REPRESENTATIVE = {
    *product(["module"], [SQUARE], (0.5, 0.8, 0.9, 0.95), (16, 256, 4096), ["fp16"]),
    *product(["kernel"], [SQUARE], (0.5, 0.9), (256, 4096), ["fp16"]),
    *product(["module"], [SQUARE], [0.9], (256, 4096), ("bf16", "tf32")),
    *product(["module"], [WIDE], (0.9, 0.98), (1, 256), ["fp16"]),
    ("kernel", SQUARE, 0.98, 1, "fp16"),
}
"""What is run without ``--full``."""
GRID = list(product(("module", "kernel"), (SQUARE, WIDE), SPARSITY, TOKENS, ("fp16", "bf16", "tf32")))

ROWS = [
    *(
        Row(_name(*case), "pruned weights", partial(product_of, *case), GPU, full=case not in REPRESENTATIVE)
        for case in sorted(GRID, key=lambda case: case not in REPRESENTATIVE)
    ),
    *(
        Row(f"training step, {_name('module', *case)}", "pruned weights", partial(trained, *case), GPU)
        for case in ((SQUARE, 0.9, 256, "fp16"), (SQUARE, 0.9, 4096, "fp16"))
    ),
    *(
        Row(_name(*case), "pruned weights", partial(product_of, *case), CPU)
        for case in product(["module"], [(1024, 1024)], (0.5, 0.9, 0.98), (1, 64), ["float32"])
    ),
    Row(
        f"training step, {_name('module', (1024, 1024), 0.9, 64, 'float32')}",
        "pruned weights",
        partial(trained, (1024, 1024), 0.9, 64, "float32"),
        CPU,
    ),
    *(
        Row(_name(f"blocks of {side}²", *case), "pruned weights", partial(product_in_blocks, side, *case), GPU)
        for side, case in product((32, 64), product([SQUARE], (0.8, 0.9, 0.95), (256, 4096), ["fp16"]))
    ),
    *(
        Row(_name("blocks of 32²", *case), "pruned weights", partial(product_in_blocks, 32, *case), CPU)
        for case in product([(1024, 1024)], (0.9,), (1, 64), ["float32"])
    ),
    *(
        Row(f"training step, {_name('blocks of 32²', *case)}", "pruned weights", partial(trained, *case, 32), on)
        for case, on in (((SQUARE, 0.9, 4096, "fp16"), GPU), (((1024, 1024), 0.9, 64, "float32"), CPU))
    ),
]
