"""Variants of a configuration: names with dotted overrides, from a recipe or from a file of their own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vcpo.config import RunConfig, parse_config, read_recipe, set_dotted
from vcpo.errors import UserError


def read_variants(path: Path) -> dict[str, dict[str, Any]]:
    """The variants of a recipe (``compare.variants``) or of a file that holds nothing else.

    Raises UserError when there are none, or when they are no mapping of names to mappings of overrides.
    """
    found = read_recipe(path)
    section = found.get("compare")
    if isinstance(section, dict) and isinstance(section.get("variants"), dict):
        found = section["variants"]
    for name, changes in found.items():
        if not isinstance(name, str) or not isinstance(changes, dict):
            raise UserError(
                f"{str(path)!r} must map names of variants to overrides, like 'slow: {{training.learning_rate: 1e-6}}',"
                f" but {name!r} has {changes!r}"
            )
    if not found:
        raise UserError(f"{str(path)!r} names no variant")
    return found


def changed(data: Mapping[str, Any], changes: Mapping[str, Any], source: str) -> RunConfig:
    """The configuration that plain data make with dotted overrides. Raises UserError that begins with ``source``."""
    mine = copy.deepcopy(dict(data))
    for key, value in changes.items():
        set_dotted(mine, key, copy.deepcopy(value))
    return parse_config(mine, source=source)
