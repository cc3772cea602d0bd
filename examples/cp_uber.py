"""When and where New York called an Uber: the components of a month's pickups, drawn.

    python examples/cp_uber.py [pickups.png]

Pickups are counts, so `cp_apr` looks for the model under which Poisson variables make them most likely. Each component
is a map (latitude times longitude), the hours of the day at which it is busy, and the days on which it is. Nothing says
what a weekend, a rush hour or an airport is; components come out as such all the same.
"""

import sys
import time
from importlib.util import find_spec
from itertools import pairwise

import torch

import sparsetc as stc

RANK = 8
MAP = (slice(300, 530), slice(540, 850))
"""Latitudes and longitudes that are drawn: the city and its airports, 98 % of the pickups."""
WEEKDAYS = [(1 + day) % 7 for day in range(23)]
"""Of the days, from Tuesday, 1 April 2014 on; Monday is 0."""


def draw(model: stc.decomposition.CP, x: stc.SparseTensor, path: str) -> None:
    """A row a component: its map on that of all pickups, its hours, its days."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    city = torch.zeros(x.shape[2:]).index_put((x.coords[2], x.coords[3]), x.values, accumulate=True)[MAP]
    figure, rows = plt.subplots(model.rank, 3, figsize=(11, 2.3 * model.rank), width_ratios=(1.35, 1, 1))
    for component, (here, hours, days) in zip(torch.argsort(model.weights, descending=True), rows, strict=True):
        day, hour, latitude, longitude = (f[:, component].cpu() for f in model.factors)
        area = torch.outer(latitude[MAP[0]], longitude[MAP[1]])
        area = torch.nn.functional.max_pool2d(area[None], 3, stride=1, padding=1)[0]  # so that single spots are seen
        here.imshow(city.clamp(max=1), origin="lower", cmap="Greys", vmax=3, aspect="auto")
        shown = here.imshow(area / area.max(), origin="lower", cmap="inferno", vmax=0.6, aspect="auto")
        shown.set_alpha((area / area.max()).sqrt().numpy())
        here.set(xticks=[], yticks=[], ylabel=f"{float(model.weights[component]):,.0f} pickups")
        hours.bar(range(24), hour * 100, color="tab:orange")
        hours.set(xticks=range(0, 25, 6), ylim=(0, 15))
        weekend = ["tab:red" if weekday >= 5 else "tab:blue" for weekday in WEEKDAYS]
        days.bar(range(1, 24), day * 100, color=weekend)
        days.set(xticks=range(1, 24, 7), ylim=(0, 15))
    for axis, title in zip(rows[0], ("where", "hour of the day, %", "day of April, % (weekends red)"), strict=True):
        axis.set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main(path: str = "pickups.png") -> None:
    """Decompose, draw, and check that the likelihood rose and that nights at weekends were told from the rest."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = stc.datasets.uber().to(device)
    started = time.perf_counter()
    model = stc.decomposition.cp_apr(x, RANK, n_iter_max=10, random_state=0)
    print(f"{model}\n{time.perf_counter() - started:.1f} s on {device}")

    likelihoods = model.log_likelihoods
    print(f"log-likelihood {likelihoods[0]:,.0f} -> {likelihoods[-1]:,.0f}")
    assert all(later > earlier for earlier, later in pairwise(likelihoods))
    total = float(x.values.sum())
    assert abs(float(model.weights.sum()) - total) < 1e-3 * total

    days, hours = (f.cpu() for f in model.factors[:2])
    weekend = days[[day for day, weekday in enumerate(WEEKDAYS) if weekday >= 5]].sum(0)
    night = hours[:4].sum(0)
    party = int((weekend * night).argmax())
    print(f"component {party}: {weekend[party]:.0%} of it at weekends, {night[party]:.0%} between midnight and 4")
    assert weekend[party] > 0.5
    assert night[party] > 0.15

    if find_spec("matplotlib") is None:
        print("not drawn: pip install 'sparsetc[plot]'")
        return
    draw(model, x.cpu(), path)
    print(f"drawn to {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
