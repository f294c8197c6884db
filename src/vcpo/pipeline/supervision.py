"""One sampler process as the learner's process sees it: started, written to, watched, ended.

Requests go through a queue and a thread of their own, so that whoever starts groups never waits for a sampler that is
loading its model, or that has stopped reading.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from ctypes import c_int64
from multiprocessing.connection import Connection
from pathlib import Path

from vcpo import vllm_environment
from vcpo.config import LocalRuntime, RunConfig
from vcpo.errors import UserError
from vcpo.pipeline.interrupt import ENDING_SIGNALS
from vcpo.pipeline.placement import sampler_gpu, visible_gpus
from vcpo.pipeline.sampler_process import BEATS_SIZE, Failure, Message, Start
from vcpo.pipeline.shared_memory import OwnedMemory
from vcpo.pipeline.shared_weights import PublishedWeights
from vcpo.records import GenerationRequest, SamplingParams

_PROGRAM = "import sys; sys.path[:] = sys.argv[4:] or sys.path\n"
_PROGRAM += "from vcpo.pipeline.sampler_process import main; main(*map(int, sys.argv[1:4]))"

_STACK_SECONDS = 2.0  # for a hung process to write its stack before it is killed


class SamplerDied(RuntimeError):
    """A sampler process ended with an exception, was killed or hung. The message names the process and the reason."""


class Sampler:
    """A running sampler process.

    ready: it has said that it takes work. hung: what ``end_if_hung`` has ended it for, or ``None``.
    """

    def __init__(
        self, index: int, config: RunConfig, params: SamplingParams, weights: PublishedWeights, timeline_until: int
    ) -> None:
        self.index = index
        self.ready = False
        self.hung: str | None = None
        beats = OwnedMemory(BEATS_SIZE)
        self._beats = c_int64.from_buffer(beats.buffer)
        self._seen = 0, time.monotonic()
        self._checking = threading.Lock()
        ours, theirs = socket.socketpair()
        with theirs, _children_block_signals():
            passed = theirs.fileno(), weights.descriptor, beats.descriptor
            self.process = _start(index, config, passed)
        self.pipe = Connection(ours.detach())
        self._outbox: queue.SimpleQueue[Start | list[GenerationRequest] | None] = queue.SimpleQueue()
        self._outbox.put(Start(index, config.to_plain(), params, weights.layout, weights.base_checksum, timeline_until))
        threading.Thread(target=self._write, name=f"vcpo-outbox-{index}", daemon=True).start()

    @property
    def name(self) -> str:
        """For messages."""
        return f"sampler {self.index} (pid {self.process.pid})"

    def send(self, requests: list[GenerationRequest]) -> None:
        """Ask for responses; never waits. What a dead sampler was asked for is known to the ``Assignment``."""
        self._outbox.put(requests)

    def is_ready(self) -> None:
        """It has said that it takes work; from now on it is to make decoding steps."""
        with self._checking:
            self.ready = True
            self._seen = self._beats.value, time.monotonic()

    def receive(self) -> Message:
        """The next message; waits for it. Raises SamplerDied when the process is gone or has failed.

        Raises UserError for what the user can mend.
        """
        try:
            message: Message | Failure = self.pipe.recv()
        except (EOFError, OSError):  # OSError: killed in the middle of a message
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            raise SamplerDied(f"{self.name} {self.hung or self._ending()}") from None
        except Exception as error:  # of making an object of the bytes
            self.kill()
            raise SamplerDied(f"{self.name} sent what is no message, and was killed: {error}") from None
        if isinstance(message, Failure):
            if message.by_user:
                raise UserError(message.message)
            raise SamplerDied(
                f"{self.name}: {message.kind}: {message.message}\n"
                f"--- traceback of the sampler process ---\n{message.traceback}"
            )
        return message

    def end_if_hung(self, owes: bool, runtime: LocalRuntime) -> None:
        """Kill a process that owes responses and has not made a decoding step for long, or has not become ready.

        Its stack goes to its standard error first. Whoever reads the pipe then sees its end.
        """
        with self._checking:
            beats, since = self._seen
            now = time.monotonic()
            limit, missed = runtime.hang_timeout, "it made no decoding step for {} s (runtime.hang_timeout)"
            if not self.ready:
                limit, missed = runtime.start_timeout, "it was not ready after {} s (runtime.start_timeout)"
            if self._beats.value != beats or (self.ready and not owes):
                self._seen = self._beats.value, now
            elif now - since > limit and self.hung is None:
                self.hung = f"hung: {missed.format(round(now - since))}, and was killed"
                self._show_stack()
                self.kill()

    def kill(self) -> None:
        """End the process and wait until it is gone. Samplers hold nothing that is worth an orderly end."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End the process and release what belongs to it."""
        self.kill()
        self._outbox.put(None)
        self.pipe.close()

    def _show_stack(self) -> None:
        """Let the process write where it is, which ends it; it may be beyond that."""
        if hasattr(signal, "SIGUSR1") and self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGUSR1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_STACK_SECONDS)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the reader of the pipe reports a dead sampler
            while (message := self._outbox.get()) is not None:
                self.pipe.send(message)

    def _ending(self) -> str:
        code = self.process.returncode
        return f"died with exit code {code}" + (" (killed; out of memory?)" if code == -signal.SIGKILL else "")


def _start(index: int, config: RunConfig, passed: Sequence[int]) -> subprocess.Popen[bytes]:
    """A sampler process, in the environment that its engine needs. passed: file descriptors, its arguments."""
    assert config.runtime.name == "local"
    engine = config.sampling.engine
    python, path, variables = sys.executable, sys.path, dict[str, str]()
    if engine.name == "vllm":
        python, path = str(Path(engine.python).absolute()), []  # not resolved: a venv is known by its link
        variables = vllm_environment.variables(config.runtime.sampler_threads)
    gpu = None if config.model.device == "cpu" else sampler_gpu(index, visible_gpus())
    if gpu is not None:
        variables["CUDA_VISIBLE_DEVICES"] = gpu
    return subprocess.Popen(
        [python, "-c", _PROGRAM, *map(str, passed), *path],
        stdin=subprocess.DEVNULL,
        pass_fds=passed,
        env={**os.environ, **variables},
    )


@contextlib.contextmanager
def _children_block_signals() -> Iterator[None]:
    """Processes started in this block are deaf to the ending signals from their first instruction on.

    A sampler needs seconds to import what it needs before it can ignore them itself, and Ctrl-C in that time must not
    kill it. A new program inherits which signals are blocked. Here they stay pending until the end of the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
