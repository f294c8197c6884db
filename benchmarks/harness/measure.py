"""One cell from start to end: agreement, peak memory, then timed rounds in which every variant has its turn."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from alternatives.one_at_a_time import OneAtATime

from harness.agreement import GRADIENT_TOLERANCE, NORM_TOLERANCE, Reference
from harness.cells import SEED, Cell
from harness.flops import measured_peak, plain_step_flops
from harness.peak_memory import peak_bytes
from harness.variants import MANDATORY, Call, Variant, make_variants
from harness.workload import make_group, make_model, sharing_weights
from vcpo.observe.environment import environment

LEAST_ROUNDS = 2

# in plain steps, while nothing but the plain step has been timed
_ASSUMED_COST = {"plain": 1.0, "ours": 1.2, "one_at_a_time": 1.2, "padded": 1.5, "torch_func": 3.0, "opacus": 3.0}
# every variant runs for the agreement and for the peak memory before it is timed
_UNTIMED_CALLS = 2


def measure(cell: Cell, repeats: int, budget_seconds: float) -> dict[str, Any]:
    """The result of a cell as plain data.

    repeats: timed rounds, fewer (but at least ``LEAST_ROUNDS``) if they would exceed the budget; slow alternatives that
        would exceed it even so are left out.

    Raises RuntimeError if a variant computes another gradient or other norms than the reference.
    """
    with warnings.catch_warnings():
        # vmap loops over attention in a batch, and Opacus' hook on the embedding has no input that needs a gradient
        warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
        warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)
        # what the imports have left is not looked through before every call
        gc.freeze()
        try:
            return _measure(cell, repeats, budget_seconds)
        finally:
            gc.unfreeze()


def _measure(cell: Cell, repeats: int, budget_seconds: float) -> dict[str, Any]:
    started = time.perf_counter()
    torch.set_num_threads(cell.threads)
    model = make_model(cell)
    group = make_group(model, cell)
    trajectories = group.trajectories
    peak = measured_peak(cell.device)
    variants, skipped = make_variants(model, cell, group)
    results: dict[str, dict[str, Any]] = {name: {"skipped": reason} for name, reason in skipped.items()}

    plain_seconds = variants["plain"].run(update=False).seconds
    for name in sorted(variants.keys() - set(MANDATORY), key=lambda name: -_ASSUMED_COST[name]):
        needed = (_UNTIMED_CALLS + LEAST_ROUNDS) * plain_seconds * sum(_ASSUMED_COST[other] for other in variants)
        if needed > budget_seconds:
            del variants[name]
            results[name] = {
                "skipped": f"a plain step takes {plain_seconds:.0f} s: with this one the cell would take about"
                f" {needed:.0f} s, but {budget_seconds:.0f} s are allowed"
            }

    reference = Reference(model, OneAtATime(sharing_weights(model, "sdpa"), trajectories))
    for name, variant in variants.items():
        results[name] = _check(variant, reference)
    del reference

    for name, variant in variants.items():
        results[name]["peak_bytes"] = peak_bytes(_without_update(variant), cell.device)

    round_seconds = sum(results[name]["check_seconds"] for name in variants)
    left = budget_seconds - (time.perf_counter() - started)
    rounds = max(LEAST_ROUNDS, min(repeats, int(left / round_seconds)))
    if rounds > LEAST_ROUNDS:
        # one more for the caches: the profiler has been through them
        _round(list(variants.values()))
    timings: dict[str, list[float]] = {name: [] for name in variants}
    optimizer_seconds: list[float] = []
    order = list(variants.values())
    for _ in range(rounds):
        for name, call in _round(order).items():
            timings[name].append(call.seconds)
            if call.optimizer_seconds is not None:
                optimizer_seconds.append(call.optimizer_seconds)
        # another one comes first in the next round
        order = [*order[1:], order[0]]
    for name, seconds in timings.items():
        results[name]["seconds"] = seconds

    parameters = [p for p in model.parameters() if p.requires_grad]
    return {
        "cell": cell.to_plain(),
        "seed": SEED,
        "lengths": {
            "prompt": len(trajectories[0].prompt_ids),
            "responses": [len(t.response_ids_T) for t in trajectories],
        },
        "parameters": sum(p.numel() for p in parameters),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "plain_step_flops": plain_step_flops(model, cell, trajectories),
        "peak_flops_per_second": peak,
        "rounds": rounds,
        "optimizer_seconds": optimizer_seconds,
        "variants": results,
        "environment": {**environment(), "simd": torch.backends.cpu.get_cpu_capability()},
        "budget_seconds": budget_seconds,
        "elapsed_seconds": time.perf_counter() - started,
    }


def _round(order: list[Variant]) -> dict[str, Call]:
    calls = {}
    for variant in order:
        gc.collect()
        calls[variant.name] = variant.run()
    return calls


def _check(variant: Variant, reference: Reference) -> dict[str, Any]:
    deviations: list[float] = []
    call = variant.run(
        update=False, on_gradient=lambda: deviations.append(reference.gradient_deviation(variant.baseline))
    )
    result: dict[str, Any] = {
        "check_seconds": call.seconds,
        "gradient_deviation": deviations[0],
        "norm_deviation": None,
    }
    if not deviations[0] <= GRADIENT_TOLERANCE:
        raise RuntimeError(f"the gradient of {variant.name} is off by {deviations[0]:.1e}")
    if call.squared_norms_B is not None:
        result["norm_deviation"] = reference.norm_deviation(call.squared_norms_B)
        if not result["norm_deviation"] <= NORM_TOLERANCE:
            raise RuntimeError(f"the norms of {variant.name} are off by {result['norm_deviation']:.1e}")
    return result


def _without_update(variant: Variant) -> Callable[[], Any]:
    return lambda: variant.run(update=False)
