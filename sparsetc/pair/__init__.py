"""Contractions of two or more sparse operands, with sparse results (BCB-SpTC, and two paths beside it).

In: a `Bound` einsum whose operands are sparse in two places or more. Out: which entries meet, and programs that add up
their products. `contraction/several.py`, `chain.py` and `pair_step.py` make contractions of them. Data flows down::

    join_operand.py  letters by role; operands diagonal, summed
    join.py          which entries match, counted
    symbolic.py      the tasks in order; the pattern of the result
    expansion.py     tasks made, and grouped by the entry of the result they add to
    marks.py         the same on a GPU, by a bit a place; its kernels are in mark_kernels.py
    tasks.py         tasks as a sparse operand of ones
    scalar.py        a product a task: an einsum with that operand
    dense.py         positions in unfolded operands
    blocking.py      operands in bitmap blocks, the tile program of a pair of them
    populations.py   blocks of x by how many nonzeros they hold
    blocks.py        which pairs each program takes
    block_path.py    one matrix product a pair of blocks
    plans.py         what a plan says of blocks
    prices.py        expected times, from counts and a device's profile
    problem.py       what a method is chosen by
    method.py, methods/   scalar, dense, blocks, and a hybrid: expected times, plans, and what runs them
    choose.py        the method
    contraction_order.py   more than two operands, two at a time
"""
