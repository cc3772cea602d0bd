"""Ctrl-C at any moment: the call ends, and the next one gives what it would have given."""

from __future__ import annotations

import processes

PROGRAM = """
import random, signal, threading, warnings
warnings.simplefilter("ignore")
import torch
import sparsetc as stc

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
random.seed(0)
interrupted = 0
for n in range(120):
    x, y = stc.rand((20, 30, 25), 0.05), stc.rand((25, 10), 0.1)
    seconds = 30.0 if n < 6 else 0.05  # however busy the machine is, the first search loads the source of every plan
    b, c = torch.rand(30, 4), torch.rand(25, 4)
    mttkrp = torch.einsum("ijk,jr,kr->ir", x.to_dense(), b, c)
    call, expected = (
        (lambda: stc.einsum("ijk,jr,kr->ir", x, b, c), mttkrp),
        (lambda: stc.einsum("ijk,jr,kr->ir", x, b, c, plan="hls"), mttkrp),
        (lambda: stc.einsum("ijk,jr,kr->ir", x, b, c, tune=seconds), mttkrp),
        (lambda: stc.stream("ijk,jr,kr->ir", x, b, c, chunk_bytes=4096), mttkrp),
        (lambda: stc.einsum("ijk,kl->ijl", x, y).to_dense(), torch.einsum("ijk,kl->ijl", x.to_dense(), y.to_dense())),
        (lambda: (x + x).to_dense(), 2 * x.to_dense()),
    )[n % 6]
    try:
        if n >= 6:  # Python turns an interrupt of an import into other errors, so all modules are loaded first
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0005, 0.03))
        call()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted += 1
    torch.testing.assert_close(call(), expected, rtol=1e-4, atol=1e-4)
assert interrupted, "no call was interrupted"
assert threading.active_count() == 1
"""


def test_an_interrupted_call_leaves_nothing_behind() -> None:
    done = processes.run(["-c", PROGRAM])
    assert done.returncode == 0, done.stderr[-2000:]
