"""Devices, markers, the GPU receipt and the fixtures that several files share."""

import collections
import datetime
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import pytest
import receipt
import runners

import jax_fused_topk

# Both take effect when JAX first uses a device: child processes need room on the GPU
# beside this one, and shard_map needs several devices, which a CPU gives when asked.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
jax.config.update("jax_num_cpu_devices", 4)

ROOT = pathlib.Path(__file__).resolve().parent.parent
# For benchmarks; last, so that an installed jax_fused_topk comes before the sources.
sys.path.append(str(ROOT))
# The replay inputs and the reports lie beside a checkout, or inside it.
SHARED = next((p for p in (ROOT.parent / "shared", ROOT / "shared") if p.exists()), ROOT / "shared")


def pytest_addoption(parser):
    parser.addoption(
        "--gpu-receipt",
        metavar="PATH",
        type=pathlib.Path,
        help="write which kernel sources the run tested, on which card and with what outcome",
    )

    parser.addoption("--part", metavar="I/N", help="every N-th test, from the I-th on")


def pytest_configure(config):
    config.addinivalue_line("markers", "small: few and small, for compute-sanitizer")


def pytest_collection_modifyitems(config, items):
    """Skips what needs a GPU where there is none, and says what is missing."""
    if part := config.getoption("--part"):
        i, n = map(int, part.split("/"))
        items[:] = items[i - 1 :: n]
    if not any("gpu" in item.keywords for item in items):
        return
    missing = runners.missing_for_cuda()
    if missing is None:
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=missing))


def pytest_sessionfinish(session, exitstatus):
    """A run that was to write a receipt and could not has failed."""
    asked = session.config.getoption("--gpu-receipt") is not None
    if asked and exitstatus == 0 and runners.missing_for_cuda() is not None:
        session.exitstatus = pytest.ExitCode.USAGE_ERROR


def pytest_terminal_summary(terminalreporter, config):
    """Writes the receipt of a run on a GPU, whatever its outcome."""
    path = config.getoption("--gpu-receipt")
    if path is None:
        return
    missing = runners.missing_for_cuda()
    if missing is not None:
        terminalreporter.write_line(f"no GPU receipt written: {missing}", red=True)
        return
    counts = collections.Counter()
    for outcome, reports in terminalreporter.stats.items():
        if outcome in ("passed", "failed", "error", "skipped"):
            counts["failed" if outcome == "error" else outcome] += len(reports)
    info = jax_fused_topk.build_info()
    device = jax.devices("cuda")[0]
    written = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "card": device.device_kind,
        "compute_capability": device.compute_capability,
        "driver": _driver_version(),
        **{name: info[name] for name in ("version", "jax", "jaxlib", "cuda_toolkit")},
        "python": sys.version.split()[0],
        "source_sha256": receipt.source_sha256(),
        "selection": " ".join(filter(None, (config.option.markexpr, config.option.keyword))),
        "counts": dict(sorted(counts.items())),
    }
    path.write_text(json.dumps(written, indent=1) + "\n")
    terminalreporter.write_line(f"GPU receipt: {path}")


def _driver_version():
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    query = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0] or None


CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", "reference", CUDA])
def implementation(request):
    """Each implementation, as a Runner."""
    return runners.Runner(request.param)


@pytest.fixture(params=["cpu", CUDA])
def kernel(request):
    """Each compiled implementation, as a Runner."""
    return runners.Runner(request.param)


@pytest.fixture
def cuda():
    """The CUDA implementation, for tests marked gpu."""
    return runners.Runner("cuda")


@pytest.fixture
def cpu():
    """The CPU implementation."""
    return runners.Runner("cpu")


@pytest.fixture(scope="session")
def replay():
    """A function of num_queries and num_keys that loads the replay inputs as a dict."""
    folder = SHARED / "replay"
    data = folder / "replay_layer2.npz"
    if not data.exists():
        pytest.skip(f"the replay inputs are not here: no {data}")
    spec = importlib.util.spec_from_file_location("replay", folder / "replay.py")
    module = importlib.util.module_from_spec(spec)
    # Reading shared files must not leave a cache beside them.
    write, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = write
    return lambda num_queries, num_keys: module.load(data, num_queries, num_keys)
