"""The manifests in the docs set what a worker reads."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.run as torchrun
import yaml

import gossamer
from gossamer.process.replica.place import parse_address
from gossamer.process.store.rank_info import find_rank_info, free_port

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


EXAMPLES = Path(__file__).parents[1] / "examples"
KUBERNETES = EXAMPLES / "kubernetes-replicas.yaml"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def replicas_manifest():
    return tuple(yaml.safe_load_all(KUBERNETES.read_text(encoding="utf-8")))


def pod_environment(container, index, secret):
    """What Kubernetes sets in the container of the pod with this index."""
    found = {}
    for entry in container["env"]:
        source = entry.get("valueFrom", {})
        if "fieldRef" in source:
            assert source["fieldRef"]["fieldPath"] == INDEX
            found[entry["name"]] = str(index)
        elif "secretKeyRef" in source:
            found[entry["name"]] = secret
        else:
            found[entry["name"]] = entry["value"]
    return found


def test_the_kubernetes_manifest_of_replicas_is_complete(monkeypatch):
    service, job = replicas_manifest()
    assert [(each["apiVersion"], each["kind"]) for each in (service, job)] == [("v1", "Service"), ("batch/v1", "Job")]
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert pod["spec"]["restartPolicy"] == "OnFailure"
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["spec"]["volumes"]}
    given = torchrun.get_args_parser().parse_args([*container["command"][1:], *container["args"]])
    assert (container["command"][0], given.standalone, given.training_script) == ("torchrun", True, "examples/llm.py")
    assert int(given.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    # The command that makes the secret makes the one that the pods read.
    created = re.search(r"kubectl create secret generic (\S+) --from-literal=(\S+)=", KUBERNETES.read_text())
    (entry,) = (entry for entry in container["env"] if entry["name"] == "GOSSAMER_SECRET")
    assert entry["valueFrom"]["secretKeyRef"] == {"name": created[1], "key": created[2]}
    sources = [*(EXAMPLES.parent / "src").rglob("*.py"), EXAMPLES / "llm.py"]
    code = "".join(path.read_text(encoding="utf-8") for path in sources)
    environment = pod_environment(container, 3, "secret")
    for name, value in environment.items():
        assert re.search(rf"\b{name}\b", code), f"nothing reads {name}"
        monkeypatch.setenv(name, value)
    replica = replica_of_the_script()
    assert (replica.index, replica.count) == (3, job["spec"]["completions"])
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    host, port = parse_address(replica.address)
    assert host == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert port == service["spec"]["ports"][0]["port"]


@pytest.mark.timeout(600)
def test_the_container_of_the_kubernetes_manifest_trains(tmp_path):
    """Two of its pods, here: with two ranks on CPUs each, and a small model."""
    _, job = replicas_manifest()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (tmp_path / "examples").mkdir()
    shutil.copy(EXAMPLES / "llm.py", tmp_path / "examples")
    (tmp_path / "text.txt").write_text("".join(f"{number} times two is {2 * number}.\n" for number in range(400)))
    # Without restarts, which would hide that a rank died.
    here_only = {"--nproc-per-node=8": "--nproc-per-node=2", "--max-restarts=3": "--max-restarts=0"}
    assert here_only.keys() <= set(container["command"])
    command = [here_only.get(word, word) for word in container["command"]]
    small = ["--steps=10", "--layers=1", "--width=32", "--heads=2", "--context=16"]
    here = {"REPLICAS": "2", "REPLICAS_AT": f"127.0.0.1:{free_port()}", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    python = {"PATH": path, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    # This replica was started again after its seventh step.
    (tmp_path / "step-1").write_text("7")
    pods = []
    try:
        for index in range(2):
            environment = {**pod_environment(container, index, "0123456789abcdef" * 4), **here, **python}
            with (tmp_path / f"pod-{index}.log").open("wb") as log:
                words = [word.replace("/progress/$(REPLICA)", f"{tmp_path}/step-{index}") for word in container["args"]]
                words = [*command, *words, *small]
                pods.append(
                    subprocess.Popen(
                        words, cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True
                    )
                )
        codes = [pod.wait(400) for pod in pods]
    finally:
        for pod in pods:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pod.pid, signal.SIGTERM)
            pod.wait(60)
    output = [(tmp_path / f"pod-{index}.log").read_text() for index in range(2)]
    assert codes == [0, 0], output
    losses = re.findall(r"^rank (\d): loss on held-out text ([0-9.]+)", "\n".join(output), re.MULTILINE)
    assert sorted(rank for rank, _ in losses) == ["0", "1", "2", "3"]
    assert len({loss for _, loss in losses}) == 1
    assert ["goes on after step" in text for text in output] == [False, True]
    assert "replica 1 goes on after step 7\n" in output[1]
    # Another run begins at step 0.
    assert not list(tmp_path.glob("step-*"))
