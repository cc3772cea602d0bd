"""Maps between products: traced functions, row tiles, and kernels compiled ahead of time; no GPU is needed."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from map_cases import CPU, PATTERNS, SMALL, as_if_large, kernels, kernels_of, reading, scattered
from matrix_units import NATIVE, OTHERS, TARGETS, dealt

import sparsetc as stc
from sparsetc import masks
from sparsetc.codegen import cache
from sparsetc.codegen.launch import assembled, triton_type
from sparsetc.device.profile import gpu
from sparsetc.maps.body import Body
from sparsetc.maps.elementwise import INPUT, Builder, Elementwise, Ref
from sparsetc.maps.kernel import WalkKernel
from sparsetc.maps.mask_tiles import tiles_of
from sparsetc.maps.pairs import APART, Pairs, pairs_of
from sparsetc.maps.row_tiles import RowTiles, of_pattern, of_tiles
from sparsetc.maps.task import Task
from sparsetc.maps.trace import Untraced, trace
from sparsetc.nn.attention import _gat, _gat2
from sparsetc.options import of_call
from sparsetc.sparse_attention import _body, _scored

# -- traced functions -------------------------------------------------------------------------------------------------

EVALUATED: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "relu": torch.relu,
    "where": torch.where,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_not": torch.logical_not,
    "sigmoid": torch.sigmoid,
    "pow": torch.pow,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}


def evaluated(function: Elementwise, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """The outputs, by torch's function of each operation's name."""
    shape, results = next(iter(inputs.values())), list[torch.Tensor]()

    def value(argument: Any) -> torch.Tensor:
        return results[argument] if isinstance(argument, Ref) else torch.full_like(shape, argument)

    for name, arguments in function.operations:
        call = EVALUATED.get(name) or getattr(torch, name, None)
        results.append(inputs[arguments[0]] if name == INPUT else call(*map(value, arguments)))  # type: ignore[misc]
    return {name: value(argument) for name, argument in function.outputs.items()}


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "softplus": F.softplus,
    "elu": F.elu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp_min": lambda x: x.clamp(min=0.1),
    "square": lambda x: x**2,
    "reciprocal": lambda x: (x + 3) ** -1,
    "constant": lambda x: torch.tensor(2.0) * x,
    "logsigmoid": F.logsigmoid,
    "softcap": lambda x: torch.tanh(x / 30) * 30,
    "step": lambda x: (x > 0).float() * x,
    "remainder": lambda x: x % 2,
    "rounded remainder": lambda x: (x * 100).floor() * 41 % 41 + x,
    "floor of a quotient": lambda x: ((x * 100).floor() * 41 / 41).floor() * 0.01 + x,
    "compared quotient": lambda x: torch.where(((x * 10).floor() * 41 / 41 == 1) | (x * 10 / 3 < 0.5), x, -x),
    "floor division": lambda x: torch.div((x * 100).floor(), 3, rounding_mode="floor") * x,
    "logaddexp": lambda x: torch.logaddexp(x, x * 2),
    "folded": lambda x: -(2 * (x * 3 + 0) * 1 - 1) / 4,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_their_derivatives_are_traced(name: str) -> None:
    function = FUNCTIONS[name]

    def both(x: torch.Tensor, g: torch.Tensor) -> dict[str, torch.Tensor]:
        z, pull = torch.func.vjp(function, x)
        return {"z": z, "d": pull(g)[0]}

    x, g = torch.randn(40, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 1, 40)
    found = evaluated(trace(both, ["x", "g"]), x=x, g=g)
    own = x.clone().requires_grad_()
    expected = function(own)
    torch.testing.assert_close(found["z"], expected.detach())
    torch.testing.assert_close(found["d"], torch.autograd.grad(expected, own, g)[0])


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x.sum() + x, "no sum|not elementwise"),
        (lambda x: x.flip(0), "no (flip|rev)"),
        (lambda x: x if x.sum() > 0 else -x, "cannot be traced"),
        (lambda x: torch.lgamma(x), "no lgamma"),
        (lambda x: x * torch.arange(7), "no (arange|iota)"),
        (lambda x: x.int().float(), "converts"),
        (lambda x: torch.div(x, 2, rounding_mode="trunc"), "rounded by trunc|no trunc"),
        (lambda x: x % -2, "remainders, by positive"),
        (lambda x: undefined, "cannot be traced"),  # type: ignore[name-defined]  # noqa: F821
    ],
)
def test_what_kernels_do_not_have_is_named(function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(Untraced, match=reason):
        trace(lambda x: {"z": function(x)}, ["x"])


def test_constants_are_folded_and_factors_are_peeled() -> None:
    function = trace(lambda x, y: {"z": 2 * (x * y * 3.0) * 0.5, "w": x * 1.0 + 0.0}, ["x", "y"])
    argument, factor = function.peeled("z")
    assert factor == 3.0
    assert function.inputs([argument]) == {"x", "y"}
    assert function.operations[function.outputs["w"]] == (INPUT, ("x",))  # type: ignore[index]
    builder = Builder()
    assert builder.add("mul", 2.0, builder.add("add", 1.0, 2.0)) == 6.0
    assert math.isinf(builder.add("div", builder.add(INPUT, "x"), 0.0)) is False


# -- row tiles --------------------------------------------------------------------------------------------------------


def met(tiles: RowTiles) -> torch.Tensor:
    """Which pairs the tiles hold, bit by bit."""
    meets = torch.zeros(tiles.rows, tiles.columns, dtype=torch.bool)
    for kind in ("full", "part"):
        ptr, columns = getattr(tiles, f"{kind}_ptr"), getattr(tiles, f"{kind}_col")
        for window in range(len(ptr) - 1):
            for tile in range(int(ptr[window]), int(ptr[window + 1])):
                for r in range(tiles.height):
                    word = -1 if kind == "full" else int(tiles.bits[tile, r])
                    for c in range(tiles.width):
                        if word >> c & 1:
                            column = int(columns[tile, c]) if tiles.gathered else int(columns[tile]) * tiles.width + c
                            assert not meets[window * tiles.height + r, column]
                            meets[window * tiles.height + r, column] = True
    return meets


@pytest.mark.parametrize(("height", "width"), [(16, 32), (64, 64), (32, 64)])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("name", ["entries", "scattered", "blocks-of-32", "blocks-of-128", "one-entry"])
def test_tiles_hold_the_pattern(name: str, mode: int, height: int, width: int) -> None:
    given, meets = PATTERNS[name]()
    meets = meets.T if mode else meets
    assert torch.equal(met(of_pattern(given.pattern, mode, height, width)), meets)


@pytest.mark.parametrize(("height", "width"), [(1, 8), (1, 32), (16, 32)])
@pytest.mark.parametrize("mode", [0, 1])
def test_gathered_tiles_hold_the_pattern(mode: int, height: int, width: int) -> None:
    given, meets = PATTERNS["scattered"]()
    tiles = of_pattern(given.pattern, mode, height, width, numbered=True, gathered=True)
    assert torch.equal(met(tiles), meets.T if mode else meets)
    assert tiles.part_base is not None
    assert int(tiles.part_base.max()) < given.nnz


@pytest.mark.parametrize(
    "mask", [SMALL, masks.causal(), ~masks.prefix(70), masks.documents([0, 64, 70]), masks.dilated(2)]
)
@pytest.mark.parametrize("shape", [(130, 200), (64, 64), (1, 3)])
def test_tiles_of_a_mask(mask: masks.Mask, shape: tuple[int, int]) -> None:
    tiles = of_tiles(*tiles_of(mask, shape, 32, 64, torch.device("cpu")), shape, 32, 64)
    assert torch.equal(met(tiles), mask.dense(*shape))


@pytest.mark.parametrize("most", [0, 1, 3])
def test_items_share_out_the_tiles(most: int) -> None:
    given, _ = PATTERNS["entries"]()
    tiles = of_pattern(given.pattern, 0, 16, 32)
    items, cut, slots = tiles.items(most)
    taken = [0] * tiles.tiles
    full = int(tiles.full_ptr[-1])
    for _, full_from, full_to, part_from, part_to, _ in items.tolist():
        assert not most or full_to - full_from + part_to - part_from <= most
        for tile in [*range(full_from, full_to), *(full + t for t in range(part_from, part_to))]:
            taken[tile] += 1
    assert taken == [1] * tiles.tiles
    assert sorted(slot for *_, slot in items.tolist() if slot >= 0) == list(range(slots))
    assert slots == sum(end - first for _, first, end in cut.tolist())
    assert (slots > 0) == (most > 0)


def test_far_entries_are_gathered_and_near_ones_are_not() -> None:
    far = stc.SparseTensor.from_dense(scattered(2000, 2000, 0.002).float())
    near = stc.SparseTensor.from_dense(SMALL.dense(300).float())
    narrow = torch.eye(20)[(torch.arange(20) * 7) % 20].repeat_interleave(32, 0).repeat_interleave(32, 1)
    small = stc.SparseTensor.from_dense(narrow, blocksize=(32, 32))
    for tensor, expected in ((far, APART), (near, 64), (stc.SparseTensor.from_dense(narrow), 32), (small, 32)):
        assert Pairs(tensor.pattern, tensor.shape, tensor.device).width == expected


# -- ahead of time ----------------------------------------------------------------------------------------------------

compiles = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


def assembly(kernel: WalkKernel, target: str, dtypes: dict[str, torch.dtype], table: torch.dtype) -> Any:
    """Return what Triton compiles of ``walk`` for a target; needs no GPU.

    Args:
        kernel: of the walk.
        target: a name of `device.profile.TARGETS`.
        dtypes: of what is neither fixed nor of the tables' type.
        table: the type of tables.
    """
    machine = gpu(target)[0]
    source = kernel.source_for(machine)
    module, _ = cache.load(source.text, kernel.path.parent, kernel.name)
    types, divisible = [], []
    for place, name in enumerate(source.arguments):
        value = kernel.fixed.get(name)
        if isinstance(value, int):
            types.append("i32")
            divisible += [place] if value % 16 == 0 else []
        else:
            dtype = torch.float32 if name.endswith("_slots") else dtypes.get(name, table)
            types.append(f"*{triton_type(dtype if value is None else value.dtype)}")
    return assembled(module.walk, types, target, kernel.options_for(machine), divisible)


TYPES = {"g_lse": torch.float32, "lse": torch.float32, "delta": torch.float32, "lse_out": torch.float32}


@compiles
@pytest.mark.parametrize(("dtype", "target"), dealt([torch.float16, torch.bfloat16, torch.float32]), ids=str)
def test_attention_compiles_for(dtype: torch.dtype, target: str) -> None:
    pytest.importorskip("triton")
    for kernel in kernels(SMALL, (512, 512), dtype, 64, 64):
        built = assembly(kernel, target, TYPES, dtype).asm
        text = str(built["ptx"] if "ptx" in built else built["amdgcn"])
        assert re.search(NATIVE[target], text)
        assert not re.search(r"\.local\b", text)


@compiles
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize(
    ("name", "bias"), [("entries", True), ("scattered", False), ("scattered", True), ("by-row", True)]
)
def test_biases_and_rows_compile_for(name: str, bias: bool, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    as_if_large(name, monkeypatch)
    given, meets = PATTERNS[name]()
    for kernel in kernels(given, (meets.shape[0], meets.shape[1]), torch.float16, 64, 32, bias):
        assert assembly(kernel, target, TYPES, torch.float16).asm


@compiles
def test_rows_that_begin_at_multiples_of_16_bytes_are_loaded_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    as_if_large("by-row", monkeypatch)
    given, meets = PATTERNS["by-row"]()
    texts = {}
    for width in (20, 32):
        made = kernels(given, (meets.shape[0], meets.shape[1]), torch.float32, width, width)
        texts[width] = [str(assembly(kernel, "sm_90", TYPES, torch.float32).asm["ptx"]) for kernel in made]
    loads = {width: [text.count("ld.global.v4") for text in of_width] for width, of_width in texts.items()}
    assert loads[20] == loads[32]
    assert all(loads[20])


def bodies() -> dict[str, list[WalkKernel]]:
    """Kernels of what attention over one pattern for all heads has not."""
    half = [torch.empty(4, 100, 64, dtype=torch.float16) for _ in range(3)]
    meets = torch.rand(4, 100, 100) < 0.5
    by_head = pairs_of(stc.SparseTensor.from_dense(meets.float()), (4,), (100, 100), CPU, causal=False)
    grouped = Pairs(SMALL, (100, 100), CPU)
    fewer = [half[0], *(t[:2] for t in half[1:])]
    behind = [t.view(2, 50, 4, 64).transpose(1, 2) for t in half]
    poisson = Body({"m": ("a", "b")}, {"x": "entries"}, lambda m, x: m - x * torch.log(m))
    entries = pairs_of(stc.SparseTensor.from_dense(meets[0].float()), (), (100, 100), CPU, causal=False)
    whole = [torch.empty(1, 100, 32), torch.empty(1, 100, 32), torch.empty(1, entries.given.nnz)]  # type: ignore[union-attr]
    return {
        "by head, dropout, log-sums": kernels_of(_body(0.3, False, 0.2), by_head, half, of_lse=True),
        "heads behind rows, dropout": kernels_of(_body(0.3, False, 0.2), Pairs(SMALL, (50, 50), CPU), behind),
        "grouped, dropout": kernels_of(_body(0.3, False, 0.2), grouped, fewer),
        "poisson": kernels_of(poisson, entries, whole),
        "stored": kernels_of(replace(poisson, stored=True), entries, whole),
        "inner, dropout": kernels_of(_gat2(0.2, 0.3), entries, [t.half() for t in (*whole[:2], torch.empty(1, 32))]),
        "numbers with steps": kernels_of(
            _gat(0.2), entries, [whole[0], torch.empty(100, 1).T, torch.empty(100, 3).T[:1]]
        ),
        "inner": kernels_of(_gat2(0.2), entries, [*whole[:2], torch.empty(1, 32)]),
    }


COPIED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "one after another": (lambda x: x, False),
    "behind rows": (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), False),
    "some of each batch": (lambda x: x[:, 1:], False),
    "in three groups": (lambda x: x.unflatten(1, (2, 2)).transpose(0, 2), True),
    "with elements apart": (lambda x: x.mT.contiguous().mT, True),
}


@pytest.mark.parametrize("name", COPIED)
def test_kernels_read_heads_where_they_lie(name: str) -> None:
    lay, copied = COPIED[name]
    q = lay(torch.empty(2, 4, 50, 16))
    task = Task(_body(0.3, False), Pairs(SMALL, (50, 50), CPU), of_call({"backend": "triton"}), "attention")
    found = task.kernels([q, q, q])
    assert found.copied == [copied] * 3


@compiles
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize(("name", "read"), [("times", torch.int64), ("relative", torch.float32)])
def test_functions_of_scores_that_read_tensors_compile_for(name: str, read: torch.dtype, target: str) -> None:
    pytest.importorskip("triton")
    inputs, function, _ = reading(name, (2, 2))
    every = Pairs(SMALL, (100, 100), CPU)
    body, every, vectors = _scored(function, every, (2, 2), (2, 2), (0.3, 0.0), torch.float32, False)
    types = {name: vector.dtype for name, vector in zip(body.vectors, vectors, strict=True)}
    types |= {f"grad_{name}": dtype for name, dtype in types.items()}
    assert read in types.values()
    half = [t.detach().half().flatten(0, 1) for t in inputs[:3]]
    for kernel in kernels_of(body, every, [*half, *vectors]):
        assert assembly(kernel, target, TYPES | types, torch.float16).asm


@compiles
@pytest.mark.parametrize("target", TARGETS)
def test_extrema_keep_nan_on(target: str) -> None:
    """Of which the plain instruction returns the other number."""
    pytest.importorskip("triton")
    body = Body({}, {"c": "columns"}, lambda c: torch.relu(c) + c.clamp(-0.5, 0.5))
    pairs = pairs_of(stc.SparseTensor.from_dense(torch.ones(100, 100)), (), (100, 100), CPU, causal=False)
    (kernel, *_) = kernels_of(body, pairs, [torch.empty(1, 100)])
    built = assembly(kernel, target, TYPES, torch.float32).asm
    if "ptx" in built:
        extrema = re.findall(r"(?:max|min)(\.NaN)?\.f32", str(built["ptx"]))
        assert extrema
        assert all(extrema)


@compiles
@pytest.mark.parametrize("target", TARGETS)
def test_other_bodies_compile_for(target: str) -> None:
    pytest.importorskip("triton")
    every = [*bodies().items()]
    for name, walks in every if target == "sm_90" else every[OTHERS.index(target) :: len(OTHERS)]:
        for kernel in walks:
            table = torch.float16 if "dropout" in name else torch.float32
            assert assembly(kernel, target, TYPES | {"seed": torch.int64}, table).asm
