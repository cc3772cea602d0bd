"""What a model is asked: its entries, norm and forms, files of it, and what is no model."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from decomposition_cases import F32, F64, random_factors
from safetensors.torch import save, save_file

import sparsetc as stc
from sparsetc.decomposition import CP, Tucker, factored

SHAPE, RANKS = (4, 5, 3), (2, 3, 2)
Model = CP | Tucker


def cp(dtype: torch.dtype = F64) -> CP:
    weights = torch.tensor([2.0, -3.0], dtype=dtype)
    return CP(weights, tuple(random_factors(SHAPE, 2, dtype)), (0.25, 0.5), "converged", (-3.0, -2.0))


def tucker(dtype: torch.dtype = F64) -> Tucker:
    core = random_factors((2,), 6, dtype)[0].reshape(RANKS)
    factors = [random_factors((n,), r, dtype)[0] for n, r in zip(SHAPE, RANKS, strict=True)]
    return Tucker(core, tuple(factors), (0.25, 0.5), "callback")


def in_full(model: Model) -> torch.Tensor:
    head, factors = model
    return torch.einsum("r,ir,jr,kr->ijk" if isinstance(model, CP) else "rst,ir,js,kt->ijk", head, *factors)


MODELS = pytest.mark.parametrize("make", [cp, tucker])


@MODELS
def test_a_model_says_what_it_is(make: type) -> None:
    model = make()
    assert (model.shape, model.order, model.dtype, model.device.type) == (SHAPE, 3, F64, "cpu")
    assert model.rank == (2 if isinstance(model, CP) else RANKS)
    assert model.fit == 0.5
    assert "shape=(4, 5, 3)" in repr(model)
    assert "fit=0.5000 after 2 iterations" in repr(model)
    assert f"stopped='{model.stopped}'" in repr(model)
    head, factors = model
    assert isinstance(factors, list)
    assert "fit" not in repr(type(model)(head, factors))
    assert type(model)(head, factors).fit is None


@MODELS
@pytest.mark.parametrize("chunk", [1, 7, 1 << 22])
def test_entries_and_norms_are_those_of_the_tensor_in_full(
    make: type, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factored, "CHUNK", chunk)
    model = make()
    full = in_full(model)
    torch.testing.assert_close(model.to_dense(), full)
    torch.testing.assert_close(model.norm(), full.norm())
    coords = (full == full).nonzero().T
    torch.testing.assert_close(model.values_at(coords), full.flatten())
    torch.testing.assert_close(model.values_at(coords[:, :5].to(torch.int32).numpy()), full.flatten()[:5])
    assert model.values_at(coords[:, :0]).shape == (0,)


@pytest.mark.parametrize("order", [1, 2, 4, 5])
def test_models_of_any_order(order: int) -> None:
    shape = (3, 4, 2, 5, 3)[:order]
    model = CP(torch.ones(2, dtype=F64), tuple(random_factors(shape, 2)))
    letters = "abcde"[:order]
    full = torch.einsum(",".join(c + "r" for c in letters) + "->" + letters, *model.factors)
    torch.testing.assert_close(model.to_dense(), full)
    coords = torch.ones(shape).nonzero().T
    torch.testing.assert_close(model.values_at(coords), full.flatten())
    core = torch.rand((2,) * order, dtype=F64)
    other = Tucker(core, model.factors)
    torch.testing.assert_close(other.values_at(coords), other.to_dense().flatten())
    torch.testing.assert_close(other.norm(), other.to_dense().norm())


@MODELS
def test_coordinates_of_no_entry_are_refused(make: type) -> None:
    model = make()
    with pytest.raises(stc.ShapeError, match=r"shape \(3, n\)"):
        model.values_at([[0], [1]])
    for ragged in ([[0], [1, 2], [0]], "abc"):
        with pytest.raises(stc.ShapeError, match=r"a rectangle of integers \(3, n\)"):
            model.values_at(ragged)
    with pytest.raises(stc.CoordinateError, match=r"mode 2: entry 0 has 3, but the size of mode 2 is 3 \("):
        model.values_at([[0], [1], [3]])
    with pytest.raises(stc.DtypeError, match="integers"):
        model.values_at([[0.0], [1.0], [2.0]])
    with pytest.raises(stc.OutOfMemoryError, match="the model in full"):
        model.to_dense(memory_limit=100)
    assert model.values_at([[], [], []]).shape == (0,)


def test_a_model_arranged_for_a_reader_is_the_same_tensor() -> None:
    model = cp().arranged()
    torch.testing.assert_close(model.to_dense(), cp().to_dense())
    assert bool((model.weights > 0).all())
    assert model.weights[0] > model.weights[1]
    for f in model.factors:
        torch.testing.assert_close(f.norm(dim=0), torch.ones(2, dtype=F64))
    zero = CP(torch.zeros(2), tuple(torch.zeros(n, 2) for n in SHAPE)).arranged()
    assert all(bool(t.isfinite().all()) for t in (zero.weights, *zero.factors))


@MODELS
@pytest.mark.parametrize("dtype", [F32, F64])
def test_a_file_holds_all_of_a_model(make: type, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make(dtype)
    model.save(tmp_path / "model.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    found = type(model).load(tmp_path / "model.safetensors")
    assert same(model, found)
    model.to(F32).save(tmp_path / "model.safetensors")
    assert type(model).load(tmp_path / "model.safetensors").dtype == F32
    for copied in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert same(model, copied)


def same(one: Model, other: Model) -> bool:
    heads = [m.weights if isinstance(m, CP) else m.core for m in (one, other)]
    tensors = zip((heads[0], *one.factors), (heads[1], *other.factors), strict=True)
    told = [(m.fits, m.stopped, getattr(m, "log_likelihoods", ())) for m in (one, other)]
    return all(torch.equal(a, b) for a, b in tensors) and told[0] == told[1]


def test_files_that_hold_no_model_are_refused(tmp_path: Path) -> None:
    cp().save(tmp_path / "cp.safetensors")
    with pytest.raises(stc.IOFormatError, match="holds no Tucker model"):
        Tucker.load(tmp_path / "cp.safetensors")
    mapped = mock.patch("safetensors.safe_open", side_effect=AssertionError)
    with stc.options(memory_limit=100), mapped, pytest.raises(stc.OutOfMemoryError, match="the model"):
        CP.load(tmp_path / "cp.safetensors")
    with pytest.raises(FileNotFoundError):
        CP.load(tmp_path / "absent.safetensors")
    (tmp_path / "text.safetensors").write_text("no archive")
    with pytest.raises(stc.IOFormatError):
        CP.load(tmp_path / "text.safetensors")
    whole = {"weights": torch.ones(2), "factor_0": torch.ones(3, 2)}
    known = {"kind": "CP", "stopped": "", "fits": "[]", "log_likelihoods": "[]"}
    for name, tensors, metadata, message in (
        ("odd", whole | {"factor_0": torch.ones(3, 4)}, known, r"mode 0 must have shape \(size, 2\)"),
        ("integers", whole | {"weights": torch.ones(2, dtype=torch.long)}, known, "weights is of torch.int64"),
        ("headless", {"factor_0": torch.ones(3, 2)}, known, "it has no 'weights'"),
        ("gaps", {"weights": torch.ones(2), "factor_1": torch.ones(3, 2)}, known, "it has no 'factor_0'"),
        ("text", whole, known | {"fits": '["a"]'}, "could not"),
        ("nested", whole, known | {"fits": "[" * 10**5}, "recursion"),
        ("lacking", whole, {"kind": "CP"}, "it has no 'stopped'"),
        ("plain", whole, None, "holds no CP model"),
    ):
        save_file(tensors, tmp_path / f"{name}.safetensors", metadata)
        with pytest.raises(stc.IOFormatError, match=rf"{name}\.safetensors: .*{message}"):
            CP.load(tmp_path / f"{name}.safetensors")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(stc.IOFormatError, match="pipe: it is read in any order, so it must be a file on disk"):
        CP.load(tmp_path / "pipe")


def test_a_model_that_would_command_a_terminal_is_refused_in_one_line_of_plain_text(tmp_path: Path) -> None:
    command, path = "\x1b]0;mine\x07\r\n\u202e", tmp_path / "x.safetensors"
    header = {"weights": {"dtype": command, "shape": [1], "data_offsets": [0, 4]}}
    named = {f"a{command}": torch.ones(1, dtype=torch.long), "weights": torch.ones(1)}
    known = {"kind": "CP", "stopped": "", "fits": "[]", "log_likelihoods": "[]"}
    text = json.dumps(header).encode()
    for data in (len(text).to_bytes(8, "little") + text + bytes(4), save(named, known)):
        path.write_bytes(data)
        with pytest.raises(stc.IOFormatError, match=r"x\.safetensors: ") as caught:
            CP.load(path)
        assert str(caught.value).isprintable()


def test_files_that_were_altered_give_a_model_or_one_error(tmp_path: Path) -> None:
    path, r = tmp_path / "cp.safetensors", random.Random(0)
    cp().save(path)
    whole, refused = path.read_bytes(), 0
    for _ in range(300):
        changed = bytearray(whole)
        for _ in range(r.choice((1, 1, 3))):
            changed[r.randrange(300)] = r.randrange(256)
        path.write_bytes(changed[: r.choice((len(whole), len(whole), r.randrange(len(whole))))])
        try:
            assert CP.load(path).order == 3
        except stc.IOFormatError as error:
            assert "cp.safetensors: " in str(error)  # noqa: PT017
            refused += 1
    assert refused > 200


def test_files_need_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (cp().save, CP.load):
        with pytest.raises(ImportError, match=r'pip install "sparsetc\[files\]"'):
            call(tmp_path / "x")


@MODELS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_files_of_other_dtypes_are_refused_before_an_old_one_is_lost(
    make: type, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, path = make(), tmp_path / "model.safetensors"
    model.save(path)
    with pytest.raises(stc.DtypeError, match=str(dtype)):
        model.to(dtype).save(path)
    assert torch.equal(type(model).load(path).factors[0], model.factors[0])


@MODELS
def test_other_libraries_take_a_model(make: type) -> None:
    pytest.importorskip("pyttb")
    tl = pytest.importorskip("tensorly")
    model = make()
    full = model.to_dense().numpy()
    np.testing.assert_allclose(model.to_pyttb().full().data, full)
    np.testing.assert_allclose(model.to_tensorly().to_tensor(), full)
    assert model.to_tensorly().shape == SHAPE
    as_pair = tl.cp_to_tensor if isinstance(model, CP) else tl.tucker_to_tensor
    head, factors = model
    np.testing.assert_allclose(as_pair((head.numpy(), [f.numpy() for f in factors])), full)
    np.testing.assert_allclose(model.to(torch.bfloat16).to_tensorly().to_tensor(), full, rtol=0.1, atol=0.1)
    with tl.backend_context("pytorch"):
        assert torch.equal(model.to_tensorly()[1][0], model.factors[0])


@MODELS
def test_a_library_that_is_missing_is_named(make: type, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in ("tensorly", "pyttb"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match=f"pip install {name}"):
            getattr(make(), f"to_{name}")()


def test_what_is_no_model_is_refused() -> None:
    weights, factors = cp()
    with pytest.raises(stc.ShapeError, match="a factor for each mode"):
        CP(weights, ())
    with pytest.raises(stc.ShapeError, match=r"factor of mode 1 must have shape \(size, 2\) with the weights"):
        CP(weights, (factors[0], factors[1][:, :1]))
    with pytest.raises(stc.DtypeError, match=r"mode 0 has dtype torch\.float32"):
        CP(weights, (factors[0].float(),))
    with pytest.raises(stc.DeviceError, match="mode 0 is on meta"):
        CP(weights, (factors[0].to("meta"),))
    with pytest.raises(stc.DecompositionError, match="found list"):
        CP(weights, ([[1.0, 2.0]],))  # type: ignore[arg-type]
    core, factors = tucker()
    with pytest.raises(stc.ShapeError, match=r"a factor for each mode, found 2 with the core of shape \(2, 3, 2\)"):
        Tucker(core, factors[:2])
    with pytest.raises(stc.ShapeError, match="factor of mode 0 must have shape"):
        Tucker(core, (factors[0][:, :1], *factors[1:]))
    with pytest.raises(stc.DtypeError, match="mode 1"):
        Tucker(core, (factors[0], factors[1].float(), factors[2]))
    with pytest.raises(stc.DeviceError, match="mode 2"):
        Tucker(core, (*factors[:2], factors[2].to("meta")))


def test_models_of_nothing_can_be_looked_at() -> None:
    weights, factors = cp()
    bare = CP(weights[:0], tuple(f[:, :0] for f in factors))
    assert repr(bare) == "CP(shape=(4, 5, 3), rank=0, dtype=torch.float64, device=cpu)"
    assert bare.norm() == 0
    assert bare.to_dense().abs().sum() == 0
    assert bare.arranged().rank == 0
    assert CP(weights, (factors[0][:0], factors[1])).arranged().shape == (0, 5)
    assert "weights" not in repr(cp().to("meta"))
    core, matrices = tucker()
    assert "core" not in repr(Tucker(core[:0], (matrices[0][:, :0], *matrices[1:])))
    assert "core" not in repr(tucker().to("meta"))


@MODELS
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_models_are_of_real_floating_point_numbers(make: type, dtype: torch.dtype) -> None:
    with pytest.raises(stc.DtypeError, match=f"real floating-point numbers, found {dtype}"):
        make().to(dtype)
