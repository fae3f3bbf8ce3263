"""The manifests in the docs set what a worker reads."""

import os
import re
from pathlib import Path

import yaml

import gossamer
from gossamer.process.replica.place import parse_address
from gossamer.process.store.rank_info import find_rank_info

PAGE = (Path(__file__).parents[1] / "docs" / "several-machines.md").read_text(encoding="utf-8")


def block(start):
    return re.search(rf"```\w+\n({re.escape(start)}.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[1]


def test_the_kubernetes_manifest_gives_every_worker_its_rank_info(monkeypatch):
    service, job = yaml.safe_load_all(block("apiVersion"))
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert service["spec"]["clusterIP"] == "None"
    pod = job["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    environment = {entry["name"]: entry for entry in pod["spec"]["containers"][0]["env"]}
    index = environment.pop("RANK")["valueFrom"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    monkeypatch.setenv("RANK", "3")
    for name, entry in environment.items():
        monkeypatch.setenv(name, entry["value"])
    rank_info = find_rank_info()
    assert (rank_info.rank, rank_info.workers) == (3, job["spec"]["completions"])
    assert rank_info.host == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert rank_info.port == service["spec"]["ports"][0]["port"]


def test_the_slurm_script_gives_every_worker_its_rank_info(monkeypatch):
    script = block("#!/bin/bash")
    exported = dict(re.findall(r"^export (\w+)=(.*)$", script, re.MULTILINE))
    assert {"MASTER_ADDR", "MASTER_PORT"} <= exported.keys()
    monkeypatch.setenv("MASTER_ADDR", "host0")
    monkeypatch.setenv("MASTER_PORT", exported["MASTER_PORT"])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("SLURM_NTASKS", "16")
    rank_info = find_rank_info()
    assert (rank_info.rank, rank_info.workers, rank_info.port) == (5, 16, 29500)


def replica_of_the_script():
    """The replica that the lines of the page make of the environment."""
    line = re.search(r"^between = (.*)$", PAGE, re.MULTILINE)[1]
    return eval(line, {"os": os, "gossamer": gossamer})


def test_the_slurm_script_of_replicas_says_which_one_a_task_is(monkeypatch):
    script = block("#!/bin/bash -l")
    exported = dict(re.findall(r"^export (\w+)=(.*)$", script, re.MULTILINE))
    assert exported["REPLICAS"] == "$SLURM_NTASKS"
    assert "--ntasks-per-node=1" in script
    assert "'REPLICA=$SLURM_PROCID torchrun " in script
    assert exported["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    monkeypatch.setenv("REPLICA", "3")
    monkeypatch.setenv("REPLICAS", "4")
    monkeypatch.setenv("REPLICAS_AT", "host0" + exported["REPLICAS_AT"].rpartition(")")[2])
    replica = replica_of_the_script()
    assert (replica.index, replica.count, parse_address(replica.address)) == (3, 4, ("host0", 29400))


def test_the_kubernetes_container_of_replicas_says_which_one_a_pod_is(monkeypatch):
    container = yaml.safe_load(block("name: replica"))
    service, job = yaml.safe_load_all(block("apiVersion"))
    environment = {entry["name"]: entry for entry in container["env"]}
    index = environment.pop("REPLICA")["valueFrom"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    monkeypatch.setenv("REPLICA", "2")
    for name, entry in environment.items():
        monkeypatch.setenv(name, entry["value"])
    assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    replica = replica_of_the_script()
    assert (replica.index, replica.count) == (2, job["spec"]["completions"])
    host, _ = parse_address(replica.address)
    assert host == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
