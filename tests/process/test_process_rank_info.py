"""Where workers meet."""

from __future__ import annotations

import random
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist

from gossamer.errors import InputError
from gossamer.process.store import rank_info
from gossamer.process.store.rank_info import find_rank_info, free_port


def test_a_free_port_can_be_listened_on() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        assert 10_000 <= server.getsockname()[1] < 16_000


@pytest.mark.skipif(sys.platform != "linux", reason="claims are made on Linux only")
def test_nobody_else_is_given_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    script = "import gossamer.process.store.rank_info as rank_info, sys; rank_info._lock_port(int(sys.argv[1]))"
    other = subprocess.run([sys.executable, "-c", script, str(port)], capture_output=True, text=True, timeout=60)
    assert "OSError" in other.stderr
    # The next one is taken when the first that is drawn is not to be had.
    first, draw = iter([port]), random.SystemRandom.randrange
    monkeypatch.setattr(random.SystemRandom, "randrange", lambda *bounds: next(first, None) or draw(*bounds))
    assert free_port() != port


@pytest.mark.skipif(sys.platform != "linux", reason="claims are made on Linux only")
def test_claims_do_not_pile_up() -> None:
    for _ in range(2 * rank_info._MAX_PORT_LOCKS):
        free_port()
    assert len(rank_info._port_locks) == rank_info._MAX_PORT_LOCKS


def test_the_address_of_the_launchers_store_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_STORE", "somewhere")
    with pytest.raises(InputError, match=r"GOSSAMER_STORE is 'somewhere': expected HOST:PORT"):
        find_rank_info()


@pytest.mark.parametrize("store_of", ["agent", "process group"])
def test_a_single_worker_leaves_the_port_to_the_store_of_torch(
    store_of: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    port = free_port()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    if store_of == "agent":
        agents = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    else:
        dist.init_process_group("gloo")
        request.addfinalizer(dist.destroy_process_group)
        agents = dist.distributed_c10d._get_default_store()
    info = find_rank_info()
    own = info.connect_store(timeout_s=5)
    try:
        own.set("here", b"yes")
        assert own.get("here") == b"yes"
    finally:
        own.close()
    assert agents.check([info.home.key])
