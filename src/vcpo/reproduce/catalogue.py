"""Figures 1 to 14: which runs stand for each, and what the paper claims with it.

What the paper shows is known to us from its caption (figure 1), from the summary in docs/methods.md and from the
authors' repository. Where neither says it, ``paper`` says so, and the figure is our own reading of what belongs there.
"""

from __future__ import annotations

from typing import Any

from vcpo.report.comparison_figure import PANELS, Panel
from vcpo.reproduce.claims import (
    Claim,
    as_good_as,
    better_than,
    both,
    collapses,
    collapses_late,
    grows_with_lag,
    out_of_reach,
    outlasts,
    predicts_collapse,
    rescues,
    shows,
    survives,
)
from vcpo.reproduce.figure import Figure, Sweep

GSM8K, MATH, AIME = (f"recipes/{name}.yaml" for name in ("gsm8k/vcpo-k12", "math/vcpo-k10", "aime/vcpo-k2"))
LAGS = (0, 2, 4, 8, 16, 32, 64, 128)

_ACCURACY, _ESS, _KL, _GRADIENT = PANELS
_SCALE = Panel("Step size factor", ("step_scale",), share=True)
_TRUNCATED = Panel("Share of ratios truncated or masked", ("truncated_share",))
_MASKED = Panel("Share of tokens masked", ("masked_share",))

_SYNC: dict[str, Any] = {"method": "tis", "runtime.max_staleness": 0}
_TIS: dict[str, Any] = {"method": "tis"}
_VCPO: dict[str, Any] = {"method": "vcpo"}
BASIC = {"sync": _SYNC, "tis": _TIS, "vcpo": _VCPO}

_FALL = shows("tis", "ESS falls from 0.5 or more to below 0.1 within 10 steps, no later than the collapse",
              lambda r: r.ess_fall_steps is not None and r.ess_fall_steps <= 10,
              lambda r: r.ess_fall_steps, " steps")  # fmt: skip
RISE = shows("tis", "KL rises by two decades or more over its median before, no later than the collapse",
              lambda r: (r.kl_rise or 0.0) >= 2, lambda r: r.kl_rise, " decades")  # fmt: skip
SPIKE = shows("tis", "the gradient norm reaches 10 times its median before, no later than the collapse",
               lambda r: (r.grad_spike or 0.0) >= 10, lambda r: r.grad_spike, " times")  # fmt: skip
_VANISH = shows("tis", "the gradient norm ends (median of 10 steps) below a thousandth of its median before",
                lambda r: r.grad_end is not None and r.grad_end < 1e-3, lambda r: r.grad_end, " times")  # fmt: skip
_HEALTHY = shows("vcpo", "the median effective sample size is between 0.3 and 0.7",
                 lambda r: 0.3 <= (r.ess_median or 0.0) <= 0.7, lambda r: r.ess_median, of_collapsed=False)  # fmt: skip


def _swept(method: str, mode: str, k: int) -> dict[str, Any]:
    changes: dict[str, Any] = {"method": method, "runtime.max_staleness": k}
    if mode == "in_flight" and k:
        changes["runtime.lag"] = mode  # without a lag both modes are the synchronous run
    if k >= 64:
        changes["training.max_steps"] = 2 * k  # the sampler of the first k steps is a frozen one
    return changes


# (method, mode) -> lag -> variant
_SWEEP = {
    (method, mode): {k: f"{method} {mode.replace('_', '-')} k={k}" for k in LAGS}
    for mode in ("fixed", "in_flight")
    for method in ("tis", "vcpo")
}
_SWEEP_VARIANTS = {name: _swept(*key, k) for key, by_lag in _SWEEP.items() for k, name in by_lag.items()}
_FIXED_VARIANTS = {name: _swept(*key, k) for key, by_lag in _SWEEP.items() if key[1] == "fixed"
                   for k, name in by_lag.items()}  # fmt: skip
_LAGGED = {key: {k: name for k, name in by_lag.items() if k} for key, by_lag in _SWEEP.items()}


def _lines(*modes: str) -> dict[str, dict[int, str]]:
    return {f"{method}, {mode.replace('_', '-')}": _SWEEP[method, mode] for mode in modes for method in ("tis", "vcpo")}


_CORRECTIONS = {
    f"{kind} {level} c={cap}": {"method": method, f"method.{key}": float(cap)}
    for kind, key in (("tis", "weight.cap"), ("mis", "weight.high"))
    for level, suffix in (("token", "_token"), ("sequence", ""), ("geometric", "_geometric"))
    for method in (kind + suffix,)
    for cap in (2, 8)
}
_RIVALS = {
    name: {"method": name} for name in ("gspo", "icepop", "cispo", "topr", "m2po", "snis", "decoupled_ppo", "opsm")
}


FIGURES: tuple[Figure, ...] = (
    Figure(
        "fig1",
        "Synchronous training, TIS and VCPO in the long-context multi-turn task",
        "By its caption: AIME-2025 accuracy over wall-clock time at k=0, and at k=2 with VCPO and with sequence TIS;"
        " gradient norm over steps, where TIS shows a brief spike followed by rapid collapse.",
        (
            Claim("speed", "VCPO reaches the best synchronous AIME-2025 accuracy 2.5 times sooner (42 h, not 105 h)",
                  out_of_reach("needs samplers and learners that work at the same time, and a 7B model", AIME)),
            Claim("match", "with a lag, VCPO is as accurate as synchronous training", as_good_as("vcpo", "sync")),
            Claim("collapse", "with the same lag, sequence TIS collapses and VCPO does not", rescues("tis", "vcpo")),
            Claim("spike", "a brief spike of the gradient norm comes before the collapse", SPIKE),
        ),
        variants=BASIC,
        panels=(_ACCURACY, _GRADIENT),
    ),
    Figure(
        "fig2",
        "The signature of a collapse",
        "Effective sample size, KL and gradient norm of a run that collapses (docs/methods.md).",
        (
            Claim("ess", "the effective sample size falls from 0.6 to under 0.1 within about 10 steps", _FALL),
            Claim("kl", "KL(sampler, learner) rises by 2 to 3 decades", RISE),
            Claim("spike", "the gradient norm spikes to 10 to 100", SPIKE),
            Claim("vanish", "then the gradient vanishes", _VANISH),
            Claim("predict", "collapse is reliably predicted by the effective sample size falling low",
                  predicts_collapse("smallest effective sample size", lambda r: r.ess_low)),
            Claim("predict-median", "collapse is reliably predicted by the effective sample size being low for long",
                  predicts_collapse("median effective sample size", lambda r: r.ess_median), ours=True),
        ),
        variants={"tis": _TIS, "vcpo": _VCPO},
        seeds=tuple(range(1, 9)),
        panels=PANELS,
    ),
    Figure(
        "fig3",
        "Weights with heavy tails, and the lag",
        "Content not found; our reading of the abstract: stale rollouts make importance ratios heavy-tailed, so that a"
        " small fraction of the samples dominates each update.",
        (
            Claim("tails", "the largest weight's share of its minibatch grows with the lag",
                  grows_with_lag(_LAGGED["tis", "fixed"], "the largest weight's share", lambda r: r.weight_share)),
            Claim("ess", "the effective sample size falls with the lag",
                  grows_with_lag(_LAGGED["tis", "fixed"], "1 - median ESS",
                                 lambda r: None if r.ess_median is None else 1 - r.ess_median)),
        ),
        variants=_FIXED_VARIANTS,
        seeds=(1, 2),
        sweep=Sweep(_lines("fixed"), ("weight_share", "ess_median")),
    ),
    Figure(
        "fig4",
        "What the step size rule does",
        "Content not found; our reading: the effective sample size and the learning rate's factor over a run.",
        (
            Claim("ess", "VCPO keeps its effective sample size at 0.3 to 0.7", _HEALTHY),
            Claim("sqrt", "the square root rule is at least as good as the linear one",
                  both(survives("vcpo"), as_good_as("vcpo", "vcpo-linear"))),
        ),
        variants={**BASIC, "vcpo-linear": {"method": "vcpo", "method.step_size": "linear_ess"}},
        panels=(_ACCURACY, _ESS, _SCALE, _KL),
    ),
    Figure(
        "fig5",
        "Training curves of synchronous training, TIS and VCPO",
        "Accuracy, effective sample size, KL and gradient norm (docs/methods.md), on GSM8K at k=12, MATH and Countdown"
        " at k=10.",
        (
            Claim("collapse", "with a lag, sequence TIS collapses and VCPO does not", rescues("tis", "vcpo")),
            Claim("match", "with a lag, VCPO matches synchronous training", as_good_as("vcpo", "sync")),
            Claim("zero", "the accuracy of a collapsed run goes to about 0",
                  shows("tis", "the final accuracy is at most 1%", lambda r: r.final_accuracy <= 0.01,
                        lambda r: 100 * r.final_accuracy, "%")),
            Claim("ess", "VCPO keeps its effective sample size at 0.3 to 0.7", _HEALTHY),
            Claim("scale", "the same on GSM8K, MATH and Countdown with models of 1.5B and 7B parameters",
                  out_of_reach("needs GPUs", GSM8K)),
        ),
        variants=BASIC,
        panels=PANELS,
    ),
    Figure(
        "fig6",
        "How far off-policy: a sweep of the lag",
        "MATH-500 at k = 16, 32, 48, 64, 96 and 128, where VCPO stays stable to at least 128 steps (docs/methods.md and"
        " the authors' repository).",
        (
            Claim("fixed", "TIS collapses from some lag on, VCPO at none up to 128 (whole responses k steps old)",
                  outlasts(_SWEEP["vcpo", "fixed"], _SWEEP["tis", "fixed"])),
            Claim("in-flight", "the same when weights are swapped while a response is decoded",
                  outlasts(_SWEEP["vcpo", "in_flight"], _SWEEP["tis", "in_flight"])),
            Claim("late", "TIS does not collapse already in the first k steps, whose sampler is frozen (fixed)",
                  collapses_late(_SWEEP["tis", "fixed"]), ours=True),
            Claim("predict", "over all lags, a collapse shows in the median effective sample size",
                  predicts_collapse("median effective sample size", lambda r: r.ess_median), ours=True),
            Claim("scale", "VCPO stays stable on MATH-500 at every lag up to 128", out_of_reach("needs GPUs", MATH)),
        ),
        variants=_SWEEP_VARIANTS,
        seeds=(1, 2),
        sweep=Sweep(_lines("fixed", "in_flight"), ("late_accuracy", "collapsed", "ess_median", "step_scale")),
    ),
    Figure(
        "fig7",
        "Other stabilisers at the same lag",
        "Content not found; our reading of the abstract: VCPO outperforms a broad suite of masking and clipping"
        " stabilisers and algorithmic variants.",
        (
            Claim("collapse", "each of the others collapses", collapses(*_RIVALS)),
            Claim("better", "VCPO is more accurate than each of the others", better_than("vcpo", *_RIVALS)),
        ),
        variants={"vcpo": _VCPO, **_RIVALS},
        panels=(_ACCURACY, _ESS),
    ),
    Figure(
        "fig8",
        "Critic-free methods without importance weights",
        "Content not found; our reading of the abstract: at high asynchrony REINFORCE and GRPO become unstable.",
        (
            Claim("reinforce", "REINFORCE with leave-one-out baseline collapses", collapses("rloo")),
            Claim("grpo", "GRPO without importance weights collapses", collapses("grpo")),
        ),
        variants={"vcpo": _VCPO, "rloo": {"method": "rloo"}, "grpo": {"method": "grpo"}},
        panels=(_ACCURACY, _ESS),
    ),
    Figure(
        "fig9",
        "VCPO's two parts, each alone",
        "TIS, TIS with ESS step size, TIS with OPOB, and both (docs/methods.md).",
        (
            Claim("ess", "the ESS step size alone prevents the collapse", rescues("tis", "tis+ess")),
            Claim("opob", "the off-policy optimal baseline alone prevents the collapse", rescues("tis", "tis+opob")),
            Claim("both", "both together are better than either alone", better_than("vcpo", "tis+ess", "tis+opob")),
            Claim("no-harm", "both together are at least as good as the step size alone", as_good_as("vcpo", "tis+ess"),
                  ours=True),
        ),
        variants={
            "tis": _TIS,
            "tis+ess": {"method": "tis", "method.step_size": "sqrt_ess"},
            "tis+opob": {"method": "tis", "method.baseline": "opob"},
            "vcpo": _VCPO,
        },
        panels=PANELS,
    ),
    Figure(
        "fig10",
        "A smaller fixed learning rate instead",
        "TIS at a small fixed learning rate (docs/methods.md).",
        (
            Claim("tenth", "a tenth of the learning rate does not do as well as VCPO",
                  better_than("vcpo", "tis lr/10")),
            Claim("tuned", "no fixed learning rate does as well as VCPO",
                  better_than("vcpo", "tis lr/2", "tis lr/3", "tis lr/10")),
            Claim("same-baseline", "no fixed learning rate does as well, even with VCPO's baseline",
                  better_than("vcpo", "tis+opob lr/2", "tis+opob lr/3"), ours=True),
            Claim("same-rate", "at half the rate, where nothing collapses, the step size rule does no harm",
                  as_good_as("vcpo lr/2", "tis+opob lr/2"), ours=True),
        ),
        variants={
            "tis": _TIS,
            "tis lr/2": {"method": "tis", "training.learning_rate": 2e-4},
            "tis lr/3": {"method": "tis", "training.learning_rate": 1.33e-4},
            "tis lr/10": {"method": "tis", "training.learning_rate": 4e-5},
            "tis+opob lr/2": {"method": "tis", "method.baseline": "opob", "training.learning_rate": 2e-4},
            "tis+opob lr/3": {"method": "tis", "method.baseline": "opob", "training.learning_rate": 1.33e-4},
            "vcpo": _VCPO,
            "vcpo lr/2": {"method": "vcpo", "training.learning_rate": 2e-4},
        },
        panels=(_ACCURACY, _ESS, _KL, _GRADIENT),
    ),
    Figure(
        "fig11",
        "Truncating and masking at three levels, two thresholds",
        "TIS and MIS, by token, sequence and geometric mean, with c = 2 and 8 (docs/methods.md).",
        (
            Claim("collapse", "every one of the twelve corrections collapses", collapses(*_CORRECTIONS)),
            Claim("better", "VCPO is more accurate than every one of them", better_than("vcpo", *_CORRECTIONS)),
        ),
        variants={"vcpo": _VCPO, **_CORRECTIONS},
        panels=(_ACCURACY, _ESS, _TRUNCATED, _GRADIENT),
    ),
    Figure(
        "fig12",
        "Masking by the second moment: M2PO",
        "M2PO and the share of tokens that it masks (docs/methods.md).",
        (
            Claim("collapse", "M2PO collapses", collapses("m2po")),
            Claim("mask", "it masks few tokens",
                  shows("m2po", "fewer than 1% of the tokens are masked", lambda r: (r.masked or 0.0) < 0.01,
                        lambda r: 100 * (r.masked or 0.0), "%", of_collapsed=False)),
            Claim("better", "VCPO is more accurate", better_than("vcpo", "m2po")),
        ),
        variants={"m2po": {"method": "m2po"}, "vcpo": _VCPO},
        panels=(_ACCURACY, _MASKED, _ESS, _GRADIENT),
    ),
    Figure(
        "fig13",
        "A KL penalty in the reward",
        "TIS with R - beta KL, beta = 1e-3, which does not prevent the collapse (docs/methods.md).",
        (
            Claim("collapse", "a KL penalty in the reward does not prevent the collapse", collapses("kl_in_reward")),
            Claim("better", "VCPO is more accurate", better_than("vcpo", "kl_in_reward")),
        ),
        variants={"kl_in_reward": {"method": "kl_in_reward"}, "vcpo": _VCPO},
        panels=(_ACCURACY, _ESS, _KL, _GRADIENT),
    ),
    Figure(
        "fig14",
        "Another optimal baseline: OTB",
        "The optimal token baseline collapses, VCPO does not (docs/methods.md).",
        (
            Claim("collapse", "with the optimal token baseline, training collapses; with VCPO it does not",
                  rescues("otb", "vcpo")),
            Claim("better", "VCPO is more accurate", better_than("vcpo", "otb")),
        ),
        variants={"otb": {"method": "otb"}, "vcpo": _VCPO},
        panels=(_ACCURACY, _ESS, _GRADIENT),
    ),
)  # fmt: skip
