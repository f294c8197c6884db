"""The exact high-water mark of torch's allocations during a call."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], Any], device: str) -> int:
    """The most bytes that torch's allocator held at one time during the call, above those held at its start.

    On the CPU every allocation and release is recorded and added up in order. Memory that was held before the call
    counts as held throughout; what libraries allocate outside torch (BLAS packing buffers) is not seen.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with _silenced(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    results: Any = profiler.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@contextmanager
def _silenced() -> Iterator[None]:
    """Drop what the profiler's C++ code prints about itself and about releases of older blocks."""
    saved = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
