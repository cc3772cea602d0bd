"""Checks of what users, extensions and files give: names, keywords, fields of records; and of the memory limit.

In: names as an extension gives them. Out: nothing, or an error that says what is wrong. Formats and arrays are printed
into generated programs, so they are words that can be nothing but a name there; what is only shown to people is one
line of plain text.

Generated programs have one name space. A letter of the equation stands in an identifier only behind one of the words of
`LETTERED`, or behind a dense operand's name, and no other generated name has that form. So all 52 letters are free for
equations: none can meet an accumulator, a format's array, or a name of Python or Triton.

A keyword that no function takes is answered with the nearest name that there is, and all others (`refused`): keywords
pass through public functions as ``**settings`` until they are checked.

Of records of plain data, and of arguments, in: states as files hold them, or values with their annotations. Out:
records; of what is not as annotated, which it is, in words. Nothing is converted. Of containers only a tuple's contents
are looked at: a ``dict[str, Any]`` need only be a dict. Users' plans, and streams' descriptions, too.

Of memory, in: numbers of bytes, or text as in ``"8GB"``, and a device. Out: bytes; uninitialised tensors; or
`OutOfMemoryError`, before anything is allocated.
"""

from __future__ import annotations

import builtins
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from inspect import Parameter, isfunction, signature, unwrap
from itertools import dropwhile
from keyword import iskeyword, issoftkeyword
from math import prod
from traceback import walk_stack
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor
from torch._C._dynamo import guards

from sparsetc.errors import DtypeError, FormatError, OutOfMemoryError, PlanError, ShapeError, SparsetcError
from sparsetc.support import later

LONGEST_NAME = 80
"""Characters of a name."""

LETTERED = ("at", "in", "block", "tile", "side", "first", "past", "most", "scale", "scaled", "unscale")
"""The words that stand before a letter, or before the name of an operand."""

WORDS = frozenset(
    """
    across add_rows along b0 b1 bag before behind below block chunks count counts every expanded fiber fiber_sum
    first full has i0 i1 inside item items kernel lane length n0 n1 nonzeros number ok pair part passed pid place pos
    position programs result row run_products run_sums scaled skipped slot start step steps stop summed term tile
    tiles tl torch total triton within words
    bits block_full block_ptr high_values item_ptr lane_len low_values most value_ptr values
    """.split()  # noqa: SIM905 (a list of 70 quoted words is no easier to read)
)
"""Names in generated programs that are no letter's; last, the arrays of a packed part without coordinates."""
_LETTERED = re.compile(
    rf"[A-Za-z]|({'|'.join(LETTERED)})_([A-Za-z]|operand)|([a-w]|operand_\d+)_[A-Za-z]+|.*_(bits|high|low)"
)
_NUMBER = re.compile(r"\d*(_\d+)*$")
_IDENTIFIER = re.compile(rf"[A-Za-z_]\w{{0,{LONGEST_NAME - 1}}}", re.ASCII)
_LABEL = re.compile(rf"(?! )[^\"'\\]{{1,{LONGEST_NAME}}}(?<! )")


def check_identifier(name: object, kind: str, error: type[SparsetcError]) -> str:
    """The name; `error` unless it is an ASCII identifier, no keyword of Python and not longer than `LONGEST_NAME`."""
    if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name) or iskeyword(name):
        raise error(
            f"the name of {kind} is printed into generated programs, so it must be letters, digits and underscores, no "
            f"word of Python's own and at most {LONGEST_NAME} characters; found {name!r:.80}"
        )
    return name


def check_label(name: object, kind: str, error: type[SparsetcError]) -> str:
    """The name; `error` unless it is one line of printable characters without quotes, backslashes or outer spaces."""
    if not isinstance(name, str) or not name.isprintable() or not _LABEL.fullmatch(name):
        raise error(
            f"the name of {kind} must be one line of 1 to {LONGEST_NAME} printable characters without quotes and "
            f"backslashes; found {name!r:.80}"
        )
    return name


def check_array(name: object, error: type[SparsetcError]) -> None:
    """Raise `error` unless an array of a view has a name that hides nothing else of a generated program."""
    word = check_identifier(name, "an array of a view", error)
    if not is_free(word):
        raise error(
            f"a view calls an array {word!r}, which means something else in generated programs; name it by two letters "
            'or more that say what it holds, as in "item_word"'
        )


def is_free(name: str) -> bool:
    """True if a format may call an array `name`: an identifier that no generated name can equal."""
    bare = _NUMBER.sub("", name)  # what a tree makes several of is numbered, and so are steps taken together
    word = iskeyword(name) or issoftkeyword(name) or hasattr(builtins, name) or bare in WORDS
    return name.isidentifier() and name.isascii() and not word and not _LETTERED.fullmatch(bare)


def check_free(
    name: str, kind: str, holders: Iterable[object], replace: bool, error: type[SparsetcError], by: object
) -> None:
    """Raise `error` where a name of the package's own would be taken unnoticed.

    Args:
        name: what is registered.
        kind: of thing, as the message calls it.
        holders: what has the name now.
        replace: whether the caller means to put something else in their place.
        error: class of the error.
        by: what is registered; the package's own things take their names freely.
    """
    if any(map(is_own, holders)) and not replace and not is_own(by):
        raise error(
            f"{kind} {name!r} comes with sparsetc, and another of that name would take its place everywhere; choose "
            "another name, or register it with replace=True"
        )


def is_own(thing: object) -> bool:
    """True if something comes with the package."""
    return f"{getattr(thing, '__module__', None) or ''}.".startswith("sparsetc.")


NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
TORCHS = {"attn_mask": "pattern", "mask": "pattern", "block_mask": "pattern", "score_mod": "bias"}
"""Names that torch has for arguments of `attention`."""
CLOSE = 0.6
"""Least likeness of a name that is proposed. Words that only share letters, as seed and device, stay below it."""


def refused(unknown: Sequence[str], options: Sequence[str]) -> str:
    """Return the text of an error about unknown keywords, with the function called and its arguments."""
    functions = list(_called())
    parameters = dict.fromkeys(
        p.name for function in functions for p in signature(function).parameters.values() if p.kind in NAMED
    )
    likest = (max((_likeness(known, name), known) for known in (*parameters, *options)) for name in unknown)
    near = dict.fromkeys(known for likeness, known in likest if likeness > CLOSE)
    near |= dict.fromkeys(TORCHS[name] for name in unknown if TORCHS.get(name) in parameters)
    who = f"{functions[0].__name__} takes no" if functions else "there is no option"
    guess = f" (did you mean {', '.join(near)}?)" if near else ""
    arguments = f"; arguments are {', '.join(parameters)}" if parameters else ""
    elsewhere = "; einsum and spmm take reduce=, which has no plan" if "reduce" in unknown else ""
    return f"{who} {', '.join(unknown)}{guess}{elsewhere}{arguments}; options are {', '.join(options)}"


def _likeness(known: str, name: str) -> float:
    """Return how much of two names agrees, 0 to 1, in order or word by word: ``maxiters`` is like ``n_iter_max``."""
    shared = sum(len(word) for word in known.split("_") if word in name)
    return max(SequenceMatcher(None, known, name).ratio(), shared / len(name))


def _called() -> Iterator[Callable[..., Any]]:
    """Yield the public function that received the keywords, then those it passed them to directly."""
    modules = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == "sparsetc"]
    named = [vars(m).get(name) for m in modules for name in getattr(m, "__all__", ())]
    registered = sys.modules["sparsetc"].OPERATIONS.values()
    public = {unwrap(f).__code__: f for f in (*named, *registered) if isfunction(f)}
    calls = [frame.f_code for frame, _ in walk_stack(None)][::-1]
    for code in dropwhile(lambda code: code not in public, calls):
        if code in public:
            yield public[code]
        elif code.co_argcount or code.co_kwonlyargcount:  # unlike a decorator's (*args, **kwargs)
            return


# -- records ----------------------------------------------------------------------------------------------------------

LONGEST = 60
"""Characters of a value that a message quotes."""

Made = TypeVar("Made")


def state_of(record: Any) -> dict[str, Any]:
    """Return the fields by name; not ``__dict__``, to which another thread may be adding a cached property."""
    return {f.name: getattr(record, f.name) for f in fields(record)}


def from_state(record: type[Made], state: dict[str, Any]) -> Made:
    """Return a record, which is a dataclass, with the fields of a file; `FormatError` unless all are of their types."""
    try:
        signature(record).bind(**state)
        fault = "" if plain(state.values()) else "it holds more than numbers and texts"
    except TypeError:
        fault = f"it has fields {', '.join(signature(record).parameters)}, found {quoted(state)}"
    except RecursionError:
        fault = "it is nested too deep"
    if not fault:
        restored = record(**state)
        fault = misfit(restored, (tuple, list))
        if not fault:
            return restored
    raise FormatError(f"a saved {record.__name__}: {fault}; it is damaged")


def plain(values: Iterable[object]) -> bool:
    """True if all values are numbers, texts, None, records, or tuples or lists of such."""
    for value in values:
        if is_dataclass(value):
            value = tuple(state_of(value).values())
        if not (plain(value) if isinstance(value, tuple | list) else isinstance(value, int | float | str | None)):
            return False
    return True


def quoted(value: object) -> str:
    """The beginning of a value as a message quotes it; its type where it has no text, as numbers of 5,000 digits."""
    try:
        return repr(value)[:LONGEST]
    except (ValueError, RecursionError):
        return type(value).__name__


def found_shape(value: Any) -> str:
    """Return the shape of an operand, as a message says it; the type of what has none."""
    return str(tuple(value.shape)) if hasattr(value, "shape") else type(value).__name__


def misfit(record: Any, sequences: tuple[type, ...] = (tuple,)) -> str:
    """Return an error text about the first field with a value of the wrong type; empty if there is none.

    Args:
        record: an instance of a dataclass whose fields are annotated with classes, tuples, unions and `Any`.
        sequences: the classes that may stand for a tuple.
    """
    kind: Any = type(record)
    for field in fields(record):
        value = getattr(record, field.name)
        if not fits(value, _hints(kind)[field.name], sequences):
            return f"{kind.__name__}.{field.name} must be {field.type}, found {quoted(value)}"
    return ""


@lru_cache
def _hints(record: Any) -> dict[str, Any]:
    return get_type_hints(record)


def fits(value: object, kind: Any, sequences: tuple[type, ...] = (tuple,)) -> bool:
    """True if a value is an instance of its annotation."""
    if kind is Any:
        return True
    arguments = get_args(kind)
    if get_origin(kind) is tuple:
        if not isinstance(value, sequences):
            return False
        items: tuple[object, ...] = tuple(value)  # type: ignore[arg-type]
        kinds = arguments[:1] * len(items) if arguments[-1] is Ellipsis else arguments
        return len(items) == len(kinds) and all(fits(v, k, sequences) for v, k in zip(items, kinds, strict=True))
    if get_origin(kind) is UnionType:
        return any(fits(value, k, sequences) for k in arguments)
    return isinstance(value, get_origin(kind) or kind)


# -- memory ------------------------------------------------------------------------------------------------------------

UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
"""Letters before ``B`` or ``iB``, by the power of 1000, or of 1024, that they stand for."""
FREE = 1 << 20
"""Most bytes that are allocated without asking the device for its free memory: to ask takes longer than to allocate
them."""
MOST = 2**63 - 1
"""Bytes that no tensor passes, whatever the limit."""
_options = later("options", "current")
SIZE = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([kmgtp]?)(i?)b?\s*", re.IGNORECASE)


def as_bytes(limit: Any, what: str = "memory_limit") -> int:
    """Bytes, 0 or more, of a whole number or of text: ``"1GB"`` is 10**9, ``"512MiB"`` 512 * 2**20, ``"4096"`` 4096.

    Raises:
        PlanError: anything else, a negative number or an infinite one included.
    """
    match = SIZE.fullmatch(limit) if isinstance(limit, str) else None
    if match and (match[2] or not match[3]):
        number, scale = match[1].replace("_", ""), (1024 if match[3] else 1000) ** UNITS[match[2].lower()]
        return int(float(number) * scale) if "." in number else int(number) * scale
    with suppress(TypeError, ValueError, OverflowError):
        if not isinstance(limit, bool | str) and limit >= 0 and int(limit) == limit:
            return int(limit)
    raise PlanError(f'{what} must be a number of bytes, 0 or more, or text like "512MiB" or "8GB"; found {limit!r:.80}')


def checked_number(value: Any, what: str) -> float:
    """Return a real number as a float. Raise `DtypeError`, which says `what` it is, for anything else."""
    known = isinstance(value, int | float | torch.SymFloat)  # which Dynamo can be asked of a symbol, and not the rest
    if not known and (not hasattr(value, "__float__") or getattr(value, "shape", ()) != ()):
        raise DtypeError(f"{what} must be a number, found {value!r:.80}")
    return float(value)


def checked_share(value: Any, what: str) -> float:
    """Return a number from 0 to 1 as a float. Raise an error, which says `what` it is, for anything else."""
    share = checked_number(value, what)
    if not 0 <= share <= 1:
        raise ShapeError(f"{what} is a share, from 0 to 1, found {value!r:.80}")
    return share


SOON = 0.005
"""Seconds for which a device's free memory is taken to stay as it was: a compilation asks for it several times, and the
system's answer takes as long as a tenth of a small one."""
_asked: dict[torch.device, tuple[float, int]] = {}
"""The time of the last answer for each device, and the answer."""


def available_memory(device: torch.device) -> int:
    """Return the bytes that a new tensor on ``device`` may take now; memory cached by torch counts as free."""
    now, answer = time.monotonic(), _asked.get(device)
    if answer is None or now - answer[0] > SOON:
        answer = _asked[device] = now, _free(device)
    return answer[1]


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        # As nested as torch keeps them: memory_reserved() flattens hundreds of counts each time.
        held = torch.cuda.memory_stats_as_nested_dict(device)
        unused = held["reserved_bytes"]["all"]["current"] - held["allocated_bytes"]["all"]["current"] if held else 0
        return int(torch.cuda.mem_get_info(device)[0]) + int(unused)
    try:
        # MemAvailable counts the page cache, which the kernel gives back; SC_AVPHYS_PAGES does not.
        with open("/proc/meminfo", "rb") as lines:
            line = next(line for line in lines if line.startswith(b"MemAvailable"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


available_memory._dynamo_marked_constant = True  # type: ignore[attr-defined]  # of a graph: nothing need be traced


def _limit(limit: int | str | None) -> int | None:
    return _options().memory_limit if limit is None else as_bytes(limit)  # type: ignore[no-any-return]


_limit._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as it has no context variables


def check_memory(
    what: str, nbytes: int, device: torch.device, limit: int | str | None = None, instead: str = ""
) -> None:
    """Raise `OutOfMemoryError` when ``what`` would take more bytes than the memory limit allows.

    Everything that makes a dense or an unpacked result calls this before it allocates.

    Args:
        what: what would be made, as the message begins.
        nbytes: bytes at the peak, beyond what is there before.
        device: where they would be taken.
        limit: bytes that may be taken, or text such as ``"8GB"``. Default: what `sparsetc.options` says, else what the
            device has free.
        instead: what can be done other than raising the limit.
    """
    limit = _limit(limit)
    if limit is None:
        if nbytes < FREE:
            return
        limit = available_memory(device)
    if nbytes > min(limit, MOST):
        raise OutOfMemoryError(
            f"{what} would take {nbytes:,} bytes, the limit on {device} is {limit:,}; raise it with "
            f"sparsetc.options(memory_limit=...){instead and ', or '}{instead}"
        )


LARGE = 1 << 20
"""Elements of a large tensor: 4 MB of float32, from which on numpy asks for large pages."""


def room(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return an uninitialised tensor; a large one on a CPU in memory of numpy, which asks the system for large pages.

    The first writes to 16 MB take .4 ms then, and 8 ms in pages of 4 KB, as torch allocates it.
    """
    if device.type != "cpu" or prod(shape) < LARGE or dtype == torch.bfloat16:  # which numpy has not
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(shape, str(dtype).removeprefix("torch.")))


def room_of(like: Tensor, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that gives an uninitialised tensor like this one; a GPU's is made without torch's dispatch."""
    shape, strides = tuple(like.shape), like.stride()  # a torch.Size is none to torch's own function

    def make() -> Tensor:
        if device.type == "cuda" and torch._C._cuda_getDevice() == device.index:
            return guards._empty_strided_cuda(shape, strides, like.dtype)  # type: ignore[attr-defined, no-any-return]
        return torch.empty_strided(shape, strides, dtype=like.dtype, device=device)

    return make
