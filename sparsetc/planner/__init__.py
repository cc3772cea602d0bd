"""The problem of a plan, methods and their prices, and the choice among them."""

# ruff: noqa: F401
from sparsetc.planner.bounds import Numbers, different, least_seconds, rates_of, tiles_of, windows_of
from sparsetc.planner.candidate import Best, Candidate, blocked, items_of, max_item_nnz_of, repeats, rounds, single
from sparsetc.planner.pricing import ROUNDING, cheapest, costs, describe, in_order, natively, price, seconds_of
from sparsetc.planner.problem import Counts, Problem
from sparsetc.planner.registry import PLANS, Method, add_plans, register_format
from sparsetc.planner.schedule import (
    deepened,
    dot_may_form,
    dot_takes_entries,
    fit,
    in_blocks,
    of_whole_axes,
    padded_axes,
    programs_of,
    schedule_of,
)
