"""Sparse tensors as buffers of modules: converted, moved, saved, copied, pinned."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import sparsetc as stc


class OfGraph(torch.nn.Module):
    """A module with a sparse buffer."""

    adjacency: stc.SparseTensor

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("adjacency", stc.rand((5, 5), 0.4, generator=generator, dtype=dtype))  # type: ignore[arg-type]
        self.linear = torch.nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.adjacency @ x)  # type: ignore[no-any-return]


def test_a_buffer_is_converted_and_moved() -> None:
    module = OfGraph(0)
    before = module.adjacency
    assert module.to("cpu").adjacency is before
    for call, dtype in (("half", torch.float16), ("double", torch.float64), ("float", torch.float32)):
        assert getattr(module, call)().adjacency.dtype == dtype
        assert module.adjacency.pattern is before.pattern
    assert module.to(torch.bfloat16).adjacency.dtype == torch.bfloat16
    module.register_buffer("mask", before > 0.5)  # type: ignore[arg-type]
    assert module.float().mask.dtype == torch.bool  # type: ignore[union-attr]
    module.requires_grad_(False).eval().zero_grad()
    assert module.type(torch.float64).adjacency.dtype == torch.float64


def test_a_buffer_is_saved_and_loaded(tmp_path: Path) -> None:
    first, second = OfGraph(0), OfGraph(1, torch.float64)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    held, x = second.adjacency, torch.rand(5, 2)
    assert not second.load_state_dict(torch.load(tmp_path / "state.pt")).missing_keys
    assert second.adjacency is held
    assert second.adjacency.dtype == torch.float64
    assert torch.equal(second.adjacency.to_dense(), first.adjacency.to_dense().double())
    assert torch.equal(second.float()(x[:, :1].expand(5, 5)), first(x[:, :1].expand(5, 5)))
    values = second.adjacency.values
    second.load_state_dict({**first.state_dict(), "adjacency": first.adjacency * 2})
    assert second.adjacency.values is values  # written where they lie, as the coordinates are the same
    assert torch.equal(values, first.adjacency.values * 2)
    second.load_state_dict(first.state_dict(), assign=True)
    assert second.adjacency.pattern is first.adjacency.pattern
    with pytest.raises(RuntimeError, match="size mismatch for adjacency"):
        first.load_state_dict({**first.state_dict(), "adjacency": stc.eye(4)})
    with pytest.raises(stc.DtypeError, match="copy_ takes a SparseTensor"):
        first.adjacency.copy_(torch.eye(5))  # type: ignore[arg-type]


def test_a_module_with_a_buffer_is_copied_shared_and_called() -> None:
    module, x = OfGraph(0), torch.rand(5, 5)
    expected = module(x)
    other = copy.deepcopy(module)
    assert other.adjacency.values.data_ptr() != module.adjacency.values.data_ptr()
    assert torch.equal(other(x), expected)
    module.share_memory()
    assert module.adjacency.is_shared()
    assert module.adjacency.coords.is_shared()
    assert torch.equal(module(x), expected)
    found = torch.func.functional_call(module, {"linear.bias": module.linear.bias + 1}, (x,))
    torch.testing.assert_close(found, expected + 1)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["adjacency"])
    assert module.adjacency._ddp_ignored
    averaged = torch.optim.swa_utils.AveragedModel(module, use_buffers=False)
    averaged.update_parameters(module)
    assert torch.equal(averaged(x), expected)


def test_gradients_and_hooks_of_values() -> None:
    x, seen = stc.eye(3).requires_grad_(), []
    assert (x.is_leaf, x.grad, x.grad_fn) == (True, None, None)
    x.register_hook(seen.append)
    (x * 2).sum().backward()
    assert x.grad.values.tolist() == [2.0] * 3
    assert x.grad.pattern is x.pattern
    assert [g.tolist() for g in seen] == [[2.0] * 3]
    assert not (x * 2).is_leaf
    torch.optim.SGD([x.values], 0.5).step()
    assert x.values.tolist() == [0.0] * 3


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_a_loader_pins_tensors_that_workers_send(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, pinned = [stc.eye(n) * n for n in (2, 3)], []
    loader = DataLoader(graphs, batch_size=2, collate_fn=stc.nn.collate, num_workers=1)  # type: ignore[arg-type, var-annotated]
    (batch,) = loader
    assert torch.equal(batch.to_dense(), stc.nn.collate(graphs).to_dense())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor.clone())
    found = torch.utils.data._utils.pin_memory.pin_memory([batch])[0]
    assert len(pinned) == 2
    assert torch.equal(found.to_dense(), batch.to_dense())
