"""Completion: ratings that were never given, from those that were.

    python examples/completion.py

People rate films at some time of the day, on a scale from 1 to 5; tastes are a few, so the ratings in full would be a
CP model of low rank and noise. One in 25 is known. `cp_als` with a mask fits those alone: zeros elsewhere are not
ratings, though a decomposition without a mask takes them for such. A tenth of the known ratings is held out to see what
the model is worth, against means of persons and films: ratings are 1.0 stars off by means, and 0.29 by the model.
"""

import torch

import sparsetc as stc

PEOPLE, FILMS, TIMES, TASTES = 300, 200, 8, 4


def ratings(random: torch.Generator) -> stc.SparseTensor:
    """Known ratings: four tastes, noise of 0.2, rounded to halves between 1 and 5."""
    people, films = (torch.randn(n, TASTES, generator=random) for n in (PEOPLE, FILMS))
    times = 0.7 + 0.6 * torch.rand(TIMES, TASTES, generator=random)
    count = PEOPLE * FILMS * TIMES // 25
    at = torch.randperm(PEOPLE * FILMS * TIMES, generator=random)[:count]
    coords = torch.stack(torch.unravel_index(at, (PEOPLE, FILMS, TIMES)))
    liked = (people[coords[0]] * films[coords[1]] * times[coords[2]]).sum(1)
    values = 3 + 0.5 * liked + 0.2 * torch.randn(count, generator=random)
    return stc.SparseTensor(coords, ((2 * values).round() / 2).clamp(1, 5), (PEOPLE, FILMS, TIMES))


def baseline(known: stc.SparseTensor, coords: torch.Tensor) -> torch.Tensor:
    """The mean rating, and how persons and films differ from it."""
    mean = known.values.mean()
    guess = mean.expand(coords.shape[1])
    for mode in (0, 1):
        total = torch.bincount(known.coords[mode], known.values - mean, known.shape[mode])
        count = torch.bincount(known.coords[mode], minlength=known.shape[mode])
        guess = guess + (total / (count + 5))[coords[mode]]
    return guess


def main() -> None:
    """The model predicts held-out ratings with less than half the error of every other guess."""
    random = torch.Generator().manual_seed(0)
    x = ratings(random)
    held = torch.rand(x.nnz, generator=random) < 0.1
    known = stc.SparseTensor(x.coords[:, ~held], x.values[~held], x.shape)
    hidden, truth = x.coords[:, held], x.values[held]
    print(f"{known.nnz:,} ratings known, {truth.numel():,} held out, {known.density:.1%} of all there could be")

    mean = known.values.mean()
    centred = known.with_values(known.values - mean)  # a rating of 3 says nothing, and so should a row without any
    model = stc.decomposition.cp_als(
        centred, TASTES + 1, mask="observed", l2_reg=2.0, n_iter_max=60, tol=1e-5, random_state=0
    )
    print(model)

    def error(guess: torch.Tensor) -> float:
        return float((guess.clamp(1, 5) - truth).square().mean().sqrt())

    whole = stc.decomposition.cp_als(centred, TASTES + 1, n_iter_max=60, tol=1e-5, random_state=0)
    errors = {
        "the mean": error(mean.expand_as(truth)),
        "means of persons and films": error(baseline(known, hidden)),
        "CP, unknown taken for 0": error(mean + whole.values_at(hidden)),
        "CP of what is known": error(mean + model.values_at(hidden)),
    }
    for name, value in errors.items():
        print(f"{name:28} {value:.3f} stars off")
    assert errors["CP of what is known"] < 0.5 * min(list(errors.values())[:3])


if __name__ == "__main__":
    main()
