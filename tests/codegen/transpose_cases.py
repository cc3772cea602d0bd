"""Views whose modes are in any order, of which some are matrices turned, for the tests of transposed copies."""

from __future__ import annotations

import torch
from hypothesis import strategies as st


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A view of a contiguous tensor of int32: permuted, and of every second element or repeated here and there."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 16, 17, 40]), min_size=1, max_size=5))
    whole = torch.arange(torch.tensor(shape).prod().item(), dtype=torch.int32).reshape(shape)
    view = whole.permute(draw(st.permutations(range(len(shape)))))
    if draw(st.booleans()):
        view = view[..., :: draw(st.integers(1, 2))]
    if draw(st.booleans()):
        view = view.unsqueeze(0).expand(3, *view.shape)
    return view
