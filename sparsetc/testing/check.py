"""One case, run and compared with the reference.

In: a `Case`. Out: whether it was checked or refused, or an error: `Wrong` where the result is not the reference's, and
whatever the call raised. While the call runs, memory that torch gives uninitialised is filled with NaN.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch

from sparsetc.testing.build import Built, build, laid_out, run_call
from sparsetc.testing.case import Case
from sparsetc.testing.compare import SMALLEST, Expected, Wrong, check_result, check_values, dense_of, tolerance
from sparsetc.testing.forms import CIRCUMSTANCES, magnitude_memory
from sparsetc.testing.reference import Entries, Term, evaluate, fits, join, pattern, result_dtype, whole, wide

ALWAYS = ("auto", "coo", "scalar", "dense")
"""Plans that apply to every einsum of their number of sparse operands."""
POISON = 77
"""What uninitialised integers are filled with."""


class Hang(BaseException):
    """A case that ran past its time limit; not an `Exception`, so that nothing below swallows it."""


def check(case: Case, limit: float = 60.0) -> str:
    """Run a case and compare it with the reference; returns ``"checked"``, or ``"refused"`` by a plan.

    Args:
        case: what to run.
        limit: seconds after which `Hang` is raised, in a process's main thread.
    """
    from sparsetc import DtypeError, FormatError, OutOfMemoryError, PlanError

    with quiet(), time_limit(limit):
        built = build(case)
        expected = gradient_expected(built) if case.kind == "gradients" else [result_expected(built)]
        try:
            found, again = _found(built)
        except (PlanError, FormatError):
            made = "k" in built.space or ("plan" in built.space and not case.deterministic)
            if case.plan.name in ALWAYS or made:  # what a kernel says its plan is can be given back
                raise
            return "refused"
        except OutOfMemoryError:
            if not case.memory_limit:
                raise
            return "refused"
        except DtypeError:
            if not _overflows(expected):
                raise
            return "checked"
        duplicates = not case.several and any(o.form == "uncoalesced" for o in case.operands)
        if _overflows(expected) and not duplicates:  # of a sum that passes its type, the duplicates may each fit
            raise Wrong("integers", f"a result that {expected[0].dtype} cannot hold was not refused")
        compare(built, found, expected)
        if again is not None:
            _same_bits(found, again)
    return "checked"


def _overflows(expected: Sequence[Expected]) -> bool:
    return any(wide(e.dtype) == torch.int64 and not fits(e.values, e.dtype) for e in expected)


def _found(built: Built) -> tuple[Any, Any]:
    case = built.case
    before = [leaf.detach().clone() for leaf in built.leaves]
    space = built.space
    if case.kind == "gradients":
        space["gradients"] = Gradients(built)
    original = dict(space)
    with poisoned():
        found = run_call(case, space)
        bits = case.deterministic and CIRCUMSTANCES[case.circumstance].bits
        again = run_call(case, original) if bits else None
    if not CIRCUMSTANCES[case.circumstance].changes:
        for leaf, kept, name in zip(built.leaves, before, case.names, strict=True):
            if not torch.equal(_bits(leaf.detach()), _bits(kept)):
                raise Wrong("operand", f"the values of {name} were changed by the call")
    return found, again


def compare(built: Built, found: Any, expected: Sequence[Expected]) -> None:
    """Raise `Wrong` unless what was found, a result or gradients, is what was expected."""
    case = built.case
    if case.kind != "gradients":
        coalesced = case.several or all(o.form != "uncoalesced" for o in case.operands)
        check_result(found, expected[0], case.form, coalesced)
        return
    for name, gradient, wanted in zip(gradient_names(case), found, expected, strict=True):
        what = f"gradient of {'a dense' if name in 'abcdefg' else 'a sparse'} operand"
        what = what if name != "upstream" else "gradient of a gradient"
        if gradient is None:
            gradient = torch.zeros(wanted.values.shape, dtype=wanted.dtype)
        if gradient.dtype != wanted.dtype or gradient.shape != wanted.values.shape:
            raise Wrong(what, f"{gradient.dtype} of shape {tuple(gradient.shape)}, expected {wanted.dtype}, {name}")
        check_values(gradient.detach().cpu(), wanted, what)


def _same_bits(found: Any, again: Any) -> None:
    pairs = zip(found, again, strict=True) if isinstance(found, tuple) else [(found, again)]
    for one, other in pairs:
        a, b = (getattr(r, "values", r) if not isinstance(r, torch.Tensor) else r for r in (one, other))
        if a is not None and not torch.equal(_bits(a.detach()), _bits(b.detach())):
            raise Wrong("determinism", "a second run gave other bits")


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Values with NaN replaced, so that equal ones compare equal."""
    values = values.resolve_conj().resolve_neg().contiguous()
    return torch.view_as_real(values).nan_to_num(nan=12345.0) if values.is_complex() else values.nan_to_num(nan=12345.0)


# -- what is expected -------------------------------------------------------------------------------------------------


def terms_of(built: Built, leaves: Sequence[torch.Tensor], magnitude: bool = False) -> list[Term]:
    """The operands as the reference reads them, laid out from these wide leaves on the CPU."""
    terms = []
    for operand, leaf, coords in zip(built.case.operands, leaves, built.coords, strict=True):
        memory = magnitude_memory(operand.memory)
        if not magnitude and operand.memory in ("conj", "negative", "real"):
            memory = operand.memory
        values = laid_out(operand, leaf, memory)
        terms.append(Term(operand.letters, values) if coords is None else whole(operand.letters, coords, values))
    return terms


def wide_leaves(built: Built) -> list[torch.Tensor]:
    """Copies of the leaves that the reference computes with."""
    return [leaf.detach().cpu().to(wide(leaf.dtype)) for leaf in built.leaves]


def magnitude_leaves(built: Built) -> list[torch.Tensor]:
    """Absolute values of what the leaves lay out."""
    found = []
    for operand, leaf in zip(built.case.operands, wide_leaves(built), strict=True):
        memory = operand.memory
        values = laid_out(operand, leaf, memory) if memory in ("conj", "negative", "real") else leaf
        found.append(values.abs().double() if wide(values.dtype) != torch.int64 else values.abs())
    return found


def result_expected(built: Built) -> Expected:
    """The reference's result of a case."""
    case = built.case
    terms = terms_of(built, wide_leaves(built))
    entries = join(terms)
    factor = CIRCUMSTANCES[case.circumstance].factor
    values = evaluate(terms, case.output, case.sizes, entries) * factor
    dtype = case.torch_dtype
    shape = pattern(entries, case.output, case.sizes)
    if wide(dtype) == torch.int64:
        plain_sum = len(case.operands) == 1 and set(case.operands[0].letters) != set(case.output)
        return Expected(values, values, result_dtype(dtype, plain_sum), 0.0, pattern=shape)
    magnitude = evaluate(terms_of(built, magnitude_leaves(built), True), case.output, case.sizes, entries) * factor
    special = any(o.values.specials for o in case.operands)
    nan = _has_nan(built, entries) if special else None
    limit = tolerance(case.dtype, case.precision)
    # A sum over no entries may be formed as a product of sums, of which one is infinite and another 0.
    any_value = special and case.several and not entries.count
    return Expected(values, magnitude, dtype, limit, SMALLEST.get(case.dtype, 0.0), nan, any_value, shape)


def _has_nan(built: Built, entries: Entries) -> torch.Tensor:
    """Where a term of the result has a factor that is NaN."""
    leaves = [torch.where(torch.isinf(leaf), 1.0, leaf) for leaf in magnitude_leaves(built)]
    return torch.isnan(evaluate(terms_of(built, leaves, True), built.case.output, built.case.sizes, entries))


# -- gradients --------------------------------------------------------------------------------------------------------


def gradient_names(case: Case) -> tuple[str, ...]:
    """Whose gradients are found: the learned operands, and the upstream gradient where it is differentiated again."""
    learned = tuple(n for n, o in zip(case.names, case.operands, strict=True) if o.learned)
    return (*learned, "upstream") if case.second else learned


class Gradients:
    """A function of a result that gives the gradients of the learned leaves, for a fixed upstream gradient."""

    def __init__(self, built: Built) -> None:
        case = built.case
        self.case, self.leaves = case, [leaf for leaf in built.leaves if leaf.requires_grad]
        self.upstream = upstream(case).to(case.device)
        self.seconds = [seconds(case, n, leaf) for n, leaf in enumerate(self.leaves)]

    def __call__(self, result: Any) -> tuple[torch.Tensor | None, ...]:
        dense, _ = dense_of(result)
        return differentiated(dense, self.leaves, self.upstream, self.seconds if self.case.second else None)


def upstream(case: Case) -> torch.Tensor:
    """The gradient of the result, dense, in the operands' dtype."""
    g = torch.Generator().manual_seed(case.seed + 1)
    shape = [case.sizes[c] for c in case.output]
    made = torch.rand(shape, generator=g, dtype=torch.float64) * 2 - 1
    if case.torch_dtype.is_complex:
        made = torch.complex(made, torch.rand(shape, generator=g, dtype=torch.float64))
    return made.to(case.torch_dtype)


def seconds(case: Case, n: int, leaf: torch.Tensor) -> torch.Tensor:
    """What the n-th gradient is multiplied with before it is differentiated again."""
    g = torch.Generator().manual_seed(case.seed + 2 + n)
    return (torch.rand(leaf.shape, generator=g, dtype=torch.float64) * 2 - 1).to(leaf.dtype).to(leaf.device)


def differentiated(
    dense: torch.Tensor,
    leaves: Sequence[torch.Tensor],
    upstream: torch.Tensor,
    seconds: Sequence[torch.Tensor] | None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the leaves, or gradients of these and of the upstream gradient."""
    again = seconds is not None
    upstream = upstream.to(dense.dtype).clone().requires_grad_(again)
    first = torch.autograd.grad(dense, leaves, upstream, create_graph=again, retain_graph=True, allow_unused=True)
    if seconds is None:
        return first
    pairs = [(g, s) for g, s in zip(first, seconds, strict=True) if g is not None and g.requires_grad]
    if not pairs:
        return (*(None for _ in leaves), None)
    gradients, others = zip(*pairs, strict=True)
    return torch.autograd.grad(gradients, [*leaves, upstream], others, retain_graph=True, allow_unused=True)


def gradient_expected(built: Built) -> list[Expected]:
    """The reference's gradients of a case."""
    case = built.case
    exact = _reference_gradients(built, wide_leaves(built), False)
    sizes = _reference_gradients(built, magnitude_leaves(built), True)
    learned = [leaf.dtype for leaf in built.leaves if leaf.requires_grad]
    dtypes = [*learned, case.torch_dtype] if case.second else learned
    limit, smallest = 2 * tolerance(case.dtype, case.precision), SMALLEST.get(case.dtype, 0.0)
    return [Expected(v, m, d, limit, smallest) for v, m, d in zip(exact, sizes, dtypes, strict=True)]


def _reference_gradients(built: Built, leaves: list[torch.Tensor], magnitude: bool) -> list[torch.Tensor]:
    case = built.case
    for leaf, original in zip(leaves, built.leaves, strict=True):
        leaf.requires_grad_(original.requires_grad)
    learned = [leaf for leaf in leaves if leaf.requires_grad]
    result = evaluate(terms_of(built, leaves, magnitude), case.output, case.sizes)
    above = upstream(case).to(result.dtype) if not magnitude else upstream(case).abs().double()
    own = [leaf for leaf in built.leaves if leaf.requires_grad]
    others = [seconds(case, n, leaf).cpu() for n, leaf in enumerate(own)]
    others = [s.abs().double() if magnitude else s.to(leaf.dtype) for s, leaf in zip(others, learned, strict=True)]
    if not result.requires_grad:
        result = result + sum((leaf.sum() * 0 for leaf in learned), torch.zeros((), dtype=result.dtype))
    found = differentiated(result, learned, above, others if case.second else None)
    shapes = [*learned, above] if case.second else learned
    return [torch.zeros_like(s) if f is None else f.detach() for f, s in zip(found, shapes, strict=True)]


# -- around a run -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that say where a case runs, or that a layout of torch is new."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore")
        yield


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `Hang` after so many seconds; nothing in threads other than the main one, which get no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise Hang(f"no result after {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill what torch gives uninitialised with NaN, or a large integer, so that what nobody wrote is seen."""
    places = [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")]
    originals = [getattr(owner, name) for owner, name in places]
    for (owner, name), original in zip(places, originals, strict=True):
        setattr(owner, name, _filling(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


def _filling(original: Any) -> Any:
    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = original(*args, **kwargs)
        if made.dtype == torch.bool or not prod(made.shape) or made.device.type == "meta":
            return made
        with torch.no_grad():
            return made.fill_(torch.nan if made.is_floating_point() or made.is_complex() else POISON)

    return filled
