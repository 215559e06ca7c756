"""Two processes under `jax.distributed`: bit for bit what one process gives."""

import os
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import oracles
import processes
import pytest

SECONDS = 120  # for all processes together
DEVICES = processes.PROCESSES * processes.DEVICES_EACH


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def wait_for(running, logs):
    """Waits for all until they are done or time is up, and fails with what they wrote."""
    end = time.monotonic() + SECONDS
    try:
        codes = [p.wait(max(end - time.monotonic(), 0)) for p in running]
    except subprocess.TimeoutExpired:
        codes = f"not done after {SECONDS} s"
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert codes == [0] * len(running), (codes, *(log.read_text() for log in logs))


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A function of a name and a result's number -> [(first row, array)], one a device."""
    folder = tmp_path_factory.mktemp("processes")
    address = f"localhost:{free_port()}"
    running, logs = [], []
    for number in range(processes.PROCESSES):
        logs.append(folder / f"{number}.log")
        with logs[-1].open("w") as log:
            running.append(
                subprocess.Popen(
                    [sys.executable, processes.__file__, str(number), address],
                    cwd=folder,
                    env=os.environ | {"JAX_PLATFORMS": "cpu"},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    wait_for(running, logs)
    for number, log in enumerate(logs):
        last = log.read_text().splitlines()[-1]
        assert last.startswith(f"process {number} wrote 12 files to {folder}: jit-0-"), last
    assert len(list(folder.glob("*.npy"))) == 12 * processes.PROCESSES

    def load(name, i):
        paths = folder.glob(f"{name}-{i}-*.npy")
        return [(int(path.stem.split("-")[2]), np.load(path)) for path in paths]

    return load


@pytest.mark.parametrize(
    ("name", "copies"), [("jit", 1), ("shard_map", 1), ("keys", DEVICES)], ids=lambda x: str(x)
)
def test_as_one_process(parts, name, copies):
    """Queries over the devices of both processes under jit and shard_map; keys over them."""
    for i, expected in enumerate(jax.jit(processes.index_topk)(*processes.operands())):
        expected = np.asarray(expected)
        rows = len(expected) * copies // DEVICES
        got = parts(name, i)
        firsts = sorted(first for first, _ in got)
        assert firsts == sorted(list(range(0, len(expected), rows)) * copies)
        for first, part in got:
            oracles.assert_same(part, expected[first : first + rows], f"{name} from row {first}")


def test_a_process_without_arguments_says_what_it_needs():
    done = subprocess.run([sys.executable, processes.__file__], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "usage: processes.py PROCESS ADDRESS, 0 to 1 and host:port\n"


def test_a_failing_process_ends_the_test(tmp_path):
    log = tmp_path / "log"
    with log.open("w") as file:
        failing = subprocess.Popen(
            [sys.executable, "-c", "raise SystemExit('no address')"], stderr=file
        )
    with pytest.raises(AssertionError, match="no address"):
        wait_for([failing], [log])
