"""Evaluation of bodies on tensors: by kernels if possible, else in steps over the entries of a pattern.

In: a body, the pairs that it is computed of, and tensors. Out: the result. The log says at level DEBUG which way was
taken, and why. The steps are sampled products, the map on what these and the vectors are for each entry, a softmax over
the entries of a row, and a product; they are differentiable any number of times, and by every transform of torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from sparsetc import masks
from sparsetc.api import einsum
from sparsetc.contraction.autograd import following
from sparsetc.errors import ShapeError, TransformError
from sparsetc.explain import MapReport, device_name, watched
from sparsetc.maps.body import LOG2E, Body
from sparsetc.maps.fused import Results, fused, gradients_by, gradients_of_steps
from sparsetc.maps.pairs import Pairs, pattern_of, single
from sparsetc.maps.saved import described, read
from sparsetc.maps.task import Kernels, Task, flattened, lead_of, result_shape
from sparsetc.maps.torch_walk import LOWEST, mixed, multiplied_by
from sparsetc.options import Options, Settings, in_force, of_call
from sparsetc.support import Ints, Lru
from sparsetc.support.checks import found_shape
from sparsetc.support.entry import entry_point, exporting, log, traced_by_modes, without_autocast
from sparsetc.tensor.dtypes import accumulator
from sparsetc.tensor.groups import added, gathered, groups_of
from sparsetc.tensor.pattern import Pattern, transforming
from sparsetc.tensor.softmax import log_sums, softmax
from sparsetc.tensor.sparse_tensor import SparseTensor

KEPT = 256
"""Bodies that graphs may name. Not measured."""


def computed(
    body: Body,
    pairs: Pairs,
    tensors: Sequence[Tensor],
    settings: Settings,
    name: str,
    seed: Tensor | None = None,
    with_lse: bool = False,
) -> Results:
    """Return the result of a body, (*heads, rows, size), (*heads, rows) or (*heads, entries), and maybe rows' log-sums.

    Args:
        body: a function of each pair.
        pairs: the pairs of a row and a column that it is computed for.
        tensors: as `Body.inputs` says, tables of one dtype, with any modes of heads; those of columns may have a head
            for several of rows.
        settings: of `einsum`; kernels take precision and cache_dir.
        name: for the log and for files.
        seed: (1,) int64, of random numbers, where the body drops weights.
        with_lse: whether the logarithms of the sums of rows are returned too, (*heads, rows).
    """
    task = Task(body, pairs, of_call(settings), name)
    if traced_by_modes() and not transforming():
        key, coords = _key_and_coords(task)
        if key:
            both = torch.ops.sparsetc.mapped(key, [*flattened(body, tensors), *coords], seed)
            lead = lead_of(body, pairs, tensors)
            return tuple([_with_lead(one, lead) for one in both[: 1 + with_lse]])
    steps = partial(in_steps, body, pairs, settings, seed, with_lse)
    kernels, ready = kernels_of(task, tensors)
    if kernels is None:
        return steps(*tensors)
    results = fused(kernels, steps, ready, seed, with_lse)
    dtype = tensors[0].dtype
    return results if ready[0].dtype == dtype else (results[0].to(dtype), *results[1:])


_opaque = entry_point(computed)


def traceable(
    body: Body, pairs: Pairs, tensors: Sequence[Tensor], settings: Settings, name: str, seed: Tensor | None = None
) -> Tensor:
    """Compute as `computed` does, for callers that Dynamo looks into: it traces the steps."""
    if is_dynamo_compiling():
        return in_steps(body, pairs, settings, seed, False, *tensors)[0]
    return _opaque(body, pairs, tensors, settings, name, seed)[0]


known: Lru[str, Task] = Lru(KEPT)
"""Tasks by the keys that graphs' nodes name them by: see `pairwise_ops`."""
_keys: Lru[Any, str] = Lru(KEPT)
_numbers = itertools.count()


def key_of(task: Task) -> str:
    """Return the key by which operators know a task, the same for equal ones."""
    body, pairs, options, name = task
    told_apart = body, pairs.given, pairs.shape, pairs.device, pairs.patterns, pairs.fastest, options, name
    key = _keys.once(told_apart, lambda: f"{name} {next(_numbers)}")
    known.once(key, lambda: task)
    return key


def _key_and_coords(task: Task) -> tuple[str, list[Tensor]]:
    """Return what names a map in a graph; in a program, a text and coordinates. The text is empty if it has none."""
    if not exporting():
        return key_of(task), []
    if not isinstance(task.pairs.given, Pattern) and (text := described(task)):
        return text, []
    pairs = task.pairs if isinstance(task.pairs.given, Pattern) else of_entries(task.pairs)
    return described(task._replace(pairs=pairs)), [pairs.given.coords]  # type: ignore[union-attr]


def kernels_of(task: Task, tensors: Sequence[Tensor]) -> tuple[Kernels | None, Sequence[Tensor]]:
    """Return the kernels for these tensors and the tensors in the kernels' layout; None if there are no kernels."""
    reason, kernels = _unfit(task.options), None
    if not reason:
        kernels = task.kernels(tensors)
        if kernels.copied and any(kernels.copied):
            tensors = kernels.taken(tensors)
            kernels = task.kernels(tensors)
        reason = kernels.refusal
    reports = watched.get()
    if reports is not None:
        reports.append(_report(task, reason, kernels))
    if reason:
        log.debug("%s runs in steps: %s", task.name, reason)
        return None, tensors
    log.debug("%s runs in one kernel", task.name)
    return kernels, tensors


def _report(task: Task, reason: str, kernels: Kernels | None) -> MapReport:
    """Return what `explain` says of a call."""
    _, pairs, options, name = task
    return MapReport(
        name,
        "in steps" if reason else "in one kernel",
        reason,
        "numba" if kernels is not None and kernels.loops else options.effective_backend(pairs.device).name,
        device_name(pairs.device),
        pairs.shape,
        pairs.patterns,
        () if reason or kernels is None else kernels.reports(),
    )


def _unfit(options: Options) -> str:
    """Return the reason why kernels cannot run here and now; empty if they can."""
    if transforming() or forward_ad._current_level >= 0:
        return "forward mode, or a transform of torch.func"
    if exporting():
        return "an exported program has einsums, which any process runs"
    if options.plan != "auto" or options.tune is not None:
        return "a plan or a search of plans was asked for"
    return ""


# -- in steps ---------------------------------------------------------------------------------------------------------


def in_steps(
    body: Body, pairs: Pairs, settings: Settings, seed: Tensor | None, with_lse: bool, *tensors: Tensor
) -> Results:
    """Return what `computed` does, entry by entry."""
    results = _in_steps(body, pairs, settings, seed, with_lse, flattened(body, tensors))
    if body.stored and pairs.patterns > 1:
        return tuple(results)
    lead = lead_of(body, pairs, tensors)
    return tuple([_with_lead(one, lead) for one in results])


def _with_lead(one: Tensor, lead: Ints) -> Tensor:
    """Return a tensor with these modes in place of its first one."""
    return one if len(lead) == 1 else one.reshape(*lead, *one.shape[1:])


def _in_steps(
    body: Body, pairs: Pairs, settings: Settings, seed: Tensor | None, with_lse: bool, tensors: Sequence[Tensor]
) -> list[Tensor]:
    """Return the result, and maybe the logarithms of rows' sums, of tensors with one mode of heads."""
    pattern = entries_of(pairs)
    dtype = tensors[0].dtype
    wide = accumulator(tensors[0].dtype)
    (heads,) = lead_of(body, pairs, tensors)
    inputs = {name: _whole(body, pairs, name, tensor, heads) for name, tensor in zip(body.inputs, tensors, strict=True)}
    inputs = {name: t.to(wide) if t.is_floating_point() else t for name, t in inputs.items()}
    stacked = pattern.order == 3
    entry, row, column = ("pij", "pxid", "pxjd") if stacked else ("ij", "xid", "xjd")
    ones = SparseTensor._make(pattern, tensors[0].new_ones(pattern.nnz, dtype=wide))
    values = {}
    for name, (left, right) in body.products.items():
        if name in body.inner:
            function, shared = body.inner[name]
            rows = [
                gathered(inputs[t].transpose(0, 1), place)
                for t, place in zip((left, right), pattern.coords, strict=True)
            ]
            values[name] = function(*rows, inputs[shared]).sum(-1)
            continue
        equation = f"{entry},{row},{column}->{entry}x"
        values[name] = einsum(equation, ones, inputs[left], inputs[right], output="sparse", **settings).values
    for name, side in body.vectors.items():
        values[name] = inputs[name]
        if side != "entries":
            values[name] = _at_entries(body, name, inputs[name], pattern)
        if name in body.positions:
            values[name] = values[name].long()
    mapped, whole = body.mapped(values), (pattern.nnz, heads // pairs.patterns)
    fits = isinstance(mapped, Tensor) and all(
        n in (1, m) for n, m in zip(mapped.shape[::-1], whole[::-1], strict=False)
    )
    if not fits:
        raise ShapeError(
            f"the function must return a tensor of its arguments' shape {whole}, found {found_shape(mapped)}"
        )
    weights = mapped.expand(whole)
    log_of_rows = log_sums(weights, pattern, (*range(pattern.order - 1),)) if with_lse else None
    if body.softmax:
        weights = softmax(SparseTensor._make(pattern, weights), pattern.order - 1)._values
    if seed is not None:
        weights = weights * kept(body.dropout, seed, pattern, pairs, heads)
    if body.stored:
        return [weights.T.to(dtype)]
    if body.table is None:
        result = _of_rows(added(weights, pattern, (*range(pattern.order - 1),)), pattern, pairs, 0.0)
    else:
        equation = f"{entry}x,{column}->{row}"
        weighted = SparseTensor._make(pattern, weights)
        result = _by_head(einsum(equation, weighted, inputs[body.table], output="dense", **settings), pairs)
    result = result.to(dtype)
    if log_of_rows is None:
        return [result]
    return [result, _of_rows(log_of_rows, pattern, pairs, -torch.inf)]


def _whole(body: Body, pairs: Pairs, name: str, tensor: Tensor, heads: int) -> Tensor:
    """Return a tensor of all heads; of a stack of patterns, as (patterns, heads of each, ...); of entries turned."""
    if body.vectors.get(name) == "entries":
        return tensor.T
    if tensor.shape[0] < heads:
        tensor = tensor.repeat_interleave(heads // tensor.shape[0], 0)
    if pairs.patterns == 1:
        return tensor
    if pairs.fastest:
        return tensor.unflatten(0, (-1, pairs.patterns)).transpose(0, 1)
    return tensor.unflatten(0, (pairs.patterns, -1))


def _by_head(tensor: Tensor, pairs: Pairs) -> Tensor:
    """Return (heads, ...) of a stack's (patterns, heads of each, ...)."""
    if pairs.patterns == 1:
        return tensor
    return (tensor.transpose(0, 1) if pairs.fastest else tensor).flatten(0, 1)


def _at_entries(body: Body, name: str, vector: Tensor, pattern: Pattern) -> Tensor:
    """Return (nnz, heads of a pattern) of numbers of a vector, of which an entry has one."""
    row, column = pattern.coords[-2:]
    place, size = row if body.vectors[name] == "rows" else column, vector.shape[-1]
    if name in body.places:
        place = body.places[name].of({"i": row.double(), "j": column.double()}).long().remainder_(size)
    if pattern.order == 2:
        return gathered(vector.T, place)
    return gathered(vector.transpose(1, 2).flatten(0, 1), pattern.coords[0] * size + place)


def _of_rows(groups: Tensor, pattern: Pattern, pairs: Pairs, fill: float) -> Tensor:
    """Return (heads, rows) numbers, given those of the rows with entries; `fill` elsewhere."""
    *stack, row = groups_of(pattern, (*range(pattern.order - 1),)).pattern.coords
    rows = pairs.shape[0]
    whole = groups.new_full((pairs.patterns * rows, groups.shape[1]), fill)
    whole = whole.index_copy(0, row + stack[0] * rows if stack else row, groups[: len(row)])
    if not stack:
        return whole.T
    return _by_head(whole.unflatten(0, (pairs.patterns, rows)).transpose(1, 2), pairs)


def entries_of(pairs: Pairs) -> Pattern:
    """Return the pattern of single entries of some pairs; of a stack, with one mode more in front."""
    given = pairs.given
    if isinstance(given, Pattern):
        return single(given)
    if isinstance(given, masks.Mask):
        return pattern_of(given, pairs.shape, pairs.device)
    each = [pattern_of(mask, pairs.shape, pairs.device).coords for mask in given]

    def made() -> Pattern:
        stacked = [torch.cat((torch.full_like(coords[:1], n), coords)) for n, coords in enumerate(each)]
        return Pattern(torch.cat(stacked, 1), (len(each), *pairs.shape), True)

    return pairs.kept(("stacked",), made)


def of_entries(pairs: Pairs) -> Pairs:
    """Return the pairs as a pattern of single entries, whose numbers inputs or results are given by."""
    pattern = entries_of(pairs)
    return pairs if pattern is pairs.given else pairs._replace(given=pattern)


# -- what operators of graphs do --------------------------------------------------------------------------------------


def _of(key: str, tensors: list[Tensor]) -> tuple[Task, list[Tensor]]:
    """Return the task of a key, and its tensors. Those of a saved one end in coordinates, which are left out."""
    if key.startswith("{"):
        return read(key, tensors)
    task = known.get(key)
    if task is None:
        raise TransformError(
            f"the graph was traced with {key!r}, which this process does not have, or no more; trace it again here"
        )
    return task, tensors


def run_mapped(key: str, tensors: list[Tensor], seed: Tensor | None) -> tuple[Tensor, Tensor]:
    if forward_ad._current_level >= 0:  # torch takes tangents away before an operator runs
        raise TransformError("forward mode cannot look into this graph; call the function eagerly")
    (body, pairs, options, name), tensors = _of(key, tensors)
    with in_force(options), without_autocast(tensors[0].device):
        result, *sums = computed(body, pairs, tensors, {}, name, seed, body.softmax)
    lse = sums[0] if sums else result.new_empty(0)
    return result.contiguous(), lse.to(accumulator(result.dtype)).contiguous()


def run_gradients(
    key: str,
    tensors: list[Tensor],
    seed: Tensor | None,
    result: Tensor,
    lse: Tensor,
    of_result: Tensor | None,
    of_lse: Tensor | None,
    wanted: list[bool],
) -> list[Tensor]:
    task, tensors = _of(key, tensors)
    body, wanted = task.body, wanted[: len(tensors)]
    with in_force(task.options), without_autocast(result.device):
        kernels, ready = kernels_of(task, tensors)
        gradients = None
        if kernels is not None:
            sums = torch.where(lse.isneginf(), LOWEST, lse * LOG2E) if body.softmax else None
            gradients = gradients_by(kernels, ready, wanted, seed, result, sums, (of_result, of_lse))
        if gradients is None:
            steps = partial(in_steps, body, task.pairs, {}, seed, body.softmax)
            detached = [t.detach().requires_grad_(want) for t, want in zip(tensors, wanted, strict=True)]
            with following():  # a formula of its own hides the operator's steps from autograd
                steps_gradients = gradients_of_steps(steps, detached, wanted, (of_result, of_lse))
            gradients = [g if g is None else g.clone(memory_format=torch.contiguous_format) for g in steps_gradients]
    return [g.to(t.dtype).contiguous() for g, t in zip(gradients, tensors, strict=True) if g is not None]


def second_gradients(
    key: str,
    tensors: list[Tensor],
    seed: Tensor | None,
    of_result: Tensor | None,
    of_lse: Tensor | None,
    wanted: list[bool],
    upstream: list[Tensor],
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return the gradients of `run_gradients`, by tensors and by gradients of the result, as functions of them."""
    further = torch.is_grad_enabled()
    with torch.enable_grad():  # views: gradients of the result may depend on the tensors
        views = [t.view_as(t) if t.requires_grad else t for t in tensors]
        of_results = [t.view_as(t) if t is not None and t.requires_grad else t for t in (of_result, of_lse)]
        (body, pairs, options, _), inputs = _of(key, views)
        with in_force(options), without_autocast(tensors[0].device):
            steps = partial(in_steps, body, pairs, {}, seed, body.softmax)
            gradients = gradients_of_steps(steps, inputs, wanted[: len(inputs)], of_results)
        places = [*views, *of_results]
        followed = [t for t in places if t is not None and t.requires_grad]
        outputs = [g for g in gradients if g is not None]
        derived = iter(torch.autograd.grad(outputs, followed, upstream, create_graph=further, materialize_grads=True))
    found = [next(derived) if t is not None and t.requires_grad else None for t in places]
    return found[: len(tensors)], found[len(tensors) :]


def shapes_of_mapped(key: str, tensors: list[Tensor], seed: Tensor | None) -> tuple[Tensor, Tensor]:
    (body, pairs, *_), tensors = _of(key, tensors)
    shape = result_shape(body, pairs, tensors)
    sums = shape[:-1] if body.softmax else (0,)
    return tensors[0].new_empty(shape), tensors[0].new_empty(sums, dtype=accumulator(tensors[0].dtype))


# -- random numbers ---------------------------------------------------------------------------------------------------


def kept(share: float, seed: Tensor, pattern: Pattern, pairs: Pairs, heads: int) -> Tensor:
    """Return (nnz, heads of a pattern) of 0 for a share of the entries, and what others are multiplied by.

    The numbers are those of the kernels' hashes.
    """
    *stack, row, column = pattern.coords
    part = torch.arange(heads // pairs.patterns, device=seed.device)
    which = stack[0][:, None] if stack else torch.zeros_like(row)[:, None]
    head = which + part * pairs.patterns if pairs.fastest else which * len(part) + part
    near = mixed(mixed((seed + head).int()) + row[:, None].int())
    return multiplied_by(near, mixed(column.int())[:, None], share, torch.float32)
