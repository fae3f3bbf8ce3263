"""The figures of a combination that the planner predicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gossamer.plan.cluster_parser import ClusterParser
from gossamer.plan.predict import Candidate, predict
from gossamer.plan.recommend import NUM_RUNS
from gossamer.plan.runtime_model.cluster_model import ClusterModel
from gossamer.reproduce.experiment import Cell, Experiment


def predicted(experiment: Experiment, cell: Cell, seed: int) -> dict[str, Any]:
    """Return the figures of a summary (``measures``) of one step."""
    settings: Mapping[str, Any] = cell.settings
    name = str(settings["cluster"])
    spec = ClusterParser(name, experiment.clusters[name]).parse()
    model = ClusterModel(spec, spec.parameters, seed=seed, num_runs=NUM_RUNS)
    options = {key: value for key, value in settings.items() if key not in ("cluster", "method", "topology")}
    candidate = Candidate(str(settings["method"]), str(settings.get("topology", "complete")), options)
    prediction = predict(model, candidate)
    return {"time": prediction.step_s, "steps": 1, "megabytes": prediction.bytes_per_step / 1e6}
