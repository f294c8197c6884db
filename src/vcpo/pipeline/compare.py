"""Methods x seeds of one recipe: every run its own process, as many at a time as there are cores, resumable.

A run's directory is named after its variant, its seed and a hash of its configuration: a finished run is not run
again, an interrupted one continues from its last checkpoint, and a changed recipe gets new directories. The hash
decides: variants of one configuration share one run, and a run is found again when its variant has another name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vcpo.config import RunConfig, parse_config, read_recipe, set_dotted
from vcpo.errors import UserError, suggest
from vcpo.methods.spec import METHODS
from vcpo.pipeline.interrupt import ENDING_SIGNALS
from vcpo.pipeline.run_directory import RunDirectory
from vcpo.pipeline.variants import changed, read_variants

_VARIANT_NAME = re.compile(r"[\w.+=@-]+")  # it becomes part of file names and of a Markdown table


@dataclass(frozen=True)
class PlannedRun:
    """One cell of the comparison. Cells of equal configuration have the same directory: they are one run."""

    variant: str
    seed: int
    directory: Path
    config: RunConfig


def plan(
    recipe: Path, names: Sequence[str], seeds: Sequence[int] | None, overrides: dict[str, Any], out: Path
) -> list[PlannedRun]:
    """Every run of the comparison, validated before any of them starts.

    names: variants of the recipe's ``compare.variants``, names of methods (``file.py:SPEC`` for a user's own), or YAML
        files of variants; all variants of the recipe when empty.
    seeds: those of the recipe's ``compare.seeds`` when ``None``.
    Raises UserError for an unknown name or an invalid configuration, naming the variant, and when there is no seed.
    """
    base = read_recipe(recipe)
    for key, value in overrides.items():
        set_dotted(base, key, value)
    section = parse_config(base, source=str(recipe)).compare
    chosen = _chosen_variants(names, section.variants)
    if not chosen:
        raise UserError(f"{str(recipe)!r} has no compare.variants: name the methods to compare with --methods")
    seeds = list(dict.fromkeys(section.seeds if seeds is None else seeds))
    if not seeds:
        raise UserError(f"{str(recipe)!r} has no compare.seeds: name the seeds with --seeds")
    alone = {key: value for key, value in base.items() if key != "compare"}
    runs = []
    directories: dict[str, Path] = {}
    for name, changes in chosen.items():
        for seed in seeds:
            source = f"variant {name!r} of {str(recipe)!r}"
            config = changed(alone, {**changes, "seed": seed}, source)
            left_out = {"output_dir"} if config.watchdog.enabled else {"output_dir", "watchdog"}
            identity = {k: v for k, v in config.to_plain().items() if k not in left_out}
            digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:10]
            if digest not in directories:
                directories[digest] = _directory(out / "runs", name, f"seed{seed}-{digest}")
            placed = {**changes, "seed": seed, "output_dir": str(directories[digest])}
            runs.append(PlannedRun(name, seed, directories[digest], changed(alone, placed, source)))
    return runs


def _chosen_variants(names: Sequence[str], of_recipe: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Names and overrides of the variants to run, in the order asked for."""
    chosen: dict[str, dict[str, Any]] = {}
    for name in names or of_recipe:
        if name in of_recipe:
            found = {name: of_recipe[name]}
        elif name in METHODS:
            found = {name: {"method": name}}
        elif name.endswith((".yaml", ".yml")):
            found = read_variants(Path(name))
        elif ":" in name:
            found = {name.rpartition(":")[2]: {"method": name}}
        else:
            raise UserError(f"unknown variant or method {name!r}{suggest(name, {**of_recipe, **METHODS})}")
        for variant, changes in found.items():
            if not _VARIANT_NAME.fullmatch(variant):
                raise UserError(f"the variant name {variant!r} must consist of letters, digits and any of . _ + = @ -")
            if chosen.setdefault(variant, changes) != changes:
                raise UserError(f"two variants with different overrides are called {variant!r}: rename one of them")
    return chosen


def _directory(runs: Path, name: str, seed_and_digest: str) -> Path:
    """Where the run is; one of the same configuration that was made under another name serves as well."""
    own = runs / f"{name}-{seed_and_digest}"
    others = sorted(path for path in runs.glob(f"*-{seed_and_digest}") if path.is_dir())
    return min([own, *others], key=lambda path: (not RunDirectory(path).is_finished, not path.exists()))


def execute(runs: Sequence[PlannedRun], jobs: int, note: Callable[[str], None]) -> list[tuple[PlannedRun, str]]:
    """Run what is not finished, ``jobs`` at a time; returns the runs that failed with the last words of each.

    A run that fails does not stop the others. Cells that share a directory are run once, and a failure is returned
    for the first of them. The seeds of one variant may share a warm start through its cache, so the first run of each
    warm start goes first.
    Raises UserError when a run's directory cannot be made.
    """
    for parent in {run.directory.parent for run in runs}:
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"the runs cannot be written to {str(parent)!r}: {error}") from None
    unique: dict[Path, PlannedRun] = {}
    for run in runs:
        same = unique.setdefault(run.directory, run)
        if same is not run:
            note(f"{run.variant} seed {run.seed} has the configuration of {same.variant}: one run serves both")
    todo = [run for run in unique.values() if not RunDirectory(run.directory).is_finished]
    note(f"{len(unique)} runs, {len(unique) - len(todo)} finished before, {jobs} at a time")
    failed = []
    done = len(unique) - len(todo)
    # the children are told before the pool waits for them
    with ThreadPoolExecutor(jobs) as pool, _children() as start:
        futures = {pool.submit(_run, run, start): run for run in _spread(todo)}
        for future in as_completed(futures):
            run, last_words = futures[future], future.result()
            done += 1
            if last_words is None:
                note(f"[{done}/{len(unique)}] {run.variant} seed {run.seed} finished")
            else:
                failed.append((run, last_words))
                note(f"[{done}/{len(unique)}] {run.variant} seed {run.seed} FAILED: {last_words}")
    return failed


def _spread(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """One variant's seeds first: they make the warm starts that the other variants then find in the cache."""
    first = runs[0].variant if runs else ""
    return sorted(runs, key=lambda run: run.variant != first)


def _run(run: PlannedRun, start: Callable[..., subprocess.Popen[str]]) -> str | None:
    try:
        return _run_process(run, start)
    except OSError as error:  # a full disk, or no process to be had: the other runs may still succeed
        return f"it could not be run: {error}"


def _run_process(run: PlannedRun, start: Callable[..., subprocess.Popen[str]]) -> str | None:
    # appended, not with_suffix: a variant such as lr-1.2e-4 has a dot in its name, and its runs would share one file
    recipe = run.directory.with_name(f"{run.directory.name}.yaml")
    recipe.write_text(yaml.safe_dump(run.config.to_plain(), sort_keys=False), encoding="utf-8")
    resumable = (run.directory / "checkpoints").is_dir() and any((run.directory / "checkpoints").glob("step-*"))
    mode = ["--resume"] if resumable else ["--overwrite"]
    log = run.directory.with_name(f"{run.directory.name}.log")
    with log.open("w", encoding="utf-8") as output:
        process = start(
            [sys.executable, "-m", "vcpo", "train", str(recipe), *mode, "--no-report"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        code = process.wait()
    if code == 0:
        return None
    return f"exit code {code}: {_last_words(log.read_text(encoding='utf-8'))} (see {log})"


def _last_words(output: str) -> str:
    """What stands unindented at the end: a traceback's exception with its notes, or the sentence of a UserError."""
    words: list[str] = []
    for line in reversed([line for line in output.splitlines() if line.strip()]):
        if words and (line.startswith(" ") or len(words) == 3):
            break
        words.insert(0, line.strip())
    return "; ".join(words) or "no output"


@contextmanager
def _children() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start processes that are interrupted together when this block is left by an exception (Ctrl-C, SIGTERM)."""
    running: list[subprocess.Popen[str]] = []
    stopping = False
    lock = threading.Lock()

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[str]:
        with lock:
            if stopping:
                raise KeyboardInterrupt
            process = subprocess.Popen(*args, **kwargs, start_new_session=os.name == "posix")
            running.append(process)
            return process

    # SIGINT, too: a shell starts background commands with it ignored
    before = {number: signal.signal(number, signal.default_int_handler) for number in ENDING_SIGNALS}
    try:
        yield start
    except BaseException:
        with lock:
            stopping = True
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # saves a checkpoint and ends
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
