"""JAX's persistent compilation cache: a second process compiles nothing and gets the same bits."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np

TESTS = pathlib.Path(__file__).resolve().parent

PROGRAM = """
import json, sys
import jax, numpy as np
import inputs, jax_fused_topk
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

counts = {"hit": 0, "miss": 0}
def listen(event, **_):
    for name in counts:
        counts[name] += event.endswith({"hit": "/cache_hits", "miss": "/cache_misses"}[name])
jax.monitoring.register_event_listener(listen)
jax.config.update("jax_num_cpu_devices", 2)
# Left in, the key holds a callback's address, which another process does not have.
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)

x = inputs.with_ranges(inputs.integer(1, 8, 200, 4, 16), 2)
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
rows, everywhere = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
layout = (rows, everywhere, rows, everywhere, rows, rows)
sharded = [jax.device_put(a, s) for a, s in zip(x, layout, strict=True)]

def select(topk):
    def run(q, k, weights, k_scale, starts, ends):
        return jax_fused_topk.index_topk(
            q, k, weights, topk=topk, k_scale=k_scale, starts=starts, ends=ends)
    return jax.jit(run)

told, results = {}, {}
for name, operands, topk in (("one", x, 9), ("sharded", sharded, 9), ("other", sharded, 20)):
    f = select(topk)
    before = dict(counts)
    compiled = f.lower(*operands).compile()
    told[name] = {n: counts[n] - before[n] for n in counts}
    results[name] = compiled(*operands)
np.savez(sys.argv[1], **results)
print(json.dumps(told))
"""


def run(folder, results):
    """Runs the program with a cache in `folder` -> (hits and misses by name, results)."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, results],
        cwd=folder,
        env=os.environ
        | {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    with np.load(folder / results) as saved:
        return json.loads(done.stdout.splitlines()[-1]), dict(saved)


def test_a_second_process_hits(tmp_path):
    """For one device and for a sharded program, whose options do not mix up."""
    miss, hit = {"hit": 0, "miss": 1}, {"hit": 1, "miss": 0}
    counts, first = run(tmp_path, "first.npz")
    assert counts == dict.fromkeys(("one", "sharded", "other"), miss)
    counts, second = run(tmp_path, "second.npz")
    assert counts == dict.fromkeys(("one", "sharded", "other"), hit)
    for name, indices in first.items():
        assert np.array_equal(second[name], indices), name
    assert np.array_equal(first["one"], first["sharded"])
    assert first["one"].shape == (8, 9) and first["other"].shape == (8, 20)
