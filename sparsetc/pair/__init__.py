"""Contractions of two or more sparse operands, with sparse results (BCB-SpTC, and two paths beside it).

In: a `Bound` einsum whose operands are sparse in two places or more. Out: which entries meet, and programs that add up
their products. `contraction/pair.py` makes a contraction of them. Data flows down::

    join.py          letters by role; operands diagonal, summed; which entries match, counted
    symbolic.py      the tasks in order; the pattern of the result
    tasks.py         tasks made, grouped by the entry of the result they add to, and as a sparse operand of ones;
                     on a GPU by a bit a place, with the kernels of mark_kernels.py
    blocking.py      operands in bitmap blocks, the tile program of a pair of them, and which pairs each program takes
    problem.py       what a path is chosen by, and what each has to say
    scalar.py        a product a task: an einsum with that operand
    dense.py         one matrix product of operands that are unfolded
    block_path.py    one matrix product a pair of blocks
    hybrid.py        blocks of x by how many nonzeros they hold, the rest by tasks; which of all paths is taken
"""
