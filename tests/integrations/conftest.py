import json
import multiprocessing
from importlib.util import find_spec

import pytest
import torch.distributed as dist
from integration_process import run_script

from gossamer.process.store.rank_info import free_port

WITHIN_S = 300
WORKERS = 2


@pytest.fixture(scope="session")
def launch(tmp_path_factory):
    """Run a script of ours with two workers, as torchrun does; what each reports, and what they printed.

    The workers are forked from a server that has the libraries loaded: to load them takes longer than the rest.
    """

    def run(script, *libraries):
        for library in libraries:
            if find_spec(library) is None:
                pytest.skip(f"{library} is not installed")
        out = tmp_path_factory.mktemp(script)
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload([*libraries, "gossamer.process.runtime.swarm", "torch._dynamo"])
        # Torchrun's store, which outlives the process groups and the joins of its workers.
        store = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
        environment = {
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(WORKERS),
            "LOCAL_WORLD_SIZE": str(WORKERS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "test",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "GROUP_RANK": "0",
        }
        workers = [
            forks.Process(target=run_script, args=(script, str(out), rank, environment)) for rank in range(WORKERS)
        ]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                worker.join(WITHIN_S)
            codes = [worker.exitcode for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
        said = {
            name: "".join(log.read_text() for log in sorted(out.glob(f"{name}-*.log"))) for name in ("stdout", "stderr")
        }
        assert codes == [0] * WORKERS, said["stdout"] + said["stderr"]
        reports = [json.loads((out / f"{rank}.json").read_text()) for rank in range(WORKERS)]
        return out, reports, said["stdout"]

    return run
