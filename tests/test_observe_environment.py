"""The record of versions and machine."""

from __future__ import annotations

import json
import subprocess
import sys

from vcpo.observe.environment import environment


def test_the_record_is_plain_data_with_versions_and_machine() -> None:
    record = json.loads(json.dumps(environment()))
    assert record["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"torch", "transformers", "numpy"} <= record["packages"].keys()
    assert record["cores"] >= 1
    assert isinstance(record["gpus"], list)


def test_making_it_does_not_import_torch() -> None:
    code = "import sys; from vcpo.observe.environment import environment; environment(); print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "False"
