"""The data of the benchmarks: make what can be made, say where the rest comes from, and convert what was downloaded.

    python benchmarks/data.py --list                                # every tensor and matrix, and where it comes from
    python benchmarks/data.py make [NAME ...] [--folder data]       # synthetic ones; all but those like published ones
    python benchmarks/data.py make "nell-2 x0.25"                   # one like a published one, its nonzeros scaled
    python benchmarks/data.py convert bcsstk16.mtx bcsstk16_mat     # a .tns or .mtx file, also .gz, as NAME.npz
    SPARSETC_DATA=data python benchmarks/spmm.py bcsstk16_mat

A file is NAME.npz: ``coords`` (order x nnz, from 0, sorted, without repeats), ``values`` and ``shape``. Benchmarks read
``coords`` and ``shape`` of a real tensor and draw its values. They make synthetic tensors themselves, so ``make`` is
for other programs; on a GPU its random numbers differ from a CPU's. Nothing is downloaded. Licences are named where
they are known: ask the source before you pass data on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import synthetic
from common import SYNTHETIC, tensor

import sparsetc as stc
from sparsetc.explain import aligned

SUFFIXES = (".tns", ".tns.gz", ".mtx", ".mtx.gz")


class Source(NamedTuple):
    """A real tensor or matrix.

    Attributes:
        shape: its sizes, which a converted file is compared with.
        nnz: its nonzeros, likewise.
        where: who publishes it, or how it was computed.
        url: an address to download it from; empty where none publishes it in this form.
    """

    shape: tuple[int, ...]
    nnz: int
    where: str
    url: str = ""


UBER = "trips of the NYC TLC and FiveThirtyEight (no licence named), April to June 2014, counted by"
TRIPS = "https://github.com/fivethirtyeight/uber-tlc-foil-response"
PYSCF = "computed with PySCF:"
CITED = "a graph of citations, as edges in both directions:"
FROSTT = "http://frostt.io"
HATEN2 = "https://datalab.snu.ac.kr/haten2"
SUITESPARSE = "https://sparse.tamu.edu"
NETWORK = "https://networkrepository.com"
LINQS = "https://linqs.org/datasets"

REAL = {
    "uber_amj_4d": Source((91, 24, 887, 1410), 1_378_268, f"{UBER} day, hour, latitude, longitude", TRIPS),
    "uber_amj_3d": Source((2184, 887, 1410), 1_378_268, f"{UBER} hour, latitude, longitude", TRIPS),
    "guanine_TEoo_3d": Source((39, 39, 686), 172_036, f"{PYSCF} three-centre integrals of guanine, cc-pVDZ, localised"),
    "guanine_TEov_3d": Source((39, 179, 686), 1_067_116, f"{PYSCF} the same, occupied x virtual"),
    "guanine_TEvv_3d": Source((179, 179, 686), 2_147_356, f"{PYSCF} the same, virtual x virtual"),
    "uracil3_t2_4d": Source((87, 87, 153, 153), 7_436_111, f"{PYSCF} MP2 amplitudes of a uracil trimer, 6-31G"),
    "bcsstk16_mat": Source((4884, 4884), 290_378, "SuiteSparse HB/bcsstk16 (CC BY 4.0)", f"{SUITESPARSE}/HB/bcsstk16"),
    "econ_mbeacxc_mat": Source((496, 496), 49_920, "SuiteSparse HB/mbeacxc (CC BY 4.0)", f"{SUITESPARSE}/HB/mbeacxc"),
    "c2000_5_mat": Source((2000, 2000), 1_999_672, "Network Repository C2000-5", NETWORK),
    "hamming10_4_mat": Source((1024, 1024), 868_352, "Network Repository hamming10-4", NETWORK),
    "p_hat1500_1_mat": Source((1500, 1500), 569_846, "Network Repository p-hat1500-1", NETWORK),
    "cora_mat": Source((2708, 2708), 13_264, f"{CITED} Cora, and a loop at each paper", LINQS),
    "pubmed_mat": Source((19_717, 19_717), 88_651, f"{CITED} PubMed Diabetes", LINQS),
    "amazon": Source(
        (4_821_207, 1_774_269, 1_805_187), 1_741_809_018, "FROSTT; benchmarks use its sizes alone", FROSTT
    ),
    "reddit": Source((8_211_298, 176_962, 8_116_559), 4_687_474_081, "FROSTT; benchmarks use its sizes alone", FROSTT),
}
"""Real data by the names of their files."""
IMITATED = {
    **dict.fromkeys(("nell-1", "nell-2", "flickr", "delicious"), ("FROSTT", FROSTT)),
    **dict.fromkeys(("freebase-music", "darpa"), ("HaTen2", HATEN2)),
}
"""Published tensors that `synthetic.like` imitates. Benchmarks make the imitation where they are given such a name: a
published one goes by another, such as ``nell_2_3d``."""


def table() -> str:
    """Return a table of all data: name, sizes, nonzeros, where it comes from, and an address."""
    rows = [["name", "sizes", "nonzeros", "from", "at"]]
    for name, source in REAL.items():
        rows.append([name, _sizes(source.shape), f"{source.nnz:,}", source.where, source.url])
    for name, (publisher, url) in IMITATED.items():
        shape, nnz = synthetic.PUBLISHED[name][:2]
        rows.append([name, _sizes(shape), f"{nnz:,}", f"made like the tensor of {publisher}", url])
    rows += [[name, "", "", "made", ""] for name in SYNTHETIC]
    return aligned(rows, left=(0, 3, 4), ruled=True)


def _sizes(shape: Sequence[int]) -> str:
    """Return sizes as text."""
    return " x ".join(map(str, shape))


def make(name: str, folder: Path) -> Path:
    """Make a synthetic tensor and write it; return the file.

    Raises:
        ValueError: no synthetic tensor has this name.
    """
    if name not in SYNTHETIC and name.partition(" x")[0] not in synthetic.PUBLISHED:
        if name in REAL:
            raise ValueError(f"{name} cannot be made: {REAL[name].where} {REAL[name].url}".rstrip())
        raise ValueError(f"no tensor is called {name!r}; --list prints all names")
    x = tensor(name)
    assert x is not None
    return _write(x, name, folder)


def convert(file: Path, name: str, folder: Path) -> Path:
    """Write a downloaded .tns or .mtx file as ``name``.npz; return the file.

    Raises:
        ValueError: the file is of another kind, the name is that of a synthetic tensor, or sizes or nonzeros are not
            those of the tensor that benchmarks have by this name.
    """
    if not file.name.endswith(SUFFIXES):
        raise ValueError(f"{file} should be one of {', '.join(SUFFIXES)}")
    if name in SYNTHETIC or name.partition(" x")[0] in synthetic.PUBLISHED:
        raise ValueError(f"benchmarks make {name!r} themselves; name the published one otherwise, such as nell_2_3d")
    x = stc.read(file)
    source = REAL.get(name)
    if source and (x.shape, x.nnz) != source[:2]:
        found, expected = (f"{_sizes(shape)} with {nnz:,} nonzeros" for shape, nnz in ((x.shape, x.nnz), source[:2]))
        raise ValueError(f"{file} is {found}, but {name} is {expected}; give it another name")
    return _write(x, name, folder)


def _write(x: stc.SparseTensor, name: str, folder: Path) -> Path:
    """Write a tensor as ``name``.npz and say so."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.npz"
    stc.write(path, x)
    print(f"wrote {path}: {_sizes(x.shape)}, {x.nnz:,} nonzeros")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0, or 2 where it is refused."""
    parser = argparse.ArgumentParser(description="The data of the benchmarks.")
    parser.add_argument("--list", action="store_true", help="print every tensor and where it comes from")
    commands = parser.add_subparsers(dest="command", metavar="command")
    maker = commands.add_parser("make", help="make synthetic tensors")
    maker.add_argument(
        "names", nargs="*", metavar="NAME", help="such as clustered or 'nell-2 x0.25' (default: all made)"
    )
    converter = commands.add_parser("convert", help="convert a downloaded .tns or .mtx file")
    converter.add_argument("file", type=Path)
    converter.add_argument("name", help="the name that benchmarks have for it, or one of yours")
    for command in (maker, converter):
        command.add_argument("--folder", type=Path, default=Path("data"), help="where files go (default: data)")
    options = parser.parse_args(arguments)
    try:
        if options.command == "make":
            for name in options.names or SYNTHETIC:
                make(name, options.folder)
        elif options.command == "convert":
            convert(options.file, options.name, options.folder)
        elif options.list:
            print(table())
        else:
            parser.error("nothing to do: --list, make or convert")
    except (ValueError, OSError) as error:
        print(f"data.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
