"""Copies of what a user holds: pickled, copied, saved, sent to another process; before and after it was used."""

from __future__ import annotations

import copy
import io
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import threading
import time
import traceback
import zipfile
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import assert_matches, random_sparse, random_values, reduced

import sparsetc as stc
from sparsetc import restore
from sparsetc.support import cached_property

SPMM = "ij,jr->ir"


def matrix(seed: int = 0) -> stc.SparseTensor:
    return random_sparse((6, 8), "random", torch.float64, seed)


def used(x: stc.SparseTensor) -> stc.SparseTensor:
    """After einsums of one and of two sparse operands, and a gradient."""
    b = random_values((x.shape[1], 3), torch.float64, 1).requires_grad_()
    stc.einsum(SPMM, x, b).sum().backward()
    stc.einsum("ij,kj->ik", x, x)
    stc.einsum("ij,jr->ijr", x, b.detach())
    return x


def saved(x: Any, **settings: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, **settings)


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "save": saved,
    "save, unrestricted": lambda x: saved(x, weights_only=False),
}
every_copy = pytest.mark.parametrize("how", COPIES)


def equal(x: stc.SparseTensor, y: stc.SparseTensor) -> bool:
    same = torch.equal(x.coords, y.coords) and torch.equal(x.values, y.values)
    return same and (x.shape, x.is_coalesced, x.dtype) == (y.shape, y.is_coalesced, y.dtype)


# --- tensors ----------------------------------------------------------------------------------------------------------


@every_copy
@pytest.mark.parametrize("before", [lambda x: x, used], ids=["new", "used"])
def test_a_tensor(how: str, before: Callable[[stc.SparseTensor], stc.SparseTensor]) -> None:
    x = before(matrix())
    y = COPIES[how](x)
    assert equal(x, y)
    assert (y.pattern is x.pattern) == (how == "copy")
    b = random_values((8, 3), torch.float64, 2)
    assert_matches(stc.einsum(SPMM, y, b), SPMM, [y, b])


@every_copy
@pytest.mark.parametrize("form", ["duplicates", "semi-sparse", "empty", "bfloat16"])
def test_tensors_of_all_forms(how: str, form: str) -> None:
    x = {
        "duplicates": stc.SparseTensor([[2, 0, 2]], torch.ones(3), (3,), coalesce=False),
        "semi-sparse": stc.SparseTensor([[2, 0]], random_values((2, 5), torch.float64, 1), (3, 5)),
        "empty": stc.SparseTensor(torch.zeros(2, 0, dtype=torch.long), torch.zeros(0), (0, 3)),
        "bfloat16": matrix().to(torch.bfloat16),
    }[form]
    assert equal(x, COPIES[how](x))


@every_copy
def test_a_parameter_stays_one(how: str) -> None:
    x = matrix()
    p = torch.nn.Parameter(x.values.clone())
    y = COPIES[how](x.with_values(p))
    assert isinstance(y.values, torch.nn.Parameter)
    assert (y.values is p) == (how == "copy")
    stc.einsum(SPMM, y, random_values((8, 3), torch.float64, 2)).sum().backward()
    assert y.values.grad is not None


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "save", "save, unrestricted"])
def test_tensors_of_one_pattern_stay_so_together(how: str) -> None:
    x = used(matrix())
    z, kernel = x.with_values(2 * x.values), stc.compile(SPMM, x, random_values((8, 3), torch.float64, 1))
    copied, other, again, own = COPIES[how]([x, z, kernel, x.pattern])
    assert copied.pattern is other.pattern is again.operand.pattern is own is not x.pattern
    assert equal(x, copied)
    assert equal(z, other)


def test_a_deep_copy_is_apart() -> None:
    x = used(matrix())
    y, before = copy.deepcopy(x), x.to_dense()
    y.values.zero_()
    assert torch.equal(x.to_dense(), before)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"coords": torch.tensor([[0, 9], [1, 1]])}, "out of range"),
        ({"coords": torch.tensor([[1, 0], [1, 1]])}, "sorted, unique"),
        ({"coords": torch.tensor([[1, 1], [1, 1]])}, "sorted, unique"),
        ({"coords": torch.tensor([[0.0, 1.0], [1.0, 1.0]])}, "integers"),
        ({"shape": (2,)}, "2"),
        ({"values": torch.ones(3)}, "3 values"),
        ({"values": torch.ones(2, dtype=torch.complex32)}, "complex32"),
        ({"values": torch.ones(())}, "values"),
        ({"values": "1"}, "values"),
        ({"pattern": torch.ones(2)}, "must have a Pattern"),
    ],
)
def test_a_damaged_pattern_is_refused(change: dict[str, Any], error: str) -> None:
    class Damaged:
        def __init__(self, *made_of: Any) -> None:
            self.made_of = made_of

        def __reduce__(self) -> tuple[Any, ...]:
            return self.made_of  # type: ignore[return-value]

    good = {"coords": torch.tensor([[0, 1], [1, 1]]), "values": torch.ones(2), "shape": (2, 2)} | change
    pattern = change.get("pattern", Damaged(restore.pattern, (good["coords"], good["shape"], True)))
    with pytest.raises(stc.SparsetcError, match=error):
        saved(Damaged(restore.tensor, (pattern, good["values"])))


def test_a_damaged_kernel_is_refused() -> None:
    """Kernels write where a file says, so what it says must agree with its operands."""
    x, other = matrix(), random_sparse((6, 9), "random", torch.float64)
    function, (equation, operands, settings, *rest) = reduced(stc.compile(SPMM, x, torch.ones(8, 3).double()))
    inputs, output, sparse, text, sizes = equation
    for wrong in (
        (equation, (other,), settings),
        ((inputs, output, sparse, text, (("i", 5), *sizes[1:])), operands, settings),
        ((inputs, output, sparse, text, sizes[:-1]), operands, settings),
        ((inputs, output, sparse, text, (*sizes[:-1], ("r", -1))), operands, settings),
        ((inputs, output, sparse, text, (*sizes, ("z", 2))), operands, settings),
        ((inputs, output, (), text, sizes), (), settings),
        ((inputs, output, (2,), text, sizes), operands, settings),
        ((inputs, output, (1, 0), text, sizes), (*operands, *operands), settings),
        ((inputs, ("r", "i", "z"), sparse, text, sizes), operands, settings),
        ((inputs, ("i", "i"), sparse, text, sizes), operands, settings),
        (((("ij",), inputs[1]), output, sparse, text, sizes), operands, settings),
        (((("i", "1"), inputs[1]), output, sparse, text, sizes), operands, settings),
        (((*inputs, ("i", ".", ".", ".")), output, sparse, text, sizes), operands, settings),
        (equation, operands, {**settings, "cache_dir": "/elsewhere"}),
        (equation, operands, {**settings, "backend": "other"}),
    ):
        with pytest.raises(stc.SparsetcError):
            function(*wrong, *rest)


class Made:
    """What pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def test_elements_that_a_file_has_once_for_many_are_not_made_whole() -> None:
    many = torch.zeros(1, 1, dtype=torch.long).expand(2, 10**12)
    for coords in (many, many[:, :7], torch.arange(3).expand(2, 3)):
        with pytest.raises(stc.FormatError, match="coordinates of its own"):
            saved(Made(restore.pattern, coords, (9, 9), False))
    x = stc.SparseTensor(matrix().coords, torch.ones(1).expand(matrix().nnz, 1000), (6, 8, 1000))
    assert saved(x).values.shape == x.values.shape
    with stc.options(memory_limit=1000), pytest.raises(stc.OutOfMemoryError, match="which a file has once for many"):
        saved(x)


def test_a_refused_plan_hides_no_method_and_leaves_nothing_behind() -> None:
    x, b = matrix(), random_values((8, 3), torch.float64, 1)
    kernel = stc.compile(SPMM, x, b, plan=stc.compile(SPMM, x, b, plan="coo").plan)
    function, (equation, operands, settings, *rest) = reduced(kernel)
    (part,) = settings["plan"].parts

    def fields(record: Any, **change: Any) -> Made:
        kind, state = reduced(record)[1]
        return Made(restore.record, kind, state | change)

    for schedule in (
        fields(part.schedule, by_rule="no"),
        fields(part.schedule, warps="1"),
        fields(part.schedule, ruled=({},)),
        fields(part.schedule, ruled="no"),
        Made(restore.record, "Lru", {}),
        Made(restore.record, "Part", {}),
        Made(restore.record, "Schedule"),
        Made(restore.record, 3, {}),
    ):
        plan = fields(settings["plan"], parts=(fields(part, schedule=schedule),))
        with pytest.raises(stc.FormatError, match="a saved"):
            saved(Made(function, equation, operands, settings | {"plan": plan}, *rest))
        with pytest.raises(stc.FormatError, match="a saved"):
            saved(plan)
    assert torch.equal(stc.einsum(SPMM, x, b, plan=settings["plan"]), kernel(b))
    bad = replace(settings["plan"], reason=3)
    with pytest.raises(stc.PlanError, match=r"Plan\.reason must be str"):
        stc.einsum(SPMM, x, b, plan=bad, memory_limit=10**9)
    assert torch.equal(stc.einsum(SPMM, x, b, plan=settings["plan"], memory_limit=10**9), kernel(b))


@pytest.mark.parametrize("what", ["tensor", "blocks", "plan", "kernel", "kernel of two"])
def test_mutated_files(what: str) -> None:
    """A file that was changed anywhere gives what it says, or an error of the package, or torch's before it is read."""
    x, b = matrix(), random_values((8, 3), torch.float64, 1)
    things: dict[str, Callable[[], Any]] = {
        "tensor": lambda: x,
        "blocks": lambda: stc.SparseTensor.from_blocks(x.coords[:, :3], torch.ones(3, 2, 2), (12, 16)),
        "plan": lambda: stc.compile("ijk,jr,kr->ir", random_sparse((4, 8, 8), "random", torch.float64), b, b).plan,
        "kernel": lambda: stc.compile(SPMM, x, b, plan=stc.compile(SPMM, x, b).plan),
        "kernel of two": lambda: stc.compile("ij,kj->ik", x, x),
    }
    file, r = io.BytesIO(), random.Random(what)
    torch.save(things[what](), file)
    with zipfile.ZipFile(file) as whole:
        entries = {name: whole.read(name) for name in whole.namelist()}
    read, refused = 0, 0
    for _ in range(60):
        name = next(name for name in entries if name.endswith("data.pkl"))
        name = r.choice([name, name, name, r.choice(list(entries))])
        data, other = bytearray(entries[name]), io.BytesIO()
        for _ in range(r.randint(1, 2)):
            data[r.randrange(len(data))] = r.choice((0, 1, 2, 5, 255, ord("K"), ord("N"), ord(")"), r.randrange(256)))
        with zipfile.ZipFile(other, "w") as damaged:
            for one, own in entries.items():
                damaged.writestr(one, bytes(data) if one == name else own)
        other.seek(0)
        try:
            torch.load(other)
            read += 1
        except stc.SparsetcError:
            refused += 1
        except Exception as error:
            where = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
            assert not any(name.startswith(os.path.dirname(stc.__file__) + os.sep) for name in where), where
    assert read
    assert refused


def test_a_plan_cannot_write_into_the_source() -> None:
    x, b = matrix(), random_values((8, 3), torch.float64, 1)
    plan = stc.compile(SPMM, x, b, plan="coo").plan
    part = replace(plan.parts[0], label='x\nimport os"')
    with pytest.raises(stc.PlanError, match="printable"):
        stc.compile(SPMM, x, b, plan=replace(plan, parts=(part,)))


# --- kernels and plans ------------------------------------------------------------------------------------------------


@every_copy
@pytest.mark.parametrize("equation", [SPMM, "ij,ir,jr->ij", "ij,jr->jir", "ii->"])
def test_a_kernel(how: str, equation: str) -> None:
    x = random_sparse((6, 6), "random", torch.float64) if equation == "ii->" else matrix()
    sizes = {"i": 6, "j": 8, "r": 3}
    terms = equation.split("->")[0].split(",")[1:]
    dense = [random_values(tuple(sizes[c] for c in t), torch.float64, n) for n, t in enumerate(terms)]
    kernel = stc.compile(equation, x, *dense, plan="coo", output="dense")
    kernel = kernel.with_values(random_values((x.nnz,), torch.float64, 9))
    other = COPIES[how](kernel)
    assert (other.equation, other.plan.name, other.source) == (kernel.equation, "coo", kernel.source)
    assert equal(other.operand, kernel.operand)
    torch.testing.assert_close(other(*dense), kernel(*dense))


@every_copy
@pytest.mark.parametrize("equation", ["ij,kj->ik", "ij,kj,kr->ir", "ij,kj,mj->ikm"])
def test_a_kernel_of_several_sparse_operands(how: str, equation: str) -> None:
    sparse = [matrix(seed) for seed in range(3 if equation.count(",") == 2 and "m" in equation else 2)]
    dense = [random_values((6, 3), torch.float64, 4)] if "r" in equation else []
    kernel = stc.compile(equation, *sparse, *dense, plan="scalar")
    kernel = kernel.with_values(random_values((sparse[0].nnz,), torch.float64, 9), *(None for _ in sparse[1:]))
    other = COPIES[how](kernel)
    assert other.plan == kernel.plan
    found, expected = other(*dense), kernel(*dense)
    assert equal(found, expected) if isinstance(found, stc.SparseTensor) else torch.equal(found, expected)


def test_a_deep_copy_of_a_kernel_is_apart() -> None:
    x, b = matrix(), random_values((8, 3), torch.float64, 1)
    kernel = stc.compile(SPMM, x, b)
    other, before = copy.deepcopy(kernel), kernel(b)
    other.operand.values.mul_(2)
    torch.testing.assert_close(other(b), 2 * before)
    torch.testing.assert_close(kernel(b), before)


def test_a_kernel_keeps_the_precision_it_was_compiled_for() -> None:
    x, b = matrix().to(torch.float32), random_values((8, 3), torch.float32, 1)
    torch.set_float32_matmul_precision("high")
    kernel = stc.compile(SPMM, x, b)
    torch.set_float32_matmul_precision("highest")
    assert pickle.loads(pickle.dumps(kernel)).step.problem.precision == kernel.step.problem.precision


def test_plans_and_explanations() -> None:
    x, b = matrix(), random_values((8, 3), torch.float64, 1)
    kernel, pair = stc.compile(SPMM, x, b), stc.compile("ij,kj->ik", x, x)
    things = [
        kernel.plan,
        kernel.explain(),
        kernel.step.programs,
        kernel.step.choice,
        kernel.step.problem,
        pair.plan,
        pair.explain(),
    ]
    for thing in [*things, stc.plans.plan_hls(3), stc.plans.plan_bcb(i=8), kernel.contraction.settings]:
        for how in (pickle.dumps, lambda t: pickle.dumps(copy.deepcopy(t))):
            assert pickle.loads(how(thing)) == thing


# --- processes --------------------------------------------------------------------------------------------------------


def _answer(connection: Any, x: stc.SparseTensor, kernel: stc.Kernel, b: torch.Tensor) -> None:
    torch.set_num_threads(1)  # as any forked worker must: threads do not survive a fork
    connection.send((stc.einsum(SPMM, x, b).numpy(), kernel(b).numpy()))


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_other_processes(method: str) -> None:
    x, b = used(matrix()), random_values((8, 3), torch.float64, 1)
    kernel = stc.compile(SPMM, x, b)
    expected = kernel(b)
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    process = context.Process(target=_answer, args=(there, x, kernel, b))
    process.start()
    assert here.poll(120), "the process did not answer"
    for found in here.recv():
        torch.testing.assert_close(torch.from_numpy(found), expected)
    process.join()
    assert process.exitcode == 0


def test_a_property_of_one_object_does_not_wait_for_another() -> None:
    reading, answer = threading.Event(), threading.Event()

    class Slow:
        def __init__(self, wait: bool) -> None:
            self.wait = wait

        @cached_property
        def half(self) -> object:
            """An object."""
            if self.wait:
                reading.set()
                assert answer.wait(60)
            return object()

    slow, fast = Slow(True), Slow(False)
    thread = threading.Thread(target=lambda: slow.half)
    thread.start()
    assert reading.wait(60)
    other = threading.Thread(target=lambda: fast.half, daemon=True)
    other.start()
    other.join(50)
    waited = other.is_alive()
    answer.set()
    thread.join()
    assert not waited
    assert fast.half is fast.half
    assert Slow.half.__doc__ == "An object."


class SlowModule(Loader):
    """Finds and loads a module that takes its time."""

    def __init__(self, name: str) -> None:
        self.name, self.loading = name, threading.Event()

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Its place, for that name only."""
        return ModuleSpec(name, self) if name == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        """Say that it is being loaded, and wait."""
        self.loading.set()
        time.sleep(0.2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("name", ["sparsetc.slow", "torch.slow"])
def test_a_forked_child_imports_what_a_thread_was_importing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of the package, and of torch, which imports modules of its own as it is called."""
    slow = SlowModule(name)
    monkeypatch.setattr(sys, "meta_path", [slow, *sys.meta_path])
    thread = threading.Thread(target=import_module, args=(slow.name,))
    thread.start()
    assert slow.loading.wait(60)
    child = multiprocessing.get_context("fork").Process(target=import_module, args=(slow.name,))
    child.start()
    child.join(100)
    waits = child.is_alive()
    child.kill()
    thread.join()
    sys.modules.pop(slow.name)
    assert not waits


FORKS = """
import os, signal, threading
import torch
import sparsetc as stc

def work(seed):
    generator = torch.Generator().manual_seed(seed)
    x = stc.SparseTensor(torch.randint(0, 5, (3, 8), generator=generator), torch.ones(8), (5, 5, 5))
    stc.einsum("ijk,jr,kr->ir", x, torch.ones(5, 2), torch.ones(5, 2))
    stc.einsum("ijk,ijl->kl", x, x)

def compile_on(seed):
    while seed := seed + 2:
        work(seed)

pause, forked = threading.Event(), []
torch.set_num_threads(1)
work(0)  # what torch makes once is made
for first in range(2):
    threading.Thread(target=compile_on, args=(first,), daemon=True).start()
for seed in range(30):
    forked.append(os.fork())
    if not forked[-1]:
        signal.alarm(200)
        try:
            work(seed)
        except BaseException as error:
            print(repr(error))
            os._exit(1)
        os._exit(0)
    pause.wait(0.003)
statuses = [os.waitpid(child, 0)[1] for child in forked]
os.write(1, str(sum(map(bool, statuses))).encode())
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forked_children_compile_whatever_threads_do() -> None:
    """Two threads compile while 30 processes are forked."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=300)
    assert done.stdout == "0", done.stdout + done.stderr[-2000:]


def test_what_is_saved_is_checked_before_it_is_made() -> None:
    x = stc.SparseTensor.from_blocks([[0], [1]], torch.ones(1, 2, 2), (4, 4))
    with pytest.raises(stc.FormatError, match="it is damaged"):
        restore.tensor(x.pattern, torch.ones(1, 2, 3))
    kernel = stc.compile("ij,j->i", stc.eye(3), torch.ones(3))
    _, (equation, operands, settings, form, drop_zeros) = reduced(kernel)
    with pytest.raises(stc.FormatError, match="has other options"):
        restore.kernel(equation, operands, {**settings, "deterministic": 5}, form, drop_zeros)
