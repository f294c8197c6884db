"""MLflow (extra ``mlflow``)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from vcpo.observe.logger import Kind
from vcpo.observe.trackers.protocol import TrackedRun

_TAG = "vcpo.run"
_PARAM_LENGTH = 500  # servers of older versions take no more
_PARAMS_AT_ONCE = 100
_METRICS_AT_ONCE = 1000


class MLflowTracker:
    """Metrics ``train/NAME`` and ``eval/NAME``, the configuration as parameters, the project as experiment.

    ``MLFLOW_TRACKING_URI`` says where to; without it, ``mlflow.db`` in the run directory.
    """

    def __init__(self, run: TrackedRun) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric: Any = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.directory / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(run.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        # MLflow makes the ids of its runs
        found = self._client.search_runs([number], f"tags.`{_TAG}` = '{run.id}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            known = set(found[0].data.params)
        else:
            self._id = self._client.create_run(number, run_name=run.name, tags={_TAG: run.id}).info.run_id
            known = set()
        # a parameter cannot be changed any more; where a resumed run differs, its config.yaml says so
        params = [Param(key, value[:_PARAM_LENGTH]) for key, value in _flat(run.config) if key not in known]
        for start in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(self._id, params=params[start : start + _PARAMS_AT_ONCE])
        self.note = f"MLflow: see the run with: mlflow ui --backend-store-uri {uri}" if "://" in uri else ""
        if "@" in uri:  # a user name and password
            self.note = "MLflow: the run is on the server of MLFLOW_TRACKING_URI"

    def log(self, step: int, kind: Kind, metrics: Mapping[str, float]) -> None:
        """One request, or one for each thousand metrics."""
        now = int(1000 * time.time())
        entries = [self._metric(_allowed(f"{kind}/{name}"), value, now, step) for name, value in metrics.items()]
        for start in range(0, len(entries), _METRICS_AT_ONCE):
            self._client.log_batch(self._id, metrics=entries[start : start + _METRICS_AT_ONCE])

    def close(self) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._id)


def _allowed(name: str) -> str:
    """MLflow takes letters, digits and ``_-./ `` in names."""
    return re.sub(r"[^\w\-./ ]", "_", name)[:250]


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield _allowed(f"{prefix}{key}"), str(value)
