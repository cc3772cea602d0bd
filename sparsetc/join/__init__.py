"""Two patterns brought together: symbolic work alone (BCB-SpTC, section IV-A).

In: two sparse operands' coordinates and the letters of an einsum. Out: which entries meet, where the result has
entries; `products.tasks` makes of it ``T[p, q, z]``, whose einsums are the result and the gradients::

    join.py          letters by role; operands diagonal, summed; which entries match, counted
    order.py         the tasks in order; the pattern of the result
    blocking.py      operands in bitmap blocks, and which pairs of them each program takes
    loops.py         native loops that find results, tasks and sums; mark_kernels.py has a GPU's
"""
