"""Tensors that come with the package, to try it on."""

from __future__ import annotations

from importlib.resources import as_file, files

import torch

from sparsetc.io import read
from sparsetc.tensor.sparse_tensor import SparseTensor

__all__ = ["uber"]


def uber(*, dtype: torch.dtype | None = None) -> SparseTensor:
    """Uber pickups in New York City, counted by day, hour, latitude and longitude: 23 x 24 x 887 x 1410.

    The tensor has 303,343 nonzeros, of 1-23 April 2014. It is cut by day from the data of April to June (91 days,
    1,378,268 nonzeros), whose latitudes and longitudes it keeps, so some of them have no pickup. It is read at each
    call, and lies on the CPU unless ``options(device=)`` names another device.

    Args:
        dtype: of the counts; float32 by default, as `read` has it.

    Credit:
        The New York City Taxi & Limousine Commission released the trips under the Freedom of Information Law to
        FiveThirtyEight, which published them without naming a licence:
        <https://github.com/fivethirtyeight/uber-tlc-foil-response>. One count per day, hour, latitude and longitude is
        the form that FROSTT gave them: <http://frostt.io>.

    Examples:
        >>> stc.datasets.uber()
        SparseTensor(shape=(23, 24, 887, 1410), nnz=303343, density=0.000439, dtype=torch.float32, device=cpu)
    """
    with as_file(files("sparsetc") / "data" / "uber.tns.gz") as path:
        return read(path, dtype=dtype)
