"""What a sampler process does: decode without pause, swap weights between two steps, answer over one pipe.

Messages to a sampler are lists of GenerationRequest. Messages from it are Ready, once; Served, after every change of
weights; lists of finished Trajectory; or a Failure, the last one. A sampler ends when its pipe is closed, so it cannot
outlive the learner however that one ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import traceback
from ctypes import c_int64
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from vcpo.config import RunConfig, parse_config
from vcpo.errors import UserError
from vcpo.observe.timeline import Timeline
from vcpo.pipeline.interrupt import ENDING_SIGNALS
from vcpo.pipeline.shared_weights import SharedWeights, weights_checksum
from vcpo.records import GenerationRequest, SamplingParams, Trajectory
from vcpo.tasks.registry import environment_task


@dataclass(frozen=True)
class Ready:
    """The model is loaded: requests are decoded from now on."""


@dataclass(frozen=True)
class Served:
    """The engine decodes with the weights of this version, as the checksum of its own tensors has shown."""

    version: int


@dataclass(frozen=True)
class Failure:
    """An exception of a sampler process, as it is told to the learner's process."""

    process: str
    kind: str
    message: str
    traceback: str
    by_user: bool


Message = Ready | Served | list[Trajectory]


def run_sampler(
    index: int,
    plain_config: dict[str, object],
    params: SamplingParams,
    weights: SharedWeights,
    pipe: Connection,
    beats: c_int64,
    timeline_until: int,
) -> None:
    """Entry point of a sampler process.

    beats: counts its decoding steps, in shared memory. timeline_until: the version up to which it records what it does.
    """
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, chain=True)  # where it hangs; then it ends
    # signals to the whole process group are for the learner, which saves, and then ends the samplers
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    config = parse_config(plain_config)
    timeline = Timeline.off()
    if timeline_until:
        timeline = Timeline.open(Path(config.output_dir), f"sampler-{index}", timeline_until)
    try:
        _decode_until_closed(config, params, weights, pipe, beats, timeline)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        timeline.close()
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


def _decode_until_closed(
    config: RunConfig,
    params: SamplingParams,
    weights: SharedWeights,
    pipe: Connection,
    beats: c_int64,
    timeline: Timeline,
) -> None:
    import torch

    from vcpo.models.loading import load_model
    from vcpo.sampler.engines import make_engine

    assert config.runtime.name == "local"
    torch.set_num_threads(config.runtime.sampler_threads)
    with timeline.span("loading"):
        model, tokenizer = load_model(config.model, config.seed)
    model.requires_grad_(False)
    parameters = dict(model.named_parameters())
    engine = make_engine(
        environment_task(config.task.name, config.task.params),
        model,
        params,
        slots=config.sampling.slots,
        max_length=config.sampling.max_prompt_length + config.sampling.max_completion_length,
        tokenizer=tokenizer,
        version=-1,
    )
    pipe.send(Ready())
    held: list[GenerationRequest] = []
    while True:
        # waits only when there is nothing to decode; reading a closed pipe raises EOFError
        if not engine.num_active and not held:
            timeline.flush()  # the end of the run may come in this wait, by a kill
            with timeline.span("idle"):
                pipe.poll(None)
        while pipe.poll(0):
            held += pipe.recv()
        if weights.version != engine.version and (config.runtime.in_flight_updates or not engine.num_active):
            with timeline.span("loading weights"):
                version, checksum = weights.read(parameters)
                engine.load_weights(None, version, recompute_kv_cache=config.runtime.recompute_kv_cache)
                if weights_checksum(parameters) != checksum:
                    raise RuntimeError(f"the engine's weights are not those of version {version}: checksums differ")
            pipe.send(Served(version))
            timeline.step_is(version)
        if weights.version == engine.version or config.runtime.in_flight_updates:
            # without in-flight updates, new requests wait until the engine is empty and the new weights are in
            engine.submit(held)
            held = []
        begin, active, spent = timeline.now(), engine.num_active, engine.spent
        finished = engine.step()
        beats.value += 1
        other = {name: seconds - spent[name] for name, seconds in engine.spent.items()}
        timeline.more("decoding", begin, f"decoding, version {engine.version}", other, responses=active)
        if finished:
            pipe.send(finished)
