"""The options of every command.

They are apart from the commands (``gossamer.cli.commands``), so that ``--help`` and mistakes in the command line are
answered without loading torch.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from gossamer import wire
from gossamer.cli.options import add_run_options, named_methods
from gossamer.errors import InputError
from gossamer.methods import Source
from gossamer.tasks import TaskConfig

PROBE_OUT = "cluster.toml"
PROBE_SECONDS = 60.0
PLAN_BUDGET = "2min"
LAUNCH_WORKERS = 4
LAUNCH_RESTARTS = 3
LAUNCH_GRACE_S = 20
PLAN_ROWS = 12
"""Rows of the planner's table, unless --top is given."""


def add_options(command: str, parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Add the options of a command to its parser, with those of the methods that ``arguments`` name."""
    if command not in RUN_OPTIONS:
        OPTIONS[command](parser)
        return
    try:
        RUN_OPTIONS[command](parser, named_methods(arguments))
    except argparse.ArgumentError as error:
        # Only a user's method can have the name of an option that is no setting of a run.
        raise InputError(
            f"{error.argument_name} is an option of gossamer {command} and of a method: rename the one in its Config"
        ) from None


def _add_simulate_options(parser: argparse.ArgumentParser, methods: Sequence[Source]) -> None:
    add_run_options(parser, methods)
    _add_out(parser)
    _add_trackers(parser)
    _add_json(parser)


def _add_train_options(parser: argparse.ArgumentParser, methods: Sequence[Source]) -> None:
    from gossamer.train.job_spec import DEFAULT_WORKERS, SIMULATED

    differing = {
        "method": (
            "how to train: a name, or path.py[:CLASS]; several, with commas, are compared; "
            "auto: probe, plan and take the best",
            "a2cid2",
        ),
        "workers": ("number of workers; under torchrun as many as it started", str(DEFAULT_WORKERS)),
        "compute": (
            "minimum time of one gradient: T, lognormal:MEAN,SIGMA, exponential:MEAN or sample:FILE",
            "what it takes",
        ),
        "nodes": ("number of machines, for topologies that depend on them", "0"),
        "eval_every": (
            "steps between two evaluations of a worker's own model on the test set; 0: as often as is cheap",
            "0",
        ),
    }
    # This command has another --join.
    hidden = [name for name in SIMULATED if name != "join"]
    add_run_options(parser, methods, hardware="hardware", hidden=hidden, left_out=["join"], differing=differing)
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="an address of this machine at which workers can come to the run later, with --join",
    )
    parser.add_argument(
        "--join",
        metavar="HOST:PORT",
        help="add workers to the run that listens there; the job is the run's, only --workers (default: 1), --device, "
        "--compute and --straggler are this machine's",
    )
    parser.add_argument(
        "--leave-on-sigterm",
        action="store_true",
        help="under SLURM or Kubernetes: upon SIGTERM this worker leaves the run for good, and the others go on "
        "(not rank 0, which watches the run)",
    )
    parser.add_argument(
        "--checkpoint-every",
        metavar="N",
        help="write a checkpoint into the folder of --out every N steps per worker (default: never)",
    )
    parser.add_argument("--resume", metavar="RUN", help="resume the run in this folder, or from this checkpoint")
    parser.add_argument(
        "--allow-missing", action="store_true", help="exit with 0 though workers are missing in the final average"
    )
    parser.add_argument("--restart", action="store_true", help="restart workers that die, if this command started them")
    parser.add_argument(
        "--until",
        metavar="MEASURE=X",
        help="for --method auto: choose by the time to accuracy=X or loss=X, not by that of a step",
    )
    parser.add_argument(
        "--budget", metavar="T", help=f"for --until: how long candidates train for it (default: {PLAN_BUDGET})"
    )
    _add_tls(parser)
    _add_out(parser)
    _add_trackers(parser)
    _add_json(parser)


def _add_tls(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("encrypted connections between workers")
    group.add_argument("--tls-cert", metavar="FILE", help="the certificate of the workers, as a PEM file")
    group.add_argument("--tls-key", metavar="FILE", help="its private key, without a passphrase")
    group.add_argument("--tls-ca", metavar="FILE", help="the certificate of the authority that signed all of them")


def _add_launch_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", metavar="N", default=str(LAUNCH_WORKERS), help=f"number of workers (default: {LAUNCH_WORKERS})")
    add(
        "--restarts",
        metavar="N",
        default=str(LAUNCH_RESTARTS),
        help=f"how often a worker that dies is started again (default: {LAUNCH_RESTARTS})",
    )
    add(
        "--grace",
        metavar="S",
        default=str(LAUNCH_GRACE_S),
        help=f"seconds that workers have to end by themselves after Ctrl-C or SIGTERM (default: {LAUNCH_GRACE_S})",
    )
    add("--logs", metavar="DIR", help="write what worker N prints into DIR/N.log (default: it is printed here)")
    add("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as for python -m")
    add("--json", action="store_true", help="print one JSON document; what workers print goes to standard error")
    add("script", metavar="SCRIPT", help="the Python file to run; it calls gossamer.join")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")


def _add_report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders that simulate or train have written with --out")
    parser.add_argument("--out", metavar="FILE", help="the page to write (default: report.html)")
    parser.add_argument("--json", action="store_true", help="print the figures behind the page as one JSON document")


def _add_export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="RUN_OR_CHECKPOINT", help="a run's folder, a checkpoint in it, or one of torch's (dcp)"
    )
    parser.add_argument("--out", metavar="FILE", help="the file to write, such as model.safetensors")
    _add_json(parser)


def _add_watch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the folder that simulate or train writes with --out")
    parser.add_argument(
        "--host", metavar="ADDRESS", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, only here)"
    )
    parser.add_argument("--port", metavar="N", default="0", help="port to listen on (default: any that is free)")
    parser.add_argument("--json", action="store_true", help="print the address as one JSON document")


def _add_probe_options(parser: argparse.ArgumentParser, methods: Sequence[Source]) -> None:
    from gossamer.plan.recommend import BASELINE
    from gossamer.train.job_spec import DEFAULT_WORKERS, SIMULATED

    unused = ("topology", "steps", "epochs", "schedule", "lr_warmup", "eval_every", "nodes")
    differing = {
        "method": ("a method whose preferred optimizer to measure with: a name, or path.py[:CLASS]", BASELINE),
        "workers": ("number of workers; under torchrun as many as it started", str(DEFAULT_WORKERS)),
        "compute": ("minimum time of one gradient, as for gossamer train", "what it takes"),
    }
    add_run_options(parser, methods, hardware="hardware", hidden=(*SIMULATED, *unused), differing=differing)
    parser.add_argument(
        "--out", metavar="FILE", default=PROBE_OUT, help=f"the cluster file to write (default: {PROBE_OUT})"
    )
    parser.add_argument(
        "--seconds",
        metavar="X",
        default=str(PROBE_SECONDS),
        help=f"about how long to measure, in seconds (default: {PROBE_SECONDS:g})",
    )
    _add_json(parser)


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    from gossamer.plan.recommend import MAX_CONTRACTION
    from gossamer.plan.what_if import EXAMPLES

    add = parser.add_argument
    add("--cluster", metavar="FILE", help="the cluster: written by gossamer probe, or by hand")
    add("--task", metavar="TEXT", help="what to train: the name of a task, or a Python file that defines one")
    for field in dataclasses.fields(TaskConfig):
        add(f"--{field.name}", metavar="X", help=field.metadata["help"])
    add("--wire", choices=wire.names(), help="how models that are exchanged or averaged travel (default: float32)")
    add("--optimizer", metavar="TEXT", help="the optimizer; methods that need another one are not recommended")
    add("--batch", metavar="N", help="samples per mini-batch, for the recommended command")
    add("--parameters", metavar="N", help="number of parameters of the model, instead of a task")
    add("--workers", metavar="N,…", help="number of workers; several are compared (default: as in the file)")
    add(
        "--method", metavar="NAME,…", help="only these methods, by name or path.py[:CLASS] (default: all built-in ones)"
    )
    add("--topology", metavar="NAME,…", help="only these topologies (default: all that fit)")
    add("--replica-size", metavar="N", help="plan for replicas of N ranks each, or auto: compare all that fit a node")
    add("--inside", metavar="TEXT", help="what is inside of replicas: ddp or fsdp (default: both are compared)")
    add(
        "--mixing",
        metavar="X",
        default=str(MAX_CONTRACTION),
        help=f"do not recommend plans that leave more of a disagreement per step (default: {MAX_CONTRACTION})",
    )
    add("--what-if", metavar="CHANGE", help=f"change one thing first: {', '.join(EXAMPLES.values())}")
    add("--top", metavar="N", default=str(PLAN_ROWS), help=f"number of rows to print; 0: all (default: {PLAN_ROWS})")
    add("--plot", metavar="FILE", help="draw step time over workers and over bandwidth into a .png, .svg or .pdf file")
    add(
        "--verify",
        action="store_true",
        help="run the best few with real workers, here or under torchrun, and show the errors",
    )
    add("--compute", metavar="TEXT", help="for --verify: minimum time of one gradient, as for gossamer train")
    add("--straggler", metavar="RANK:FACTOR,…", help="for --verify: slow workers, as for gossamer train")
    add("--seed", metavar="N", default="0", help="seed of all that is drawn at random (default: 0)")
    add(
        "--until",
        metavar="MEASURE=X",
        help="rank by the time to accuracy=X or loss=X: the best few train in the virtual cluster",
    )
    add("--budget", metavar="T", help=f"for --until: how long they train, such as 5min (default: {PLAN_BUDGET})")
    for name in ("lr", "partition", "schedule"):
        add(f"--{name}", metavar="X", help="for --until: as for gossamer simulate")
    _add_json(parser)


def _add_reproduce_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", nargs="?", help="the experiment: a name, or path.toml; none: list them")
    add("--size", choices=("full", "reduced"), help="default: full on a GPU, reduced on a CPU")
    add("--device", metavar="TEXT", default="cpu", help="where to compute: cpu or cuda (default: cpu)")
    add("--data", metavar="DIR", help="path of the data, for experiments whose data does not come with Gossamer")
    add("--seeds", metavar="N", help="number of seeds (default: as in the experiment)")
    add("--only", metavar="AXIS=VALUE,…", action="append", default=[], help="only these rows of the table; repeatable")
    add("--out", metavar="DIR", help="folder for runs, table and picture (default: reproduced/NAME-SIZE); "
        "what is complete there is not run again")  # fmt: skip
    _add_json(parser)


def _add_topology_options(parser: argparse.ArgumentParser) -> None:
    from gossamer.topology import names

    parser.add_argument("name", nargs="?", help=f"one of {', '.join(names())}, or an edge-list file; none: list them")
    parser.add_argument("--workers", metavar="N", help="number of workers (default: 16, or as many as the file has)")
    parser.add_argument("--nodes", metavar="N", help="number of machines (alternating-exponential-ring)")
    parser.add_argument("--rate", metavar="X", default="1", help="exchanges per worker and gradient (default: 1)")
    parser.add_argument("--seed", metavar="N", default="0", help="seed of random graphs (default: 0)")
    parser.add_argument("--plot", metavar="FILE", help="draw the graph into a .png, .svg or .pdf file")
    _add_json(parser)


def _add_methods_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="a method to describe in full: a name, or path.py[:CLASS]")
    parser.add_argument("--check", action="store_true", help="check that the method keeps its contract, in both worlds")
    _add_json(parser)


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="DIR", help="write config, metrics, weights and summary into this folder")


def _add_trackers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace",
        nargs="?",
        const="",
        metavar="FILE",
        help="write every event of every worker for Perfetto: into FILE, or into the folder of --out",
    )
    parser.add_argument("--tensorboard", metavar="DIR", help="write all metrics for TensorBoard into this folder")
    parser.add_argument("--tracker", metavar="FILE", help="a Python file whose track(step, scalars) gets all metrics")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")


RUN_OPTIONS = {"simulate": _add_simulate_options, "train": _add_train_options, "probe": _add_probe_options}
"""Commands with the settings of a run."""

OPTIONS = {
    "launch": _add_launch_options,
    "report": _add_report_options,
    "export": _add_export_options,
    "watch": _add_watch_options,
    "plan": _add_plan_options,
    "reproduce": _add_reproduce_options,
    "topology": _add_topology_options,
    "methods": _add_methods_options,
}
"""The other commands."""
