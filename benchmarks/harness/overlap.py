"""What overlapping sampling and training has gained: the arithmetic of ``async_speedup.py``. Imports without torch.

All times are seconds of wall-clock between the first token that the sampler draws and the end of the last optimizer
step, from the timelines of the runs. Starting the processes and the warm start come before, evaluations after.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vcpo.observe.trace import Trace, read_trace

# what a process does while it has nothing to do
SAMPLER_IDLE = ("idle", "loading", "waiting for environments")
LEARNER_IDLE = ("waiting for rollouts", "warm start", "evaluation")


def times_of(run: Path) -> dict[str, Any]:
    """Seconds of a run's steps, and of them those in which the sampler (T_sample) and the learner (T_train) worked.

    begin: when the first token was drawn, on the monotonic clock. at: by step, the seconds until it was done.
    """
    return times(read_trace(run))


def times(trace: Trace) -> dict[str, Any]:
    """As ``times_of``. What a process does that is not recorded (a few percent) counts for neither."""
    decoding = [event["ts"] / 1e6 for event in trace.events["sampler-0"] if event.get("cat") == "decoding"]
    begin = min(decoding)
    at = {step: end - begin for step, end in sorted(trace.steps().items())}
    last = max(at)
    shares = trace.shares(begin, begin + at[last])
    t_sample = sum(s.seconds for s in shares if s.process == "sampler-0" and s.kind not in SAMPLER_IDLE)
    t_train = sum(
        s.seconds for s in shares if s.process == "learner" and s.thread == "MainThread" and s.kind not in LEARNER_IDLE
    )
    return {"steps": last, "begin": begin, "seconds": at[last], "t_sample": t_sample, "t_train": t_train, "at": at}


def time_to(accuracies: Mapping[int, float], at: Mapping[int, float], target: float) -> float | None:
    """Seconds until the accuracy has reached ``target``, linearly between evaluated steps; None if it never does.

    accuracies: by step; step 0 is the start, at 0 seconds. Nothing is known of the time before the first.
    """
    before: tuple[float, float] | None = None
    for step, accuracy in sorted(accuracies.items()):
        now = 0.0 if step == 0 else at[step]
        if accuracy >= target:
            if before is None or accuracy == before[1]:
                return now
            time, low = before
            return time + (now - time) * (target - low) / (accuracy - low)
        before = now, accuracy
    return None


def summarize(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Speedups and accuracies of one case, from its synchronous and asynchronous runs of the same seeds.

    speedup: to the same number of steps, median over seeds. bound_share: what perfect overlap would need (``needed``)
    as a share of what the asynchronous run took; the median. speedup_bound: what the speedup would be then.
    accuracy_target: 95% of the synchronous runs' mean final accuracy. speedup_to_accuracy: the median over seeds in
    which both runs reach it. accuracy_difference: asynchronous less synchronous, mean over seeds, with its standard
    error. busy: processors at work, where that was measured; means. The rest are medians per optimizer step.
    """
    sync = {run["seed"]: run for run in runs if run["mode"] == "sync"}
    asynchronous = {run["seed"]: run for run in runs if run["mode"] == "async"}
    pairs = [(sync[seed], asynchronous[seed]) for seed in sorted(sync.keys() & asynchronous.keys())]
    target = 0.95 * statistics.mean(_final(run) for run, _ in pairs)
    reached = [(time_to(_by_step(a), _at(a), target), time_to(_by_step(b), _at(b), target)) for a, b in pairs]
    differences = [_final(b) - _final(a) for a, b in pairs]
    overlapped = [needed(b) for _, b in pairs]
    ratios = [first / second for first, second in reached if first and second]
    return {
        "seeds": [run["seed"] for run, _ in pairs],
        "speedup": statistics.median(a["seconds"] / b["seconds"] for a, b in pairs),
        "speedups": [a["seconds"] / b["seconds"] for a, b in pairs],
        "speedup_bound": statistics.median(a["seconds"] / t for (a, _), t in zip(pairs, overlapped, strict=True)),
        "bound_share": statistics.median(t / b["seconds"] for (_, b), t in zip(pairs, overlapped, strict=True)),
        "accuracy_target": target,
        "reached": [[first is not None, second is not None] for first, second in reached],
        "speedup_to_accuracy": statistics.median(ratios) if ratios else None,
        "final_accuracy_sync": statistics.mean(_final(run) for run, _ in pairs),
        "final_accuracy_async": statistics.mean(_final(run) for _, run in pairs),
        "accuracy_difference": statistics.mean(differences),
        "accuracy_difference_stderr": _stderr(differences),
        **{
            f"busy_{mode}": statistics.mean(run["processor_seconds"] / run["seconds"] for run in of_mode)
            for mode, of_mode in (("sync", [a for a, _ in pairs]), ("async", [b for _, b in pairs]))
            if all("processor_seconds" in run for run in of_mode)
        },
        **{
            f"{key}_{mode}": statistics.median(run[key] / run["steps"] for run in of_mode)
            for mode, of_mode in (("sync", [a for a, _ in pairs]), ("async", [b for _, b in pairs]))
            for key in ("seconds", "t_sample", "t_train")
        },
    }


def needed(run: Mapping[str, Any]) -> float:
    """Seconds that a run's work needs on its machine when nothing waits for anything else.

    The sampler's, the learner's, or all processor time spread evenly over the cores, whichever is most. The last is
    that only where something else works, too, as sandboxes do: two processes of one thread need at most the larger of
    theirs.
    """
    spread = run["processor_seconds"] / run["cores"] if "processor_seconds" in run else 0.0
    return max(float(run["t_sample"]), float(run["t_train"]), spread)


def _by_step(run: Mapping[str, Any]) -> dict[int, float]:
    return {int(step): accuracy for step, accuracy in run["accuracies"].items()}


def _at(run: Mapping[str, Any]) -> dict[int, float]:
    return {int(step): seconds for step, seconds in run["at"].items()}


def _final(run: Mapping[str, Any]) -> float:
    accuracies = _by_step(run)
    return accuracies[max(accuracies)]


def _stderr(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
