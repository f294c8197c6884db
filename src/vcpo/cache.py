"""Where results that only depend on their inputs or on the machine are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """``VCPO_CACHE``, or ``vcpo`` in the user's cache directory."""
    if "VCPO_CACHE" in os.environ:
        return Path(os.environ["VCPO_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vcpo"
