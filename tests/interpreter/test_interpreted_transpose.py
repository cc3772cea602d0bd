"""The kernel that turns matrices under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from transpose_cases import views

from sparsetc.codegen.launch import COLUMNS, ROWS, WORDS, as_matrices, turn


@settings(max_examples=60)
@given(views())
def test_views(view: torch.Tensor) -> None:
    matrices = as_matrices(tuple(view.shape), view.stride())
    if matrices is not None:
        result = torch.full(view.shape, -1, dtype=view.dtype)
        turn(view, result, matrices)
        assert torch.equal(result, view)


@pytest.mark.parametrize("word", WORDS.values(), ids=str)
def test_whole_tiles_and_parts_of_tiles(word: torch.dtype) -> None:
    for rows, columns in ((ROWS, COLUMNS), (ROWS - 1, COLUMNS + 1), (3 * ROWS + 1, 2 * COLUMNS), (1, 2)):
        view = torch.arange(2 * rows * columns).to(word).reshape(2, rows, columns).transpose(1, 2)
        matrices = as_matrices(tuple(view.shape), view.stride())
        assert (matrices is None) == (rows == 1)
        if matrices is not None:
            result = torch.zeros(view.shape, dtype=word)
            turn(view, result, matrices)
            assert torch.equal(result, view)
