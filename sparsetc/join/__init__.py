"""Two patterns brought together: symbolic work alone (BCB-SpTC, section IV-A).

In: two sparse operands' coordinates and the letters of an einsum. Out: which entries meet, where the result has
entries, and the sparse operand of ones ``T[p, q, z]`` whose einsums are the result and the gradients::

    join.py          letters by role; operands diagonal, summed; which entries match, counted
    order.py         the tasks in order; the pattern of the result
    tasks.py         tasks made, grouped by the entry of the result they add to, and as a sparse operand of ones;
                     on a GPU by a bit a place, with the kernels of mark_kernels.py
    blocking.py      operands in bitmap blocks, and which pairs of them each program takes
"""
