"""Figures of the site's benchmark pages, made from `benchmarks/results/` when the site is built.

In: files of results. Out: Markdown. A page has `{{ name }}` in a line where the function `name` goes (`hooks.py`). Run
a benchmark again, and the pages follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from statistics import geometric_mean, median
from typing import Any

from charts import bars, measured, results, source, table

FIGURES: dict[str, Callable[[], str]] = {}


def figure(make: Callable[[], str]) -> Callable[[], str]:
    """Register what a page names."""
    FIGURES[make.__name__] = make
    return make


# -- what one would write instead -------------------------------------------------------------------------------------


GPU = "h200/instead"
"""The newest record of the yardstick on a GPU."""
MEASURES = (("us", "instead", "ratio"), ("call_us", "instead_call", "call_ratio"))
"""A time, and the keys of a row of the yardstick that name its best peer and hold its ratio: device, and call."""


def _instead(name: str, device: str) -> str:
    """Return every task beside the best peer; what is wrong or failed stands first, then the least ratio."""
    if not measured(name):
        return f"Not measured yet on {device}: there is no `benchmarks/results/{name}.json`.\n"
    rows = sorted(results(name)["rows"], key=_least_ratio)
    compared = [ratio for ratio in map(_least_ratio, rows) if 0 < ratio < inf]
    said = f"{sum(ratio < 1 for ratio in compared)} of {len(rows)} rows are below 1."
    if compared:
        said += f" The geometric mean is {geometric_mean(compared):.2g}."
    on_gpu = ("device: sparsetc, µs", "instead, µs", "ratio") if name == GPU else ()
    head = ("task", "instead", *on_gpu, "call: sparsetc, µs", "instead, µs", "ratio")
    cells = [_instead_cells(row, MEASURES if on_gpu else MEASURES[1:]) for row in rows]
    return f"{said}\n\n{table(head, cells)}{source(name)}"


def _least_ratio(row: dict[str, Any]) -> float:
    """Return the lower of a row's ratios; 0 where ours is wrong or failed, inf where no peer has a time."""
    if "error" not in row["ours"]:
        return 0.0
    return min((row[ratio] for _, _, ratio in MEASURES if ratio in row), default=inf)


def _instead_cells(row: dict[str, Any], measures: Sequence[tuple[str, str, str]]) -> list[Any]:
    ours = row["ours"]
    if "error" not in ours:
        said = "; ".join(f"{key}: {text}" for key, text in ours.items())
        return [row["task"], ", ".join(row["peers"]), said.replace("|", "\\|"), *[""] * (3 * len(measures) - 1)]
    peers = dict.fromkeys(row[peer] for _, peer, _ in measures if peer in row)
    cells = [row["task"], ", then ".join(peers)]
    for measure, peer, ratio in measures:
        times = (row["peers"][row[peer]][measure], row[ratio]) if ratio in row else ("", "")
        cells += [ours.get(measure, ""), *times]
    return cells


@figure
def instead() -> str:
    """Return the yardstick on a GPU."""
    return _instead(GPU, "a GPU")


@figure
def instead_cpu() -> str:
    """Return the yardstick on a CPU."""
    return _instead("instead_cpu", "a CPU")


# -- when it pays ------------------------------------------------------------------------------------------------------


def _kinds(name: str) -> str:
    """Return the least, mean and largest ratio of each kind of task, the kind that loses most first."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in results(name)["rows"]:
        if "call_ratio" in row:
            kinds.setdefault(row["task"].partition(":")[0], []).append(row)
    measures = ("call_ratio", "ratio") if name == GPU else ("call_ratio",)
    head = ["task", "rows"]
    for what in ("call", "device")[: len(measures)]:
        head += [f"{what}: least", "mean", "most"]
    cells = []
    for kind, rows in sorted(kinds.items(), key=lambda one: geometric_mean(row["call_ratio"] for row in one[1])):
        line: list[Any] = [kind, len(rows)]
        for measure in measures:
            ratios = [row[measure] for row in rows if measure in row]
            line += [min(ratios), geometric_mean(ratios), max(ratios)] if ratios else ["", "", ""]
        cells.append(line)
    return table(head, cells) + source(name)


def _losing(name: str) -> str:
    """Return the tasks whose call takes longer than what one would write instead, the slowest first."""
    rows = sorted((row for row in results(name)["rows"] if row.get("call_ratio", 1) < 1), key=_call_ratio)
    cells = [
        (r["task"], r["instead_call"], r["ours"]["call_us"], r["peers"][r["instead_call"]]["call_us"], r["call_ratio"])
        for r in rows
    ]
    said = f"{len(rows)} of {sum('call_ratio' in row for row in results(name)['rows'])} tasks are slower by calls.\n\n"
    return said + table(("task", "instead", "sparsetc, µs", "instead, µs", "ratio"), cells) + source(name)


def _call_ratio(row: dict[str, Any]) -> float:
    ratio: float = row["call_ratio"]
    return ratio


@figure
def pays() -> str:
    """Return the kinds of tasks on a GPU."""
    return _kinds(GPU)


@figure
def pays_cpu() -> str:
    """Return the kinds of tasks on a CPU."""
    return _kinds("instead_cpu")


@figure
def losing() -> str:
    """Return the tasks that lose on a GPU."""
    return _losing(GPU)


@figure
def losing_cpu() -> str:
    """Return the tasks that lose on a CPU."""
    return _losing("instead_cpu")


# -- MTTKRP -----------------------------------------------------------------------------------------------------------


@figure
def mttkrp() -> str:
    """Return MTTKRP beside the best peer, a bar a mode."""
    data = results("mttkrp")
    values = [
        (f"{row['tensor']}, mode {row['mode']}", row["peer_us"] / row["kernel_us"])
        for row in data["rows"]
        if row["peer_us"]
    ]
    mean = geometric_mean(ratio for _, ratio in values)
    title = f"MTTKRP, float32, rank 32: geometric mean {mean:.2g}"
    return bars(title, "time of the best peer ÷ time of the kernel", values) + source("mttkrp")


@figure
def mttkrp_times() -> str:
    """Return the times of the same, and the floor of each."""
    rows = results("mttkrp")["rows"]
    head = ("tensor", "mode", "nonzeros", "plan", "kernel, µs", "call, µs", "best peer, µs", "kernel ÷ floor")
    cells = [
        (
            r["tensor"],
            r["mode"],
            r["nnz"],
            r["plan"],
            r["kernel_us"],
            r["call_us"],
            r["peer_us"] or "",
            r["kernel_us"] / r["floor_us"],
        )
        for r in rows
    ]
    return table(head, cells) + source("mttkrp")


@figure
def tiles() -> str:
    """Return tiles on the tensor cores beside the best plan of single nonzeros, of the first mode at rank 32."""
    rows = [r for r in results("hls")["rows"] if r["mode"] == 0 and r["rank"] == 32]
    values = [
        (
            f"{r['tensor']}, {r['precision']} ({r['nonzeros_a_tile']:.0f} a tile)",
            min(r["scalar_us"].values()) / r["hls_us"],
        )
        for r in rows
    ]
    title = "MTTKRP by dense tiles and leftovers (plan hls), first mode, rank 32"
    return bars(title, "best scalar plan ÷ hls", values) + source("hls")


@figure
def one_copy() -> str:
    """Return MTTKRP of all modes from one copy, and with a copy a mode, beside the best one-copy peer."""
    rows = [r for r in results("one_copy")["tuned"] if r["peer"]]
    named = {"mm-csf": "one copy", "auto": "a copy a mode"}
    values = [(f"{r['tensor']}, {named[r['plan']]}", r["peer"] / r["sum"]) for r in rows if r["plan"] in named]
    return bars("MTTKRP of all modes, rank 32", "best one-copy peer ÷ sum of kernels", values) + source("one_copy")


@figure
def cpu_mttkrp() -> str:
    """Return MTTKRP on a CPU beside gather, multiply and index_add_."""
    rows = [(r["mode"], r["plan"], r["ms"], r["plain_ms"], r["speedup"]) for r in results("cpu_mttkrp")["rows"]]
    return table(("mode", "plan", "ms", "gather, multiply, index_add_, ms", "ratio"), rows) + source("cpu_mttkrp")


@figure
def ordered_sums() -> str:
    """Return what sums in one order cost."""
    rows = [(f"{r['tensor']}, mode {r['mode']}", 1 / r["ratio"]) for r in results("deterministic")["rows"]]
    title = "MTTKRP, rank 32, with deterministic=True"
    return bars(title, "time without ÷ with ordered sums", rows) + source("deterministic")


# -- products ---------------------------------------------------------------------------------------------------------


@figure
def ttmc() -> str:
    """Return TTM chains beside gather, einsum and index_add_ of torch."""
    rows = [
        (
            f'"{r["equation"]}"',
            r["precision"],
            r["plan"],
            r["call_us"],
            r["floor_us"],
            r["torch_us"],
            r["torch_us"] / r["call_us"],
        )
        for r in results("ttmc")["rows"]
    ]
    head = ("equation", "precision", "plan", "call, µs", "floor, µs", "torch, µs", "ratio")
    return table(head, rows) + source("ttmc")


@figure
def ttv() -> str:
    """Return TTV and TTM with a sparse result beside cuSPARSE on the unfolded tensor."""
    rows = [r for r in results("ttv_peers")["rows"] if r.get("over_cusparse")]
    values = [(f"{r['op']} {r['tensor']}, mode {r['mode']}", r["over_cusparse"]) for r in rows]
    return bars("TTV, and TTM of 16 columns", "cuSPARSE on the unfolded tensor ÷ sparsetc", values) + source(
        "ttv_peers"
    )


def _spmm(columns: int) -> str:
    rows = [
        r for r in results("spmm")["rows"] if (r["asked"], r["precision"], r["columns"]) == ("auto", "highest", columns)
    ]
    values = [(f"{r['matrix']} ({r['plan']})", r["cusparse"] / r["us"]) for r in rows]
    title = f"Sparse matrix times dense matrix of {columns:,} columns, float32"
    return bars(title, "cuSPARSE ÷ sparsetc", values) + source("spmm")


@figure
def spmm_128() -> str:
    """Return SpMM of 128 columns beside cuSPARSE."""
    return _spmm(128)


@figure
def spmm_4096() -> str:
    """Return SpMM of 4,096 columns beside cuSPARSE."""
    return _spmm(4096)


def _pairs(name: str, of: str, measure: str) -> list[tuple[str, float]]:
    """Return SpGEMM's time over that of contractions at float32's error, by the plan that is chosen.

    Args:
        name: the file of results.
        of: ``"auto"`` for rows of calls with plan="auto", ``"chosen"`` for those of the plan that it chooses.
        measure: the time that is compared.
    """
    rows = {(r["tensors"], r["equation"], r["plan"], r.get("precision")): r for r in results(name)["rows"]}
    ratios = []
    for (tensors, equation, plan, precision), row in rows.items():
        peer = rows.get((tensors, equation, "torch.sparse", None))
        if plan == "auto" and precision == "highest" and peer:
            ours = row if of == "auto" else rows[tensors, equation, row["auto"], precision]
            ratios.append((_short(tensors, equation), peer[measure] / ours[measure]))
    return ratios


def _short(tensors: str, equation: str) -> str:
    left, right = tensors.replace("guanine_TE", "").replace("_3d", "").replace("_amj_4d", "").split(" x ")
    return f"{left} × {right}, {equation}" if left != right else f"{left} squared, {equation}"


@figure
def contractions() -> str:
    """Return contractions of two sparse tensors beside cuSPARSE's SpGEMM, values only."""
    title, axis = "Two sparse tensors, values on a known pattern", "SpGEMM of cuSPARSE ÷ sparsetc"
    return bars(title, axis, _pairs("pair", "chosen", "us")) + source("pair")


@figure
def contractions_first() -> str:
    """Return first calls of the same, which find the pattern of the result too."""
    title, axis = "The same, first calls: pattern and values", "SpGEMM of cuSPARSE ÷ sparsetc"
    return bars(title, axis, _pairs("pair_first", "auto", "first_ms")) + source("pair_first")


# -- graphs and operators ---------------------------------------------------------------------------------------------


def _ratios(name: str, title: str, axis: str) -> str:
    rows = [r for r in results(name)["rows"] if "ratio" in r]
    return bars(title, axis, [(r["what"], r["ratio"]) for r in rows]) + source(name)


@figure
def graphs() -> str:
    """Return layers and aggregations on a GPU beside PyTorch Geometric."""
    return _ratios("graph", "A graph of 1.48 M edges, 64 features, on a GPU", "PyTorch Geometric ÷ sparsetc")


@figure
def graphs_cpu() -> str:
    """Return the same on a CPU."""
    return _ratios("graph_cpu", "The same on a CPU", "PyTorch Geometric ÷ sparsetc")


@figure
def relations() -> str:
    """Return messages of several relations, each with a matrix of its own."""
    axis = "a loop over relations in torch ÷ sparsetc"
    return _ratios("relations", "Relations, nodes, edges and features of a relational graph layer", axis)


@figure
def arithmetic() -> str:
    """Return operators of sparse tensors on a CPU beside scipy, pydata/sparse and torch."""
    return _ratios("arithmetic", "Operators of 400,000 entries, on one thread of a CPU", "the peer ÷ sparsetc")


# -- large tensors ----------------------------------------------------------------------------------------------------


@figure
def streams() -> str:
    """Return streams from pinned memory beside plain copies of the same bytes."""
    head = ("case", "equation", "order of chunks", "streams", "GB packed", "seconds", "GB/s", "of the rate of copies")
    rows = [
        (
            r["case"],
            f'"{r["equation"]}"',
            r["order"],
            r["streams"],
            r["packed_gb"],
            r["s"],
            r["gb_s"],
            f"{r['of_copy_rate']:.0%}",
        )
        for r in results("stream")["rows"]
        if r.get("of_copy_rate")
    ]
    return table(head, rows) + source("stream")


@figure
def two_gpus() -> str:
    """Return what a second GPU gives."""
    rows = results("distributed_2")["rows"]
    values = [
        (f"{r['what']}, {r['tensor']}" + (f", mode {r['mode']}" if "mode" in r else ""), r["speedup"]) for r in rows
    ]
    return bars("Two GPUs", "time on one GPU ÷ time on two", values) + source("distributed_2")


@figure
def packed_files() -> str:
    """Return how long packing a text file takes, by the memory that it may take."""
    rows = [
        (r["nnz"], r["text_bytes"] / 1e6, r["limit"], r["s"], r["taken_bytes"] / 1e6)
        for r in results("packing")["rows"]
        if "limit" in r
    ]
    return table(("nonzeros", "MB of text", "limit", "seconds", "MB taken"), rows) + source("packing")


@figure
def sweeps() -> str:
    """Return a sweep of CP-ALS beside its MTTKRPs."""
    rows = [
        (r["tensor"], r["fused_aside_graph_ms"], r["mttkrp_ms"], r["fused_aside_graph_ms"] / r["mttkrp_ms"])
        for r in results("als_sweeps")["rows"]
    ]
    return table(("tensor", "sweep, ms", "its MTTKRPs, ms", "ratio"), rows) + source("als_sweeps")


# -- calls ------------------------------------------------------------------------------------------------------------


@figure
def overhead() -> str:
    """Return what the first call and later calls cost the host."""
    head = ("tensor", "mode", "plan", "plan, pack and compile, s", "compile once packed, s", "CPU time of a call, µs")
    rows = [
        (r["tensor"], r["mode"], r["plan"], r["plan_pack_compile_s"], r["compile_packed_s"], r["cpu_us_per_call"])
        for r in results("overhead")["rows"]
    ]
    return table(head, rows) + source("overhead")


@figure
def model_and_clock() -> str:
    """Return how much slower the plan of the cost model is than the fastest that tuning found."""
    over = sorted(r["model"] / r["tuned"] for r in results("tuning")["rows"])
    head = ("problems", "model's plan within 5 % of the fastest", "median", "9 in 10 below", "worst")
    near = sum(ratio <= 1.05 for ratio in over)
    row = (len(over), near, median(over), over[int(0.9 * len(over))], over[-1])
    return table(head, [row]) + source("tuning")
