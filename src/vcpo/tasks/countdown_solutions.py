"""Making countdown problems that have a solution, and finding solutions by search."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from vcpo.errors import UserError

_MAX_DRAWS = 20_000
_ADDITIVE, _MULTIPLICATIVE, _ATOM = 1, 2, 3


@dataclass(frozen=True)
class Term:
    """An expression with its value, and how tightly its outermost operation binds."""

    value: Fraction
    text: str
    binding: int = _ATOM

    @staticmethod
    def number(value: int) -> Term:
        """A number by itself."""
        return Term(Fraction(value), str(value))


def random_problem(rng: random.Random, count: int, max_number: int, max_target: int) -> tuple[list[int], int, str]:
    """Numbers, a target from 1 to ``max_target`` that they reach, and an expression that reaches it.

    The numbers are combined at random until one is left, through whole numbers only, and drawn again while the result
    is no allowed target. Raises UserError when allowed targets are so rare that none is found.
    """
    for _ in range(_MAX_DRAWS):
        numbers = [rng.randint(1, max_number) for _ in range(count)]
        terms = [Term.number(number) for number in numbers]
        while len(terms) > 1:
            left = terms.pop(rng.randrange(len(terms)))
            right = terms.pop(rng.randrange(len(terms)))
            choices = [term for term in _combinations(left, right) if term.value.denominator == 1 and term.value >= 0]
            terms.append(rng.choice(choices))
        if 1 <= terms[0].value <= max_target:
            return numbers, int(terms[0].value), terms[0].text
    raise UserError(
        f"countdown found no {count} numbers up to {max_number} that reach a target up to {max_target}; raise"
        " task.max_target, or lower task.max_number or task.numbers"
    )


def solve(numbers: Sequence[int], target: int) -> str | None:
    """An expression that uses every number once and equals the target, or None: a full search, for up to 6 numbers."""
    return _search([Term.number(number) for number in numbers], target)


def _search(terms: list[Term], target: int) -> str | None:
    if len(terms) == 1:
        return terms[0].text if terms[0].value == target else None
    for i, left in enumerate(terms):
        for j, right in enumerate(terms):
            if i == j:
                continue
            rest = [term for k, term in enumerate(terms) if k not in (i, j)]
            for combined in _combinations(left, right):
                found = _search([*rest, combined], target)
                if found is not None:
                    return found
    return None


def _combinations(left: Term, right: Term) -> Iterator[Term]:
    """Both terms in this order under each operation, with no more parentheses than needed."""
    yield Term(left.value + right.value, f"{left.text}+{right.text}", _ADDITIVE)
    yield Term(left.value - right.value, f"{left.text}-{_bound(right, _MULTIPLICATIVE)}", _ADDITIVE)
    factor = _bound(left, _MULTIPLICATIVE)
    yield Term(left.value * right.value, f"{factor}*{_bound(right, _MULTIPLICATIVE)}", _MULTIPLICATIVE)
    if right.value != 0:
        yield Term(left.value / right.value, f"{factor}/{_bound(right, _ATOM)}", _MULTIPLICATIVE)


def _bound(term: Term, binding: int) -> str:
    return term.text if term.binding >= binding else f"({term.text})"
