"""Linear layers with a sparse weight, and models of which layers are replaced by such."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from typing_extensions import Unpack

from sparsetc.api import compile, einsum
from sparsetc.contraction.guard import same_kind
from sparsetc.contraction.kernel import Kernel
from sparsetc.errors import CoordinateError, DtypeError, KeywordError, ShapeError
from sparsetc.options import Settings, checked_settings, current
from sparsetc.support.checks import found_shape
from sparsetc.support.entry import traced_by_modes
from sparsetc.tensor import coords as crd
from sparsetc.tensor.blocks import checked
from sparsetc.tensor.pattern import Pattern
from sparsetc.tensor.sparse_tensor import SparseTensor

EQUATION = "oi,bi->bo"
KERNELS = 16
"""Kernels that a layer holds, one for each number of rows of its activations. Not measured."""


class SparseLinear(nn.Module):
    """Apply a linear layer with weights at fixed positions: ``x @ W.T + bias`` for (*, inputs) activations.

    A weight in blocks, as `SparseTensor.from_blocks` and torch's BSR store it, stays in blocks: all elements of the
    blocks are parameters, and on a GPU products use the matrix units. Packed storage and kernels are kept until the
    positions change: when the module moves to another device, or a ``state_dict`` with other positions is loaded.

    Args:
        weight: sparse (outputs, inputs), or anything `SparseTensor.coerce` takes. Its entries, stored zeros too, or
            all elements of its blocks, are the parameters.
        bias: (outputs,), or None for no bias.
        settings: of `einsum`, for each call.

    Attributes:
        values: (nnz,) parameter, in lexicographic order of `coords`; (nnz, *blocksize) for a weight in blocks.
        coords: (2, nnz) buffer: the positions of nonzeros, or of blocks; int32, or int64 for sizes beyond it.

    Raises:
        ShapeError: the weight is not a matrix, or the bias is not of its outputs.
        DtypeError: integers.

    Examples:
        >>> linear = torch.nn.Linear(4, 3)
        >>> stc.nn.SparseLinear.from_dense(linear.weight * torch.eye(3, 4), linear.bias)
        SparseLinear(in_features=4, out_features=3, nnz=3, bias=True)
        >>> stc.nn.SparseLinear.from_dense(torch.eye(4), blocksize=(2, 2))
        SparseLinear(in_features=4, out_features=4, nnz=2, blocksize=(2, 2), bias=False)
    """

    coords: Tensor

    def __init__(self, weight: Any, bias: Tensor | None = None, **settings: Unpack[Settings]) -> None:
        super().__init__()
        sparse = SparseTensor.coerce(weight)
        if sparse is None or sparse.order != 2:
            raise ShapeError(f"SparseLinear takes a sparse matrix (outputs, inputs), found {weight!r:.200}")
        sparse = (sparse.expand_dense() if sparse.dense_order else sparse).coalesce()
        self.out_features, self.in_features = sparse.shape
        if not (sparse.dtype.is_floating_point or sparse.dtype.is_complex):
            raise DtypeError(f"SparseLinear takes floating point or complex weights, found {sparse.dtype}")
        if bias is not None and getattr(bias, "shape", ()) != (self.out_features,):
            raise ShapeError(f"SparseLinear takes a bias ({self.out_features},), found {found_shape(bias)}")
        self.settings = checked_settings(settings)
        self.register_buffer("coords", crd.narrowed(sparse.coords.clone(), max(sparse.shape)))
        self.values = nn.Parameter(sparse.values.detach().clone())
        self._place()
        self._kernels: dict[Any, Kernel] = {}
        self._products: dict[bool, tuple[Any, ...]] = {}
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    @classmethod
    def from_dense(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        blocksize: tuple[int, int] | None = None,
        **settings: Unpack[Settings],
    ) -> SparseLinear:
        """Make the layer of a dense weight: its nonzero elements are kept, or the positions of a mask.

        Args:
            weight: (outputs, inputs).
            bias: (outputs,), or None for no bias.
            mask: (outputs, inputs): keep exactly the positions where it is not 0, zeros too.
            blocksize: sides (s, t): keep every block of s outputs and t inputs that holds such a position. The
                block's other elements start at 0 and are trained too. The sides need not divide the sizes of the
                weight.
            settings: of `einsum`, for each call.
        """
        return cls(SparseTensor.from_dense(weight.detach(), mask=mask, blocksize=blocksize), bias, **settings)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, blocksize: tuple[int, int] | None = None, **settings: Unpack[Settings]
    ) -> SparseLinear:
        """Make the layer of a `torch.nn.Linear`; of one pruned by `torch.nn.utils.prune`, the weights its mask leaves.

        Args:
            linear: the dense layer.
            blocksize: as for `from_dense`.
            settings: of `einsum`, for each call.
        """
        mask: Any = getattr(linear, "weight_mask", None)
        weight: Any = linear.weight if mask is None else linear.weight_orig
        return cls.from_dense(weight, linear.bias, mask, blocksize, **settings)

    @property
    def weight(self) -> SparseTensor:
        """The weight as a SparseTensor (out_features, in_features), with its present values."""
        if self._places is not self.coords and not traced_by_modes():  # which put stand-ins without numbers here
            self._place()
        return SparseTensor._make(self._weight.pattern, self.values)

    def _place(self) -> None:
        self._places = self.coords
        self._weight = SparseTensor._make(self._pattern(self.coords.long(), self.values), self.values.detach())

    def _pattern(self, coords: Tensor, values: Tensor) -> Pattern:
        """Return the pattern of places; values with sides are in blocks."""
        shape = self.out_features, self.in_features
        blocks = checked(values.shape[1:], shape) if values.ndim > 1 else None
        return Pattern(coords, shape if blocks is None else blocks.grid, True, blocks)

    def _apply(self, *args: Any, **settings: Any) -> SparseLinear:
        """Move the places at once, as a graph may be traced before the next call."""
        super()._apply(*args, **settings)
        self._weight = self.weight
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Multiply (*, in_features) activations to (*, out_features)."""
        bias = self.bias
        added = isinstance(x, Tensor) and (bias is None or bias.dtype is x.dtype)
        traced = torch.compiler.is_compiling() or traced_by_modes()
        whole = self._held(x) if added and not traced else None
        if whole is None:
            dense = isinstance(x, Tensor) and x.layout is torch.strided
            if not dense or x.shape[-1:] != (self.in_features,):
                shape = f"(*, {self.in_features})"
                raise ShapeError(f"SparseLinear takes dense {shape} activations, found {found_shape(x)}")
            kernel = None if traced else self._kernel(x)
            if added and kernel is not None and (found := kernel.whole()) is not None:
                whole, again = found
                values: Any = self.values
                self._products[torch.is_grad_enabled()] = same_kind([x, values]), values, _modes(), again
        if whole is not None:
            return nn.functional.linear(x, whole, bias)
        product: Any
        if kernel is None:
            product = einsum(EQUATION, self.weight, self._flat(x), output="dense", **self.settings)
        else:
            product = kernel._called((self._flat(x),), None)
        product = product if x.ndim == 2 else product.reshape(*x.shape[:-1], self.out_features)
        return product if bias is None else product + bias  # type: ignore[no-any-return]

    def _held(self, x: Tensor) -> Tensor | None:
        """Return the dense tensor of the weight as the call before found it, if this call would find the same."""
        held = self._products.get(torch.is_grad_enabled())
        if held is None:
            return None
        same, values, modes, again = held
        there = self._parameters.get("values") is values and self._buffers.get("coords") is self._places
        agree = there and same(x, values) and modes == _modes()
        return again() if agree else None

    def _flat(self, x: Tensor) -> Tensor:
        return x if x.ndim == 2 else x.reshape(prod(x.shape[:-1]), self.in_features)

    def _kernel(self, x: Tensor) -> Kernel | None:
        """Return the kernel that is held for activations of this shape; None where a call looks for one."""
        values = self.values
        # What autocast converts, or a transform puts in a parameter's place, is no kernel's.
        if type(values) is not nn.Parameter or x.dtype is not values.dtype or self._places is not self.coords:
            return None
        key = x.shape, x.dtype, x.device, x.layout, current(), torch.get_float32_matmul_precision()
        kernel = self._kernels.get(key)
        if kernel is None or kernel._values[0] is not values or kernel._patterns[0] is not self._weight._pattern:
            if kernel is not None or len(self._kernels) >= KERNELS:
                self._kernels.clear()
            kernel = compile(EQUATION, self.weight, self._flat(x), output="dense", **self.settings)
            self._kernels[key] = kernel
        return kernel

    def __getstate__(self) -> dict[str, Any]:
        """Leave kernels behind, which are compiled again where the layer is loaded."""
        return {**self.__dict__, "_kernels": {}, "_products": {}}

    def extra_repr(self) -> str:
        """Return sizes, number of nonzeros and bias for printing."""
        nnz, *blocksize = self.values.shape
        blocks = f", blocksize={tuple(blocksize)}" if blocksize else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, nnz={nnz}{blocks}, "
            f"bias={self.bias is not None}"
        )

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Take other places too, of any number and in any blocks: the shape of the matrix is what must agree."""
        coords, values = state_dict.get(f"{prefix}coords"), state_dict.get(f"{prefix}values", self.values)
        if isinstance(coords, Tensor) and coords.shape[:1] == (2,):
            coords = coords.long()
            pattern = self._pattern(coords, values)
            crd.check_range(coords, pattern.shape, "nonzero" if pattern.blocks is None else "block")
            if not crd.is_coalesced(coords, pattern.shape):
                raise CoordinateError(f"{prefix}coords must be in lexicographic order and without duplicates")
            shape = pattern.values_shape(())
            if shape != self.values.shape:
                self.coords = self.coords.new_empty(coords.shape)
                self.values.data = self.values.new_empty(shape)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[no-untyped-call]
        self._place()


def _modes() -> tuple[Any, ...]:
    """Return the settings of a product that torch's guards of tensors do not compare."""
    return forward_ad._current_level, current(), torch.get_float32_matmul_precision()


def sparsify(
    model: nn.Module,
    masks: Mapping[str, Tensor] | float | None = None,
    blocksize: tuple[int, int] | None = None,
    **settings: Unpack[Settings],
) -> nn.Module:
    """Replace the linear layers of a pruned model by `SparseLinear` layers.

    Layers of a subclass of `torch.nn.Linear`, whose weights others may read, stay as they are.

    Args:
        model: changed in place, unless it is a linear layer itself.
        masks: a mask of the weight by the name of each layer, as ``named_modules`` has it; or a number: weights of a
            larger magnitude stay, in all layers. None: what `torch.nn.utils.prune` left, of layers that it pruned.
        blocksize: of blocks that hold a weight that stays; see `SparseLinear.from_dense`.
        settings: of `einsum`, for each call.

    Returns:
        The model; of a linear layer the new one.

    Raises:
        KeywordError: a name that no linear layer has.

    Examples:
        >>> stc.nn.sparsify(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()), {"0": torch.eye(3, 4)})
        Sequential(
          (0): SparseLinear(in_features=4, out_features=3, nnz=3, bias=True)
          (1): ReLU()
        )
    """
    places = [*model.named_modules(remove_duplicate=False)]
    linear = {name: module for name, module in places if type(module) is nn.Linear}
    if isinstance(masks, Mapping) and (unknown := sorted(masks.keys() - linear.keys())):
        raise KeywordError(f"no linear layer is called {unknown[0]!r}; there are {', '.join(map(repr, linear))[:200]}")
    layers: dict[nn.Module, SparseLinear] = {}
    for name, module in linear.items():
        mask: Any = masks.get(name) if isinstance(masks, Mapping) else getattr(module, "weight_mask", None)
        if isinstance(masks, int | float):
            mask = module.weight.detach().abs() > masks
        if mask is not None and module not in layers:
            weight: Any = getattr(module, "weight_orig", module.weight)
            layer = SparseLinear.from_dense(weight, module.bias, mask, blocksize, **settings)
            layers[module] = layer.train(module.training)
    for name, module in linear.items():  # one that stands in two places stands there again
        if module in layers and name:
            model.set_submodule(name, layers[module])
    return layers.get(model, model)
