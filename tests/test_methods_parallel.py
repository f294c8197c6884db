"""Methods that look at the whole minibatch first make the same updates on two processes as on one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from parallel_cases import Case, Ranks, outcome
from test_learner_parallel import assert_same

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
@pytest.mark.parametrize("name", ["m2po", "otb", "trust_the_batch", "kl_in_reward", "gac"])
def test_two_processes_make_the_same_updates_as_one(ranks: Ranks, name: str, kind: str) -> None:
    case = Case(method=name, max_tokens=30)
    assert_same(outcome(case, "one"), ranks.run(outcome, case, kind), 1e-9)
