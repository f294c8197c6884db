"""Tools in TRL's form: a function that the model may call, and an environment whose methods it may call.

Rows with a chat prompt and what the environment wants to know are all that is needed::

    {"prompt": "Guess my number.", "number": 37, "largest": 100}

    vcpo train RECIPE.yaml task.name=dataset task.path=rows.jsonl \
        'task.tools=[examples/tools.py:halfway]' task.environment_factory=examples/tools.py:GuessTheNumber

Names, type hints and docstrings are what the model is shown.
"""

from typing import Any


def halfway(low: int, high: int) -> int:
    """
    The whole number in the middle of two others.

    Args:
        low: The smaller one
        high: The larger one
    """
    return (low + high) // 2


class GuessTheNumber:
    """One object for every response."""

    def reset(self, number: int, largest: int, **row: Any) -> str:
        """Begin, with the columns of the row; what is returned ends the prompt."""
        self._number = number
        self._guesses = 0
        self._found = False
        return f" It is between 1 and {largest}."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: The guess

        Returns:
            Whether the guess is too low, too high or right
        """
        if self._found:
            raise ValueError("the number has been found")  # the model reads this as the answer to its call
        self._guesses += 1
        self._found = number == self._number
        return "right" if self._found else "too low" if number < self._number else "too high"

    def get_reward(self) -> float:
        """The reward of the response, asked for at its end: 1 for the first guess, less for later ones."""
        return 1.0 / self._guesses if self._found else 0.0
