"""The problem of a plan, methods and their prices, and the choice among them."""

# ruff: noqa: F401
from sparsetc.planner.bounds import Numbers, different, least_seconds, rates_of, tiles_of, windows_of
from sparsetc.planner.pricing import (
    ROUNDING,
    Best,
    Candidate,
    cheapest,
    costs,
    describe,
    in_order,
    natively,
    price,
    seconds_of,
    single,
)
from sparsetc.planner.problem import Counts, Problem
from sparsetc.planner.registry import PLANS, Method, add_plans, register_format
from sparsetc.planner.schedule import (
    blocked,
    deepened,
    dot_may_form,
    dot_takes_entries,
    fit,
    items_of,
    max_item_nnz_of,
    of_whole_axes,
    padded_axes,
    programs_of,
    repeats,
    rounds,
    schedule_of,
)
