"""Compares one device with several: equal bits, and how the time scales.

    python examples/two_gpus.py                     two GPUs, Q = 4096, N = 131072
    python examples/two_gpus.py --cpu --queries 64 --keys 4096 --topk 256

One device runs `index_topk` over all rows.  Several run it with the queries sharded under
`jit`, and `index_topk_sharded_keys` with the keys sharded under `shard_map`.  The exit code is
0 only if scores and indices of every layout equal one device's, bit for bit.
"""

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import records
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from wall_time import interleaved_ms

import jax_fused_topk as jft

AXIS = "x"


class Operands(NamedTuple):
    """Arguments of `index_topk`, or their layouts."""

    q: Any  # [Q, H, D] float8_e4m3fn
    k: Any  # [N, D] float8_e4m3fn
    weights: Any  # [Q, H] float32
    k_scale: Any  # [N] float32
    ends: Any  # [Q] int32


BY_QUERIES = Operands(P(AXIS), P(), P(AXIS), P(), P(AXIS))
BY_KEYS = Operands(P(), P(AXIS), P(), P(AXIS), P())


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def random_operands(queries: int, keys: int, heads: int, dim: int) -> Operands:
    """Normal draws, quantised; the queries are the last of the keys."""
    draws = jax.random.split(jax.random.key(0), 3)
    q, q_scale = jft.quantize_fp8(jax.random.normal(draws[0], (queries, heads, dim)))
    k, k_scale = jft.quantize_fp8(jax.random.normal(draws[1], (keys, dim)))
    weights = jax.random.normal(draws[2], (queries, heads)) * q_scale
    return Operands(q, k, weights, k_scale, jft.causal_ends(queries, keys))


def select(topk: int, return_scores: bool) -> Callable[[Operands], Any]:
    """`index_topk` of operands, wherever they lie."""

    def run(x: Operands) -> Any:
        return jft.index_topk(**x._asdict(), topk=topk, return_scores=return_scores)

    return run


def select_sharded_keys(topk: int, return_scores: bool, mesh: Mesh) -> Callable[[Operands], Any]:
    """`index_topk_sharded_keys` of operands whose keys lie over the mesh."""

    def run(x: Operands) -> Any:
        return jft.index_topk_sharded_keys(
            **x._asdict(), axis_name=AXIS, topk=topk, return_scores=return_scores
        )

    return jax.shard_map(run, mesh=mesh, in_specs=(BY_KEYS,), out_specs=P())


def layouts(
    devices: Sequence[jax.Device], x: Operands, topk: int, return_scores: bool
) -> dict[str, tuple[Callable[[Operands], Any], Operands]]:
    """Name -> a jitted function and its operands, placed."""
    mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))

    def place(layout: Operands) -> Operands:
        return Operands(
            *(jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(x, layout, strict=True))
        )

    by_queries = select(topk, return_scores)
    by_keys = select_sharded_keys(topk, return_scores, mesh)
    return {
        "one device": (jax.jit(select(topk, return_scores)), jax.device_put(x, devices[0])),
        "queries sharded (jit)": (jax.jit(by_queries), place(BY_QUERIES)),
        "keys sharded (shard_map)": (jax.jit(by_keys), place(BY_KEYS)),
    }


def same_bits(a: Any, b: Any) -> bool:
    """Whether two (scores, indices) are equal, bit for bit."""
    return all(
        np.array_equal(np.asarray(x).view(np.int32), np.asarray(y).view(np.int32))
        for x, y in zip(a, b, strict=True)
    )


def measure(
    devices: Sequence[jax.Device], x: Operands, topk: int, repeats: int
) -> list[dict[str, Any]]:
    """Checks and times every layout; one dict for each, ready for a JSON line."""
    results = {name: f(placed) for name, (f, placed) in layouts(devices, x, topk, True).items()}
    expected = results["one device"]
    timed = layouts(devices, x, topk, False)
    calls = {name: functools.partial(f, placed) for name, (f, placed) in timed.items()}
    samples = interleaved_ms(calls, repeats)
    ms = {name: statistics.median(times) for name, times in samples.items()}
    return [
        {
            "layout": name,
            "devices": 1 if name == "one device" else len(devices),
            "equal": same_bits(results[name], expected),
            "wall_ms": ms[name],
            "speed_up": ms["one device"] / ms[name],
            "wall_ms_samples": samples[name],
        }
        for name in timed
    ]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default, what in (
        ("queries", 4096, "Q"), ("keys", 131072, "N"), ("heads", 64, "H"), ("dim", 128, "D"),
        ("topk", 2048, "K"), ("devices", 2, "how many share the work"), ("repeats", 11, "rounds"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (%(default)s)")
    parser.add_argument("--cpu", action="store_true", help="on devices that a CPU stands in for")
    parser.add_argument("--out", type=Path, help="file for JSON lines")
    args = parser.parse_args(argv)
    for name in ("queries", "keys", "heads", "dim", "topk", "devices", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    for name in ("queries", "keys"):
        if getattr(args, name) % args.devices:
            parser.error(f"--{name} must be a multiple of --devices, got {getattr(args, name)}")
    return args


def find_devices(count: int, cpu: bool) -> list[jax.Device]:
    """`count` devices of the CPU, or else of the default platform, which must be another.

    Raises:
      SystemExit: if there are fewer.
    """
    devices = jax.devices("cpu" if cpu else None)
    if not cpu:
        devices = [device for device in devices if device.platform != "cpu"]
        if len(devices) < count:
            advice = "try --cpu --queries 64 --keys 4096 --topk 256"
            raise SystemExit(f"needs {count} GPUs, found {len(devices)}; {advice}")
    if len(devices) < count:
        raise SystemExit(f"--devices must be at most {len(devices)} here, got {count}: {devices}")
    return devices[:count]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a table; returns 0 if every layout gives one device's bits."""
    args = parse_arguments(argv)
    if args.cpu:
        jax.config.update("jax_num_cpu_devices", max(args.devices, jax.config.jax_num_cpu_devices))
    devices = find_devices(args.devices, args.cpu)
    common = records.describe("devices", devices[0]) | {
        "q": args.queries, "n": args.keys, "h": args.heads, "d": args.dim, "topk": args.topk,
    }  # fmt: skip
    with jax.default_device(devices[0]):
        x = random_operands(args.queries, args.keys, args.heads, args.dim)
    lines = [common | line for line in measure(devices, x, args.topk, args.repeats)]
    print(
        f"Q {args.queries}, N {args.keys}, H {args.heads}, D {args.dim}, topk {args.topk}, FP8; "
        f"{common['card']}, jax {common['jax']}; wall time, medians of {args.repeats}"
    )
    print(f"{'layout':<26}{'devices':>8}{'ms':>10}{'speed-up':>10}  equal to one device")
    for line in lines:
        print(
            f"{line['layout']:<26}{line['devices']:>8}{line['wall_ms']:>10.3f}"
            f"{line['speed_up']:>10.2f}  {'bit for bit' if line['equal'] else 'NO'}"
        )
    if args.out is not None:
        records.write(args.out, lines)
    return 0 if all(line["equal"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
