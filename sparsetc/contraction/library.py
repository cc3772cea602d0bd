"""Operators of `torch.library`: a contraction as one node of a graph that torch traces, exports or differentiates.

In: contractions, known by a text that names each. Out: ``sparsetc::contract``, a result or the gradient of an operand,
with rules for gradients and batches, and ``sparsetc::run``, which it becomes below autograd. Eager calls take the
shorter way, `autograd.apply`.
"""

from __future__ import annotations

import json
import operator
import weakref
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from sparsetc.codegen.parts import Values
from sparsetc.contraction.autograd import UNREAD, following, in_batches, one_by_one
from sparsetc.contraction.contraction import Contraction, compiled, known, wrap
from sparsetc.contraction.kernel import RESULT, SAVED, Kernel, NewValues, operators, saved_settings
from sparsetc.contraction.request import Result, Tensors, converted, placed, promoted
from sparsetc.errors import FormatError, ShapeError, TransformError
from sparsetc.ir.contraction_tree import Tree
from sparsetc.ir.equation.parse import parse_arguments
from sparsetc.ir.plan import RECORDS
from sparsetc.options import latest, of_call
from sparsetc.support import Ints
from sparsetc.support.checks import LONGEST
from sparsetc.support.entry import exporting
from sparsetc.tensor.arithmetic import einsum
from sparsetc.tensor.checksum import bits
from sparsetc.tensor.dtypes import NAMED, captured, dtype_name
from sparsetc.tensor.pattern import Pattern, lasting, transforming
from sparsetc.tensor.sparse_tensor import SparseTensor

_traced: weakref.WeakKeyDictionary[Pattern, dict[str, Contraction]] = weakref.WeakKeyDictionary()
"""Contractions that graphs refer to by name, kept with a pattern that lives as long as the graph can be used."""


def _of(key: str) -> Contraction:
    contraction = known.get(key)
    if contraction is None:
        raise TransformError(
            f"the graph was traced with the kernel {key!r}, which this process does not have; keep the kernel, or the "
            "tensor that einsum was called with, and trace again; what torch.export makes runs in any process, unless "
            "a plan that is an object was asked for"
        )
    return contraction


def _named(key: str, exports: bool) -> str:
    """The name of a contraction in graphs, with a checksum of its patterns: another process may load the graph.

    A program of `torch.export` gets a description instead, from which any process compiles the einsum.
    """
    contraction = _of(key)
    if exports and (description := _description(contraction)):
        return description
    with lasting(), torch._C.DisableTorchFunction(), _disable_current_modes():
        name = " ".join([key, *(f"{bits(pattern.coords):x}" for pattern in _patterns_of(contraction))])
    known[name] = contraction
    return name


_named._dynamo_marked_constant = True  # type: ignore[attr-defined]


# -- programs that other processes load -------------------------------------------------------------------------------


def _description(contraction: Contraction) -> str:
    """Return the arguments of `einsum` other than tensors as JSON; empty if the plan is an object.

    Sizes of the result are letters, as a program may take any number of rows; the number of its entries is fixed.
    """
    patterns, einsum = _patterns_of(contraction), contraction.bound.einsum
    result = contraction.pattern_on(patterns)
    letters = einsum.output if result is None else einsum.output[result.order :]
    about = {
        "einsum": contraction.equation,
        "settings": {"output": contraction.form, **saved_settings(contraction)},
        "terms": einsum.inputs,
        "sparse": einsum.sparse,
        "shapes": [pattern.shape if pattern.blocks is None else pattern.blocks.shape for pattern in patterns],
        "in_blocks": [pattern.blocks is not None for pattern in patterns],
        "coalesced": [pattern.is_coalesced for pattern in patterns],
        "result": [*contraction.shape[: len(contraction.shape) - len(letters)], *letters],
        "dtype": dtype_name(contraction.result_dtype),
    }
    try:
        return json.dumps(about)
    except TypeError:
        return ""


@lru_cache(maxsize=256)
def _described(name: str) -> dict[str, Any] | None:
    """Parse a name that is a description; None for other names. Raise `FormatError` if it is damaged."""
    if not name.startswith("{"):
        return None
    try:
        about: dict[str, Any] = json.loads(name)
        counts = {len(about[key]) for key in ("sparse", "shapes", "in_blocks", "coalesced")}
        letters = {letter for term in about["terms"] for letter in term}
        sound = (
            len(counts) == 1
            and set(about["settings"]) <= {"output", *SAVED}
            and about["dtype"] in NAMED
            and all(type(size) is int or size in letters for size in about["result"])
            and all(type(flag) is bool for key in ("in_blocks", "coalesced") for flag in about[key])
            and all(type(n) is int and 0 <= n < len(about["terms"]) for n in about["sparse"])
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        sound = False
    if not sound:
        raise FormatError(f"a program's node {name[:LONGEST]!r} is no einsum; the program is damaged")
    return about


def _of_program(about: Mapping[str, Any], tensors: Tensors, _: Any = None) -> Tensor:
    """Return the result of a described einsum, or its values. Kernels are kept with the tensors of coordinates."""
    count, sparse = len(about["sparse"]), {}
    values, places = tensors[:count], tensors[count : 2 * count]
    others = iter(tensors[2 * count :])
    kinds = zip(about["sparse"], places, _shapes_of(about, values), about["in_blocks"], about["coalesced"], strict=True)
    for value, (place, *kind) in zip(values, kinds, strict=True):
        sparse[place] = placed(value, *kind)
    operands = [sparse[n] if n in sparse else next(others) for n in range(len(about["terms"]))]
    result: Result = einsum(about["einsum"], *operands, **about["settings"])
    return result if isinstance(result, Tensor) else result._values


def _shapes_of(about: Mapping[str, Any], values: Tensors) -> list[tuple[Any, ...]]:
    """Return the shapes of described sparse operands; the values have the sizes of dense modes."""
    kinds = zip(about["shapes"], about["in_blocks"], values, strict=True)
    return [(*shape, *value.shape[1 + len(shape) * in_blocks :]) for shape, in_blocks, value in kinds]


def _shape_of(about: Mapping[str, Any], tensors: Tensors) -> list[Any]:
    """Return the shape of a described einsum's result; sizes may be symbols."""
    count = len(about["sparse"])
    dense = iter(tensors[2 * count :])
    fixed = dict(zip(about["sparse"], _shapes_of(about, tensors[:count]), strict=True))
    sizes: dict[str, Any] = {}
    for place, term in sorted(enumerate(about["terms"]), key=lambda term: term[0] not in fixed):
        shape = fixed[place] if place in fixed else next(dense).shape
        for letter, size in zip(term, shape, strict=True):
            if letter not in sizes or isinstance(size, torch.SymInt) or size > 1:  # others are broadcast
                sizes[letter] = size
    return [sizes[size] if isinstance(size, str) else size for size in about["result"]]


# -- operators --------------------------------------------------------------------------------------------------------


def run(kernel: str, tensors: list[Tensor], operand: int) -> Tensor:
    """Return the result of values and dense operands, or an operand's gradient, with the result's as last tensor."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):  # in no graph that torch made gradients of
        return contract(kernel, tensors, operand)  # type: ignore[no-any-return]
    about = _described(kernel)
    _check_tangents(tensors[-1], exported=about is not None)
    given = tensors if operand == RESULT else tensors[:-1]
    if about is not None and len(about["sparse"]) + len(about["terms"]) != len(given):
        raise FormatError(f"a program's node {kernel[:LONGEST]!r} has {len(tensors)} tensors; the program is damaged")
    compute = partial(_of_contraction, _of(kernel)) if about is None else partial(_of_program, about)
    if operand == RESULT:
        return _fresh(compute(given), given)
    given = [t.detach() for t in given]
    wanted = given[operand].requires_grad_()
    with following():
        return _fresh(torch.autograd.grad(compute(given, UNREAD), wanted, tensors[-1])[0], tensors[-1:])


def _of_contraction(contraction: Contraction, tensors: Tensors, packed: Values | None = None) -> Tensor:
    """Return the result of values and dense operands; not evaluated where packed values are `UNREAD`."""
    count = len(contraction.bare)
    values, dense = tensors[:count], tensors[count:]
    # The patterns, of which the values are: kernels read them without a look at their size.
    expected = [(tuple(shape), contraction.dtype, contraction.device) for _, shape in contraction.compiled_for]
    kinds = [(tuple(v.shape), v.dtype, v.device) for v in values]
    if kinds != expected:
        name = f"values of the kernel {contraction.key!r}"
        raise ShapeError(f"{name} must be {expected}, (shape, dtype, device), found {kinds}")
    patterns = _patterns_of(contraction)
    if packed is UNREAD:
        return contraction.result(patterns, values, dense, packed)
    packed = None if captured(values[0]) else contraction.packed(values)  # a CUDA graph packs them itself
    return contraction.evaluate(patterns, values, dense, packed)


def shape_of_run(kernel: str, tensors: list[Tensor], operand: int) -> Tensor:
    """Return an empty tensor of the shape and dtype that `run` gives."""
    if operand != RESULT:
        return tensors[operand].new_empty(tensors[operand].shape)
    about = _described(kernel)
    if about is not None:
        return tensors[0].new_empty(_shape_of(about, tensors), dtype=NAMED[about["dtype"]])
    contraction = _of(kernel)
    return tensors[0].new_empty(contraction.shape, dtype=contraction.result_dtype)


def _patterns_of(made: Contraction) -> list[Pattern]:
    """Return the patterns of a contraction's sparse operands, made again if they were freed."""
    return [ref() or bare for bare, (ref, _) in zip(made.bare, made.compiled_for, strict=True)]


def _check_tangents(tensor: Tensor, exported: bool) -> None:
    """TransformError in forward mode where graphs run below it: a tangent would be lost.

    In a program torch takes tangents away before an operator runs, so none is looked for.
    """
    if forward_ad._current_level < 0:
        return
    try:
        forward_ad.unpack_dual(tensor)
        if not exported:
            return
    except RuntimeError:
        pass
    graph = "exported program" if exported else "compiled graph"
    raise TransformError(f"forward mode cannot look into this {graph}; call the function eagerly") from None


def _fresh(found: Tensor, given: Tensors) -> Tensor:
    """A result with memory of its own, as the rules for operators' shapes promise."""
    shared = any(torch._C._is_alias_of(found, t) for t in given)  # type: ignore[attr-defined]
    return found.clone(memory_format=torch.contiguous_format) if shared else found.contiguous()


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.kernel, tensors, ctx.operand = inputs
    ctx.held = known.get(ctx.kernel)  # for its gradients, as long as they may be asked for
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, upstream: Tensor) -> tuple[None, list[Tensor | None], None]:
    """Differentiate a result, or a gradient: linear in each operand, that is a result with `upstream` in its place."""
    tensors, wanted = list(ctx.saved_tensors), ctx.needs_input_grad[1]
    of_given = []
    if ctx.operand != RESULT:
        *tensors, given = tensors
        tensors[ctx.operand], upstream = upstream, given
        of_given = [contract(ctx.kernel, tensors, RESULT) if wanted[-1] else None]
    gradients = [
        contract(ctx.kernel, [*tensors, upstream], n) if w and n != ctx.operand else None
        for n, w in enumerate(wanted[: len(tensors)])
    ]
    return None, gradients + of_given, None


torch.library.register_autograd("sparsetc::contract", _backward, setup_context=_remember, lib=operators)


def _register_batches(name: str) -> None:
    """Register an operator's batching rules for `torch.func` and for autograd: one after the other.

    They are asked for where no kernel can be compiled for all at once.
    """
    operator = getattr(torch.ops.sparsetc, name)

    def rule(info: Any, dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
        return one_by_one(operator, arguments, dims, info.batch_size)

    def of_autograd(*arguments: Any) -> Tensor:
        leaves, form = tree_flatten(list(arguments))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        def called(*given: Tensor) -> list[Tensor]:
            new = iter(given)
            return [operator(*tree_unflatten([next(new) if isinstance(x, Tensor) else x for x in leaves], form))]

        return in_batches(called, *tensors)[0]

    torch.library.register_vmap(f"sparsetc::{name}", rule, lib=operators)
    operators.impl(name, of_autograd, "Batched")


for _operator in ("contract", "run"):
    _register_batches(_operator)
contract = torch.ops.sparsetc.contract.default


# -- tracing ----------------------------------------------------------------------------------------------------------


def traced(kernel: Kernel, dense: Tensors, values: NewValues | None) -> Result:
    """A kernel's call as a node of the graph that is being traced; where it cannot be one, the graph breaks here.

    Whatever Dynamo reads here it looks at again at each call of the graph, so constants are asked for by functions.
    """
    if kernel.drop_zeros or _transforms(is_dynamo_compiling()):
        return kernel._called(tuple(dense), values)
    contraction = kernel.contraction
    exports = exporting()
    name = _named(contraction.key, exports)
    coords = [pattern.coords for pattern in kernel._patterns] if exports else []
    held = [*(kernel._values if values is None else kernel._given(values)), *coords]
    if _is_plain(contraction.key):
        return contract(name, [*held, *dense], RESULT)  # type: ignore[no-any-return]
    tensors = converted(dense, contraction.dtype, contraction.device)
    return wrap(contraction, contract(name, [*held, *tensors], RESULT), kernel._patterns)


def _is_plain(key: str) -> bool:
    """Return True if a contraction's result is dense, and autocast, which would convert operands, is off."""
    contraction = _of(key)
    return not (contraction.sparse or torch.is_autocast_enabled(contraction.device.type))


_is_plain._dynamo_marked_constant = True  # type: ignore[attr-defined]


def traced_einsum(
    opaque: Callable[..., Result], args: tuple[Any, ...], output: str, drop_zeros: bool, settings: Mapping[str, Any]
) -> Result:
    """An einsum as a node of the graph; where it cannot be one, the graph breaks here."""
    text, operands = parse_arguments(args)
    settings = {**dict(latest.traced), **{name: value for name, value in settings.items() if value is not None}}
    if (
        _transforms(is_dynamo_compiling())
        or drop_zeros
        or not all(isinstance(o, SparseTensor | Tensor) for o in operands)
        or (named := constants(settings)) is None
    ):
        return opaque(args, output, drop_zeros, settings)
    promoted_operands = promoted(operands)
    sparse = [o for o in promoted_operands if isinstance(o, SparseTensor)]
    dense = [o for o in promoted_operands if not isinstance(o, SparseTensor)]
    kinds = tuple([_kind(o) for o in promoted_operands])
    # The number of the options is read for the guard that it makes: what they say is a constant of the graph.
    exports = exporting()
    form_and_key = _compiled(text, kinds, output, named, operator.index(latest.number), exports)
    if not form_and_key:
        return opaque(args, output, drop_zeros, settings)
    coords = [o._pattern.coords for o in sparse] if exports else []
    result = contract(form_and_key[1:], [*[o._values for o in sparse], *coords, *dense], RESULT)
    if form_and_key[0] == DENSE:
        return result  # type: ignore[no-any-return]
    pattern = sparse[0]._pattern
    return SparseTensor._make(pattern if form_and_key[0] == OWN else pattern.results[form_and_key[1:]], result)


def _transforms(tracing: bool) -> bool:
    """Return True if the graph is traced (by Dynamo, if `tracing`) in a transform, which no operator follows.

    Dynamo then runs the function as it is: a graph cannot go on after a break there, since its inputs would be what the
    transform wraps. A full graph breaks, which is an error that says where. Modes that trace can only do without.
    """
    if not transforming():
        return False
    if not tracing:
        kinds = {level.key() for level in torch._C._functorch.get_interpreter_stack() or ()}
        if kinds - {torch._C._functorch.TransformType.Vmap}:
            raise TransformError(
                "a graph of a transform of torch.func, but vmap, cannot be traced through a sparsetc kernel; take "
                "torch.autograd.grad there, or trace the function that is transformed"
            )
        return False
    from torch._dynamo.exc import SkipFrame
    from torch._dynamo.symbolic_convert import InstructionTranslator

    if not InstructionTranslator.current_tx().one_graph:
        raise SkipFrame("an einsum within a transform of torch.func")
    return True


_transforms._dynamo_marked_constant = True  # type: ignore[attr-defined]

FIELDS = {kind: tuple(f.name for f in fields(kind)) for kind in (*RECORDS.values(), Tree)}


CONSTANT = str, int, float, tuple, list, type(None), *FIELDS
"""Kinds of settings that Dynamo can have as constants; a path of the file system and numpy's numbers it cannot."""


def constants(settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...] | None:
    """Settings as constants of a graph; None where one cannot be, and the graph is to break before it."""
    if not all(isinstance(value, CONSTANT) for value in settings.values()):
        return None
    return tuple([(name, _constant(value)) for name, value in settings.items()])


def _constant(setting: Any) -> Any:
    """A setting as Dynamo can have it as a constant: a plan as its class and fields, and a list as a tuple."""
    if isinstance(setting, tuple | list):
        return tuple([_constant(one) for one in setting])
    if type(setting) is int:  # a symbol of the graph, where it was another number when the call was traced before
        return operator.index(setting)
    if type(setting) is float:  # so may this be
        return float.fromhex(setting.hex())
    names = FIELDS.get(type(setting))
    return setting if names is None else (type(setting), *[_constant(getattr(setting, name)) for name in names])


def _setting(constant: Any) -> Any:
    """Return the setting that `_constant` encoded."""
    if not isinstance(constant, tuple):
        return constant
    first, *others = constant or ((),)
    return first(*map(_setting, others)) if isinstance(first, type) else tuple(map(_setting, constant))


DENSE, OWN, OTHER = "dos"
"""Forms of a result: dense, on the first sparse operand's own pattern, or on another."""

Kind = tuple[Ints, torch.dtype, torch.device, "int | Ints"]
"""An operand's shape, dtype and device; the number of its pattern, or the strides of a dense one's repeated slices."""


def _kind(operand: Any) -> Kind:
    """An operand as constants, whether the graph's sizes are symbols or not."""
    sizes = tuple([_number_of(n) for n in operand.shape])
    if isinstance(operand, SparseTensor):
        return sizes, operand._values.dtype, operand._values.device, operator.index(operand._pattern.number)
    strides = tuple([_number_of(n) for n in operand.stride()])
    repeated = 0 in strides and not operand.requires_grad
    return sizes, operand.dtype, operand.device, strides if repeated else ()


def _number_of(size: Any) -> int:
    """Return a size as a constant; for a symbol of a program, the size it was exported with."""
    if not is_dynamo_compiling() and isinstance(size, torch.SymInt):
        return int(size.node.hint)
    return operator.index(size)


def _compiled(
    text: str, kinds: tuple[Kind, ...], output: str, settings: tuple[tuple[str, Any], ...], number: int, exports: bool
) -> str:
    """Return the form of the result and a contraction's key for these operands; empty if one was freed.

    It is called while a graph is traced, which sees none of it: what it returns is a constant of that graph.
    """
    # Dynamo looks away by itself; `torch.export` may trace by modes, which are to see nothing either.
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        operands = [_stand_in(*kind) for kind in kinds]
        patterns = [o._pattern for o in operands if isinstance(o, SparseTensor)]
        if not patterns or None in operands:
            return ""
        options = of_call({name: _setting(value) for name, value in settings})
        contraction = compiled(text, [o for o in operands if o is not None], options, output)
        root = next(p for *_, last in kinds if isinstance(last, int) and (p := Pattern.numbered(last)) is not None)
        name = _named(contraction.key, exports)
        _traced.setdefault(root, {})[name] = contraction
        pattern = contraction.pattern_on(patterns)
        if pattern is None:
            return DENSE + name
        if pattern is root:
            return OWN + name
        root.results[name] = pattern
        return OTHER + name


_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]
"""Marked as by `torch.compiler.assume_constant_result`, which would import Dynamo; that takes a second."""


def _stand_in(sizes: Ints, dtype: torch.dtype, device: torch.device, known: int | Ints) -> SparseTensor | Tensor | None:
    """An operand of a kind, to compile for; None where its pattern is gone."""
    with lasting():
        if isinstance(known, tuple):
            make = partial(torch.empty_strided, sizes, known) if known else partial(torch.empty, sizes)
            return make(dtype=dtype, device=device)
        pattern = Pattern.numbered(known)
        if pattern is None:
            return None
        none = torch.zeros((), dtype=dtype, device=device)
        return SparseTensor._make(pattern, none.expand(pattern.values_shape(sizes[pattern.order :])))
