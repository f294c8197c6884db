"""The options of a sandbox, as they stand in a recipe, and the executor that they describe."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from vcpo.errors import UserError
from vcpo.sandbox.bubblewrap import working_bubblewrap
from vcpo.sandbox.http import HttpExecutor
from vcpo.sandbox.pool import SandboxPool, Throttle
from vcpo.sandbox.protocol import MEBIBYTE, Executor, Limits, Status
from vcpo.sandbox.unprotected import WARNING, Unprotected


class SandboxOptions(BaseModel):
    """Where code is run, and what it may use."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    executor: Literal["bubblewrap", "subprocess", "http"] = Field(
        "bubblewrap",
        description="bubblewrap: Linux namespaces; http: a SandboxFusion server; subprocess: no protection",
    )
    allow_unsafe: bool = Field(False, description="required for executor subprocess, which does not protect anything")
    url: str | None = Field(None, description="of the SandboxFusion server, such as http://localhost:8080")
    wall_seconds: float = Field(10.0, gt=0, description="seconds on the clock for one run")
    cpu_seconds: PositiveInt = Field(10, description="seconds of processor time for each process of a run")
    memory_mb: int = Field(512, ge=32, description="MiB of memory for each process of a run, and for all together")
    output_kb: PositiveInt = Field(64, description="KiB of stdout, and as many of stderr; writing more ends the run")
    file_mb: PositiveInt = Field(16, description="MiB of one file; the working directory holds twice as much")
    processes: PositiveInt = Field(16, description="processes and threads of a run at the same time")
    open_files: int = Field(64, ge=16, description="open files of one process")
    warm: NonNegativeInt = Field(4, description="sandboxes that are kept ready; 0 starts each when it is needed")
    max_concurrent: PositiveInt = Field(8, description="runs at the same time, in each sampler")
    calls_per_second: float | None = Field(None, gt=0, description="runs that may start in a second, in each sampler")
    site_packages: bool = Field(False, description="let the code import the packages that are installed beside vcpo")
    preload: list[str] = Field(default_factory=list, description="modules that every sandbox has loaded ahead")

    @model_validator(mode="after")
    def _executor_fits(self) -> SandboxOptions:
        if self.executor == "subprocess" and not self.allow_unsafe:
            raise ValueError(
                "task.sandbox.executor subprocess does not protect this machine from the code that the model writes;"
                " set task.sandbox.allow_unsafe=true if that is meant, or install bubblewrap and use executor"
                " bubblewrap"
            )
        if (self.executor == "http") != (self.url is not None):
            raise ValueError("task.sandbox.url and task.sandbox.executor http need each other")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"task.sandbox.url is {self.url!r}; it must begin with http:// or https://")
        return self

    @property
    def limits(self) -> Limits:
        """In bytes."""
        return Limits(
            wall_seconds=self.wall_seconds,
            cpu_seconds=self.cpu_seconds,
            memory=self.memory_mb * MEBIBYTE,
            output=self.output_kb * 1024,
            file_size=self.file_mb * MEBIBYTE,
            processes=self.processes,
            open_files=self.open_files,
        )

    @property
    def packages(self) -> tuple[str, ...]:
        """Directories whose packages the code may import."""
        return tuple(dict.fromkeys(map(sysconfig.get_path, ("purelib", "platlib")))) if self.site_packages else ()

    def in_words(self) -> str:
        """Which executor, whether its program is there, and the limits; nothing is tried."""
        where = f"the server at {self.url} (not asked)" if self.url else self.executor
        if self.executor == "bubblewrap":
            where += " (there)" if shutil.which("bwrap") else " (NOT there)"
        words = (
            f"{where}: in each sampler {self.max_concurrent} programs at a time, each with at most"
            f" {self.wall_seconds:g} s and {self.memory_mb:,} MiB"
        )
        if self.url:  # what it keeps ready is its own business
            return words
        loaded = f" with {', '.join(self.preload)} loaded" if self.preload else ""
        return f"{words}; {self.warm} sandboxes kept ready{loaded}"


_worked: set[str] = set()  # options that have been tried


def check_sandbox(options: SandboxOptions) -> None:
    """Run a line of code, once in a process. Raises UserError with the reason and what to do when that fails."""
    if options.executor == "bubblewrap":
        working_bubblewrap(options.limits, options.packages, tuple(options.preload))
        return
    written = options.model_dump_json()
    if written in _worked:
        return
    executor = make_executor(options.model_copy(update={"warm": 0}), warn=False)
    try:
        result = executor.run("print(6 * 7)")
    finally:
        executor.close()
    if result.status is not Status.OK or result.stdout.strip() != "42":
        where = f"the server at {options.url}" if options.url else "a process of its own"
        said = " ".join(f"{result.detail} {result.stderr[-300:]}".split())
        raise UserError(f"code cannot be run by {where}: print(6 * 7) ended with {result.status.value!r}: {said}")
    _worked.add(written)


def make_executor(options: SandboxOptions, warn: bool = True) -> Executor:
    """The executor. Raises UserError as ``check_sandbox`` does for bubblewrap.

    warn: say on stderr what the unsafe one does not protect.
    """
    throttle = Throttle(options.max_concurrent, options.calls_per_second)
    if options.url is not None:
        return HttpExecutor(options.url, options.limits, throttle)
    preload = tuple(options.preload)
    if options.executor == "bubblewrap":
        return SandboxPool(working_bubblewrap(options.limits, options.packages, preload).start, options.warm, throttle)
    if warn:
        print(f"WARNING: {WARNING}", file=sys.stderr, flush=True)
    return SandboxPool(Unprotected(options.limits, options.packages, preload).start, options.warm, throttle)
