"""``vcpo doctor``: a healthy environment passes, a broken one fails with what to do."""

from __future__ import annotations

import io
from importlib import metadata
from pathlib import Path

import pytest
from rich.console import Console

import vcpo.doctor as doctor


def run() -> tuple[int, str]:
    output = io.StringIO()
    code = doctor.print_report(Console(file=output, width=200))
    return code, output.getvalue()


def pretend(monkeypatch: pytest.MonkeyPatch, package: str, version: str | None) -> None:
    """Let a package have another version, or be absent."""
    real = metadata.version

    def lookup(name: str) -> str:
        if name != package:
            return real(name)
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(doctor.metadata, "version", lookup)


def test_this_environment_is_ready() -> None:
    code, shown = run()
    assert code == 0, shown
    for text in ("torch", "transformers", "gradient of a tensor", "shared memory", "Ready to train."):
        assert text in shown


def test_a_missing_required_package_fails_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "safetensors", None)
    code, shown = run()
    assert code == 1
    assert "Not ready: safetensors" in shown
    (check,) = [check for check in doctor.report() if check.name == "safetensors"]
    assert (check.status, check.found) == ("missing", "not installed")
    assert "pip install" in check.advice


def test_a_required_package_that_is_too_old_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "transformers", "4.40.0")
    code, shown = run()
    assert code == 1
    assert "4.40.0, needs" in shown


def test_a_missing_extra_is_optional_and_names_the_extra_that_adds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "pyarrow", None)
    code, _ = run()
    assert code == 0
    (check,) = [check for check in doctor.report() if check.name.startswith("pyarrow")]
    assert check.status == "optional"
    assert "[data]'" in check.advice


def test_little_shared_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SHARED_MEMORY_GB", 1e9)
    check = doctor._shared_memory()
    assert check.status == "warning"
    assert "--shm-size" in check.advice


def test_a_cache_directory_that_cannot_be_made_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VCPO_CACHE", str(tmp_path / "file"))
    check = doctor._cache_directory()
    assert check.status == "warning"
    assert "VCPO_CACHE" in check.advice
