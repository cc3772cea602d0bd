"""The command line: ``python -m sparsetc explain | info | pack | blocking | calibrate | tune``.

In: arguments. Out: text, and an exit status: 0, or 2 where arguments or a file are refused, or there is no GPU to
calibrate. What is refused is said in one message on stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from io import BytesIO
from math import prod
from pathlib import Path
from textwrap import indent
from typing import NoReturn

import torch

import sparsetc as stc
from sparsetc import calibration
from sparsetc.device import calibrate
from sparsetc.device.profile import default_gpu
from sparsetc.errors import printable
from sparsetc.explain import aligned
from sparsetc.options import NAMED_BACKENDS
from sparsetc.planner.problem import Counts
from sparsetc.support.checks import check_memory
from sparsetc.tensor.dtypes import NAMED, dtype_name
from sparsetc.tuning import command as tune

CUT = 1
REFUSED = 2
INTERRUPTED = 130
"""Exit statuses: output cut off by its reader, a refused request, and an interrupt, as a shell reports it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    if hasattr(sys.stdout, "reconfigure"):  # a path may hold what the terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(arguments)
    commands = {"explain": _explain, "info": _info, "pack": _pack, "blocking": _blocking, "calibrate": _calibrate}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="sparsetc: no GPU")  # each command says where it runs
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
        try:
            commands.get(options.command, tune.run)(options)
            sys.stdout.flush()
            return 0
        except BrokenPipeError:  # who reads has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return CUT
        except KeyboardInterrupt:
            return INTERRUPTED
        except (stc.SparsetcError, OSError, ImportError, MemoryError) as error:
            said = printable(str(error)) or type(error).__name__
            if "memory_limit" in vars(options):
                said = said.replace("sparsetc.options(memory_limit=...)", "--memory-limit")
            print(f"sparsetc: {said}", file=sys.stderr)
            return REFUSED


class _Parser(argparse.ArgumentParser):
    """A parser that refuses in one line, as everything else here does."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit."""
        self.exit(REFUSED, f"sparsetc: {message}; see {self.prog} --help\n")


def _size(text: str) -> int:
    """A size of a mode: an integer from 1."""
    number = int(text) if text.isdecimal() and len(text) < 19 else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be an integer from 1 to 10**18 - 1, found {text!r}")
    return number


def _similarity(text: str) -> float:
    """A similarity: a number above 0, at most 1."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, found {text!r}")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="sparsetc", description="A sparse tensor compiler for PyTorch.")
    parser.add_argument("--version", action="version", version=f"sparsetc {stc.__version__}")
    commands = parser.add_subparsers(required=True, dest="command", metavar="command")

    explain = commands.add_parser("explain", help="print the plan of an einsum on a tensor from a file")
    explain.add_argument("equation", help='for example "ijk,jr,kr->ir"; the first operand is the file\'s tensor')
    explain.add_argument("file", help="a .tns, .mtx (either also .gz), .npz or .parquet file")
    explain.add_argument(
        "--rank", type=_size, default=32, help="size of letters the tensor does not have (default: 32)"
    )
    explain.add_argument("--plan", default="auto", help="a plan's name (default: auto)")
    explain.add_argument("--precision", choices=("highest", "high", "medium"))
    explain.add_argument("--backend", choices=NAMED_BACKENDS, help="triton needs no GPU here")
    explain.add_argument("--source", action="store_true", help="print the generated program too")

    info = commands.add_parser("info", help="print order, sizes, nonzeros and fibers of a tensor from a file")
    info.add_argument("file", help="a .tns, .mtx (either also .gz), .npz or .parquet file")

    pack = commands.add_parser("pack", help="make a packed file of a file of any size, in bounded memory")
    pack.add_argument("source", help="a file that sparsetc.read takes, or a .parquet or .csv table")
    pack.add_argument("target", help="the packed file to be, .parquet")
    pack.add_argument("--columns", nargs="+", help="of a table: the columns of coordinates, then that of the values")
    pack.add_argument("--memory-limit", help="bytes to take, such as 2GB (default: a quarter of what is free)")
    pack.add_argument("--dtype", choices=NAMED, help="of the values (default: as sparsetc.read)")

    blocking = commands.add_parser("blocking", help="group similar rows of a matrix from a file into dense blocks")
    blocking.add_argument("file", help="a .tns, .mtx (either also .gz), .npz or .parquet file")
    blocking.add_argument("--width", type=_size, default=64, help="columns of a block (default: 64)")
    blocking.add_argument(
        "--tau", type=_similarity, nargs="+", help="similarities, above 0 and at most 1 (default: 0.1, 0.2, …, 1)"
    )
    blocking.add_argument("--mode", type=int, default=0, help="the mode whose slices are rows (default: 0)")
    blocking.add_argument("--png", help="a file to draw the curve of heights and densities into")

    commands.add_parser("calibrate", help="measure the GPU, or the CPU, for the planner to use")
    tune.add_to(commands)
    return parser


def _explain(options: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = stc.read(options.file).to(device)
    dense = _operands(options.equation, x, options.rank)
    kernel = stc.compile(
        options.equation, x, *dense, plan=options.plan, precision=options.precision, backend=options.backend
    )
    print(kernel.explain())
    if options.source:
        print(f"\n{kernel.source}")


def _operands(equation: str, x: stc.SparseTensor, rank: int) -> list[torch.Tensor]:
    """Dense operands, all 0, of the sizes the equation asks for: the tensor's where it has the letter, or `rank`."""
    first, *terms = equation.replace(" ", "").split("->")[0].split(",")
    if "." in equation or len(first) != x.order:
        raise stc.EquationError(
            f'"{equation}": the first operand is the file\'s tensor, of order {x.order}; give it a letter a mode'
        )
    sizes = dict(zip(first, x.shape, strict=True))
    shapes = [tuple(sizes.get(c, rank) for c in term) for term in terms]
    nbytes = x.dtype.itemsize * sum(map(prod, shapes))
    written = " and ".join(" x ".join(map(str, shape)) or "1" for shape in shapes)
    instead = "give a smaller --rank, or contract fewer large modes"
    check_memory(f"dense operands of {written}", nbytes, x.device, instead=instead)
    return [torch.zeros(shape, dtype=x.dtype, device=x.device) for shape in shapes]


def _info(options: argparse.Namespace) -> None:
    if options.file.lower().endswith(".parquet"):
        _info_packed(options.file)
        return
    x = stc.read(options.file)
    dtype = dtype_name(x.dtype)
    unit = "block" if x.blocksize else "nonzero"
    of = f" of {' x '.join(map(str, x.blocksize))}" if x.blocksize else ""
    print(f"{options.file}: order {x.order}, {x.nnz:,} {unit}s{of}, density {x.density:.3g}, {dtype}")
    counts = Counts(x.coords, x.pattern.shape)
    head = ("mode", "size", "slices", "fibers", f"{unit}s a fiber")
    rows: list[Sequence[str]] = [head]
    for mode in range(x.sparse_order):
        fibers = counts.distinct(tuple(m for m in range(x.sparse_order) if m != mode))
        mean = f"{x.nnz / fibers:.1f}" if fibers else "-"
        rows.append((str(mode), f"{x.shape[mode]:,}", f"{counts.distinct((mode,)):,}", f"{fibers:,}", mean))
    print(indent(aligned(rows), "  "))
    print(f"slices and fibers are those that hold a {unit}; a fiber of a mode runs along it")


def _info_packed(path: str) -> None:
    """Describe a packed file by its footer; the file may be larger than memory."""
    size = os.path.getsize(path)
    with stc.open_packed(path) as file:
        print(f"{path}: packed, order {file.order}, {file.nnz:,} nonzeros, {dtype_name(file.dtype)}, {size:,} bytes")
        sizes = [(str(mode), f"{size:,}") for mode, size in enumerate(file.shape)]
        print(indent(aligned([("mode", "size"), *sizes]), "  "))
        print(f"{len(file.starts) - 1:,} row groups; the footer was checked, nonzeros were not read")


def _pack(options: argparse.Namespace) -> None:
    dtype = NAMED[options.dtype] if options.dtype else None
    stc.pack(options.source, options.target, dtype=dtype, columns=options.columns, memory_limit=options.memory_limit)
    with stc.open_packed(options.target) as file:
        shape = " x ".join(map(str, file.shape))
        print(f"{options.target}: {shape}, {file.nnz:,} nonzeros, {os.path.getsize(file.path):,} bytes")


def _blocking(options: argparse.Namespace) -> None:
    x = stc.read(options.file).to("cuda" if torch.cuda.is_available() else "cpu")
    wanted = {} if options.tau is None else {"taus": options.tau}
    curve = stc.plans.blocking_curve(x, width=options.width, mode=options.mode, progress=sys.stderr.isatty(), **wanted)
    print(f"{options.file}: {curve}")
    if options.png:
        picture = BytesIO()  # drawn before the file is touched
        stc.plot.blocking(curve).figure.savefig(picture, format="png", dpi=150)
        Path(options.png).write_bytes(picture.getvalue())
        print(f"drawn into {options.png}")


def _calibrate(_: argparse.Namespace) -> None:
    profile = calibration.measure()
    usual = "that of a CPU" if profile.loops else f"an {default_gpu().name}'s"
    print(f"{profile.name}, beside the default, {usual}\n{calibrate.table(profile)}")
    path = calibrate.keep(profile)
    device = "CPU" if profile.loops else "GPU"
    print(f"plans on this {device} are made by this profile from now on; remove the record to go back\n  {path}")


if __name__ == "__main__":
    sys.exit(main())
