"""Einsums -> contractions: rewritten, then compiled as a step, a pair or a path, or found again.

In: equation, operands, options. Out: a `Contraction`, new or kept with the pattern of its first sparse operand.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import torch

from sparsetc.backends import NUMBA, TORCH
from sparsetc.contraction.contraction import Contraction, kept_or_made, key_of, known, parsed
from sparsetc.contraction.pair import Pair
from sparsetc.contraction.path import Path
from sparsetc.contraction.prepare import chosen_for, in_force_on, rewritten_problem
from sparsetc.contraction.request import Operands, Request, Rewrite, check_form, check_operand, stand_in
from sparsetc.contraction.rewrites import broadcast_dims, rewrites_of
from sparsetc.contraction.step import Step
from sparsetc.contraction.tuned import tune
from sparsetc.device.profile import profile_of
from sparsetc.errors import PlanError
from sparsetc.ir.equation.einsum import Bound, Einsum, written
from sparsetc.ir.plan import AUTO, DENSE, ONE_PASS, STEPS, Plan, requested
from sparsetc.options import Options
from sparsetc.planner.candidate import Choice
from sparsetc.planner.paths import Search, State, checked_order
from sparsetc.planner.problem import Counts
from sparsetc.planner.registry import PLANS, by_nonzeros, choose
from sparsetc.planner.workload import choose_together
from sparsetc.products.problem import paired
from sparsetc.support.entry import bar, log_since
from sparsetc.tensor.pattern import Pattern, lasting
from sparsetc.tensor.sparse_tensor import SparseTensor

_numbers = itertools.count()


def contraction(
    bound: Bound,
    operands: Operands,
    settings: Options,
    form: str,
    of_call: bool = False,
    choice: Choice | None = None,
    unmet: bool = False,
) -> Contraction:
    """Compile an einsum. For `of_call` and `unmet` see `Request`; `choice` is for an einsum of a single `Step`.

    Raises:
        OutOfMemoryError: a dense result would pass the memory limit.
        DtypeError, DeviceError: operands differ.
        PlanError: the form is not known, or is ``sparse`` of a result without a pattern.
    """
    # Gradients are made, and copies compiled, in the precision that was in force here.
    settings, start = replace(settings, precision=settings.effective_precision()), time.perf_counter()
    with bar(None, f'compiling "{bound.einsum.text}"'), lasting():
        # A plan that was given is of the einsum as `compile` runs it, repeated slices too.
        of_call = of_call and requested(settings.plan).is_request
        request = Request(bound, [*map(stand_in, operands)], settings, form, of_call, unmet=unmet)
        dtype, device = request.sparse[0].dtype, request.sparse[0].device
        for position, operand in enumerate(request.operands):
            check_operand(operand, position, dtype, device)
        check_form(form, bound.einsum)
        request.is_sparse(expanded=True)
        innermost, rewrites, inner = _innermost(request, choice)
        new = Contraction(request, innermost, rewrites, inner)
    # The name says what the shapes of operands and result follow from, and no other in this process has it: what torch
    # keeps on disk of a graph that the contraction stands in is not to be taken for another's.
    new.key = f"{new.bound} {new.dtype} {new.sparse} {tuple(new.shape)} #{next(_numbers)}"
    known[new.key] = new
    log_since(
        start, logging.INFO, 'compiled "%s", plan %s, on %s', bound.einsum.text, new.innermost.plan.name, new.device
    )
    return new


Contraction.compile = contraction


def _innermost(request: Request, choice: Choice | None) -> tuple[Any, list[Rewrite], Request]:
    """Compile what an einsum runs. Return it, the rewrites around it, and the einsum that they lead to."""
    wanted = requested(request.settings.plan)
    several, count = len(request.sparse) > 1, len(request.operands)
    order, by_entries = request.settings.path or wanted.path, several and by_nonzeros(wanted)
    # A path of several operands by their entries is made below, after rewrites.
    if choice is None and not (by_entries and count > 2):
        path = None
        if order:
            path = Path(request, several and (by_entries or not request.dense_modes), checked_order(order, count))
        elif count > 2 or wanted == STEPS:
            choice = _steps_or_pass(request, wanted)
            if choice is not None and choice.plan.path:
                path = Path(request, False, choice.plan.path, choice.plan.reason)
            elif len(request.sparse) > 2 and request.dense_modes:
                path = Path(request, expanded=False)
        if path is not None:
            return path, [], request
    if choice is None and request.dense_modes and not several and wanted in (AUTO, ONE_PASS):
        choice = chosen_for(request, partial(_as_dense, request))
        if choice.plan.is_request:
            request, choice = replace(request, settings=replace(request.settings, plan=choice.plan)), None
    rewrites, inner = rewrites_of(request)
    if len(inner.sparse) > 1 and len(inner.operands) > 2:
        paired(request.settings.plan, inner.bound.einsum.indices)  # refused at once where it is not known
        return Path(inner, True, checked_order(order, len(inner.operands)) if order else None), rewrites, inner
    leaf = Step(inner, choice) if len(inner.sparse) == 1 else Pair(inner)
    if request.settings.timed:
        tune(leaf)
    if isinstance(leaf, Pair):
        leaf.find_pattern([x.pattern for x in inner.sparse])
    return leaf, rewrites, inner


def _steps_or_pass(request: Request, wanted: Plan) -> Choice | None:
    """Return steps, if asked for or expected to be faster than one pass, as a plan of no parts but a path.

    Otherwise return the plan of the pass where it had to be chosen to be compared with, and None where it was not.
    Steps and a pass of torch programs are priced by the same rates; on a GPU, and with native loops, a pass has the
    price of its plan.

    Raises:
        PlanError: steps of an einsum that cannot take any.
    """
    bound, settings = request.bound, request.settings
    asked = wanted == STEPS
    fault = _fault(request, asked) if asked or wanted == AUTO else "another plan is asked for"
    if fault and not asked:
        return None
    if fault:
        raise PlanError(f'plan {STEPS.name!r} does not apply to "{bound.einsum.text}": {fault}')
    (x,) = request.sparse
    device, pattern = x.device, x.pattern
    backend = settings.effective_backend(device)
    if not backend.at_once and not asked and x.dense_order:
        return None
    if settings.has_loops(device):
        backend = NUMBA

    def steps(one_pass: Choice | None = None) -> Choice | None:
        search = Search(
            bound,
            sparse_order=x.sparse_order,
            fibers=Counts(pattern.coords, pattern.shape, pattern.counts, pattern.cache).distinct,
            nnz=pattern.nnz,
            constants=profile_of(device, settings, backend.name).constants,
            itemsize=x.dtype.itemsize,
            limit=settings.memory_on(device),
            sparse_result=request.has_pattern(),
        )
        one, planned = (sum(one_pass.seconds), partial(_seconds_of_pass, request)) if one_pass else (None, None)
        picked = search.picked(asked, one, planned)
        return picked and Choice(replace(STEPS, reason=picked[0], path=picked[1]))

    if not (backend is TORCH or asked or x.dense_order):
        return chosen_for(request, steps)
    choice = steps()
    if asked and choice is None:
        raise PlanError(f'plan {STEPS.name!r} does not apply to "{bound.einsum.text}": no steps fit the memory limit')
    return choice


def _seconds_of_pass(request: Request, taken: Sequence[tuple[str, ...]], after: State | None) -> float:
    """Return the seconds of a first pass over the nonzeros, with the terms of these letters, as a plan of its own."""
    (x,), e = request.sparse, request.bound.einsum
    inputs = e.inputs[e.sparse[0]], *taken
    output = e.output if after is None else (*after.sparse, *sorted(after.dense))
    bound = Bound.of(Einsum(inputs, output, (0,), written(inputs, output)), request.bound.by_index)
    dense = [request.like.expand(bound.shape(n)) for n in range(1, len(inputs))]
    form = request.form if after is None else "sparse" if after.sparse else "dense"
    settings = replace(request.settings, plan=ONE_PASS)
    return choose(ONE_PASS, rewritten_problem(Request(bound, [x, *dense], settings, form))).total


def _fault(request: Request, asked: bool) -> str:
    """Say why steps are not sought for an einsum; the text is empty if they are."""
    bound, (x, *others) = request.bound, request.sparse
    e = bound.einsum
    if others:
        return "it has several sparse operands, whose steps are sought in any case"
    if len(e.dense) < 2:
        return "it has fewer than two dense operands"
    if len(e.sparse_indices) < x.order or x.blocksize or not x.is_coalesced:
        return "its sparse operand has a repeated letter, blocks or duplicates"
    if any(broadcast_dims(bound, request.operands, False).values()):
        return "a dense operand broadcasts"
    if 0 in (x.nnz, *(n for _, n in bound.sizes)):
        return "there is nothing to sum"
    if not asked and x.dtype not in (torch.float32, torch.float64):
        return "only floats are searched"
    return ""


def _as_dense(request: Request, choice: Choice) -> Choice | None:
    """Return the choice to make an operand with dense modes or blocks dense first; None unless its price is lower."""
    (x,), e = request.sparse, request.bound.einsum
    term = e.inputs[e.sparse[0]]
    if len(term) > len(e.sparse_indices) or request.has_pattern():
        return None
    shape = request.bound.extents(term)
    empty = Pattern(x.coords.new_empty(len(shape), 0), shape, x.is_coalesced)
    operands = [*request.operands]
    operands[e.sparse[0]] = SparseTensor._make(empty, request.like.expand(0))
    problem = replace(request, operands=operands, form="dense").problem
    seconds = min([own.total for own in PLANS[DENSE.name].estimates(problem)], default=inf)
    most = choice.total
    if seconds >= most:
        return None
    reason = f"{1e6 * seconds:.1f} us expected, {1e6 * most:.1f} of its entries as they are stored"
    return Choice(replace(DENSE, reason=reason))


Workload = Sequence[tuple[str, Operands]]
"""Equations with their operands, the first of each being the sparse one."""


def compiled_together(
    workload: Workload, settings: Options, form: str, of_call: bool = False
) -> tuple[Contraction, ...]:
    """Compile einsums of one sparse operand.

    They are planned together where each is one step of a tensor without dense modes and blocks; otherwise each alone.

    Args:
        workload: equations with operands; values are only looked at for their dtypes.
        settings: the plan, the memory limit and all else that is common to them.
        form: of the results, ``auto``, ``dense`` or ``sparse``.
        of_call: as of `Request`.
    """
    settings = replace(settings, precision=settings.effective_precision())
    requests = [Request(parsed(text, operands), operands, settings, form, of_call) for text, operands in workload]
    (x,) = requests[0].sparse
    choices: Sequence[tuple[Choice | None, Any]] | None = None
    if not x.dense_order and not x.blocksize and all(len(r.sparse) == 1 for r in requests):
        with lasting():
            problems = list(map(rewritten_problem, requests))
            with in_force_on(settings, x.device):
                choices = choose_together(settings.plan, problems, settings.memory_on(x.device))
    choices = choices or [(None, settings.plan)] * len(requests)
    return tuple(
        contraction(r.bound, r.operands, replace(settings, plan=again), form, of_call, choice)
        for r, (choice, again) in zip(requests, choices, strict=True)
    )


def kept_together(workload: Workload, settings: Options, form: str) -> tuple[Contraction, ...]:
    """Return the contractions cached for this workload with the sparse operand's pattern, or compile them."""
    x = workload[0][1][0]
    assert isinstance(x, SparseTensor)
    key = ("workload", *(key_of(text, operands, settings, form) for text, operands in workload))
    return kept_or_made(x._pattern, key, lambda: compiled_together(workload, settings, form, of_call=True))
