"""Draw `docs/city.png`, the picture of the README: ``python docs/city.py``; needs matplotlib.

In: the tensor that comes with the package. Out: three components of a nonnegative CP model, by hour and on the map.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch

import sparsetc as stc

COLOURS = ("#1f77b4", "#d62728", "#2ca02c")
CELL = 6
"""Latitudes and longitudes of a cell of the map."""
EAST, NORTH = (50, 165), (30, 115)
"""Cells that the map shows."""


def main() -> None:
    """Decompose the tensor, draw, and write the picture."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    x = stc.datasets.uber()
    model = stc.decomposition.cp_als(x, len(COLOURS), nonnegative=True, random_state=0, n_iter_max=60).arranged()
    _, hours, latitudes, longitudes = model.factors
    city = cells(x.sum((0, 1), output="dense")).log1p()
    background = 1 - 0.55 * city / city.max()
    figure, (clock, *maps) = pyplot.subplots(
        1, 1 + len(COLOURS), figsize=(9, 2.5), width_ratios=(1.5, 1, 1, 1), layout="constrained"
    )
    for number, (colour, axes) in enumerate(zip(COLOURS, maps, strict=True)):
        clock.plot(hours[:, number] / hours[:, number].max(), color=colour)
        share = cells(latitudes[:, number, None] * longitudes[None, :, number])
        share = (share / share.max()).pow(0.35)
        share = torch.nn.functional.max_pool2d(share[None], 5, 1, 2)[0][..., None]  # or an airport would be a pixel
        pixels = background[..., None] * (1 - share) + torch.tensor(matplotlib.colors.to_rgb(colour)) * share
        axes.imshow(pixels, origin="lower", aspect="auto")
        axes.set(xlim=EAST, ylim=NORTH, xticks=[], yticks=[])
        axes.set_title(f"component {number + 1}: where", fontsize=9, color=colour)
    clock.set(xticks=[0, 6, 12, 18, 23], yticks=[])
    clock.set_title("when (hour of the day)", fontsize=9)
    clock.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=100)


def cells(positions: torch.Tensor) -> torch.Tensor:
    """Sum a map over cells."""
    rows, columns = (size // CELL for size in positions.shape)
    return positions[: rows * CELL, : columns * CELL].reshape(rows, CELL, columns, CELL).sum((1, 3))


if __name__ == "__main__":
    main()
