"""What a run ran on: versions, machine and source revision, without importing torch."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("vcpo", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic")


def environment() -> dict[str, Any]:
    """Versions and machine as plain data, for ``environment.json``.

    Keys: python, platform, packages (name to version; absent ones left out), cpu, cores (those this process may use),
    memory_gb, gpus (names), git_commit (of the source tree, with ``-dirty`` when it has changes; ``None`` when vcpo is
    not run from one).
    """
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": _versions(),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_gb": memory_gb(),
        "gpus": gpu_names(),
        "git_commit": _git_commit(),
    }


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_gb() -> float | None:
    """Main memory in 10^9 bytes, or ``None`` where the system does not tell."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (AttributeError, OSError, ValueError):
        return None


def gpu_names() -> list[str]:
    """Names of the NVIDIA devices that the driver lists; empty without one."""
    listing = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return [line.strip() for line in listing.splitlines() if line.strip()] if listing else []


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _git_commit() -> str | None:
    here = Path(__file__).resolve()
    # an installed copy may lie inside some other project's repository, whose revision would be misleading
    if _output("git", "-C", str(here.parent), "ls-files", "--error-unmatch", here.name) is None:
        return None
    commit = _output("git", "-C", str(here.parent), "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _output("git", "-C", str(here.parent), "status", "--porcelain", "--untracked-files=no")
    return commit.strip() + ("-dirty" if changes else "")


def _output(*command: str) -> str | None:
    """What a command prints, or ``None`` when it is absent, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
