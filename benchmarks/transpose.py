"""Copies of a matrix in the other order of its modes, by tiles and by torch, on a GPU: no arguments."""

from __future__ import annotations

import torch
from common import device_microseconds, record

from sparsetc.codegen.launch import contiguous

SHAPES = ((16, 4096), (16, 11008), (256, 4096), (4096, 16), (4096, 4096), (8, 512, 512), (512, 8, 512))


def main() -> None:
    """Compare results, time both ways, print and record."""
    rows = []
    for shape in SHAPES:
        for dtype in (torch.float16, torch.float32, torch.float64):
            view = torch.rand(shape, device="cuda").to(dtype).transpose(-2, -1)
            assert torch.equal(contiguous(view), view)
            ways = contiguous, torch.clone, torch.Tensor.contiguous
            tiles, whole, by_torch = (device_microseconds(lambda way=way, v=view: way(v)) for way in ways)
            row = {"shape": [*shape], "dtype": str(dtype), "us": tiles, "torch_us": by_torch, "clone_us": whole}
            rows.append(row)
            print(f"{shape} {dtype}: {tiles:.2f} us by tiles, {by_torch:.2f} by torch, {whole:.2f} without a turn")
    record("transpose", rows)


if __name__ == "__main__":
    main()
