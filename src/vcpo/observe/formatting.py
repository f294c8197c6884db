"""How numbers are shown to people, the same in the terminal and in the report; a dash where there is none."""

from __future__ import annotations

import math

_UNKNOWN = "-"


def fixed(value: float | None) -> str:
    """Three decimals."""
    return _UNKNOWN if value is None else f"{value:.3f}"


def percent(value: float | None) -> str:
    """A share as a percentage with one decimal."""
    return _UNKNOWN if value is None else f"{100 * value:.1f}%"


def count(value: float | None) -> str:
    """A quantity: whole from 100 on, otherwise with one decimal where it has any."""
    if value is None:
        return _UNKNOWN
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.1f}"


def seconds(value: float | None) -> str:
    """``45s``, ``3m 05s`` or ``2h 07m``."""
    if value is None or not math.isfinite(value):
        return _UNKNOWN
    whole = round(value)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
