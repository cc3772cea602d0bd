"""Files changed at random, of every kind that is read: ``python tests/fuzz/mutated.py --files 10000 --seed 1``.

In: kinds of files, how many of each, a seed. Out: how many were read, refused, and are at fault; each fault with its
traceback and the file, kept in a folder; an exit status of 1 where there was one. Ten thousand files of every kind take
about half an hour; other seeds make other files, and the same seed the same ones.

Whatever a file holds, it is used or refused by one error of the package in plain text. It costs little time and memory,
starts no program, loads no pickle, and leaves its folder as it was. Most changes are of bytes. Archives are changed
within members and JSON within its tree, with checksums that are right, so that what lies behind those is reached too.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import gzip
import io
import json
import os
import re
import resource
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, wherever it is run

import torch

import sparsetc as stc
from sparsetc.__main__ import main as command
from sparsetc.codegen import cache
from sparsetc.decomposition import CP, Tucker
from sparsetc.device import profile
from sparsetc.device.timing import Timing
from sparsetc.ir.plan import AUTO
from sparsetc.planner.pricing import costs, price, seconds_of
from sparsetc.planner.registry import PLANS
from sparsetc.tuning import record, refit
from sparsetc.tuning.search import Trial

PIECES = (b"0", b"-1", b"9223372036854775808", b"1e39", b"nan", b"_", b"\0", b"\r", b"\n", b"#", b"%", b"3\n4 5 6\n")
NUMBERS = (b"0", b"1", b"-1", b"7", b"255", b"65536", b"4294967296", b"9223372036854775807", b"9" * 40)
VALUES = (None, True, 0, -1, 1, 3, 2**31, 2**63 - 1, 10**40, 0.5, -1e300, float("inf"), float("nan"), "", "\x1b[2J")
VALUES = (*VALUES, "a\u202e\n", "float64", [], [[]], {}, [1, 2, 3], {"a": 1}, "x" * 5000)
LIMIT = 10**7
"""Bytes of the memory limit under which files are used."""
SECONDS, GROWTH, HANGS = 3.0, 200_000, 120
"""Processor time that a file may take, kilobytes by which it may raise the process's largest memory, and the clock's
seconds after which the driver ends."""
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class", "socket.connect")


class Fault(AssertionError):
    """What a reader must not do."""


class Kind(NamedTuple):
    """Files of one kind.

    Attributes:
        make: writes a good file.
        use: reads and uses one.
        change: makes another text of a good one.
        name: of the file, below the folder.
        writes: True if using a file may write to its folder.
    """

    make: Callable[[Path], object]
    use: Callable[[Path], object]
    change: Callable[[Random, bytes], bytes]
    name: str
    writes: bool = False


# -- changes ----------------------------------------------------------------------------------------------------------


def changed(random: Random, data: bytes) -> bytes:
    """Other bytes in a few places, or another number in place of one, as long as it was or not."""
    made = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        if numbers := random.random() < 0.3 and [*re.finditer(rb"\d+", made)]:
            one, number = random.choice(numbers), random.choice(NUMBERS)
            length = len(one.group())
            made[one.start() : one.end()] = random.choice((number, number[:length].rjust(length, b"0")))
            continue
        # every second one near an end, where headers and footers are
        near = min(len(made), random.choice((len(made), 400)))
        at = random.choice((random.randrange(near + 1), len(made) - random.randrange(near + 1)))
        piece = random.choice((*PIECES, random.randbytes(1), random.randbytes(2)))
        made[at : at + random.choice((0, 1, len(piece), len(piece), 100))] = piece
    return bytes(made[: random.randrange(len(made) + 1)] if random.random() < 0.05 else made)


def changed_archive(random: Random, data: bytes) -> bytes:
    """An archive, or one with right checksums of which a member is another, or is gone, or is there twice."""
    if random.random() < 0.3:
        return changed(random, data)
    made = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
        warnings.simplefilter("ignore", UserWarning)  # of two members with one name
        chosen, times = random.choice(old.namelist()), random.choice((0, 1, 1, 1, 1, 2))
        for name in old.namelist():
            for _ in range(times if name == chosen else 1):
                member = old.read(name)
                new.writestr(name, changed(random, member) if name == chosen else member)
    return made.getvalue()


def changed_gzip(random: Random, data: bytes) -> bytes:
    """A compressed text, or the text within it."""
    if random.random() < 0.5:
        return changed(random, data)
    return gzip.compress(changed(random, gzip.decompress(data)), 1, mtime=0)


def changed_tree(random: Random, tree: Any) -> Any:
    """JSON with a few of its values others, or gone, or where another was."""
    tree = copy.deepcopy(tree)
    for _ in range(random.choice((1, 1, 2, 5))):
        places = [*_places(tree)]
        if not places:
            return random.choice(VALUES)
        holder, key = random.choice(places)
        kind = random.random()
        if kind < 0.1:
            del holder[key]
        elif kind < 0.2 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif kind < 0.4:
            other, name = random.choice(places)
            holder[key] = copy.deepcopy(other[name])
        else:
            holder[key] = copy.deepcopy(random.choice(VALUES))
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """The values of a tree, each as its holder and its place in that."""
    for key in [*tree] if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from _places(tree[key])


def changed_json(random: Random, data: bytes) -> bytes:
    """JSON, or lines of it, of which one value or more is another; or changed bytes."""
    if random.random() < 0.3:
        return changed(random, data)
    texts = data.splitlines() if data.count(b"\n") > 1 and data[:2] == b'{"' else [data]
    for at in random.choice((range(len(texts)), [random.randrange(len(texts))])):  # all lines alike, or one
        texts[at] = json.dumps(changed_tree(Random(random.random()), json.loads(texts[at]))).encode()
    return b"\n".join(texts) + b"\n"


def changed_safetensors(random: Random, data: bytes) -> bytes:
    """A safetensors file with another header, and within that another description of a stream, checksum included."""
    if random.random() < 0.3:
        return changed(random, data)
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    about = header.get("__metadata__", {})
    if "stream" in about and random.random() < 0.8:
        text = json.dumps(changed_tree(random, json.loads(about["stream"])), separators=(",", ":"))
        about |= {"stream": text, "crc32": str(zlib.crc32(text.encode()))}
    else:
        header = changed_tree(random, header)
    text = json.dumps(header, separators=(",", ":")).encode()
    return max(length, len(text)).to_bytes(8, "little") + text.ljust(length) + rest


# -- tensors, models and streams --------------------------------------------------------------------------------------


def _tensor(*shape: int) -> stc.SparseTensor:
    random = torch.Generator().manual_seed(0)
    coords = torch.stack([torch.randint(0, n, (30,), generator=random) for n in shape])
    return stc.SparseTensor(coords, torch.randn(30, generator=random), shape)


def _check(x: stc.SparseTensor) -> None:
    inside = (x.coords >= 0) & (x.coords < torch.tensor(x.shape)[: len(x.coords), None])
    if not x.is_coalesced or not bool(inside.all()) or x.values.shape[0] != x.coords.shape[1]:
        raise Fault(f"it is not sorted, does not fit together or has coordinates outside: {x}")


def _write(path: Path) -> None:
    stc.write(path, _tensor(9, 9) if ".mtx" in path.name else _tensor(9, 5, 7))


def _read(path: Path) -> None:
    _check(stc.read(path))


def _open(path: Path) -> None:
    with stc.open_packed(path) as file:
        file.rows(0, file.shape[0])
        file.verify()


def _table(path: Path) -> None:
    _check(stc.read(path, columns=("i0", "i1", "value")))


def _pack(path: Path) -> None:
    target = path.with_name("packed.parquet")
    try:
        stc.pack(path, target, memory_limit="128MiB")
        _read(target)
    finally:
        target.unlink(missing_ok=True)


def _model(kind: type[Any], path: Path) -> None:
    model = kind.load(path)
    repr(model)
    model.to_dense()


B, C = torch.ones(5, 2), torch.ones(7, 2)
EQUATION, GPU = "ijk,jr,kr->ir", "A GPU"


def _stream(path: Path) -> None:
    with stc.stream_kernel(EQUATION, _tensor(9, 5, 7), B, C, plan="coo", chunk_bytes=4096) as stream:
        stream.save(path)


def _streamed(path: Path) -> None:
    with stc.open_stream(path) as stream:
        repr(stream)
        with contextlib.suppress(stc.ShapeError, stc.EquationError, stc.DtypeError):  # of another einsum
            stream(B, C)


# -- what the cache folder holds --------------------------------------------------------------------------------------


def _compiled(**settings: Any) -> stc.Kernel:
    stc.clear_cache()
    return stc.compile(EQUATION, _tensor(9, 5, 7), B, C, **settings)


def _timed(path: Path) -> None:
    _compiled(tune=0.05)


def _planned(path: Path) -> None:
    """Compile by a record, list it, price it."""
    kernel = _compiled(tune="now", deterministic=True)
    if not str(kernel.explain()).replace("\n", "").isprintable():
        raise Fault("explain() says what a terminal should not be shown")
    torch.testing.assert_close(kernel(B, C), RIGHT)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        command(["tune", "list"])
    if not said.getvalue().replace("\n", "").isprintable():
        raise Fault("tune list says what a terminal should not be shown")
    _priced(path)


@lru_cache(maxsize=1)
def _step() -> Any:
    """What a GPU would run."""
    return _compiled(backend="triton").step


def _of_triton(path: Path) -> None:
    step, trials = _step(), []
    for candidate in (c for method in PLANS.values() for c in method.estimates(step.problem)):
        trials.append(Trial(price(candidate, step.problem), None, Timing(1e-5, 2e-5, 3e-5, 9)))
    record.Known(record.facts_of(step.problem), AUTO, GPU).add(trials)


def _priced(path: Path) -> None:
    for one in refit.timings(record.lines(path)):
        refit.regret(one, profile.default_gpu())
        refit.cost(one, profile.default_gpu())


def _calibrated(path: Path) -> None:
    usual = profile.default_gpu()
    numbers = {name: getattr(usual, name) for name in profile.MEASURED}
    profile.write(profile.calibrated(GPU, "2026-01-02", numbers), {"torch": "2"})


def _of_gpu(path: Path) -> None:
    profile._read.cache_clear()
    found = profile.of_gpu(GPU)
    if not found.describe().isprintable():
        raise Fault("a profile says what a terminal should not be shown")
    step = _step()
    for candidate in (c for method in PLANS.values() for c in method.estimates(step.problem)):
        seconds = seconds_of(candidate.plan, costs(candidate, step.problem), candidate.expected, found)
        if not 0 < sum(seconds) < float("inf"):
            raise Fault("a profile by which a plan has no price")


SOURCE = "answer = 42\n"


def _kept(path: Path) -> None:
    cache.clear()
    if cache.load(SOURCE, path.parent, "kernel")[0].answer != 42 or path.read_text() != SOURCE:
        raise Fault("another source than the one that was generated")


KINDS = {
    "tns": Kind(_write, _read, changed, "x.tns"),
    "tns.gz": Kind(_write, _read, changed_gzip, "x.tns.gz"),
    "mtx": Kind(_write, _read, changed, "x.mtx"),
    "npz": Kind(_write, _read, changed_archive, "x.npz"),
    "parquet": Kind(_write, _read, changed, "x.parquet"),
    "packed": Kind(_write, _open, changed, "x.parquet"),
    "table": Kind(_write, _table, changed, "x.parquet"),
    "pack": Kind(_write, _pack, changed, "x.tns"),
    "pack.mtx": Kind(_write, _pack, changed, "x.mtx"),
    "cp": Kind(
        lambda path: CP(torch.rand(2), [torch.rand(n, 2) for n in (9, 5)]).save(path),
        partial(_model, CP),
        changed_safetensors,
        "x.safetensors",
    ),
    "tucker": Kind(
        lambda path: Tucker(torch.rand(2, 3), [torch.rand(9, 2), torch.rand(5, 3)]).save(path),
        partial(_model, Tucker),
        changed_safetensors,
        "x.safetensors",
    ),
    "stream": Kind(_stream, _streamed, changed_safetensors, "x.safetensors"),
    "record": Kind(_timed, _planned, changed_json, "tuning/cpu.jsonl", writes=True),
    "fit": Kind(_of_triton, _priced, changed_json, "tuning/a-gpu.jsonl"),
    "profile": Kind(_calibrated, _of_gpu, changed_json, "profiles/a-gpu.json"),
    "source": Kind(
        lambda path: cache.load(SOURCE, path.parent, "kernel"),
        _kept,
        changed,
        cache.path_of(SOURCE, Path(), "kernel").name,
        writes=True,
    ),
}
RIGHT = torch.einsum("ijk,jr,kr->ir", _tensor(9, 5, 7).to_dense(), B, C)


# -- the driver -------------------------------------------------------------------------------------------------------

_watched: list[str] = []
"""The events that must not happen; a list while a file is used."""


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event in FORBIDDEN:
        _watched.append(f"{event} {arguments!r:.200}")


_watching = False


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def use(kind: Kind, path: Path) -> str:
    """Use a file as its kind is used; return "read" or "refused". `Fault` says what it must not have done."""
    global _watching
    before, data = _folder(path), path.read_bytes()
    with contextlib.suppress(OSError):  # the peak begins anew, whatever this process held before
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    start, peak, _watching = time.process_time(), _peak(), True
    outcome = "read"
    try:
        with warnings.catch_warnings(), stc.options(memory_limit=LIMIT):
            warnings.filterwarnings("error")
            warnings.filterwarnings("ignore", "sparsetc: .*(passed over|no profile|no GPU|is not kept)")
            kind.use(path)
    except stc.SparsetcError as error:
        outcome = "refused"
        if path.name not in str(error) or not str(error).replace("\n", "").isprintable() or len(str(error)) > 1000:
            raise Fault(f"a message that does not name the file, or is no plain text: {error!r:.2000}") from error
    finally:
        _watching = False
    seconds, growth = time.process_time() - start, _peak() - peak
    if seconds > SECONDS or growth > GROWTH:
        raise Fault(f"{seconds:.1f} s and {growth:,} KB for a file of {len(data):,} bytes")
    if _watched:
        raise Fault(f"it started {', '.join(_watched)}")
    if not kind.writes and (_folder(path) != before or path.read_bytes() != data):
        raise Fault(f"the folder holds {_folder(path)}")
    return outcome


def _folder(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir())


def run(name: str, seed: int, count: int, keep: Path | None = None, show: bool = False) -> Counter[str]:
    """Use ``count`` changed files of a kind; count what became of them.

    Args:
        name: of the kind.
        seed: of the first change.
        count: of files.
        keep: folder for files at fault; None raises the first `Fault`, or foreign exception.
        show: print faults.
    """
    kind, tally = KINDS[name], Counter[str]()
    with tempfile.TemporaryDirectory(prefix="sparsetc-mutated-") as folder, stc.options(cache_dir=folder):
        path = Path(folder, kind.name)
        kind.make(path)
        good = path.read_bytes()
        kind.use(path)
        for number in range(seed, seed + count):
            path.write_bytes(data := kind.change(Random(f"{name} {number}"), good))
            if keep is not None:
                faulthandler.dump_traceback_later(HANGS, exit=True)
            try:
                tally[use(kind, path)] += 1
            except Exception:
                if keep is None:
                    raise
                tally["fault"] += 1
                keep.mkdir(exist_ok=True)
                (keep / f"{name}-{number}-{path.name}").write_bytes(data)
                print(f"\n-- {name} {number}", traceback.format_exc(), sep="\n", flush=True)
            finally:
                faulthandler.cancel_dump_traceback_later()
                _watched.clear()
    return tally


sys.addaudithook(_watch)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return the exit status."""
    parser = argparse.ArgumentParser(description="Use files that were changed at random.")
    parser.add_argument("kinds", nargs="*", metavar="kind", help=f"{', '.join(KINDS)}; all if none is named")
    parser.add_argument("--files", type=int, default=10_000, help="of each kind (default: 10,000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first file; file n of it is seed + n (default: 0)")
    parser.add_argument("--keep", type=Path, default=Path("mutated"), help="folder for faults (default: mutated)")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.kinds) - set(KINDS)):
        parser.error(f"kinds are {', '.join(KINDS)}; found {', '.join(unknown)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    faults = 0
    for name in options.kinds or KINDS:
        start = time.perf_counter()
        tally = run(name, options.seed, options.files, options.keep)
        faults += tally["fault"]
        print(f"{name}: {dict(tally)}, {time.perf_counter() - start:.0f} s", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
