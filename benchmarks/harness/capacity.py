"""What the machine has to give to two processes at a time.

Two virtual processors may be two threads of one core, and they share caches and memory in any case. Two independent
copies of the same work, which wait for nothing and tell each other nothing, then do less than twice the work of one:
no overlap of two processes can gain more than that.
"""

from __future__ import annotations

import subprocess
import sys

_LOOP = """
import sys, time
import torch
torch.set_num_threads(1)
layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.SiLU(), torch.nn.Linear(256, 64))
inputs = torch.randn(64, 64)
print("ready", flush=True)
sys.stdin.readline()
count, begin = 0, time.perf_counter()
while time.perf_counter() - begin < float(sys.argv[1]):
    layers(inputs).square().sum().backward()
    count += 1
print(count)
"""


def capacity_of_two(seconds: float = 4.0) -> float:
    """Work done by two processes at the same time over the work of one alone: 2 where they do not slow each other.

    The work is small matrix products and Python's overhead around them, as in the small jobs of these benchmarks.
    """
    first = _counts(1, seconds)[0]
    together = _counts(2, seconds)
    second = _counts(1, seconds)[0]
    return sum(together) / ((first + second) / 2)


def _counts(processes: int, seconds: float) -> list[int]:
    command = [sys.executable, "-c", _LOOP, str(seconds)]
    pipe = subprocess.PIPE
    running = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(processes)]
    for process in running:
        assert process.stdout is not None
        process.stdout.readline()  # all have imported what they need before any begins
    return [int(process.communicate("go\n")[0]) for process in running]
