"""The coefficient of grad log pi of every token under every named method, in plain Python floats from the papers.

``SLOW`` has one function per name in ``METHODS``. Each goes through a minibatch with loops and gives, for each scored
response and each of its trained tokens, the number u by which the objective's gradient is sum u grad log pi, averages
included. Nothing here comes from the implementation; where a source was not followed, the function says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Coefficients = list[list[float]]

CONSTANT_LENGTH = 13  # tokens, of dr_grpo


@dataclass(frozen=True)
class Response:
    """A response with a reward; lists have one entry per trained token.

    mu, pi: log-probabilities under the sampler and the learner. energies: 1 - 2 p(a) + sum_v p(v)^2 of the learner.
    square: squared norm of the gradient of its summed log-probability.
    """

    group: int
    reward: float
    mu: list[float]
    pi: list[float]
    energies: list[float]
    square: float

    @property
    def logs(self) -> list[float]:
        return [new - old for new, old in zip(self.pi, self.mu, strict=True)]

    @property
    def total(self) -> float:
        return sum(self.logs)

    @property
    def length(self) -> int:
        return len(self.mu)


Batch = list[Response]


def exp(x: float) -> float:
    return math.inf if x > 709 else math.exp(x)


def mates(batch: Batch, i: int) -> Batch:
    return [r for r in batch if r.group == batch[i].group]


def is_equal(batch: Batch, i: int) -> bool:
    rewards = [r.reward for r in mates(batch, i)]
    return max(rewards) == min(rewards)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def deviation(values: list[float]) -> float:
    return math.sqrt(mean([(v - mean(values)) ** 2 for v in values]))


def centred(batch: Batch) -> list[float]:
    return [
        0.0 if is_equal(batch, i) else r.reward - mean([m.reward for m in mates(batch, i)]) for i, r in enumerate(batch)
    ]


def standardised(batch: Batch) -> list[float]:
    """A = (R - mean) / std of the group, population std; 0 in a group without a spread."""
    spreads = [deviation([m.reward for m in mates(batch, i)]) for i in range(len(batch))]
    return [a / s if a else 0.0 for a, s in zip(centred(batch), spreads, strict=True)]


def over_trajectories(batch: Batch) -> list[float]:
    return [1 / (len(batch) * r.length) for r in batch]


def over_tokens(batch: Batch) -> list[float]:
    return [1 / sum(r.length for r in batch)] * len(batch)


def summed(batch: Batch) -> list[float]:
    return [1 / len(batch)] * len(batch)


def combine(batch: Batch, factors: list[float], u: Callable[[int, int], float]) -> Coefficients:
    return [[f * u(i, t) for t in range(r.length)] for i, (r, f) in enumerate(zip(batch, factors, strict=True))]


def effective(logs: list[float]) -> float:
    if math.inf in logs:  # infinite ones are equal among themselves and outweigh the rest
        return sum(x == math.inf for x in logs) / len(logs)
    return sum(exp(x) for x in logs) ** 2 / sum(exp(2 * x) for x in logs) / len(logs)


def reinforce(batch: Batch) -> Coefficients:
    return combine(batch, over_trajectories(batch), lambda i, t: batch[i].reward)


def rloo(batch: Batch) -> Coefficients:
    def advantage(i: int) -> float:
        others = [r.reward for r in mates(batch, i) if r is not batch[i]]
        return 0.0 if is_equal(batch, i) else batch[i].reward - mean(others)

    return combine(batch, over_trajectories(batch), lambda i, t: advantage(i))


def grpo(batch: Batch) -> Coefficients:
    a = standardised(batch)
    return combine(batch, over_trajectories(batch), lambda i, t: a[i])


def dr_grpo(batch: Batch) -> Coefficients:
    a = centred(batch)
    return combine(batch, [1 / (len(batch) * CONSTANT_LENGTH)] * len(batch), lambda i, t: a[i])


def clipped_surrogate(a: float, r: float, low: float, high: float, dual: float = math.inf) -> float:
    """d/d log pi of min(r A, clip(r, 1 - low, 1 + high) A), and of its dual clip max(., dual A) for A < 0."""
    if a == 0 or (a > 0 and r > 1 + high) or (a < 0 and (r < 1 - low or r > dual)):
        return 0.0
    return a * r


def by_token(
    weight: Callable[[float, float], float], factors: Callable[[Batch], list[float]]
) -> Callable[[Batch], Coefficients]:
    """Methods in which a token's coefficient is a function of A and its own ratio's logarithm."""

    def coefficients(batch: Batch) -> Coefficients:
        a = standardised(batch)
        return combine(batch, factors(batch), lambda i, t: weight(a[i], batch[i].logs[t]) if a[i] else 0.0)

    return coefficients


def by_sequence(
    weight: Callable[[float, float], float], factors: Callable[[Batch], list[float]], geometric: bool = False
) -> Callable[[Batch], Coefficients]:
    """The same of the sequence log-ratio, or of its mean over tokens."""

    def coefficients(batch: Batch) -> Coefficients:
        a = standardised(batch)
        logs = [r.total / r.length if geometric else r.total for r in batch]
        return combine(batch, factors(batch), lambda i, t: weight(a[i], logs[i]) if a[i] else 0.0)

    return coefficients


def ppo_weight(a: float, log: float) -> float:
    return clipped_surrogate(a, exp(log), 0.2, 0.2, 3.0)


def truncated(cap: float) -> Callable[[float, float], float]:
    return lambda a, log: a * min(exp(log), cap)


def masked(low: float, high: float) -> Callable[[float, float], float]:
    return lambda a, log: a * exp(log) if low <= exp(log) <= high else 0.0


def aspo_weight(a: float, log: float) -> float:
    """One clip range for all tokens; the source widens it where the entropy is high."""
    if a > 0:
        return a * min(exp(-log), 3.0) if exp(log) <= 1.2 else 0.0
    return a * min(exp(log), 3.0) if exp(log) >= 0.8 else 0.0


def sapo_weight(a: float, log: float) -> float:
    tau = 1.0 if a > 0 else 1.05
    x = tau * (exp(log) - 1)
    p, q = 1 / (1 + exp(-x)), 1 / (1 + exp(x))
    return a * 4 * p * q * exp(log) if q else 0.0


def vespo_weight(a: float, log: float) -> float:
    k, rate = (2, 3) if a > 0 else (3, 2)
    if log > 15:
        return 0.0
    return a * exp(log) ** k * exp(rate * (1 - exp(log)))


def topr_weight(a: float, log: float) -> float:
    """The sign is the advantage's; the source's rewards are -1 and 1 less a constant."""
    return a if a > 0 else a * min(exp(log), 1.0)


def vcpo(batch: Batch, leave_own_out: bool = False) -> Coefficients:
    a = []
    for i, r in enumerate(batch):
        if is_equal(batch, i):
            a.append(0.0)
            continue
        group = mates(batch, i)
        sharing = [m for m in group if not (leave_own_out and m is r)]
        is_infinite = any(m.total == math.inf for m in sharing)
        weights = [(float(m.total == math.inf) if is_infinite else exp(2 * m.total)) * m.square for m in sharing]
        b = sum(w * m.reward for w, m in zip(weights, sharing, strict=True)) / sum(weights)
        a.append((r.reward - b) / deviation([m.reward for m in group]))
    return combine(batch, over_trajectories(batch), lambda i, t: a[i] * min(exp(batch[i].total), 8.0))


def seq_mask_tis(batch: Batch) -> Coefficients:
    a = standardised(batch)
    keeps = [a[i] != 0 and 0.999 <= exp(r.total / r.length) <= 1.002 for i, r in enumerate(batch)]
    return combine(batch, over_tokens(batch), lambda i, t: a[i] * exp(batch[i].logs[t]) if keeps[i] else 0.0)


def snis(batch: Batch) -> Coefficients:
    """sum_i w_i g_i / sum_i w_i, with g_i the mean over a trajectory's tokens."""
    a = standardised(batch)
    infinite = sum(r.total == math.inf for r in batch)
    if infinite:
        share = [float(r.total == math.inf) / infinite for r in batch]
    else:
        share = [exp(r.total) / sum(exp(o.total) for o in batch) for r in batch]
    return combine(batch, [1 / r.length for r in batch], lambda i, t: share[i] * a[i])


def gmpo(batch: Batch) -> Coefficients:
    a = standardised(batch)

    def ratio(i: int) -> float:
        logs = [min(x, 0.4) if a[i] > 0 else max(x, -0.4) for x in batch[i].logs]
        return exp(sum(logs) / len(logs))

    def u(i: int, t: int) -> float:
        x = batch[i].logs[t]
        is_clipped = (a[i] > 0 and x > 0.4) or (a[i] < 0 and x < -0.4)
        return 0.0 if is_clipped or not a[i] else a[i] * ratio(i)

    return combine(batch, over_trajectories(batch), u)


def m2po(batch: Batch) -> Coefficients:
    """The mask of the paper's algorithm 1: greedily, among tokens that a step would move further away."""
    a = standardised(batch)
    trusted = [
        (x * x, i, t)
        for i, r in enumerate(batch)
        for t, x in enumerate(r.logs)
        if (a[i] > 0 and x > 0) or (a[i] < 0 and x < 0)
    ]
    trusted.sort()
    dropped = set()
    while trusted and mean([square for square, _, _ in trusted]) > 0.04:
        _, i, t = trusted.pop()
        dropped.add((i, t))
    return combine(
        batch,
        over_tokens(batch),
        lambda i, t: 0.0 if (i, t) in dropped or not a[i] else a[i] * exp(batch[i].logs[t]),
    )


def opsm(batch: Batch) -> Coefficients:
    a = standardised(batch)
    drops = [a[i] < 0 and -r.total / r.length > 0.5 for i, r in enumerate(batch)]
    return combine(
        batch, over_trajectories(batch), lambda i, t: 0.0 if drops[i] else ppo_weight(a[i], batch[i].logs[t])
    )


def dppo_tv(batch: Batch) -> Coefficients:
    a = standardised(batch)

    def u(i: int, t: int) -> float:
        r = batch[i]
        moved = exp(r.pi[t]) - exp(r.mu[t])
        drops = not a[i] or (moved > 0.2 if a[i] > 0 else moved < -0.2)
        return (0.0 if drops else a[i] * exp(r.logs[t])) - 2 * 1e-3 * r.logs[t]

    return combine(batch, over_tokens(batch), u)


def oapl(batch: Batch) -> Coefficients:
    """Of (b2 L - A)^2 / (2 b2): the source has no 1 / (2 b2), a factor on the whole gradient. b1 = 1, b2 = 1e-3."""
    values = [math.log(mean([exp(m.reward) for m in mates(batch, i)])) for i in range(len(batch))]
    a = [0.0 if is_equal(batch, i) else r.reward - values[i] for i, r in enumerate(batch)]
    return combine(batch, summed(batch), lambda i, t: a[i] - 1e-3 * batch[i].total)


def kl_in_reward(batch: Batch) -> Coefficients:
    shaped = [r.reward - 1e-3 * r.total for r in batch]

    def advantage(i: int) -> float:
        group = [shaped[j] for j, r in enumerate(batch) if r.group == batch[i].group]
        return 0.0 if is_equal(batch, i) else (shaped[i] - mean(group)) / deviation(group)

    a = [advantage(i) for i in range(len(batch))]
    return combine(batch, over_trajectories(batch), lambda i, t: a[i] * min(exp(batch[i].total), 8.0))


def otb(batch: Batch) -> Coefficients:
    """B_t over the group's responses that are at least t long; where one is alone, its own reward (no zero tail).

    The baseline is made of plain energies, as its paper defines it, not of energies times squared token ratios.
    """

    def advantage(i: int, t: int) -> float:
        alive = [m for m in mates(batch, i) if m.length > t]
        if is_equal(batch, i) or len(alive) == 1:
            return 0.0
        weights = [sum(m.energies[: t + 1]) for m in alive]
        return batch[i].reward - sum(w * m.reward for w, m in zip(weights, alive, strict=True)) / sum(weights)

    return combine(batch, over_trajectories(batch), lambda i, t: advantage(i, t) * min(exp(batch[i].logs[t]), 2.0))


def trust_the_batch(batch: Batch) -> Coefficients:
    """P3O; 1/r of the penalty is at most e^20, which the source does not bound."""
    a = standardised(batch)
    e = effective([x for r in batch for x in r.logs])

    def u(i: int, t: int) -> float:
        x = batch[i].logs[t]
        return min(exp(x), e) * a[i] - (1 - e) * (1 - min(exp(-x), exp(20)))

    return combine(batch, over_tokens(batch), u)


def copc(batch: Batch) -> Coefficients:
    """Our own reading, without a critic: the bands of the two corrections are not published."""
    a = standardised(batch)

    def u(i: int, t: int) -> float:
        x = batch[i].logs[t]
        corrected = a[i] * min(max(exp(batch[i].total / batch[i].length), 0.8), 1.2)
        return corrected * exp(x) if a[i] and 0.5 <= exp(x) <= 2 else 0.0

    return combine(batch, over_trajectories(batch), u)


SLOW: dict[str, Callable[[Batch], Coefficients]] = {
    "vcpo": vcpo,
    "reinforce": reinforce,
    "rloo": rloo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "ppo": by_token(ppo_weight, over_tokens),
    "grpo_clip": by_token(ppo_weight, over_trajectories),
    "tis": by_sequence(truncated(8), over_trajectories),
    "tis_token": by_token(truncated(2), over_trajectories),
    "tis_geometric": by_sequence(truncated(2), over_trajectories, geometric=True),
    "mis": by_sequence(masked(0, 8), over_trajectories),
    "mis_token": by_token(masked(0, 2), over_trajectories),
    "mis_geometric": by_sequence(masked(0, 2), over_trajectories, geometric=True),
    "icepop": by_token(masked(0.5, 5), over_tokens),
    "seq_mask_tis": seq_mask_tis,
    "snis": snis,
    "gspo": by_sequence(lambda a, log: clipped_surrogate(a, exp(log), 3e-4, 4e-4), over_trajectories, geometric=True),
    "gmpo": gmpo,
    "cispo": by_token(truncated(5), over_tokens),
    "decoupled_ppo": by_token(masked(0, 5), over_tokens),  # one update per minibatch: pi is pi_prox
    "topr": by_sequence(topr_weight, summed),
    "aspo": by_token(aspo_weight, over_tokens),
    "m2po": m2po,
    "opsm": opsm,
    "dppo_tv": dppo_tv,
    "sapo": by_token(sapo_weight, over_trajectories),
    "vespo": by_sequence(vespo_weight, over_tokens),
    "oapl": oapl,
    "kl_in_reward": kl_in_reward,
    "low_lr_tis": by_sequence(truncated(8), over_trajectories),
    "otb": otb,
    "trust_the_batch": trust_the_batch,
    "gac": grpo,
    "copc": copc,
}
