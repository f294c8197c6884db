"""Evaluations beside the training: the learner copies its weights and goes on, a process of its own samples.

The process is a sampler like the others, with published weights of its own that stay as they are until the next
evaluation. Answers are graded by the run's graders. One evaluation at a time: one that falls due meanwhile is skipped,
because only newer weights than its own could be evaluated later.

While an evaluation runs its weights lie in a file as well, so that a run that is interrupted or killed does it again
when it is resumed. It is removed once the result is in the metrics.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vcpo.config import RunConfig
from vcpo.pipeline.evaluate import Evaluator
from vcpo.pipeline.sampler_process import Ready
from vcpo.pipeline.shared_weights import PublishedWeights, published_of
from vcpo.pipeline.supervision import Sampler
from vcpo.records import Trajectory

DIRECTORY = "evaluation"

_TICK = 0.2  # seconds between two looks at whether the process hangs, or the run ends
_TRIES = 2
_END_SECONDS = 1.0


class BackgroundEvaluation:
    """Evaluates versions of the model one after the other. All calls come from the main thread, and none waits long.

    Nothing that goes wrong in an evaluation is raised: it is tried once more, then noted, and has no metrics.
    """

    def __init__(
        self, config: RunConfig, model: nn.Module, evaluator: Evaluator, run_dir: Path, note: Callable[[str], None]
    ) -> None:
        """Raises UserError when the machine has too little shared memory. note: also told from another thread."""
        assert config.runtime.name == "local"
        self._config = config
        self._runtime = config.runtime
        self._parameters, base = published_of(model, config.sampling.merges_adapters)
        self._evaluator = evaluator
        self._directory = run_dir / DIRECTORY
        self._note = note
        self._weights = PublishedWeights(self._parameters, base)
        self._published = 0  # versions of the published weights count evaluations, not steps
        self._sampler: Sampler | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._is_saved = threading.Event()
        self._thread: threading.Thread | None = None
        self._result: dict[str, float] | None = None
        self._step: int | None = None
        self._skipped = 0
        self._failed = 0

    @property
    def running(self) -> int | None:
        """The step whose weights are being evaluated, until its result is taken."""
        return self._step

    def start(self, step: int) -> bool:
        """Evaluate the model as it is now, that is after ``step`` steps. False, and counted, if one is running."""
        if self._step is not None:
            if not self._skipped:
                self._note(
                    f"the evaluation of step {step} is skipped, because that of step {self._step} is still running"
                    " (evaluations_skipped in the metrics counts them)"
                )
            self._skipped += 1
            return False
        self._begin(step, self._parameters)
        return True

    def unfinished(self, step: int) -> int | None:
        """The step whose evaluation had not finished when the run ended, of those up to ``step``, the checkpoint's.

        What is later is forgotten: those steps are done again.
        """
        steps = []
        for path in self._directory.glob("*"):
            number = path.stem.removeprefix("step-")
            if path.suffix == ".safetensors" and number.isdecimal() and int(number) <= step:
                steps.append(int(number))
            else:
                path.unlink()
        return max(steps, default=None)

    def restart(self, step: int) -> None:
        """Begin an unfinished evaluation again, with the weights in its file."""
        try:
            tensors = load_file(self._file(step))
        except (OSError, SafetensorError) as error:
            self._note(f"the evaluation of step {step} cannot be done again, its weights are unreadable: {error}")
            self.done(step)
        else:
            self._begin(step, tensors)

    def take_result(self) -> tuple[int, dict[str, float]] | None:
        """Step and metrics of an evaluation that has finished; once. ``done`` is to be called when they are logged."""
        if self._step is None or self._thread is None or self._thread.is_alive():
            return None
        step, self._step, self._thread = self._step, None, None
        if self._result is None:
            self._failed += 1
            self.done(step)
            return None
        return step, self._result

    def done(self, step: int) -> None:
        """The result is in the metrics: nothing is to be done again."""
        with contextlib.suppress(OSError):
            self._file(step).unlink(missing_ok=True)
            self._directory.rmdir()

    def wait(self, seconds: float = _TICK) -> None:
        """Wait a little for the evaluation that is running."""
        if self._thread is not None:
            self._thread.join(seconds)

    def wait_until_saved(self) -> None:
        """Wait until the weights that are being evaluated are in their file, before a checkpoint is made."""
        if self._thread is not None:
            self._is_saved.wait()

    def metrics(self) -> dict[str, float]:
        """Counts since the run was started or resumed."""
        return {"evaluations_skipped": float(self._skipped), "evaluations_failed": float(self._failed)}

    def close(self) -> None:
        """Give up what is running. Safe to call twice."""
        with self._lock:
            self._closing.set()
            sampler = self._sampler
        if sampler is not None:
            sampler.kill()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)  # it may be waiting for graders
        if sampler is not None:
            sampler.close()

    def _begin(self, step: int, parameters: Mapping[str, Tensor]) -> None:
        self._weights.publish(parameters, self._published)
        self._published += 1
        self._step, self._result = step, None
        self._is_saved.clear()
        self._thread = threading.Thread(target=self._evaluate, args=(step,), name="vcpo-evaluation", daemon=True)
        self._thread.start()

    def _evaluate(self, step: int) -> None:
        begin = time.perf_counter()
        try:
            self._save(step)
        except Exception as error:
            self._note(f"the weights of step {step} were not saved for evaluation, should the run be resumed: {error}")
        finally:
            self._is_saved.set()
        for attempt in range(1, _TRIES + 1):
            try:
                result = self._evaluator.result(self._sample())
            except Exception as error:
                if self._closing.is_set():
                    return
                self._end_sampler()
                then = "trying once more" if attempt < _TRIES else "it has no metrics"
                self._note(f"the evaluation of step {step} failed, {then}: {error}")
            else:
                self._result = {**result.metrics, "time_evaluation": time.perf_counter() - begin}
                return

    def _save(self, step: int) -> None:
        path = self._file(step)
        if path.exists():
            return
        self._directory.mkdir(exist_ok=True)
        beside = path.with_suffix(".tmp")
        # views of the published weights, which nobody overwrites before the next evaluation
        self._weights.read(lambda tensors, _: save_file(dict(tensors), beside))
        beside.replace(path)

    def _sample(self) -> list[Trajectory]:
        """Responses to all problems. Raises what the process has died of."""
        sampler = self._running_sampler()
        requests = self._evaluator.requests()
        sampler.send(requests)
        found: list[Trajectory] = []
        while len(found) < len(requests):
            sampler.end_if_hung(True, self._runtime)
            if not sampler.pipe.poll(_TICK):
                continue
            message = sampler.receive()
            if isinstance(message, Ready):
                sampler.is_ready()
            elif isinstance(message, list):
                found += message
        return found

    def _running_sampler(self) -> Sampler:
        with self._lock:
            if self._closing.is_set():
                raise RuntimeError("the run has ended")
            if self._sampler is None:
                number = self._runtime.samplers  # the next after those that sample for the training
                self._sampler = _EvaluationSampler(number, self._config, self._evaluator.params, self._weights, 0)
            return self._sampler

    def _end_sampler(self) -> None:
        with self._lock:
            if self._sampler is not None:
                self._sampler.close()
            self._sampler = None

    def _file(self, step: int) -> Path:
        return self._directory / f"step-{step:06d}.safetensors"


def discard_unfinished(run_dir: Path) -> bool:
    """Forget what was not finished, in a run that now evaluates otherwise. Whether there was anything."""
    directory = run_dir / DIRECTORY
    found = directory.is_dir()
    shutil.rmtree(directory, ignore_errors=True)
    return found


class _EvaluationSampler(Sampler):
    """A sampler that is called by what it does."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"the evaluation's process (pid {self.process.pid})"
