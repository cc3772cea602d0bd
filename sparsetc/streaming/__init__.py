"""Einsums with a sparse operand larger than the device: packed chunks pass through it, one after the other.

In: a sparse operand in host memory or in a file. Out: results as of `einsum`. `cutting` and `compiler` make packed
chunks of the nonzeros, `store` keeps these, `contents` says what a file of them holds, `engine` runs them; `budget`
says what was asked for and what fits.
"""

from sparsetc.streaming.api import open_stream, stream, stream_kernel
from sparsetc.streaming.budget import StreamOptions
from sparsetc.streaming.engine import ChunkTimes
from sparsetc.streaming.stream import Stream

__all__ = ["ChunkTimes", "Stream", "StreamOptions", "open_stream", "stream", "stream_kernel"]
