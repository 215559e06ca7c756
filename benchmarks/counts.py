"""How often the Hopper path's sampled thresholds misled, and how many candidates came.

    python -m benchmarks counts --out benchmarks/results/h200/counts.jsonl

For each kind of input one call, whose workspace is read afterwards: rows whose block was
scored again because too few keys exceeded the threshold, rows with a segment that was cut
because too many did, and candidates a row in multiples of K.  The kernels are compiled
here from the sources, for the package itself does not show its workspace.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import hopper_library, inputs, sources
from jax_fused_topk import _ffi

TARGET = "jax_fused_topk_benchmark_count"
SOURCES = (
    "benchmarks/counts.cu",
    "cuda/hopper.cu",
    "cuda/hopper_few.cu",
    "cuda/top_k_filter.cu",
    "cuda/sort_rows.cu",
)
TOPK = 2048
QUERIES = 4096
KEYS = (65536, 131072, 163840)  # shapes that hold candidates
UNKIND_KEYS = 131072


def count(data: inputs.Operands, topk: int) -> dict[str, float]:
    """The counts of one call.

    Args:
      data: the operands of `index_topk`, by name, without batch dimensions.
      topk: K.
    """
    queries, heads, dim = data["q"].shape
    keys = data["k"].shape[0]
    size = _ffi.cuda_module().index_topk_workspace_bytes(
        True, 1, queries, heads, dim, keys, topk, _ffi.ORDERS["any"], False
    )
    shapes = [
        jax.ShapeDtypeStruct((1, queries, 0), jnp.float32),
        jax.ShapeDtypeStruct((1, queries, topk), jnp.int32),
        jax.ShapeDtypeStruct((size,), jnp.uint8),
        jax.ShapeDtypeStruct((4,), jnp.uint32),
    ]
    names = ("q", "k", "weights", "k_scale", "starts", "ends")
    call = jax.jit(lambda *x: jax.ffi.ffi_call(TARGET, shapes)(*x)[3])
    rows, repaired, cut, candidates = (int(x) for x in call(*(data[n][None] for n in names)))
    return {
        "rows": rows,
        "rows_scored_again": repaired,
        "rows_cut": cut,
        "candidates_over_k": candidates / (rows * topk),
    }


def cases(replay: Path | None) -> Iterator[tuple[str, int, inputs.Operands]]:
    """Kind of input, N, and the operands."""
    for keys in KEYS:
        yield "random", keys, inputs.random(0, QUERIES, keys)
        if replay is not None:
            yield "replay", keys, inputs.replay(replay, 0, QUERIES, keys)
    draws = inputs.values(0, 1, UNKIND_KEYS)[0]
    for kind in inputs.ADVERSARIAL:
        if kind != "random":
            yield kind, UNKIND_KEYS, inputs.dial(inputs.unkind(kind, draws), QUERIES)


def main(arguments: list[str]) -> int:
    """Runs `python -m benchmarks counts`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks counts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--replay", type=Path, default=inputs.REPLAY, help="folder of the replay set (%(default)s)"
    )
    parser.add_argument("--out", type=Path, help="file for JSON lines")
    args = parser.parse_args(arguments)
    if not hopper_library.available():
        parser.error("counts needs a Hopper GPU and nvcc")
    hopper_library.register(TARGET, "JftCount", SOURCES)
    lines: list[dict[str, Any]] = []
    for kind, keys, data in cases(args.replay):
        line = {"source_sha256": sources.sha256(), "card": jax.devices()[0].device_kind}
        line |= {"inputs": kind, "q": QUERIES, "n": keys, "topk": TOPK, **count(data, TOPK)}
        lines.append(line)
        print(
            f"{kind:<12}{QUERIES} x {keys:<8} scored again {line['rows_scored_again']:>5}"
            f"   cut {line['rows_cut']:>5}   candidates / K {line['candidates_over_k']:.3f}"
        )
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
        print(f"wrote {args.out}")
    return 0
