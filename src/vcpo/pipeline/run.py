"""One training run from configuration to final model; the same loop for every runtime."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vcpo import vllm_environment
from vcpo.config import RunConfig
from vcpo.errors import StoppedByWatchdog, UserError
from vcpo.learner.learner import Learner
from vcpo.models.loading import end_token_ids, load_model, saved_model
from vcpo.models.lora import has_adapter, save_adapter, save_merged, trained_parameters
from vcpo.observe.logger import Kind, Logger
from vcpo.observe.metrics import FILE_NAME as METRICS_FILE
from vcpo.observe.metrics import MetricsLog, read_metrics
from vcpo.observe.progress import Progress
from vcpo.observe.tensorboard import TensorBoardLogger
from vcpo.observe.timeline import Timeline, clear_timeline
from vcpo.observe.trackers.protocol import check_trackers
from vcpo.observe.trackers.remote import RemoteTracker, tracked_run
from vcpo.observe.trajectories import TrajectoryLog
from vcpo.observe.transcripts import TranscriptWriter
from vcpo.pipeline.background_eval import BackgroundEvaluation, discard_unfinished
from vcpo.pipeline.checkpoint import (
    RunState,
    check_base,
    disk_errors_explained,
    latest_intact,
    list_checkpoints,
    load_state,
    remove_old_checkpoints,
    replace_directory,
    save_checkpoint,
    version_of,
)
from vcpo.pipeline.evaluate import Evaluator
from vcpo.pipeline.grading import Grading
from vcpo.pipeline.grading_pool import make_task_and_grading
from vcpo.pipeline.guard import Answer, Guard
from vcpo.pipeline.interrupt import StopRequest
from vcpo.pipeline.ledger import Ledger, LedgerMismatch
from vcpo.pipeline.local import LocalRollouts
from vcpo.pipeline.lockstep import LockstepRollouts
from vcpo.pipeline.rollouts import DataProgress, GroupStarter, Rollouts, Stopped
from vcpo.pipeline.run_directory import Mode, RunDirectory
from vcpo.pipeline.shared_weights import base_checksum
from vcpo.pipeline.snapshots import SnapshotRing, assign
from vcpo.pipeline.warm_start import warm_start
from vcpo.records import SamplingParams
from vcpo.tasks.prompts import PromptSource
from vcpo.tasks.protocol import Task


def train(config: RunConfig, mode: Mode = "new", make_report: bool = True, progress: Progress | None = None) -> Path:
    """Train as configured and return the run directory.

    mode: ``new`` refuses a directory that holds a run, ``resume`` continues it, ``overwrite`` replaces it.
    Raises UserError for what the user can mend, KeyboardInterrupt after an interruption and StoppedByWatchdog when the
    watchdog ends the run (the state is then saved), and otherwise whatever went wrong, in whichever process.
    """
    # data and reward functions are read before anything is created or loaded
    progress = progress or Progress(config.training.max_steps)
    check_trackers(config.logging.report_to)
    if config.sampling.engine.name == "vllm":
        vllm_environment.examine(config.sampling.engine.python)
    task, grading = make_task_and_grading(config, progress.note)
    with contextlib.closing(grading), progress, StopRequest(progress.note) as stop:
        if config.eval.eval_steps:
            task.eval_problems(1)  # its UserError about missing evaluation data belongs here, too
        run = _Run(config, task, grading, progress, stop, mode)
        directory = run.directory
        with _record_of(directory):
            directory.record_start(run.learner.version if mode == "resume" else None)
        outcome, facts = "failed", dict[str, Any]()
        try:
            run.loop(task)
            outcome = "finished"
        except StoppedByWatchdog as stopped:
            outcome, facts = "stopped", {"reason": str(stopped)}
            raise
        except KeyboardInterrupt:
            if run.failure is not None:
                raise run.failure from None
            outcome = "interrupted"
            raise
        finally:
            stop.abort = lambda: False  # whatever fails now must not interrupt the closing
            run.close()
            with contextlib.suppress(OSError):  # a full disk: what has been raised says more
                directory.record_end(outcome, step=run.learner.version, **facts)
    if make_report:
        from vcpo.report.html import write_report

        with disk_errors_explained(
            f"the report {str(directory.report)!r}",
            f"the run is finished: free space and write it with: vcpo report {directory.path}",
        ):
            write_report([directory.path], directory.report)
        progress.summary(directory.path, directory.report)
    return directory.path


class _Run:
    """The parts of one run and the loop over its steps."""

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        grading: Grading,
        progress: Progress,
        stop: StopRequest,
        mode: Mode,
    ) -> None:
        self.config = config
        self.directory = directory = RunDirectory.check(config, mode)
        self.grading = grading
        self.progress = progress
        self.stop = stop
        self.guard = Guard(config, directory, progress.note)
        self.rollouts: Rollouts | None = None
        self.snapshots: SnapshotRing | None = None
        self.ledger: Ledger | None = None
        self.background: BackgroundEvaluation | None = None
        runtime = config.runtime
        threads = runtime.threads if runtime.name == "lockstep" else runtime.learner_threads
        if threads:
            torch.set_num_threads(threads)
        if runtime.name == "lockstep":
            self.snapshots = SnapshotRing(runtime.max_staleness + 1)

        resume = mode == "resume"
        checkpoint = latest_intact(directory.checkpoints, progress.note) if resume else None
        self.data = DataProgress()
        self.rollouts_state: dict[str, Any] | None = None
        self.model: PreTrainedModel
        self.tokenizer: PreTrainedTokenizerBase
        if checkpoint is None:
            if resume:
                progress.note("no intact checkpoint: starting from the beginning")
            self.model, self.tokenizer = load_model(config.model, config.seed)
            self.learner = self._make_learner()
        else:
            self.model, self.tokenizer = self._load_model_of(checkpoint)
            check_base(checkpoint, base_checksum(self.model))
            state = load_state(checkpoint)
            self.guard.load_state(state.numbers.get("guard"))
            self.learner = self._make_learner()
            self._restore(state)
            progress.note(f"resuming at step {self.learner.version} from {checkpoint}")
        if config.watchdog.rolls_back:
            self.learner.norm_way(self.guard.spec_after_rollback())  # its UserError belongs here, not after the alarm
        self.base_checksum = base_checksum(self.model)  # the base stays as it is
        # its UserError about tools, and a model that cannot have them, belongs here, too
        self.prompts = self._make_prompts(task)
        # a model that cannot be loaded neither leaves a directory behind nor costs the run that it was to replace
        RunDirectory.open(config, mode)
        self.is_new = checkpoint is None
        resume_step = None if self.is_new else self.learner.version
        with _record_of(directory):
            self.guard.open(resume_step)
            self.metrics_log = MetricsLog(directory.path, resume_step, progress.note)
            self.loggers: list[Logger] = [self.metrics_log, progress]
            if config.logging.tensorboard:
                # resumed without a checkpoint: every event that is there is hidden
                self.loggers.append(TensorBoardLogger(directory.path, -1 if resume and self.is_new else resume_step))
            if config.logging.report_to:
                tracked = tracked_run(
                    directory.path, config.logging.project, config.logging.run_name, config.to_plain()
                )
                self.loggers += [RemoteTracker(name, tracked, progress.note) for name in config.logging.report_to]
            self.transcripts = TranscriptWriter(
                directory.path, config.logging.transcript_steps, config.logging.transcripts_per_step
            )
            self.trajectories = TrajectoryLog(directory.path, config.logging.trajectory_steps, resume_step)
        self.timeline = Timeline.off()
        if config.logging.timeline_steps:
            clear_timeline(directory.path)
            last = self.learner.version + config.logging.timeline_steps
            self.timeline = Timeline.open(directory.path, "learner", last)

    @property
    def failure(self) -> BaseException | None:
        """What failed beside the main thread."""
        return self.rollouts.failure if isinstance(self.rollouts, LocalRollouts) else None

    def loop(self, task: Any) -> None:
        """Warm start, then steps until the last one, evaluating and saving on the way."""
        config, learner = self.config, self.learner
        ends = end_token_ids(self.model, self.tokenizer)
        evaluator = None
        if config.eval.eval_steps:
            evaluator = Evaluator(task, self.grading, self.tokenizer, config.eval, config.sampling, ends, config.seed)
        self._open_background(evaluator)
        if learner.version >= config.training.max_steps:
            self._finish_again()
            return
        ledger = self._open_ledger()
        if self.is_new and config.warm_start.steps:
            steps = config.warm_start.steps
            with self.timeline.span("warm start"), self.progress.phase("warm start", steps) as report:
                warm_start(self.model, self.tokenizer, task, config, report, self.progress.note)
        sampling = config.sampling
        params = SamplingParams(
            max_tokens=sampling.max_completion_length,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=ends,
            stop_strings=tuple(sampling.stop_strings),
            template_kwargs=sampling.chat_template_kwargs,
        )
        starter = GroupStarter(self.prompts, self.data, ledger.fates)
        if self.is_new and evaluator:
            self._evaluate(evaluator)
        self.stop.abort = lambda: self.failure is not None  # from here on there is something to save
        self.rollouts = self._make_rollouts(params, starter)
        if self.rollouts_state is not None:
            self.rollouts.load_state(self.rollouts_state)
        self.rollouts.publish(learner.version)
        last_saved = None if self.is_new else learner.version
        if self.is_new and self.guard.needs_first_checkpoint:
            self._save()
        while learner.version < config.training.max_steps:
            if self.stop.requested:
                break
            try:
                self._step(self.rollouts, starter, ledger)
            except Stopped:
                break
            step = learner.version
            is_last = step == config.training.max_steps
            self._log_background()
            if evaluator and self._evaluates_at(step):
                self._evaluate(evaluator)
            save_steps = config.checkpoint.save_steps
            if is_last or (save_steps and step % save_steps == 0) or self.guard.rolled_back_at(step):
                self._save()
                last_saved = step
            if self.guard.stop_reason is not None:
                break
        if learner.version < config.training.max_steps:
            if last_saved != learner.version:
                self._save()
            self._check(ledger, starter.progress, starter.next_number)
            self.progress.note(
                f"stopped after step {learner.version}; continue with: vcpo train"
                f" {self.directory.path / 'config.yaml'} --resume"
            )
            if self.guard.stop_reason is not None:
                raise StoppedByWatchdog(self.guard.stop_reason)
            raise KeyboardInterrupt
        self._write_final_model()
        ledger.fates.not_needed(learner.version)
        self._check(ledger, starter.progress, starter.next_number)
        self._finish_background()

    def _finish_again(self) -> None:
        """What comes after the last checkpoint, which a killed run may have left undone."""
        self.progress.note(f"the run is finished (step {self.learner.version}): writing its model again")
        remove_old_checkpoints(
            self.directory.checkpoints, self.learner.version, *self.guard.to_keep(self.learner.version)
        )
        self._note_checkpoints()
        self._write_final_model()
        ledger = self._open_ledger()
        ledger.fates.not_needed(self.learner.version)
        self._check(ledger, self.data, self.data.next_group)
        self._finish_background()

    def _open_ledger(self) -> Ledger:
        data = self.data
        with self._disk_errors_explained("the ledger"):
            self.ledger = Ledger(
                self.directory.ledger,
                self.config.sampling.num_generations,
                data.next_group,
                data.done,
                self.progress.note,
            )
        return self.ledger

    def close(self) -> None:
        """End the runtime and close the logs."""
        if self.rollouts is not None:
            self.rollouts.close()
        if self.background is not None:
            self.background.close()
        if self.ledger is not None:
            try:
                self.ledger.check_sums()
            except (OSError, UserError, sqlite3.Error, LedgerMismatch) as error:
                self.progress.note(f"the ledger could not be completed: {error}")  # what has been raised says more
            with contextlib.suppress(OSError, UserError, sqlite3.Error):
                self.ledger.close()
        self.timeline.close()
        for logger in self.loggers:
            with contextlib.suppress(OSError):  # a full disk has been reported by the write that met it
                logger.close()

    def _make_learner(self) -> Learner:
        config = self.config
        if config.model.gradient_checkpointing:
            self.model.activation_checkpointing_enable()
        return Learner(self.model, self.guard.spec, config.training, config.sampling.temperature)

    def _make_prompts(self, task: Task) -> PromptSource:
        sampling = self.config.sampling
        prompts = PromptSource(
            task,
            self.tokenizer,
            self.config.seed,
            sampling.max_prompt_length,
            sampling.long_prompts,
            self.data.position,
            sampling.chat_template_kwargs,
        )
        prompts.skipped = int(self.data.counts["prompts_skipped"])
        prompts.truncated = int(self.data.counts["prompts_truncated"])
        return prompts

    def _make_rollouts(self, params: SamplingParams, starter: GroupStarter) -> Rollouts:
        if self.snapshots is not None:
            return LockstepRollouts(
                self.config, self.model, params, self.tokenizer, starter, self.grading, self.snapshots, self.timeline
            )
        return LocalRollouts(
            self.config,
            self.model,
            params,
            starter,
            self.grading,
            stop_requested=lambda: self.stop.requested,
            note=self.progress.note,
            timeline=self.timeline,
        )

    def _check(self, ledger: Ledger, data: DataProgress, next_number: int) -> None:
        """Assert that every trajectory of the run is accounted for. next_number: of the next group to be started."""
        trained = self.learner.version * self.config.training.prompts_per_step
        with self._disk_errors_explained("the ledger"):
            ledger.check(data.next_group, data.done, next_number, trained)

    def _step(self, rollouts: Rollouts, starter: GroupStarter, ledger: Ledger) -> None:
        learner, timeline = self.learner, self.timeline
        begin = time.perf_counter()
        learner.damping = self.guard.damping(learner.version)
        with timeline.span("waiting for rollouts"):
            groups = rollouts.minibatch(learner.version)
        sampled = time.perf_counter()
        numbers = [group.id for group in groups]
        with ledger.fates.failing("the learner's step", numbers), timeline.span("training"):
            result = learner.step(groups)
        ledger.fates.trained(learner.version, numbers, result.skipped)
        rollouts.observe(result.metrics)
        with self._disk_errors_explained("alarms"):
            answer = self.guard.inspect(learner.version, groups, result)
        self._follow(answer, rollouts)
        with timeline.span("publishing weights"):
            rollouts.publish(learner.version)
        end = time.perf_counter()
        self.data = starter.progress
        self.rollouts_state = rollouts.state()
        with self._disk_errors_explained("the ledger"), timeline.span("ledger"):
            ledger.write()
        metrics = {
            **result.metrics,
            **self.data.counts,
            **rollouts.metrics(),
            **self.grading.metrics(),
            **self.guard.metrics(),
            **(self.background.metrics() if self.background else {}),
            "time_sample": sampled - begin,  # in the local runtime: the time that the learner waited
            "time_train": end - sampled,
            "time_step": end - begin,
            "time_ledger": ledger.seconds(),
            "tokens_per_second": result.metrics["tokens"] / (end - begin),
        }
        if result.skipped:
            self.progress.note(f"step {learner.version} skipped: {result.skipped}")
        with timeline.span("logging"):
            self._log("train", metrics)
            with self._disk_errors_explained("transcripts"):
                self.transcripts.write(learner.version, groups, result, self._decode)
            with self._disk_errors_explained("trajectories"):
                self.trajectories.step_done(learner.version, groups)
        timeline.step_is(learner.version)

    def _follow(self, answer: Answer | None, rollouts: Rollouts) -> None:
        """Do what the watchdog's alarm asks for, before the weights of this step are published."""
        if answer is None:
            return
        if answer.action == "drain":
            rollouts.drain(self.config.watchdog.drain_steps)
        if answer.checkpoint is not None:
            self._roll_back(answer.checkpoint)
            rollouts.restart()

    def _roll_back(self, checkpoint: Path) -> None:
        """The weights and the optimizer of a checkpoint become those of the present version; later ones are removed."""
        model, _ = self._load_model_of(checkpoint)
        assign(self.model, trained_parameters(model))
        state = load_state(checkpoint)
        self.learner.go_on_from(state.numbers["learner"], _with_prefix(state.tensors, "learner."), self.guard.spec)
        for path in list_checkpoints(self.directory.checkpoints):
            if version_of(path) > version_of(checkpoint):
                shutil.rmtree(path)

    def _evaluates_at(self, step: int) -> bool:
        return step % self.config.eval.eval_steps == 0 or step == self.config.training.max_steps

    def _evaluate(self, evaluator: Evaluator) -> None:
        if self.background is not None:
            if self.learner.version < self.config.training.max_steps:  # the last one starts when nothing else is left
                with self.timeline.span("copying weights for evaluation"):
                    self.background.start(self.learner.version)
            return
        with self.timeline.span("evaluation"), self.progress.phase("evaluation", None) as phase:
            result = evaluator.run(self.model, phase)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the evaluation's key/value memory, which samplers on the same device may need
        self._log("eval", result.metrics)

    def _open_background(self, evaluator: Evaluator | None) -> None:
        """The evaluation beside the training, if there is one; what was not finished before a resume begins again."""
        in_background = evaluator is not None and self.config.eval.background
        if (self.is_new or not in_background) and discard_unfinished(self.directory.path) and not self.is_new:
            self.progress.note("an unfinished evaluation is given up: eval.background is off now")
        if evaluator is None or not in_background:
            return
        self.background = background = BackgroundEvaluation(
            self.config, self.model, evaluator, self.directory.path, self.progress.note
        )
        if self.is_new:
            return
        step = self.learner.version
        unfinished = background.unfinished(step)
        if unfinished is not None:
            if self._is_evaluated(unfinished):
                background.done(unfinished)  # the run was killed right after its result was logged
            else:
                background.restart(unfinished)
        # the kill may also have come between the checkpoint and the evaluation of the same step
        is_due = step < self.config.training.max_steps and self._evaluates_at(step)
        if is_due and background.running is None and not self._is_evaluated(step):
            background.start(step)

    def _is_evaluated(self, step: int) -> bool:
        lines = read_metrics(self.directory.path / METRICS_FILE)
        return any(line["kind"] == "eval" and line["step"] == step for line in lines)

    def _log_background(self) -> None:
        """Log the result of an evaluation that has finished, under the step that it is of."""
        if self.background is None or (found := self.background.take_result()) is None:
            return
        step, metrics = found
        self._log("eval", metrics, step)
        self.background.done(step)

    def _finish_background(self) -> None:
        """Wait for the evaluation that is running, then for that of the last step."""
        if self.background is None:
            return
        last = self.learner.version
        self._await_background()
        if not self._is_evaluated(last):
            self.background.start(last)
            self._await_background()

    def _await_background(self) -> None:
        background = self.background
        assert background is not None
        step = background.running
        if step is None:
            return
        with self.timeline.span("waiting for evaluation"), self.progress.phase(f"evaluation of step {step}"):
            while background.running is not None:
                if self.stop.requested:
                    background.wait_until_saved()
                    self.progress.note(
                        f"the evaluation of step {step} is not finished; do it again with: vcpo train"
                        f" {self.directory.path / 'config.yaml'} --resume"
                    )
                    raise KeyboardInterrupt
                background.wait()
                self._log_background()

    def _log(self, kind: Kind, metrics: dict[str, float], step: int | None = None) -> None:
        """step: when it is not the present one."""
        with self._disk_errors_explained("metrics"):
            for logger in self.loggers:
                logger.log(self.learner.version if step is None else step, kind, metrics)

    def _disk_errors_explained(self, what: str) -> contextlib.AbstractContextManager[None]:
        return disk_errors_explained(
            f"{what} in {str(self.directory.path)!r}", "free space and continue with --resume from the last checkpoint"
        )

    def _decode(self, ids: Any) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def _save(self) -> None:
        with self.timeline.span("checkpoint"):
            self._save_now()

    def _save_now(self) -> None:
        if self.background is not None:
            self._log_background()
            self.background.wait_until_saved()
        keep, spare = self.guard.to_keep(self.learner.version)
        numbers, tensors = self.learner.state()
        numbers = {"learner": numbers, **dataclasses.asdict(self.data), "rollouts": self.rollouts_state}
        numbers["guard"] = self.guard.state()
        numbers["base_checksum"] = self.base_checksum
        tensors = {f"learner.{name}": tensor for name, tensor in tensors.items()}
        if self.snapshots is not None:
            tensors |= {f"snapshots.{name}": tensor for name, tensor in self.snapshots.state().items()}
        if self.ledger is not None:
            with self._disk_errors_explained("the ledger"):
                self.ledger.sync()
        with self._disk_errors_explained("metrics"):
            self.metrics_log.sync()
        with self._disk_errors_explained("trajectories"):
            self.trajectories.checkpoint_comes()
        save_checkpoint(
            self.directory.checkpoints,
            self.learner.version,
            lambda path: self._write_model(path / "model"),
            RunState(numbers, tensors),
            keep,
            spare,
        )
        self._note_checkpoints()

    def _note_checkpoints(self) -> None:
        with self._disk_errors_explained("trajectories"):
            self.trajectories.checkpoints_are(
                [version_of(path) for path in list_checkpoints(self.directory.checkpoints)]
            )

    def _restore(self, state: RunState) -> None:
        self.data = DataProgress(**{f.name: state.numbers[f.name] for f in dataclasses.fields(DataProgress)})
        self.rollouts_state = state.numbers["rollouts"]
        self.learner.load_state(state.numbers["learner"], _with_prefix(state.tensors, "learner."))
        if self.snapshots is not None:
            version = self.learner.version
            size = self.config.runtime.max_staleness + 1
            needed = range(max(self.guard.fresh_from, version - size + 1), version + 1)
            self.snapshots.load_state(_with_prefix(state.tensors, "snapshots."), needed)

    def _load_model_of(self, checkpoint: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        return load_model(saved_model(self.config.model, checkpoint / "model"), self.config.seed)

    def _write_final_model(self) -> None:
        with self._disk_errors_explained("the final model"):
            if has_adapter(self.model):
                replace_directory(self.directory.final_adapter, self._write_model)
            replace_directory(self.directory.final_model, self._write_merged)

    def _write_merged(self, path: Path) -> None:
        if has_adapter(self.model):
            save_merged(self.model, path)
            self.tokenizer.save_pretrained(path)
        else:
            self._write_model(path)

    def _write_model(self, path: Path) -> None:
        """The model, or the adapters of one that has some."""
        if has_adapter(self.model):
            save_adapter(self.model, path)
        else:
            self.model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)


def _record_of(directory: RunDirectory) -> contextlib.AbstractContextManager[None]:
    """Around what is written before the first step."""
    return disk_errors_explained(f"the record of this run in {str(directory.path)!r}", "free space and start again")


def _with_prefix(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
