"""Decompositions of sparse tensors: CP by least squares (`cp_als`) and for counts (`cp_apr`), and Tucker (`tucker`).

In: a sparse tensor and a rank. Out: `CP` and `Tucker` models. All that is computed of the sparse tensor is einsums.
"""

from sparsetc.decomposition.apr import cp_apr
from sparsetc.decomposition.cp import cp_als
from sparsetc.decomposition.hooi import tucker
from sparsetc.decomposition.models import CP, Tucker

__all__ = ["CP", "Tucker", "cp_als", "cp_apr", "tucker"]
