"""One case, run on poisoned memory and compared with a reference in float64 that shares no code with the compiler.

In: a `Case`. Out: whether it was checked or refused, or an error: `Wrong` where the result is not the reference's, and
whatever the call raised. An element that is NaN or infinite in the reference must be so in the result, and no other may
be; values are within a tolerance of the sum of the absolute values of their terms; the rest is exact.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from cases import SMALLEST, TOLERANCE, poisoned
from fuzz.calls import Built, laid_out, numbers
from fuzz.case import HUGE, Case
from reference import ReferenceEntries, Term, evaluate, join, pattern, whole, wide

from sparsetc import DtypeError, FormatError, OutOfMemoryError, PlanError

PRECISION = {"high": 4e-3, "medium": 3e-2}
"""What the tolerance is where float32 is not kept in matrix products."""
PARTS = ("conj", "negative", "real")
"""Layouts whose values are not those of the leaf."""


class Wrong(AssertionError):
    """A result that is not the reference's."""


class Expected(NamedTuple):
    """The reference's result, or one of its gradients.

    Attributes:
        allowed: what each element may be off by; None where values are not compared.
        nan: where a term has a NaN; None where no operand has one.
        fits: whether its dtype holds the result; if not, an error is expected; None where float64 cannot tell, which
            leaves open what is expected.
        pattern: where entries are; None where the pattern is no matter.
    """

    values: torch.Tensor
    allowed: torch.Tensor | None
    dtype: torch.dtype
    nan: torch.Tensor | None = None
    fits: bool | None = True
    pattern: torch.Tensor | None = None


def check(case: Case) -> str:
    """Run a case and compare it with the reference; returns "checked", or "refused" by a plan or for want of memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = Built(case)
        expected = expectations(built)
        try:
            found, again = _found(built)
        except (PlanError, FormatError):
            everywhere = ("auto", "scalar", "dense") if case.several else ("auto", "coo")
            no_product = case.plan == "dense" and case.device != "cpu" and case.dtype.startswith("int")
            given_back = "k" in built.space or ("Plan(" in case.plan and "plan" in built.space)
            if (case.plan in everywhere and not no_product) or (given_back and not case.deterministic):
                raise
            return "refused"
        except DtypeError:
            if expected[0].fits:
                raise
            return "checked"
        except OutOfMemoryError:
            if not case.memory_limit and max(case.sizes.values(), default=0) <= HUGE:
                raise
            return "refused"
        compare(case, found, expected)
        if again is not None:
            pairs = zip(found, again, strict=True) if isinstance(found, tuple) else [(found, again)]
            if not all(one is other or torch.equal(_bits(one), _bits(other)) for one, other in pairs):
                raise Wrong("a second run of a deterministic call gave other bits")
    return "checked"


def _found(built: Built) -> tuple[Any, Any]:
    case, space = built.case, built.space
    before = [leaf.detach().clone() for leaf in built.leaves]
    learned, given = [leaf for leaf in built.leaves if leaf.requires_grad], directions(built)
    space["gradients"] = lambda result: differentiated(case, dense_of(result), learned, given)
    original, state = dict(space), _state()
    with poisoned():
        found = built.call(space)
        again = built.call(original) if case.deterministic and "bits" in case.flags else None
    if (now := _state()) != state:
        torch.set_float32_matmul_precision("highest")
        raise Wrong(f"settings of torch are {now} after the call, {state} before")
    for name, leaf, kept in zip(case.names, built.leaves, before, strict=True):
        if "changed" not in case.flags and not torch.equal(_bits(leaf), _bits(kept)):
            raise Wrong(f"the values of {name} were changed by the call")
    return found, again


def _bits(x: Any) -> torch.Tensor:
    """Values with NaN replaced, so that equal ones compare equal."""
    x = (x if isinstance(x, torch.Tensor) else x.values).detach().resolve_conj().resolve_neg().contiguous()
    return (torch.view_as_real(x) if x.is_complex() else x).nan_to_num(nan=12345.0)


def _state() -> list[object]:
    """What a call must leave as it was."""
    settings = (
        *(torch.get_float32_matmul_precision, torch.get_default_dtype, torch.get_default_device, torch.get_num_threads),
        *(torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_autocast_enabled),
        torch.are_deterministic_algorithms_enabled,
    )
    return [hash(torch.get_rng_state().numpy().tobytes()), *(setting() for setting in settings)]


# -- gradients --------------------------------------------------------------------------------------------------------


def directions(built: Built) -> list[torch.Tensor]:
    """The gradient of the result, and what the gradients are multiplied with before they are differentiated again."""
    learned = [leaf for leaf in built.leaves if leaf.requires_grad]
    factors = (numbers(("uniform", n + 2, 0), (*x.shape,), x.dtype).to(x.device) for n, x in enumerate(learned))
    return [built.space["above"], *factors] if built.case.kind == "gradients" else []


def differentiated(
    case: Case, result: torch.Tensor, leaves: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the leaves or, of a second derivative, gradients of these and of the gradient of the result."""
    above = given[0].to(result.dtype).clone().requires_grad_(case.second)
    grad, options = torch.autograd.grad, {"retain_graph": True, "allow_unused": True}
    first = grad(result, leaves, above, create_graph=case.second, **options)
    if not case.second:
        return first
    pairs = [(g, s) for g, s in zip(first, given[1:], strict=True) if g is not None and g.requires_grad]
    if not pairs:
        return (None,) * (len(leaves) + 1)
    return grad([g for g, _ in pairs], [*leaves, above], [s for _, s in pairs], **options)


# -- the reference ----------------------------------------------------------------------------------------------------


def wide_leaves(built: Built, magnitude: bool = False, doubled: bool = True) -> list[torch.Tensor]:
    """Copies of the leaves that the reference computes with, doubled where the case does it; or absolute values."""
    case, found = built.case, []
    first = next(n for n, o in enumerate(case.operands) if o.sparse)
    for n, (o, leaf) in enumerate(zip(case.operands, built.leaves, strict=True)):
        x = leaf.detach().cpu()
        if n == first and doubled and "doubled" in case.flags:  # parts of complex numbers on their own
            x = torch.view_as_complex(torch.view_as_real(x) * 2) if x.is_complex() else x * 2
        x = x.to(wide(x.dtype))
        if magnitude:
            x = laid_out(o, x) if o.memory in PARTS else x
            x = (x if x.is_complex() else x.double()).abs().double()  # of integers the smallest has none of its type
        found.append(x.requires_grad_(leaf.requires_grad))
    return found


def terms_of(built: Built, leaves: Sequence[torch.Tensor], magnitude: bool = False) -> list[Term]:
    """The operands as the reference reads them, of these leaves."""
    terms = []
    for o, leaf, coords in zip(built.case.operands, leaves, built.coords, strict=True):
        values = laid_out(o, leaf) if o.memory == "expanded" or (o.memory in PARTS and not magnitude) else leaf
        terms.append(Term(o.letters, values) if coords is None else whole(o.letters, coords, values))
    return terms


def _answers(
    built: Built, leaves: Sequence[torch.Tensor], entries: ReferenceEntries, magnitude: bool = False
) -> list[torch.Tensor]:
    """The result, or the gradients, in a wide dtype; or the sums of the absolute values of their terms."""
    case, learned = built.case, [leaf for leaf in leaves if leaf.requires_grad]
    result = evaluate(terms_of(built, leaves, magnitude), case.output, case.sizes, entries)
    if case.kind != "gradients":
        return [result]
    given = [d.cpu().abs().double() if magnitude else d.cpu().to(wide(d.dtype)) for d in directions(built)]
    found = differentiated(case, result + sum(leaf.sum() * 0 for leaf in learned), learned, given)
    shapes = [*learned, given[0]] if case.second else learned
    return [torch.zeros_like(s) if f is None else f.detach() for f, s in zip(found, shapes, strict=True)]


def tolerance(dtype: torch.dtype, precision: str) -> float:
    """What an error may be, relative to the sum of the absolute values of the terms."""
    single = dtype in (torch.float32, torch.complex64)
    return max(TOLERANCE[dtype], PRECISION.get(precision, 0.0) if single else 0.0)


TOLD = 2.0**88
"""The largest sum of magnitudes of which float64 tells whether its integer fits in 64 bits, whatever the order."""


def expectations(built: Built) -> list[Expected]:
    """The reference's result of a case, or its gradients."""
    case, leaves, large = built.case, wide_leaves(built), wide_leaves(built, True)
    entries = join(terms_of(built, large, True))
    answers, magnitudes = _answers(built, leaves, entries), _answers(built, large, entries, True)
    gradients, found = case.kind == "gradients", []
    own = [leaf.dtype for leaf in built.leaves if leaf.requires_grad and gradients]
    own += [case.promoted] * (case.second or not gradients)
    for values, magnitude, dtype in zip(answers, magnitudes, own, strict=True):
        rounded = {dtype, case.promoted, *(case.dtype_of(o) for o in case.operands if o.duplicates)}
        relative = max(tolerance(d, case.precision) for d in rounded) * (2 if gradients else 1)
        allowed = relative * magnitude + max(2 * SMALLEST.get(d, 0.0) for d in rounded)
        found.append(Expected(values.detach(), allowed.detach(), dtype))
    if gradients:
        return found
    found[0] = found[0]._replace(pattern=pattern(entries, case.output, case.sizes))
    if wide(case.promoted) == torch.int64:
        # A single operand is summed to int64, as torch's sums are; before values are doubled, too, all must fit.
        dtype = torch.int64 if len(case.operands) == 1 and {*case.letters} - {*case.output} else case.promoted
        (before,) = _answers(built, wide_leaves(built, doubled=False), entries)
        close = [[leaf.double() for leaf in wide_leaves(built, doubled=d)] for d in (False, True)]
        pairs = zip((before, answers[0]), (_answers(built, own, entries)[0] for own in close), strict=True)
        fits = all(bool(((x.to(dtype) == x) & ((near - x).abs() <= 2.0**63)).all()) for x, near in pairs)
        told = bool((magnitudes[0] <= TOLD).all())
        return [found[0]._replace(dtype=dtype, fits=fits if told else None)]
    if any(o.values[2] for o in case.operands):
        finite = [torch.where(torch.isinf(leaf), 1.0, leaf) for leaf in large]
        found[0] = found[0]._replace(nan=torch.isnan(_answers(built, finite, entries, True)[0]))
        # A sum over no terms may be formed as a product of sums, of which one is infinite and another 0.
        if not entries.count * prod(size for letter, size in case.sizes.items() if letter not in case.sparse_letters):
            found[0] = found[0]._replace(allowed=None)
    return found


# -- the comparison ---------------------------------------------------------------------------------------------------


def compare(case: Case, found: Any, expected: Sequence[Expected]) -> None:
    """Raise `Wrong` unless what was found, a result or gradients, is what was expected."""
    if case.kind != "gradients":
        check_result(found, expected[0], case.form, case.several or all(o.form != "uncoalesced" for o in case.operands))
        return
    for gradient, wanted in zip(found, expected, strict=True):
        gradient = torch.zeros(wanted.values.shape, dtype=wanted.dtype) if gradient is None else gradient
        if gradient.dtype != wanted.dtype or gradient.shape != wanted.values.shape:
            raise Wrong(f"a gradient is {gradient.dtype}, {(*gradient.shape,)}, expected {wanted.dtype}")
        check_values(gradient.detach().cpu(), wanted)


def dense_of(found: Any) -> torch.Tensor:
    """A result as a dense tensor, differentiable, integers in 64 bits."""
    if isinstance(found, torch.Tensor):
        return found
    values = found.values if found.dtype.is_floating_point or found.dtype.is_complex else found.values.long()
    zeros = torch.zeros(tuple(found.shape), dtype=values.dtype, device=values.device)
    return zeros.index_put(tuple(found.coords), values, accumulate=True)


def check_result(found: Any, expected: Expected, form: str, coalesced: bool) -> None:
    """Raise `Wrong` unless a result, a tensor or a `SparseTensor`, is the expected one, in the form that was asked for.

    Args:
        found: the result.
        expected: the reference's.
        form: "auto", "sparse" or "dense".
        coalesced: whether the sparse operands were, so that the result must be sorted and unique.
    """
    if expected.fits is False and coalesced:
        raise Wrong(f"a result that {expected.dtype} cannot hold was given, not refused")
    if form != "auto" and isinstance(found, torch.Tensor) != (form == "dense"):
        raise Wrong(f"form: the result is a {type(found).__name__}, asked for was {form}")
    said, wanted = (found.dtype, tuple(found.shape)), (expected.dtype, tuple(expected.values.shape))
    if said != wanted:
        raise Wrong(f"the result has dtype and shape {said}, expected {wanted}")
    if not isinstance(found, torch.Tensor) and expected.pattern is not None:
        ones = torch.ones_like(found.values, dtype=torch.int64)
        count = torch.sparse_coo_tensor(found.coords, ones, wanted[1], check_invariants=True).to_dense().cpu()
        if not torch.equal(count > 0, expected.pattern):
            raise Wrong(f"pattern: entries are at {count.nonzero().tolist()}, expected {expected.pattern.nonzero()}")
        columns = found.coords.T.tolist()
        if (coalesced or found.is_coalesced) and (bool((count > 1).any()) or columns != sorted(columns)):
            raise Wrong("pattern: the result should be coalesced, and has duplicates or is not sorted")
    if expected.allowed is not None:
        check_values(dense_of(found).detach().cpu(), expected)


def check_values(found: torch.Tensor, expected: Expected) -> None:
    """Raise `Wrong` unless each element is within what is allowed, and NaN or infinite where it should be."""
    wanted, value = expected.values, found.to(expected.values.dtype)
    if wanted.dtype == torch.int64:
        right = value == wanted
    else:
        special = ~torch.isfinite(value)
        if not wanted.is_complex():
            special &= ~torch.isinf(wanted) | (value == wanted)
        if expected.nan is not None:
            special &= ~expected.nan | torch.isnan(value)
        right = torch.where(torch.isfinite(wanted), (value - wanted).abs() <= expected.allowed, special)
    if not bool(right.all()):
        at = tuple(torch.nonzero(~right)[0].tolist())
        many = f"{int((~right).sum())} of {right.numel()} elements are wrong"
        raise Wrong(f"values: {many}; element {at} is {found[at].item()}, expected {wanted[at].item()}")
