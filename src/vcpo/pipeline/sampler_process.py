"""What a sampler process does: decode without pause, swap weights between two steps, answer over one pipe.

Messages to a sampler are lists of GenerationRequest. Messages from it are lists of finished Trajectory, or a Failure.
A sampler ends when its pipe is closed, so it cannot outlive the learner however that one ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

from vcpo.config import RunConfig, parse_config
from vcpo.errors import UserError
from vcpo.pipeline.interrupt import ENDING_SIGNALS
from vcpo.pipeline.shared_weights import SharedWeights
from vcpo.records import GenerationRequest, SamplingParams


@dataclass(frozen=True)
class Failure:
    """An exception of a sampler process, as it is told to the learner's process."""

    process: str
    kind: str
    message: str
    traceback: str
    by_user: bool


def run_sampler(
    index: int, plain_config: dict[str, object], params: SamplingParams, weights: SharedWeights, pipe: Connection
) -> None:
    """Entry point of a sampler process."""
    # signals to the whole process group are for the learner, which saves, and then ends the samplers
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    config = parse_config(plain_config)
    try:
        _decode_until_closed(config, params, weights, pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the learner is gone: taking the interpreter down in order would keep this process for seconds
    except BaseException as error:
        failure = Failure(
            process=f"sampler {index} (pid {os.getpid()})",
            kind=type(error).__name__,
            message=str(error),
            traceback=traceback.format_exc(),
            by_user=isinstance(error, UserError),
        )
        with contextlib.suppress(OSError):
            pipe.send(failure)


def _decode_until_closed(config: RunConfig, params: SamplingParams, weights: SharedWeights, pipe: Connection) -> None:
    import torch

    from vcpo.models.loading import load_model
    from vcpo.sampler.torch_engine import TorchEngine

    assert config.runtime.name == "local"
    torch.set_num_threads(config.runtime.sampler_threads)
    model, tokenizer = load_model(config.model, config.seed)
    model.requires_grad_(False)
    parameters = dict(model.named_parameters())
    engine = TorchEngine(
        model,
        params,
        slots=config.sampling.slots,
        max_length=config.sampling.max_prompt_length + config.sampling.max_completion_length,
        tokenizer=tokenizer,
        version=-1,
    )
    held: list[GenerationRequest] = []
    while True:
        # waits only when there is nothing to decode; reading a closed pipe raises EOFError
        while pipe.poll(None if not engine.num_active and not held else 0):
            held += pipe.recv()
        if weights.version != engine.version and (config.runtime.in_flight_updates or not engine.num_active):
            version = weights.read(parameters)
            engine.load_weights(None, version, recompute_kv_cache=config.runtime.recompute_kv_cache)
        if weights.version == engine.version or config.runtime.in_flight_updates:
            # without in-flight updates, new requests wait until the engine is empty and the new weights are in
            engine.submit(held)
            held = []
        finished = engine.step()
        if finished:
            pipe.send(finished)
