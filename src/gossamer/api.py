"""The two functions that Python programs call: ``join`` and ``simulate``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gossamer.config import AUTO, RunConfig, resolve
from gossamer.errors import InputError, unknown
from gossamer.methods import AnyMethod, Method, find
from gossamer.methods import build as build_method
from gossamer.methods.loading.method_contract import is_encodable
from gossamer.methods.loading.method_source import check_ready
from gossamer.settings import from_values
from gossamer.tasks import Task
from gossamer.topology import Topology, build
from gossamer.wire import find as find_codec

if TYPE_CHECKING:
    import networkx as nx
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from gossamer.process.net.tls import TlsFiles
    from gossamer.process.replica.place import Replica
    from gossamer.process.runtime.swarm import Swarm
    from gossamer.runs.loop.loop_output import LoopOutput
    from gossamer.runs.loop.loop_request import PathArgument, TrackerArgument
    from gossamer.virtual.compute.optimizers import MakeOptimizer
    from gossamer.virtual.simulation import PointCallback, SimulationResult
    from gossamer.wire import Codec

TRANSPORTS = ("tcp", "nccl")


def simulate(
    *,
    method: AnyMethod = "a2cid2",
    task: str | Task = "digits",
    topology: str | nx.Graph = "",
    optimizer: str | MakeOptimizer = "",
    schedule: str | Callable[[int], float] = "",
    wire: str | Codec = "float32",
    callback: PointCallback | None = None,
    **settings: Any,
) -> SimulationResult:
    """Train one model on virtual workers: real gradients, simulated time.

    Args:
        method: A name that ``gossamer methods`` lists, the path of a Python file that defines a method (``path.py`` or
            ``path.py:Class``), a subclass of ``gossamer.Method``, or such a method, built already with its settings
            and its topology.
        task: The name of a task, the path of a Python file that defines one, or a ``gossamer.Task``.
        topology: The name of a topology, the path of an edge list, or a networkx graph with the nodes 0 … n−1. Empty:
            the ring, or that of a method that is built already.
        optimizer: A name, or a function from parameters to a torch optimizer. Empty: the default of the method and
            the task.
        schedule: A name, or a function from the step number to a factor on the learning rate. Empty: the task's
            default.
        wire: How models that are exchanged or averaged travel: ``float32``, ``bfloat16``, ``int8``, or a codec
            (``gossamer.wire.Codec``).
        callback: Called with every point of the history, a list with one point per worker, and the events since the
            previous point.
        **settings: Any option of ``gossamer simulate`` by its name, such as ``workers=64``, ``lr=0.1``, ``rate=2``.

    Returns:
        The final figures, the history and the averaged model.

    Raises:
        InputError: If a name, an option or the task cannot be used.

    Examples:
        >>> result = simulate(task="quadratic", method="gossip", workers=4, clock="ideal", steps=20)
        >>> result.final.time
        20.0
    """
    from gossamer.virtual.simulation import observer_of
    from gossamer.virtual.simulation import simulate as run_simulation

    _check_topology(method, topology)
    given = {"method": method, "task": task, "topology": topology, "optimizer": optimizer, "schedule": schedule}
    names = {name: value for name, value in given.items() if isinstance(value, str) and (value or name == "method")}
    if isinstance(wire, str):
        names["wire"] = wire
    runs = resolve(
        {**settings, **names},
        method=None if isinstance(method, str) else method,
        task=None if isinstance(task, str) else task,
        graph=None if isinstance(topology, str) else topology,
        make_optimizer=None if isinstance(optimizer, str) else optimizer,
        schedule=None if isinstance(schedule, str) else schedule,
        codec=None if isinstance(wire, str) else find_codec(wire),
    )
    if len(runs) > 1:
        raise InputError("simulate trains with one method at a time: call it once for each")
    return run_simulation(runs[0], None if callback is None else observer_of(callback))


def join(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    method: AnyMethod = "a2cid2",
    topology: str | nx.Graph = "",
    mesh: DeviceMesh | None = None,
    between: str | Replica = "",
    seed: int = 0,
    wire: str | Codec = "float32",
    transport: str = "tcp",
    loss: Callable[[], Tensor] | None = None,
    timeout: float = 300.0,
    tls: TlsFiles | None = None,
    partition: str = "continue",
    out: PathArgument | None = None,
    tracker: TrackerArgument | None = None,
    trace: bool | PathArgument = False,
    resume: bool = False,
    at: str = "",
    **settings: Any,
) -> Swarm:
    """Train ``model`` together with the other workers of this job, which torchrun starts like any PyTorch job.

    Returns when all workers have joined and compared what has to be the same on all of them; if something differs,
    every worker raises the same error. The training loop stays as it is, including ``optimizer.step()``. Each worker
    must see its own share of the data, which ``shard`` gives it:

    ```python
    swarm = gossamer.join(model, optimizer, method="a2cid2", topology="ring")
    for x, y in swarm.shard(loader):
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    swarm.finish()  # all workers have the same, averaged weights
    ```

    Args:
        model: The model. Its trainable parameters become views of one flat vector, and all workers start from the
            weights and buffers of rank 0.
        optimizer: The optimizer of exactly the model's trainable parameters; frozen ones may be in it too. That inside
            Accelerate's and Lightning's wrappers is found.
        method: A name that ``gossamer methods`` lists, the path of a Python file that defines a method (``path.py`` or
            ``path.py:Class``), a subclass of ``gossamer.Method``, or such a method, built already with its settings
            and its topology. ``auto`` measures the workers for some seconds, plans, and uses the best method and
            topology; ``swarm.events`` names them.
        topology: A name that ``gossamer topology`` lists, or a networkx graph with the nodes 0 … n−1. Empty: the ring,
            or that of a method that is built already.
        mesh: For workers of several ranks each, called replicas: the device mesh of all ranks, in whose other
            dimensions the model is parallel (DDP, FSDP2, tensor parallel).
        between: The dimension of ``mesh`` that counts the replicas; or a ``gossamer.Replica``, if each replica is a job
            of its own and ``mesh`` has its ranks only.
        seed: Seed of all random choices. It must be the same on all workers.
        wire: How models that are exchanged or averaged travel: ``float32``, ``bfloat16``, ``int8``, or a codec
            (``gossamer.wire.Codec``). It must be the same on all workers.
        transport: Transport of collectives among more than two workers: ``tcp``, through host memory, or ``nccl``,
            between GPUs, if each worker has its own. Pairwise exchanges always go through host memory.
        loss: Only for ``auto``, to time a step: a function that returns the loss of one mini-batch, such as
            ``lambda: loss_fn(model(x), y)``. The model and the optimizer are restored afterwards.
        timeout: How many seconds to wait for the other workers.
        tls: The certificates for encrypted connections between the workers. By default the files that the environment
            names (``GOSSAMER_TLS_CERT``, ``GOSSAMER_TLS_KEY``, ``GOSSAMER_TLS_CA``), if any.
        partition: What a worker does that cannot reach the others. ``continue``: it trains on with those that it can
            reach, and both sides are averaged when they meet again. ``majority``: it waits unless it can reach more
            than half of the workers; ``swarm.events`` says so.
        out: A folder for the run, which ``gossamer report`` and ``gossamer watch`` show, during the training too. It
            must be new. All workers give one; on a shared disk, the same.
        tracker: A function ``track(step, scalars)``, the path of a Python file that defines it, or ``tensorboard``,
            which writes into the run folder. One worker calls it, with the figures of all.
        trace: True, or the name of a file: trace every single event. It needs ``out``.
        resume: Continue the run that ``out`` contains, if it contains one, from checkpoints of your own
            (``Swarm.load_state_dict``).
        at: HOST:PORT of the store or of any worker of a run in progress: this worker comes to it, gets the next
            free rank and takes over the state of the others. By default what ``GOSSAMER_JOIN`` says in the environment,
            so that a script need not be changed. Everything else must be given as on the others.
        **settings: Options of the method by name, such as ``rate=2``.

    Returns:
        The handle of this worker, to evaluate, checkpoint and finish with.

    Raises:
        InputError: If an argument or the run folder cannot be used, if workers differ, or if some do not come within
            ``timeout``.
    """
    from gossamer.process.events import EventKind
    from gossamer.process.joining.handshake import refuse_start
    from gossamer.process.joining.join_checks import check
    from gossamer.process.roster.newcomer import Newcomer
    from gossamer.process.runtime import partition_policy
    from gossamer.process.runtime.swarm import Swarm
    from gossamer.process.runtime.worker_runtime import WorkerRuntime
    from gossamer.process.store.rank_info import find_rank, find_rank_info, own_prefix

    group = None
    if mesh is not None or between != "":
        from gossamer.process.replica.checks import check_method
        from gossamer.process.replica.joining import ReplicaGroup

        group = ReplicaGroup(mesh, between, timeout)
        if group.place.shard:
            # One rank of a replica reports for all.
            out, tracker, trace, resume = None, None, False, False
    newcomer = None
    if at := at or os.environ.get("GOSSAMER_JOIN", ""):
        if group is not None or method == AUTO:
            raise InputError("a worker comes to a run (at) with a method by name and without mesh: leave those out")
        newcomer = Newcomer(at, tls, timeout, prefix=own_prefix)
        workers = newcomer.workers
    else:
        workers = find_rank()[1] if group is None else group.place.replicas

    def prepare() -> tuple[nn.Module, Optimizer, LoopOutput | None, tuple[Method, Topology, Codec | None] | None]:
        _check_arguments(method, topology, transport, timeout, loss, settings)
        partition_policy.check_policy(partition)
        joined, its_optimizer = check(model, optimizer) if group is None else group.check_model(model, optimizer)
        output = None
        if out is not None or tracker is not None or trace or resume:
            from gossamer.runs.loop.loop_output import LoopOutput

            output = LoopOutput(out, tracker, trace, resume)
        if method == AUTO:
            if group is not None:
                raise InputError("method auto does not work with mesh yet: name a method, such as diloco")
            return joined, its_optimizer, output, None
        ready = _ready(method, topology, settings, wire, workers, seed, its_optimizer)
        if group is not None:
            check_method(ready[0], joined, transport, ready[2] is not None)
        return joined, its_optimizer, output, ready

    chosen = ""
    if group is not None:
        model, optimizer, output, ready = group.agree(prepare, lambda prepared: _compared(prepared, seed))
    else:
        try:
            model, optimizer, output, ready = prepare()
        except InputError as error:
            if newcomer is not None:
                newcomer.close()
                raise
            # The others would wait for this worker.
            with contextlib.suppress(InputError):
                refuse_start(find_rank_info(tls), str(error))
            raise
    if ready is None:
        from gossamer.plan.auto import choose_for_loop

        assert loss is not None
        candidate, verdict = choose_for_loop(find_rank_info(tls), model, optimizer, loss, timeout)
        chosen, settings = f"auto: {verdict}", dict(candidate.options)
        method, topology = candidate.method, candidate.topology
        ready = _ready(method, topology, settings, wire, workers, seed, optimizer)
    instance, graph, codec = ready
    if newcomer is not None:
        rank_info = newcomer.take_rank()
    else:
        rank_info = find_rank_info(tls) if group is None else group.place.rank_info(tls)
    recorder = None if output is None else output.recorder(rank_info.rank)
    replica = None if group is None else group.connect(rank_info)
    try:
        runtime = WorkerRuntime(
            model,
            optimizer,
            instance,
            graph,
            rank_info,
            seed,
            transport,
            recorder,
            codec,
            timeout,
            output is not None,
            replica,
            partition,
        )
    except BaseException as error:
        if replica is not None:
            replica.watch.close(finished=False, why=str(error) if isinstance(error, InputError) else "")
        raise
    swarm = Swarm(runtime, output)
    if output is not None:
        from gossamer.runs.loop.loop_config import loop_config

        shown_topology = topology if isinstance(topology, str) and topology else graph.name
        output.start(swarm, runtime, loop_config(runtime, method, settings, shown_topology, seed, codec, transport))
    if chosen:
        swarm.events.add(EventKind.CHOSEN, chosen)
    return swarm


def _compared(prepared: tuple[Any, ...], seed: int) -> tuple[nn.Module, Method, str, int]:
    """Return what all ranks of all replicas compare of what ``join`` has prepared."""
    model, _, _, (method, topology, _) = prepared
    return model, method, topology.name, seed


def _check_arguments(
    method: AnyMethod,
    topology: str | nx.Graph,
    transport: str,
    timeout: float,
    loss: Callable[[], Tensor] | None,
    settings: dict[str, Any],
) -> None:
    if transport not in TRANSPORTS:
        raise unknown("transport", transport, TRANSPORTS)
    if not timeout > 0:
        raise InputError(f"timeout is {timeout}: expected a number of seconds above 0, such as 300")
    _check_topology(method, topology)
    if method != AUTO:
        return
    if loss is None:
        raise InputError(
            "method auto has to time a step: give the loss of one mini-batch, as loss=lambda: loss_fn(model(x), y)"
        )
    if settings or topology != "":
        raise InputError("method auto chooses the topology and the options too: leave them out, or name a method")


def _ready(
    method: AnyMethod,
    topology: str | nx.Graph,
    settings: dict[str, Any],
    wire: str | Codec,
    workers: int,
    seed: int,
    optimizer: Optimizer,
) -> tuple[Method, Topology, Codec | None]:
    """Return the method, its topology and its codec, checked."""
    if isinstance(method, Method):
        instance, graph = method, check_ready(method, workers, settings)
    else:
        graph = build(RunConfig.topology if topology == "" else topology, workers=workers, seed=seed)
        instance = _built(method, settings, graph)
    instance.check_optimizer(optimizer)
    codec = find_codec(wire)
    if codec is not None and not is_encodable(instance):
        raise InputError(
            f"wire is for models that are exchanged or averaged, which {instance.name} does not do: leave it out"
        )
    return instance, graph, codec


def _built(method: str | type[Method], settings: dict[str, Any], topology: Topology) -> Method:
    kind = find(method)
    options = kind.Config.__dataclass_fields__
    for name in settings:
        if name not in options:
            raise InputError(f"{kind.name} has no option {name!r}: expected some of {', '.join(options) or 'none'}")
    return build_method(kind, from_values(kind.Config, settings), topology)


def _check_topology(method: AnyMethod, topology: str | nx.Graph) -> None:
    if isinstance(method, Method) and topology != "":
        raise InputError(f"method {method.name} has been built with its topology: leave topology out")
