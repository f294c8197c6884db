"""Which way to a layer's norms is the quicker one on this machine, from a few timings made once and cached.

For P x Q parameters and a trajectory of T rows, Gram matrices cost T^2 (P + Q) multiply-adds, and one product of all
rows for the gradient later; single gradients cost T P Q multiply-adds, which replace that product, and some passes over
P Q numbers. How fast each of these runs depends on T and on the sizes far more than on the count, so times are
interpolated in tables instead of computed from one speed.
"""

from __future__ import annotations

import json
import os
import platform
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import log2
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vcpo.cache import cache_directory
from vcpo.gradnorm.kernels import TILE_ELEMENTS

LENGTHS = (8, 16, 32, 64, 128, 256, 512)
WIDTHS = (64, 256, 1024)
_ROUNDS = 8

Table = list[list[float]]


@dataclass(frozen=True)
class CostModel:
    """Seconds per unit of work. Tables have one row per entry of ``LENGTHS`` and one column per entry of ``WIDTHS``.

    gram: per column of a trajectory's rows, for its Gram matrix; a column of the table is the number of columns.
    single: per number of a single gradient, for making it, its norm, and adding it to two sums in one case of two; a
        column of the table is the square root of the gradient's size.
    combined: per row and number of the gradient, for the one product of all rows.
    """

    gram: Table
    single: Table
    combined: float

    def __post_init__(self) -> None:
        for table in (self.gram, self.single):
            if [len(row) for row in table] != [len(WIDTHS)] * len(LENGTHS):
                raise ValueError("a table has another shape")

    def prefers_gram(self, lengths: Sequence[int], height: int, width: int, is_shared: bool) -> bool:
        """Whether Gram matrices and one product later are expected to take less time than single gradients.

        is_shared: the Gram matrices of the ``width`` side are there already.
        """
        size = height * width
        side = size**0.5
        gram = self.combined * sum(lengths) * size
        single = 0.0
        for length, count in Counter(lengths).items():
            columns = height * _interpolate(self.gram, length, height, 2)
            if not is_shared:
                columns += width * _interpolate(self.gram, length, width, 2)
            gram += count * columns
            single += count * size * _interpolate(self.single, length, side, 1)
        return gram < single


@lru_cache(maxsize=8)
def cost_model(device: torch.device, dtype: torch.dtype, threads: int) -> CostModel:
    """The costs on this machine: from the cache, or measured now."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    key = f"{device.type} {name} {os.cpu_count()} cores, {threads} threads, {dtype}, torch {torch.__version__}, 1"
    path = cache_directory() / "gradient-costs.json"
    known = _read(path)
    try:
        return CostModel(**known[key])
    except (KeyError, TypeError, ValueError):
        model = measure(device, dtype)
        _write(path, known | {key: asdict(model)})
        return model


def measure(device: torch.device, dtype: torch.dtype) -> CostModel:
    """Time the kernels."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, device=device, dtype=dtype, generator=generator) - 0.5

    def gram(length: int, width: int) -> float:
        rows = [random(length, width) for _ in range(3)]

        def run() -> None:
            for part in rows:
                product = torch.mm(part, part.T)
                torch.dot(product.view(-1), product.view(-1))

        return _seconds(run, device) / (3 * width)

    def single(length: int, width: int) -> float:
        left, right = random(3 * length, width), random(3 * length, width)
        height = min(width, TILE_ELEMENTS // width)
        scratch, first, second = random(height, width), random(height, width), random(height, width)

        def run() -> None:
            for index in range(3):
                own = slice(index * length, (index + 1) * length)
                torch.mm(left[own, :height].T, right[own], out=scratch)
                torch.dot(scratch.view(-1), scratch.view(-1))
                first.add_(scratch, alpha=0.5)
                if index % 2:
                    second.add_(scratch, alpha=0.5)

        return _seconds(run, device) / (3 * height * width)

    left, right = random(512, 512), random(512, 512)
    with torch.no_grad():
        return CostModel(
            gram=[[gram(length, width) for width in WIDTHS] for length in LENGTHS],
            single=[[single(length, width) for width in WIDTHS] for length in LENGTHS],
            combined=_seconds(lambda: torch.mm(left.T, right), device) / 512**3,
        )


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Shortest time of a call, the first one left out: what else runs on the machine only ever makes it longer."""
    times = []
    for _ in range(_ROUNDS + 1):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _interpolate(table: Table, length: float, width: float, power: int) -> float:
    """Between table entries, linear in the logarithms; beyond the longest, as the ``power`` of the length."""
    beyond = max(length / LENGTHS[-1], 1.0) ** power
    row, row_part = _position(LENGTHS, length)
    column, column_part = _position(WIDTHS, width)
    near, far = (
        (1 - column_part) * line[column] + column_part * line[column + 1] for line in (table[row], table[row + 1])
    )
    return beyond * ((1 - row_part) * near + row_part * far)


def _position(grid: Sequence[int], value: float) -> tuple[int, float]:
    value = min(max(value, grid[0]), grid[-1])
    index = min(bisect_right(grid, value), len(grid) - 1) - 1
    return index, log2(value / grid[index]) / log2(grid[index + 1] / grid[index])


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(path: Path, content: dict[str, dict[str, Any]]) -> None:
    """The measurement is cheap: a cache that cannot be written is no reason to stop."""
    beside = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(content, indent=1), encoding="utf-8")
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink()
