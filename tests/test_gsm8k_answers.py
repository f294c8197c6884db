"""The number that a response gives as its answer."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.tasks.answers import final_number, parse_number


@pytest.mark.parametrize(
    ("response", "value"),
    [
        # the last number
        ("He has 3 + 4 = 7 apples.", "7"),
        ("16 - 3 - 4 = <<16-3-4=9>>9\n#### 18", "18"),
        ("The answer is 18.", "18"),
        ("**18**", "18"),
        ("(18)", "18"),
        # thousands, decimals
        ("1,234", "1234"),
        ("It costs 1,234,567.50 in all.", "1234567.5"),
        ("$1,450,000.", "1450000"),
        ("0.5", "1/2"),
        ("only .25 of it", "1/4"),
        ("18.00", "18"),
        ("12,34", "34"),
        # currency, units, percent
        ("$18", "18"),
        ("€18.50", "18.5"),
        ("18€", "18"),
        ("She makes $18/day", "18"),
        ("18 dollars per hour", "18"),
        ("25%", "25"),
        ("18 cm^2", "18"),
        ("60km", "60"),
        # signs
        ("-3", "-3"),
        ("\u22123 degrees", "-3"),
        ("it is \u20133", "-3"),
        ("x=-3", "-3"),
        ("-$3", "-3"),
        ("$-3", "-3"),
        ("10-7", "7"),
        ("10 - 7", "7"),
        ("- 18 apples", "18"),
        # fractions
        ("3/4 of it", "3/4"),
        ("-3/4", "-3/4"),
        ("1 3/4 cups", "7/4"),
        ("3 / 4", "3/4"),
        (r"$\frac{3}{4}$", "3/4"),
        (r"$-\dfrac{3}{4}$", "-3/4"),
        (r"\frac34", "3/4"),
        (r"1\frac{3}{4}", "7/4"),
        ("it is 3/0", None),
        # LaTeX and typographic thousands
        (r"1{,}234", "1234"),
        (r"1\,234", "1234"),
        ("1\u202f234", "1234"),
        (r"\$18", "18"),
        # boxes
        (r"so $\boxed{18}$, which is 3 more than 15", "18"),
        (r"\boxed{7} no: \boxed{18}", "18"),
        (r"\boxed {18}", "18"),
        (r"\fbox{18}", "18"),
        (r"\boxed{\$1,234.00}", "1234"),
        (r"\boxed{18 \text{ dollars}}", "18"),
        (r"\boxed{\text{18 dollars}}", "18"),
        (r"\boxed{18\text{ cm}^2}", "18"),
        (r"\boxed{x = 18}", "18"),
        (r"\boxed{5 \times 3 = 15}", "15"),
        (r"\boxed{\frac{3}{4}}", "3/4"),
        (r"\boxed{\boxed{18}} 5", "18"),
        (r"\boxed{90^\circ}", "90"),
        (r"\boxed{18\%}", "18"),
        (r"\boxed{} 18", None),
        (r"\boxed{none} 18", None),
        (r"\boxed{17, 18}", None),
        (r"\boxed{18", "18"),
        (r"\boxed{17} and \boxed{18", "17"),
        # no number
        ("", None),
        ("no idea", None),
        ("\u0661\u0662", None),
        ("\u00bd", None),
        pytest.param("9" * 61, None, id="61 digits"),
    ],
)
def test_final_number(response: str, value: str | None) -> None:
    assert final_number(response) == (None if value is None else Fraction(value))


@pytest.mark.parametrize(("text", "value"), [("18", 18), (" $1,234 ", 1234), ("7 eggs", 7), ("1 2", None), ("", None)])
def test_parse_number_wants_exactly_one(text: str, value: int | None) -> None:
    assert parse_number(text) == value


@given(st.integers(-(10**12), 10**12), st.integers(0, 4), st.sampled_from(["{}", "The answer is {}.", r"\boxed{{{}}}"]))
def test_formatted_numbers_are_read_back(value: int, places: int, sentence: str) -> None:
    exact = Fraction(value, 10**places)
    assert final_number(sentence.format(f"{value / 10**places:,.{places}f}")) == exact


@given(st.one_of(st.text(), st.text("0123456789.,/$-\\{}boxedfrac ^%=")))
def test_any_text_has_an_answer_or_none(text: str) -> None:
    assert isinstance(final_number(text), Fraction | None)


REPEATED = [
    *("1", "1,", "1,000", "1,000,", "1 ", "1/", "1 1/", "1.", "-", "$", ".", ",", " ", "{", "}", "{,}", "a^{"),
    *("\\", "\\boxed{", "\\boxed ", "\\boxed{1}", "\\boxed{\\text{", "1\\,"),
    *("\\frac{", "\\frac{1}{", "\\frac{1}{2}"),
]


@pytest.mark.parametrize("unit", REPEATED)
def test_hostile_repetition_stays_linear(unit: str) -> None:
    # quadratic work on 200,000 characters would take minutes
    start = time.process_time()
    final_number(unit * (200_000 // len(unit)))
    assert time.process_time() - start < 5
