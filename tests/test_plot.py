"""Pictures: what is drawn agrees with the numbers; and what notebooks show of tensors, kernels and models."""

from __future__ import annotations

import base64
import re
import time
import zlib
from dataclasses import replace

import processes
import pytest
import torch

import sparsetc as stc
from sparsetc import plot
from sparsetc.decomposition import cp_als, tucker
from sparsetc.similarity.curve import BlockingCurve, BlockingPoint
from sparsetc.tensor.picture import as_png, binned

pytest.importorskip("matplotlib")


def cube() -> stc.SparseTensor:
    return stc.rand((30, 40, 700), nnz=500, generator=torch.Generator().manual_seed(0))


def test_spy_counts_entries() -> None:
    x = cube()
    dense = x.to_dense() != 0
    axes = stc.plot.spy(x)
    assert [one.get_ylabel() + one.get_xlabel() for one in axes] == ["mode 0mode 1", "mode 0mode 2", "mode 1mode 2"]
    first = torch.as_tensor(axes[0].images[0].get_array().filled(0)).expm1()
    torch.testing.assert_close(first, dense.sum(2).float())
    (image,) = stc.plot.spy(x, (2, 0), at={1: 7}).images
    cells = torch.as_tensor(image.get_array().filled(0)).expm1()
    assert cells.shape[0] <= 256
    assert cells.sum().item() == pytest.approx(int(dense[:, 7].sum()))


@pytest.mark.parametrize("shape", [(9,), (0, 4), (1, 1), (3, 2**40)])
def test_spy_of_any_shape(shape: tuple[int, ...]) -> None:
    x = stc.SparseTensor(torch.zeros((len(shape), 0), dtype=torch.long), torch.zeros(0), shape)
    axes = stc.plot.spy(x)
    axes.figure.canvas.draw()
    high, wide = shape if len(shape) > 1 else (1, *shape)
    assert axes.images[0].get_extent() in ([0, wide, max(high, 1), 0], [0, high, wide, 0])
    assert "<table>" in x._repr_html_()


def test_spy_of_blocks_and_dense_modes() -> None:
    dense = torch.zeros(6, 6)
    dense[:2, 2:4], dense[4:, 4:] = 1, 2
    for x in (
        stc.SparseTensor.from_torch(dense.to_sparse_bsr((2, 2))),
        stc.SparseTensor([[0, 4]], torch.ones(2, 6), (6, 6)),
    ):
        (image,) = stc.plot.spy(x).images
        torch.testing.assert_close(torch.as_tensor(image.get_array().filled(0)) > 0, x.to_dense() != 0)


def test_millions_of_entries_in_a_second() -> None:
    coords = torch.randint(0, 10**6, (2, 2_000_000))
    start = time.thread_time()
    binned(coords, (10**6, 10**6), (0, 1), 256)
    assert time.thread_time() - start < 1


def test_tiles_show_the_part_of_each_region() -> None:
    dense = torch.zeros(64, 64)
    dense[:16, :16] = 1
    dense[40:, 40:] = torch.eye(24)
    x = stc.SparseTensor.from_dense(dense)
    kernel = stc.compile("ij,jr->ir", x, torch.rand(64, 4), plan="coo")
    axes = stc.plot.tiles(kernel)
    shown = torch.as_tensor(axes.images[0].get_array().filled(-1))
    torch.testing.assert_close(shown >= 0, dense != 0)
    hls = stc.compile("ij,jr->ir", x, torch.rand(64, 4), plan="hls")
    assert len(stc.plot.tiles(hls).get_legend().get_texts()) == len(hls.explain().parts)


def test_tiles_of_later_modes() -> None:
    x = stc.SparseTensor([[0, 1], [1, 0], [2, 0]], [1.0, 2.0], (2, 3, 4))
    axes = stc.plot.tiles(stc.compile("ijk,kr->ir", x, torch.rand(4, 2), plan="coo"), (2, 0))
    shown = torch.as_tensor(axes.images[0].get_array().filled(-1)) >= 0
    torch.testing.assert_close(shown, (x.to_dense() != 0).any(1).T)


def test_plan_has_a_bar_a_part() -> None:
    x, b = cube(), (torch.rand(40, 4), torch.rand(700, 4))
    kernel = stc.compile("ijk,jr,kr->ir", x, *b)
    axes = stc.plot.plan(kernel, *b)
    widths = [patch.get_width() for patch in axes.patches]
    assert widths[: len(kernel.explain().parts)] == [p.predicted_us for p in kernel.explain().parts]
    assert len(widths) == 2 * len(kernel.explain().parts) + 1
    with pytest.raises(stc.PlanError, match="several sparse operands"):
        stc.plot.plan(stc.compile("ijk,ljk->il", x, cube()))


def test_models() -> None:
    model = cp_als(cube(), 3, n_iter_max=4, random_state=0)
    axes = stc.plot.factors(model)
    assert axes.shape == (3, 3)
    assert axes[1, 2].lines[0].get_ydata().tolist() == model.factors[2][:, 1].double().tolist()
    assert stc.plot.fit(model).lines[0].get_ydata().tolist() == list(model.fits)
    assert stc.plot.factors(tucker(cube(), (2, 3, 2), n_iter_max=2), [2]).shape == (1, 3)
    with pytest.raises(stc.ShapeError, match="numbers below 3"):
        stc.plot.factors(model, [3])
    with pytest.raises(stc.ShapeError, match="takes 9 axes"):
        stc.plot.factors(model, ax=stc.plot.fit(model))
    assert "after 4 iterations" in model._repr_html_()


def test_factors_of_modes_that_have_names_and_ranks_of_their_own() -> None:
    model = stc.decomposition.tucker(stc.rand((6, 5, 4), 0.5), (3, 2, 2), n_iter_max=2)
    drawn = stc.plot.factors(model, modes=("user", "item", "day"))
    assert drawn[0, 1].get_title() == "item, component 0"
    assert [[one.axison for one in row] for row in drawn] == [[True] * 3, [True] * 3, [True, False, False]]
    with pytest.raises(stc.ShapeError, match="2 names"):
        stc.plot.factors(model, modes=("user", "item"))


def test_what_stands_beside_a_picture() -> None:
    """Labels name the axis that they stand at, and titles what is drawn."""
    x, b = cube(), (torch.rand(40, 4), torch.rand(700, 4))
    image = stc.plot.spy(x, (2, 0))
    assert (image.get_ylabel(), image.get_xlabel(), image.get_title()) == ("mode 2", "mode 0", "500 entries")
    assert image.images[0].get_extent() == [0, 30, 700, 0]
    kernel = stc.compile("ijk,jr,kr->ir", x, *b, plan="coo")
    bars, (part,) = stc.plot.plan(kernel, *b), kernel.explain().parts
    names = [label.get_text() for label in bars.get_yticklabels()]
    assert names == [f"0: {part.format}\n{part.nbytes / 1e6:,.1f} MB", "measured"]
    assert [text.get_text() for text in bars.get_legend().get_texts()] == ["expected", "floor", "measured, all parts"]
    assert (bars.get_xlabel(), bars.get_title()) == ("microseconds a call", "ijk,jr,kr->ir: coo")
    tiles = stc.plot.tiles(kernel)
    assert [text.get_text() for text in tiles.get_legend().get_texts()] == [f"0: {part.format}, 500 nonzeros"]
    assert (tiles.get_title(), tiles.get_ylabel(), tiles.get_xlabel()) == ("ijk,jr,kr->ir: coo", "mode 0", "mode 1")
    model = cp_als(x, 2, n_iter_max=3, random_state=0)
    fit = stc.plot.fit(model)
    assert (fit.get_xlabel(), fit.get_ylabel(), fit.get_title()) == ("iteration", "fit", f"{model.KIND}, rank 2")
    assert fit.lines[0].get_xdata().tolist() == [1, 2, 3]
    assert fit.lines[0].get_marker() == "."
    sizes = [one.figure.get_size_inches().tolist() for one in (image, bars, tiles, fit)]
    assert sizes == [[pytest.approx(3.4), pytest.approx(3.2)], [6, pytest.approx(2.4)], [5, 4], [5, 3]]
    assert stc.plot.factors(model)[1, 2].get_title() == "mode 2, component 1"
    counts = stc.decomposition.cp_apr(x, 2, n_iter_max=2, random_state=0)
    assert stc.plot.fit(counts).get_ylabel() == "log-likelihood"


def test_blockings() -> None:
    """A point a similarity that has blocks, and a label for points at one place."""
    places = [(0.0, 4, 1.0, 0.5), (0.1, 4, 1.05, 0.5), (0.5, 2, 4.0, 0.25), (0.9, 0, 0.0, 0.0)]
    points = tuple(BlockingPoint(tau, 1, blocks, height, density, 8, 0.0) for tau, blocks, height, density in places)
    drawn = stc.plot.blocking(BlockingCurve((8, 8), 0, 4, 2, points))
    (line,) = drawn.lines
    assert line.get_xydata().tolist() == [[1.0, 0.5], [1.05, 0.5], [4.0, 0.25]]
    assert [(text.get_text(), text.xy) for text in drawn.texts] == [("τ 0 … 0.1", (1.0, 0.5)), ("τ 0.5", (4.0, 0.25))]
    assert (drawn.get_xscale(), drawn.get_ylim()) == ("log", (0.0, pytest.approx(0.55)))
    assert (drawn.get_xlabel(), drawn.get_ylabel()) == ("mean height of blocks", "density in blocks")
    assert drawn.get_title() == "blockings by similarity τ, strips of 2 columns"
    assert stc.plot.blocking(BlockingCurve((8, 8), 0, 0, 2, ())).get_ylim()[1] == pytest.approx(1.1)
    assert drawn.figure.get_size_inches().tolist() == [6, 4]
    assert all(line.get_visible() for line in drawn.get_xgridlines() + drawn.get_ygridlines())


def test_long_and_many_columns() -> None:
    """Columns of more than 256 rows are lines, and eight components are drawn; parts have ten colours in turn."""
    model = stc.decomposition.CP(torch.ones(9), [torch.ones(256, 9), torch.ones(257, 9)])
    drawn = stc.plot.factors(model)
    assert drawn.shape == (8, 2)
    assert [(len(one.patches), len(one.lines)) for one in drawn[7]] == [(256, 0), (0, 1)]
    assert drawn[0, 0].figure.get_size_inches().tolist() == pytest.approx([5.2, 11.2])
    for count, marker in ((59, "."), (60, "None")):
        long_run = replace(model, fits=(0.5,) * count)
        assert stc.plot.fit(long_run).lines[0].get_marker() in (marker, marker.replace("None", ""))
    colors = plot._colors(11)
    assert len(set(colors)) == 10
    assert colors[10] == colors[0]


def test_pictures_of_other_things() -> None:
    with pytest.raises(stc.DtypeError, match="spy draws a sparse tensor, found list"):
        stc.plot.spy([1, 2])  # type: ignore[arg-type]
    with pytest.raises(stc.DtypeError, match=r"blocking draws what .* found SparseTensor"):
        stc.plot.blocking(stc.eye(3))  # type: ignore[arg-type]
    x = stc.SparseTensor([[0, 1], [299, 0]], torch.ones(2), (2, 300))
    (image,) = stc.plot.spy(x).images
    assert image.get_array().shape == (2, 150)  # cells of two columns, as 256 are drawn at most
    assert stc.plot.spy(x, bins=2).images[0].get_array().shape == (2, 2)
    assert stc.plot.spy(x, (0, 1), at={0: 1}).get_title() == "1 entries"


def test_a_figure_has_as_many_axes_as_pictures() -> None:
    for order, count in ((4, 6), (5, 10)):
        drawn = stc.plot.spy(stc.rand((3, 4, 2, 3, 2)[:order], 0.3))
        assert len(drawn) == len(drawn[0].figure.axes) == count
    x = stc.rand((3, 4, 2, 3), 0.3)
    five = stc.plot.spy(x)[:5]
    with pytest.raises(stc.ShapeError, match="takes 6 axes, found 5"):
        stc.plot.spy(x, ax=five)


def test_notebooks() -> None:
    x = cube()
    html = x._repr_html_()
    assert "30 × 40 × 700" in html
    png = base64.b64decode(re.search(r"base64,([^\"]+)", html)[1])  # type: ignore[index]
    assert png.startswith(b"\x89PNG")
    assert "Pattern" in x.pattern._repr_html_()
    shown = stc.compile("ijk->i", x)._repr_html_()
    assert shown.count("<tr>") == 1 + len(stc.compile("ijk->i", x).explain().parts)
    assert "-&gt;" in shown


def test_a_png_holds_the_counts() -> None:
    counts = torch.tensor([[0, 1, 4], [0, 0, 2]])
    png = as_png(counts)
    start = png.index(b"IDAT") + 4
    lines = zlib.decompress(png[start : png.index(b"IEND") - 8])
    assert list(lines) == [0, 255, 100, 0, 0, 255, 255, 58]


def test_nothing_is_shown_and_matplotlib_is_asked_for_where_it_is_needed() -> None:
    program = (
        "import sys, torch, sparsetc as stc\n"
        "assert 'matplotlib' not in sys.modules\n"
        "x = stc.eye(4); x._repr_html_(); assert 'matplotlib' not in sys.modules\n"
        "stc.plot.spy(x); assert 'matplotlib.pyplot' not in sys.modules\n"
        "for name in [n for n in sys.modules if n.startswith('matplotlib')]: sys.modules[name] = None\n"
        "try: stc.plot.spy(x)\nexcept ImportError as error: assert 'sparsetc[plot]' in str(error)\n"
        "else: raise SystemExit(1)\n"
        "try: stc.plot.tiles(stc.compile('ij,j->i', x, torch.ones(4)))\n"
        "except ImportError as error: assert 'sparsetc[plot]' in str(error)\n"
        "else: raise SystemExit(1)\n"
    )
    done = processes.run(["-c", program])
    assert done.returncode == 0, done.stderr
