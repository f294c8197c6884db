"""What a sampler process does: decode without pause, swap weights between two steps, answer over one pipe.

Messages to a sampler are Start, once, then lists of GenerationRequest. Messages from it are Ready, once; Served, after
every change of weights; lists of finished Trajectory; or a Failure, the last one. A sampler ends when its pipe is
closed, so it cannot outlive the learner however that one ends.

The interpreter of a sampler need not be the learner's: all that they share is this package, pickled messages of plain
records, and bytes in shared memory. So an engine may have an environment of its own (``vcpo.sampler.vllm_engine``).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Mapping
from ctypes import c_int64
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from torch import Tensor

from vcpo.config import RunConfig, parse_config
from vcpo.errors import UserError
from vcpo.observe.timeline import Timeline
from vcpo.pipeline.interrupt import ENDING_SIGNALS
from vcpo.pipeline.shared_memory import SharedMemory
from vcpo.pipeline.shared_weights import SharedWeights, WeightsLayout, weights_checksum
from vcpo.records import GenerationRequest, SamplingParams, Trajectory
from vcpo.sampler.protocol import Engine
from vcpo.tasks.registry import environment_task

BEATS_SIZE = 8  # bytes of the counter of decoding steps
_LAST_WORDS = 0.2  # seconds in which the main thread may find out for itself that the learner is gone


@dataclass(frozen=True)
class Start:
    """What a sampler process has to know.

    base_checksum: of the learner's model under its adapters, where only these are published.
    timeline_until: the version up to which it records what it does.
    """

    index: int
    plain_config: dict[str, object]
    params: SamplingParams
    layout: WeightsLayout
    base_checksum: int | None
    timeline_until: int


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


def main(socket_number: int, weights_number: int, beats_number: int) -> None:
    """Entry point of a sampler process; the arguments are inherited file descriptors.

    The first message says what to do, the second memory holds the weights, the third counts decoding steps.
    """
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, chain=True)  # where it hangs; then it ends
    # signals to the whole process group are for the learner, which saves, and then ends the samplers
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    pipe = Connection(socket_number)
    os.set_inheritable(socket_number, False)  # a program that is started from here must not keep it open
    threading.Thread(target=_end_with_the_learner, args=(socket_number,), daemon=True).start()
    start: Start = pipe.recv()
    weights = SharedWeights(_inherited(weights_number, start.layout.size), start.layout)
    beats = c_int64.from_buffer(_inherited(beats_number, BEATS_SIZE).buffer)
    config = parse_config(start.plain_config)
    timeline = Timeline.off()
    if start.timeline_until:
        timeline = Timeline.open(Path(config.output_dir), f"sampler-{start.index}", start.timeline_until)
    try:
        with timeline.span("loading"):
            engine = _open_engine(config, start.params, start.base_checksum)
        _decode_until_closed(engine, config, weights, pipe, beats, timeline)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        timeline.close()
        os._exit(0)  # the learner is gone: taking the interpreter down in order would keep this process for seconds
    except BaseException as error:
        failure = Failure(
            process=f"sampler {start.index} (pid {os.getpid()})",
            kind=type(error).__name__,
            message=str(error),
            traceback=traceback.format_exc(),
            by_user=isinstance(error, UserError),
        )
        with contextlib.suppress(OSError):
            pipe.send(failure)


def _inherited(descriptor: int, size: int) -> SharedMemory:
    memory = SharedMemory(descriptor, size)
    os.close(descriptor)
    return memory


def _end_with_the_learner(socket_number: int) -> None:
    """End this process when the learner's is gone, also in the middle of loading a model or of a long step."""
    hang_up = select.poll()
    hang_up.register(socket_number, 0)  # an end of the connection is reported without being asked for
    hang_up.poll()
    time.sleep(_LAST_WORDS)
    os._exit(0)


def _open_engine(config: RunConfig, params: SamplingParams, base_checksum: int | None) -> Engine:
    """An engine with weights of no version. Raises UserError when its adapters would be on another model."""
    if config.sampling.engine.name == "vllm":
        from vcpo.pipeline.vllm_sampler import open_vllm_engine

        return open_vllm_engine(config, params)
    import torch

    from vcpo.models.loading import load_model
    from vcpo.models.lora import base_parameters
    from vcpo.sampler.engines import make_engine

    assert config.runtime.name == "local"
    torch.set_num_threads(config.runtime.sampler_threads)
    model, tokenizer = load_model(config.model, config.seed)
    if base_checksum is not None and weights_checksum(base_parameters(model)) != base_checksum:
        raise UserError(
            f"the base model that a sampler process finds at {config.model.path!r} has other weights than the"
            " learner's: resume a run from the directory in which it was started, with its model as it was"
        )
    return make_engine(
        environment_task(config.task.name, config.task.params),
        model.requires_grad_(False),
        params,
        slots=config.sampling.slots,
        max_length=config.sampling.max_prompt_length + config.sampling.max_completion_length,
        tokenizer=tokenizer,
        version=-1,
    )


def _decode_until_closed(
    engine: Engine,
    config: RunConfig,
    weights: SharedWeights,
    pipe: Connection,
    beats: c_int64,
    timeline: Timeline,
) -> None:
    runtime = config.runtime
    assert runtime.name == "local"

    def load(tensors: Mapping[str, Tensor], version: int) -> None:
        engine.load_weights(tensors, version, runtime.recompute_kv_cache)

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
        if weights.version != engine.version and (runtime.in_flight_updates or not engine.num_active):
            with timeline.span("loading weights"):
                version, checksum = weights.read(load)
                if weights_checksum(engine.weights) != checksum:
                    raise RuntimeError(f"the engine's weights are not those of version {version}: checksums differ")
            pipe.send(Served(version))
            timeline.step_is(version)
        if weights.version == engine.version or runtime.in_flight_updates:
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
