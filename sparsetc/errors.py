"""The one tree of errors a caller can catch, and the way a fault in an equation is pointed at.

Every class is also the builtin that a caller who has never heard of sparsetc would expect, so ``except ValueError``
goes on working. A message says what was expected, what was found and what to do.
"""


class SparsetcError(Exception):
    """Anything that sparsetc refuses; catch this to catch them all."""


class EquationError(SparsetcError, ValueError):
    """The equation cannot be read, or does not fit the operands given with it."""


class KeywordError(SparsetcError, TypeError):
    """A keyword that the function does not take; the message names the nearest that it takes."""


class ShapeError(SparsetcError, ValueError):
    """Two sizes that must agree do not."""


class DtypeError(SparsetcError, TypeError):
    """A dtype that cannot be computed with, or dtypes that must agree and do not."""


class DeviceError(SparsetcError, RuntimeError):
    """Operands live on different devices."""


class FormatError(SparsetcError, ValueError):
    """A tensor, or its packed form, is not what its format promises."""


class CoordinateError(FormatError, IndexError):
    """A coordinate lies outside its mode."""


class PlanError(SparsetcError, ValueError):
    """A plan that is not known, or that does not apply to this einsum."""


class DecompositionError(SparsetcError, ValueError):
    """A rank, a mode, a start or another argument that no decomposition can begin with."""


class OutOfMemoryError(SparsetcError, MemoryError):
    """A result or a packed form would pass the memory limit; refused before it is allocated."""


class DistributedError(SparsetcError, RuntimeError):
    """Ranks that were given different arguments, of which some failed, or that lost each other; it names them."""


class TransformError(SparsetcError, NotImplementedError):
    """Gradients in batches, which autograd asks for as if for one, or a traced graph whose kernel is gone."""


class IOFormatError(SparsetcError, ValueError):
    """A file is not what its suffix promises; the message names file, line and text."""


def point_at(equation: str, start: int, message: str, length: int = 1) -> str:
    """``message`` followed by the equation with carets under ``equation[start:start + length]``."""
    return f"{message}\n    {equation}\n    {' ' * start}{'^' * max(1, length)}"
