"""1-SA: groups of rows that touch about the same columns, and how dense the blocks are that they make.

Files, in the order of data::

    clusters.py     rows -> the strips of columns that they touch, equal patterns once -> candidates, by min-hash
    groups.py       candidates -> groups, in rounds: `group_rows`; tensors as matrices, and what groups hold
    curve.py        height against density, over similarities
"""
