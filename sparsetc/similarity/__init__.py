"""1-SA: groups of rows with similar columns, and the density of the blocks that they form.

Files, in the order of data::

    clusters.py     rows -> the strips of columns that they touch, equal patterns once -> candidates, by min-hash
    groups.py       candidates -> groups, in rounds: `group_rows`; tensors as matrices, and what groups hold
    curve.py        height against density, over similarities
"""
