"""What a sampler engine is: requests in, finished trajectories out, weights swapped between two decode steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from vcpo.records import GenerationRequest, Trajectory


class Engine(Protocol):
    """Decodes many responses at a time. Nothing that was submitted is ever dropped."""

    @property
    def version(self) -> int:
        """The policy version of the weights in use."""
        ...

    @property
    def num_active(self) -> int:
        """Requests submitted and not yet finished, waiting ones included."""
        ...

    @property
    def spent(self) -> Mapping[str, float]:
        """Seconds that all steps together have spent on other things than decoding, by name."""
        ...

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The tensors that it decodes with, by the names of the model's parameters."""
        ...

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; they start in this order as slots become free, those that continue a response first.

        Raises UserError, and queues none of them, when a prompt with its response would not fit the length limits.
        """
        ...

    def step(self) -> list[Trajectory]:
        """Start waiting requests in the free slots, draw one token in every occupied slot, return what finished."""
        ...

    def load_weights(
        self, tensors: Mapping[str, Tensor] | None, version: int, recompute_kv_cache: bool = False
    ) -> None:
        """Continue every response with other weights from the next step on.

        tensors: the parameters by name; ``None`` when the model object has been updated in place already.
        recompute_kv_cache: rebuild the keys and values of what has been decoded so far under the new weights;
            otherwise they stay those of the weights that produced them, and the log-probs of later tokens are those
            of a mixture that no single model has (they are still exactly what was sampled from).
        """
        ...


def generate(
    engine: Engine, requests: Sequence[GenerationRequest], progress: Callable[[int, int], None] | None = None
) -> list[Trajectory]:
    """Decode requests on an idle engine to the end; the trajectories come in the order of the requests.

    progress: called with the number of responses finished so far and the number asked for.
    """
    if engine.num_active:
        raise RuntimeError(f"generate needs an idle engine; this one has {engine.num_active} unfinished requests")
    order = {(request.group_id, request.index): i for i, request in enumerate(requests)}
    if len(order) != len(requests):
        raise ValueError("two requests have the same group_id and index")
    engine.submit(requests)
    finished: list[Trajectory] = []
    while engine.num_active:
        new = engine.step()
        finished += new
        if new and progress is not None:
            progress(len(finished), len(requests))
    return sorted(finished, key=lambda t: order[t.group_id, t.index])
