"""Problems made from data rows: the options that say where rows are, and the order in which they come."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

from pydantic import Field, model_validator

from vcpo.errors import UserError
from vcpo.records import Problem
from vcpo.tasks.options import TaskOptions, options_or_user_error
from vcpo.tasks.rows import Table, read_dataset, read_file


class DataOptions(TaskOptions):
    """Where the rows are: files, or a dataset id with TRL's option names."""

    path: str | None = Field(None, description="training rows: a .jsonl, .parquet or .csv file")
    eval_path: str | None = Field(None, description="evaluation rows, in the same format")
    dataset_name: str | None = Field(None, description="a dataset id (or directory) for the `datasets` package")
    dataset_config: str | None = Field(None, description="the dataset's configuration, e.g. main")
    dataset_train_split: str = Field("train", description="the split that is trained on")
    dataset_test_split: str | None = Field(
        None, description="the split that is evaluated on, unless eval_path is given"
    )

    @model_validator(mode="after")
    def _one_source(self) -> DataOptions:
        if self.path is not None and self.dataset_name is not None:
            raise ValueError("give one of task.path (a file) and task.dataset_name (a dataset id), not both")
        return self


class DataProblems:
    """The problems of a table for training, shuffled anew in every epoch, and of another for evaluation.

    build: makes the problem of one row. It is called for every row here, so that a bad row is found before training.
    Raises UserError when data is missing, empty or malformed.
    """

    def __init__(self, options: DataOptions, build: Callable[[Table, int], Problem]) -> None:
        self._train = _build_all(_train_table(options), build)
        held_out = _eval_table(options)
        self._eval = None if held_out is None else _build_all(held_out, build)

    def train(self, position: int, seed: int) -> Problem:
        """The problem at a data position: every row comes once per epoch."""
        epoch, place = divmod(position, len(self._train))
        return self._train[epoch_order(len(self._train), seed, epoch)[place]]

    def eval(self, count: int) -> list[Problem]:
        """The first ``count`` evaluation rows. Raises UserError when the task was given none."""
        if self._eval is None:
            raise UserError(
                "evaluation needs held-out rows: give task.eval_path (or task.dataset_test_split for a dataset id),"
                " or set eval.eval_steps=0"
            )
        return self._eval[:count]


class DataTask(ABC):
    """Base of a task whose problems are data rows: what is left to it are its options, ``_problem`` and ``grade``."""

    Options: ClassVar[type[DataOptions]]
    options: DataOptions

    def __init__(self, **options: Any) -> None:
        self.options = options_or_user_error(self.Options, options)
        self._problems = DataProblems(self.options, self._problem)

    def train_problem(self, position: int, seed: int) -> Problem:
        """Rows in an order shuffled anew in each epoch."""
        return self._problems.train(position, seed)

    def eval_problems(self, count: int) -> list[Problem]:
        """The first rows of the evaluation data."""
        return self._problems.eval(count)

    @abstractmethod
    def _problem(self, table: Table, index: int) -> Problem:
        """The problem of one row. Raises UserError for a row that cannot be one."""


def _train_table(options: DataOptions) -> Table:
    if options.path is not None:
        return read_file(options.path)
    if options.dataset_name is not None:
        return read_dataset(options.dataset_name, options.dataset_config, options.dataset_train_split)
    raise UserError("the task needs data: give task.path (a .jsonl, .parquet or .csv file) or task.dataset_name")


def _eval_table(options: DataOptions) -> Table | None:
    if options.eval_path is not None:
        return read_file(options.eval_path)
    if options.dataset_name is not None and options.dataset_test_split is not None:
        return read_dataset(options.dataset_name, options.dataset_config, options.dataset_test_split)
    return None


def _build_all(table: Table, build: Callable[[Table, int], Problem]) -> list[Problem]:
    return [build(table, index) for index in range(len(table))]


@lru_cache(maxsize=2)
def epoch_order(rows: int, seed: int, epoch: int) -> list[int]:
    """The order of so many rows in an epoch, a function of seed and epoch."""
    order = list(range(rows))
    random.Random(f"epoch/{seed}/{epoch}").shuffle(order)
    return order
