"""One of several processes under `jax.distributed` on CPUs; `test_processes.py` starts them.

    python processes.py PROCESS ADDRESS

Writes the parts of results that its devices hold to NAME-RESULT-FIRST_ROW-DEVICE.npy.
"""

import os
import sys

import inputs
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fused_topk

PROCESSES, DEVICES_EACH, TOPK = 2, 2, 20


def operands():
    """Small whole numbers: ties everywhere; short, empty and reversed rows."""
    return tuple(inputs.with_ranges(inputs.integer(1, 24, 128, heads=3, dim=16), 2))


def index_topk(q, k, weights, k_scale, starts, ends):
    return jax_fused_topk.index_topk(
        q, k, weights, topk=TOPK, k_scale=k_scale, starts=starts, ends=ends, return_scores=True
    )


def index_topk_sharded_keys(q, k, weights, k_scale, starts, ends):
    return jax_fused_topk.index_topk_sharded_keys(
        q, k, weights, axis_name="x", topk=TOPK, k_scale=k_scale, starts=starts, ends=ends,
        return_scores=True,
    )  # fmt: skip


def place(mesh, specs):
    """The operands over all processes' devices: each process brings what its own hold."""
    return [
        jax.make_array_from_callback(a.shape, NamedSharding(mesh, s), a.__getitem__)
        for a, s in zip(operands(), specs, strict=True)
    ]


def save(name, results):
    """Returns the names of what it writes."""
    written = []
    for i, result in enumerate(results):
        for part in result.addressable_shards:
            first = part.index[0].start or 0
            written.append(f"{name}-{i}-{first}-{part.device.id}.npy")
            np.save(written[-1], np.asarray(part.data))
    return written


def main(process, address):
    jax.config.update("jax_num_cpu_devices", DEVICES_EACH)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, PROCESSES, process, initialization_timeout=60)
    assert jax.device_count() == PROCESSES * DEVICES_EACH
    assert jax.local_device_count() == DEVICES_EACH
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))

    rows = (P("x"), P(), P("x"), P(), P("x"), P("x"))
    by_rows = place(mesh, rows)
    sharded = jax.jit(index_topk)
    written = save("jit", sharded(*by_rows))
    assert "all-gather" not in sharded.lower(*by_rows).compile().as_text()
    mapped = jax.shard_map(index_topk, mesh=mesh, in_specs=rows, out_specs=P("x"))
    written += save("shard_map", jax.jit(mapped)(*by_rows))

    keys = (P(), P("x"), P(), P("x"), P(), P())
    merged = jax.shard_map(index_topk_sharded_keys, mesh=mesh, in_specs=keys, out_specs=P())
    written += save("keys", jax.jit(merged)(*place(mesh, keys)))
    jax.distributed.shutdown()
    print(f"process {process} wrote {len(written)} files to {os.getcwd()}: {', '.join(written)}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        usage = f"usage: processes.py PROCESS ADDRESS, 0 to {PROCESSES - 1} and host:port"
        print(usage, file=sys.stderr)
        sys.exit(2)
    main(int(sys.argv[1]), sys.argv[2])
