"""``vcpo doctor``: is everything here that a run needs, and what would each extra add."""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vcpo import vllm_environment
from vcpo.errors import UserError
from vcpo.observe.environment import cpu_model, gpu_names, memory_gb, usable_cores

Status = Literal["ok", "optional", "warning", "missing"]

_OLDEST_PYTHON = (3, 11)
_SHARED_MEMORY = Path("/dev/shm")
_SHARED_MEMORY_GB = 1.0  # containers often come with 0.06
_STYLES: dict[Status, str] = {"ok": "green", "optional": "dim", "warning": "yellow", "missing": "bold red"}


@dataclass(frozen=True)
class Check:
    """One finding. ``missing`` means that runs fail; ``advice`` says what to do, empty when nothing is to be done."""

    area: str
    name: str
    status: Status
    found: str
    advice: str = ""


def report() -> list[Check]:
    """Look at the interpreter, packages, device, shared memory and cache directory, and try a small gradient."""
    return [_python(), *_packages(), _vllm(), *_device(), _shared_memory(), _cache_directory(), _gradient()]


def print_report(console: Console) -> int:
    """Print every finding; returns the exit code: 1 when something that a run needs is missing, otherwise 0."""
    checks = report()
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("", "check", "found", "to do"):
        table.add_column(name, overflow="fold")
    area = ""
    for check in checks:
        if area and check.area != area:
            table.add_section()
        area = check.area
        status = Text(check.status, style=_STYLES[check.status])
        table.add_row(status, Text(check.name), Text(check.found), Text(check.advice))
    console.print(table)
    missing = [check.name for check in checks if check.status == "missing"]
    if missing:
        console.print(Text(f"Not ready: {', '.join(missing)}", style="bold red"))
        return 1
    console.print(Text("Ready to train.", style="bold green"))
    return 0


def _python() -> Check:
    version = platform.python_version()
    if sys.version_info < _OLDEST_PYTHON:
        return Check("python", "python", "missing", version, "use Python 3.11 or newer")
    return Check("python", "python", "ok", version)


def _packages() -> Iterator[Check]:
    """What the installed metadata of vcpo asks for: required packages, then those of each extra."""
    try:
        distribution = metadata.distribution("vcpo")
    except metadata.PackageNotFoundError:
        yield Check("packages", "vcpo", "missing", "not installed as a package", "pip install -e . in its source tree")
        return
    yield Check("packages", "vcpo", "ok", distribution.version)
    requirements = [Requirement(text) for text in distribution.requires or []]
    shown = {"vcpo"}  # extras may contain each other
    # the extra for developers contains others, which should be listed under their own names
    extras = sorted(distribution.metadata.get_all("Provides-Extra") or [], key=lambda extra: (extra == "dev", extra))
    for extra in ["", *extras]:
        for requirement in requirements:
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
            if wanted and requirement.name not in shown:
                shown.add(requirement.name)
                yield _package(requirement, extra, _install(distribution, extra))


def _package(requirement: Requirement, extra: str, command: str) -> Check:
    area = f"extra {extra}" if extra else "packages"
    name = f"{requirement.name} ({area})" if extra else requirement.name
    wanted = str(requirement.specifier)
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Check(area, name, "optional" if extra else "missing", "not installed", command)
    if not requirement.specifier.contains(version, prereleases=True):
        return Check(area, name, "warning" if extra else "missing", f"{version}, needs {wanted}", command)
    return Check(area, name, "ok", f"{version} ({wanted})" if wanted else version)


def _vllm() -> Check:
    """vLLM has an environment of its own, where configurations look for it by default."""
    try:
        environment = vllm_environment.examine(vllm_environment.DEFAULT_PYTHON)
    except UserError as error:
        installed = Path(vllm_environment.DEFAULT_PYTHON).exists()
        found = str(error).partition(". ")[0] if installed else f"no {vllm_environment.DEFAULT_PYTHON} here"
        return Check("vllm", "vLLM engine", "warning" if installed else "optional", found, "see docs/vllm.md")
    found = f"{environment.vllm} in {vllm_environment.DEFAULT_PYTHON} (Python {environment.python})"
    return Check("vllm", "vLLM engine", "ok", found)


def _install(distribution: metadata.Distribution, extra: str) -> str:
    """The command that adds an extra (or everything required) to this installation."""
    python = _shortest(Path(sys.executable))
    suffix = f"[{extra}]" if extra else ""
    # an editable installation leaves this record of its source tree
    if '"editable": true' in (distribution.read_text("direct_url.json") or ""):
        return f"{python} -m pip install -e '.{suffix}' in the source tree"
    return f"{python} -m pip install 'vcpo{suffix}'"


def _shortest(path: Path) -> str:
    """Relative to the working directory where the path lies below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _device() -> Iterator[Check]:
    memory = memory_gb()
    found = f"{cpu_model()}, {usable_cores()} usable cores" + ("" if memory is None else f", {memory:g} GB memory")
    yield Check("device", "processor", "ok", found)
    gpus = gpu_names()
    try:
        import torch
    except Exception as error:
        yield Check("device", "torch", "missing", f"import fails: {error}", "reinstall torch")
        return
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield Check("device", "CUDA devices", "ok", f"{len(names)}: {', '.join(names)} (CUDA {torch.version.cuda})")
    elif gpus:
        advice = "install a build of torch with CUDA support for this driver"
        yield Check("device", "CUDA devices", "warning", f"{', '.join(gpus)}, unusable by torch", advice)
    else:
        yield Check("device", "CUDA devices", "optional", "none: small models train on the processor")


def _shared_memory() -> Check:
    """Weights travel between the processes of the local runtime in shared memory."""
    if not _SHARED_MEMORY.is_dir():
        return Check("storage", "shared memory", "ok", "managed by the system")
    free = shutil.disk_usage(_SHARED_MEMORY).free / 1e9
    found = f"{free:.2f} GB free in {_SHARED_MEMORY}"
    if free < _SHARED_MEMORY_GB:
        advice = "enough for small models only; in a container raise it (docker run --shm-size=8g)"
        return Check("storage", "shared memory", "warning", found, advice)
    return Check("storage", "shared memory", "ok", found)


def _cache_directory() -> Check:
    """Warm starts are kept here."""
    try:
        from vcpo.cache import cache_directory
    except Exception as error:
        return Check(
            "storage", "training code", "missing", f"import fails: {error}", "reinstall torch and transformers"
        )
    directory = cache_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"x")
    except OSError as error:
        advice = "make it writable, or let VCPO_CACHE name another place"
        return Check("storage", "cache directory", "warning", f"{directory}: {error.strerror}", advice)
    free = shutil.disk_usage(directory).free / 1e9
    return Check("storage", "cache directory", "ok", f"{directory} is writable, {free:.1f} GB free")


def _gradient() -> Check:
    """d/dx of sum(x^2) at (1, 2, 3) is (2, 4, 6), on the device that a run would use."""
    try:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        x = torch.tensor([1.0, 2.0, 3.0], device=device, requires_grad=True)
        (gradient,) = torch.autograd.grad((x * x).sum(), x)
        right = gradient.tolist() == [2.0, 4.0, 6.0]
    except Exception as error:
        return Check("self-check", "gradient of a tensor", "missing", f"fails: {error}", "reinstall torch")
    if not right:
        return Check("self-check", "gradient of a tensor", "missing", "wrong result", "reinstall torch")
    return Check("self-check", "gradient of a tensor", "ok", f"right on {device}")
