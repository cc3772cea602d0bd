"""The one tree of errors a caller can catch, and the way a fault in an equation is pointed at.

Every class is also the builtin that a caller who has never heard of sparsetc would expect, so ``except ValueError``
goes on working. A message says what was expected, what was found and what to do. It may quote a file, so what could
command a terminal is escaped in it.
"""


def printable(text: str) -> str:
    """Return the text with everything but tabs and printable characters escaped, as `repr` does; line feeds too."""
    return "".join([c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in text])


class SparsetcError(Exception):
    """The base class of all errors that sparsetc raises.

    Examples:
        >>> stc.spmm(stc.eye(3), torch.ones(4, 2))
        Traceback (most recent call last):
        sparsetc.errors.ShapeError: spmm: b must have 3 rows, as a has columns, found (4, 2)
    """

    def __str__(self) -> str:
        return "\n".join(map(printable, super().__str__().split("\n")))


class EquationError(SparsetcError, ValueError):
    """Raised for an equation that cannot be read, or does not fit its operands.

    Examples:
        >>> stc.einsum("ij,j->i", stc.eye(3))
        Traceback (most recent call last):
        sparsetc.errors.EquationError: found 1 operands for 2 terms; ...
    """


class KeywordError(SparsetcError, TypeError):
    """Raised for an unknown keyword argument; the message names the nearest known one.

    Examples:
        >>> stc.einsum("ij,j->i", stc.eye(3), torch.ones(3), precison="high")
        Traceback (most recent call last):
        sparsetc.errors.KeywordError: einsum takes no precison (did you mean precision?); ...
    """


class ShapeError(SparsetcError, ValueError):
    """Raised if sizes, modes or their number do not fit an operation.

    Examples:
        >>> stc.ttv(stc.eye(3), torch.ones(4), 1)
        Traceback (most recent call last):
        sparsetc.errors.ShapeError: ttv: the vector of mode 1 must have shape (3,), found (4,)
    """


class DtypeError(SparsetcError, TypeError):
    """Raised for an unsupported dtype, or for dtypes that must be equal and differ.

    Examples:
        >>> stc.spmm(stc.eye(3), torch.ones(3, dtype=torch.float64))
        Traceback (most recent call last):
        sparsetc.errors.DtypeError: spmm: b has dtype torch.float64, the sparse operand has torch.float32; ...
    """


class DeviceError(SparsetcError, RuntimeError):
    """Raised for operands on different devices.

    Examples:
        >>> stc.spmm(stc.eye(3), torch.ones(3, device="meta"))
        Traceback (most recent call last):
        sparsetc.errors.DeviceError: spmm: b is on meta, the sparse operand is on cpu; move one of them with .to()
    """


class FormatError(SparsetcError, ValueError):
    """Raised for a tensor, or a packed form of one, with invalid contents.

    Examples:
        >>> stc.SparseTensor([[0, 1], [0, 1]], [1.0, 2.0, 3.0])
        Traceback (most recent call last):
        sparsetc.errors.FormatError: coords have 2 columns but there are 3 values
    """


class CoordinateError(FormatError, IndexError):
    """Raised for a coordinate outside its mode.

    Examples:
        >>> stc.SparseTensor([[5], [0]], [1.0], (3, 3))
        Traceback (most recent call last):
        sparsetc.errors.CoordinateError: coordinate out of range in mode 0: nonzero 0 has 5, ...
    """


class PlanError(SparsetcError, ValueError):
    """Raised for an unknown plan, or for a plan that does not apply to this einsum.

    Examples:
        >>> stc.spmm(stc.eye(3), torch.ones(3), plan="fastest")
        Traceback (most recent call last):
        sparsetc.errors.PlanError: plan 'fastest' has no parts, and no plan is called 'fastest'; known: ...
    """


class DecompositionError(SparsetcError, ValueError):
    """Raised for an argument that a decomposition cannot start with, such as a rank, a mode or an initial model.

    Examples:
        >>> stc.decomposition.cp_als(stc.eye(3), 0)
        Traceback (most recent call last):
        sparsetc.errors.DecompositionError: cp_als: the rank must be an integer from 1 on, found 0
    """


class OutOfMemoryError(SparsetcError, MemoryError):
    """Raised before an allocation that would pass the memory limit.

    Examples:
        >>> stc.einsum("ij->ij", stc.eye(1000), output="dense", memory_limit="1MB")
        Traceback (most recent call last):
        sparsetc.errors.OutOfMemoryError: the result of ij->ij  i=1000 j=1000 would take 4,000,000 bytes, ...
    """


class DistributedError(SparsetcError, RuntimeError):
    """Raised if ranks have different arguments, if some failed or were lost; the message names the ranks.

    Examples:
        >>> stc.einsum("ij->ij", stc.distributed.shard(stc.eye(3)), drop_zeros=True)
        Traceback (most recent call last):
        sparsetc.errors.DistributedError: drop_zeros=True is for tensors of one process; take it of y.gather()
    """


class TransformError(SparsetcError, NotImplementedError):
    """Raised for an unsupported transform: batched or streamed gradients, or a traced graph without its kernel.

    Examples:
        >>> stc.stream("ij,j->i", stc.eye(3), torch.ones(3, requires_grad=True))
        Traceback (most recent call last):
        sparsetc.errors.TransformError: "ij,j->i" is streamed, which gives no gradients: ...
    """


class IOFormatError(SparsetcError, ValueError):
    """Raised for a file with an unknown suffix, or other contents than its suffix says; names file, line and text.

    Examples:
        >>> stc.read("tensor.txt")
        Traceback (most recent call last):
        sparsetc.errors.IOFormatError: tensor.txt: unknown suffix; known are ...
    """


def point_at(equation: str, start: int, message: str, length: int = 1) -> str:
    """``message`` followed by the equation with carets under ``equation[start:start + length]``."""
    return f"{message}\n    {equation}\n    {' ' * start}{'^' * max(1, length)}"
