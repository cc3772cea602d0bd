"""A tensor in a file, streamed: an einsum in less memory than its operand takes.

    python examples/stream_from_disk.py

The tensor has 300,000 nonzeros, 2.2 MB in its file. Half a megabyte is allowed: for factor matrices, the result, and
chunks of the tensor, which pass through one after the other. On a GPU that is the GPU's memory, and while one chunk is
copied another is computed; here it shows on any machine. It prints how many chunks there are, and how a limit that is
too low is refused.
"""

import tempfile
from pathlib import Path

import torch

import sparsetc as stc

LIMIT, RANK = 512 * 1024, 16


def factors(shape: tuple[int, ...], g: torch.Generator) -> list[torch.Tensor]:
    """A random factor matrix a mode."""
    return [torch.rand(n, RANK, generator=g) for n in shape]


def main() -> None:
    """Write a tensor, forget it, and stream it from disk."""
    g, shape = torch.Generator().manual_seed(0), (1000, 500, 300)
    coords = torch.stack([torch.randint(n, (300_000,), generator=g) for n in shape])
    x = stc.SparseTensor(coords, torch.rand(300_000, generator=g), shape)
    _, b, c = factors(shape, g)

    with tempfile.TemporaryDirectory() as folder:
        path, chunks = Path(folder) / "x.parquet", Path(folder) / "x.safetensors"
        stc.write(path, x)
        print(f"{path.name}: {x.nnz:,} nonzeros, {path.stat().st_size:,} bytes; {LIMIT:,} are allowed")

        # At once: chunks are packed as they are read, and go when the result is there.
        found = stc.stream("ijk,jr,kr->ir", path, b, c, memory_limit=LIMIT)
        check(found, stc.einsum("ijk,jr,kr->ir", x, b, c))

        # To stream often, pack once: to a file here, so that host memory need not hold the chunks either.
        with stc.stream_kernel("ijk,jr,kr->ir", path, b, c, memory_limit=LIMIT, file=chunks) as s:
            print(s)
            assert s.device_bytes <= LIMIT
            check(s(b, c), found)
            check(s(b + 1, c), stc.einsum("ijk,jr,kr->ir", x, b + 1, c))
        with stc.open_stream(chunks, memory_limit=LIMIT) as s:  # another day: nothing is packed
            check(s(b, c), found)
            slowest = max(s.timeline(), key=lambda t: t.kernel[1] - t.copy[0])
            print(f"{s.chunks} chunks; the slowest took {slowest.kernel[1] - slowest.copy[0]:.2f} ms")

        # A result that does not fit comes back in pieces: 16 columns for every i and j that have a nonzero.
        with stc.stream_kernel("ijk,kr->ijr", path, c, memory_limit=LIMIT) as s:
            print(s)
            assert not s.resident
            z, expected = s(c), stc.einsum("ijk,kr->ijr", x, c)
            assert torch.equal(z.coords, expected.coords)
            check(z.values, expected.values)

        try:
            stc.stream("ijk,jr,kr->ir", path, b, c, memory_limit="32KiB")
        except stc.OutOfMemoryError as error:
            print(error)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, up to the order of sums."""
    torch.testing.assert_close(found.to(expected.device), expected, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    main()
