"""The profile that a plan is priced by: the one place where one and two sparse operands look.

In: a backend, or a device. Out: a `DeviceProfile`: as `calibrate` recorded it, if it did, and else a default.
"""

from __future__ import annotations

import torch

from sparsetc.device import record
from sparsetc.device.profile import DeviceProfile, cpu, default_gpu
from sparsetc.options import Options, in_force


def of_current_device() -> DeviceProfile:
    """The profile of the current CUDA device; the default GPU's without one, or without a record that can be read."""
    return record.read() or default_gpu()


def of_backend(backend: str) -> DeviceProfile:
    """The profile that generated programs of a backend are priced by: ``torch``'s run on CPU cores."""
    return cpu() if backend == "torch" else of_current_device()


def profile_of(device: torch.device, settings: Options, backend: str = "torch") -> DeviceProfile:
    """The profile of the device that operands are on, recorded where the settings say; elsewhere that of the backend.

    Operands on a CPU, of which Triton programs are made, are priced as on the GPU that these are for.
    """
    with in_force(settings):
        if device.type != "cuda":
            return of_backend(backend)
        with torch.cuda.device(device):
            return of_current_device()
