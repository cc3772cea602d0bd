"""1-SA: groups of rows that touch about the same columns, and how dense the blocks are that they make.

Files, in the order of data::

    quotient.py     rows -> the strips of columns that they touch, equal patterns once
    clusters.py     patterns -> candidates for a merge, by min-hash
    merging.py      candidates -> clusters, in rounds
    groups.py       `group_rows`, and the paper's own algorithm
    unfolding.py    tensors as matrices, and what groups hold
    curve.py        height against density, over similarities
"""
