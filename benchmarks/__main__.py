"""Times a suite, prints a table and writes JSON lines.

    python -m benchmarks --suite topk --out benchmarks/results/h200

Every line holds one implementation on one shape of one interleaved run: compare lines of
one run_id only, and ratios rather than times, for a card's clock follows its power.
"""

import argparse
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from benchmarks import suites
from benchmarks.timing import Call, interleaved, sm_mhz
from jax_fused_topk import build_info

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from receipt import source_sha256

SUITES = ("topk", "adversarial", "index", "cpu")


def cases(suite: str, replay: Path | None) -> list[Any]:
    """The generators of a suite's cases."""
    if suite == "topk":
        return [suites.top_k(suites.TOP_K_SHAPES)]
    if suite == "adversarial":
        return [suites.adversarial(suites.ADVERSARIAL_SHAPES)]
    if suite == "index":
        return [suites.index(suites.INDEX_SHAPES, replay)]
    return [
        suites.top_k(suites.CPU_TOP_K_SHAPES),
        suites.index(suites.CPU_INDEX_SHAPES, replay),
    ]


def temp_bytes(call: Call) -> int | None:
    """Scratch memory of the compiled call, None for a function that JAX did not compile."""
    if call.device_timer is not None:
        return None
    compiled = call.function.lower(*call.arguments).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--suite", choices=SUITES, required=True)
    parser.add_argument("--replay", type=Path, help="folder of replay inputs; random without it")
    parser.add_argument("--repeats", type=int, default=11, help="timed rounds (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder for <suite>.jsonl")
    args = parser.parse_args()

    info = build_info()
    device = jax.devices()[0]
    common = {
        "run_id": datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ"),
        "source_sha256": source_sha256(),
        "card": device.device_kind if device.platform == "gpu" else f"{os.cpu_count()} CPU cores",
        **{name: info[name] for name in ("version", "jax", "cuda_toolkit", "cpu_isa")},
        "topk": suites.TOPK,
    }
    lines = []
    print(f"{common['card']}, jax {common['jax']}, run {common['run_id']}")
    for generator in cases(args.suite, args.replay):
        for (rows, keys), calls in tqdm(generator, desc=args.suite, disable=None):
            before = sm_mhz()
            timed = interleaved(calls, args.repeats)
            after = sm_mhz()
            for call, result in zip(calls, timed, strict=True):
                scored = call.implementation not in suites.STANDALONE
                line = {
                    **common,
                    "implementation": call.implementation,
                    "order": call.order,
                    "inputs": call.inputs,
                    "q": rows,
                    "n": keys,
                    "h": suites.HEADS if scored else None,
                    "d": suites.DIM if scored else None,
                    "device_ms": result.device_ms,
                    "wall_ms": result.wall_ms,
                    "launches": result.launches,
                    "temp_bytes": temp_bytes(call),
                    "sm_mhz": [before, after],
                    "device_ms_samples": result.device_ms_samples,
                    "wall_ms_samples": result.wall_ms_samples,
                }
                lines.append(line)
                name = " ".join(filter(None, (call.implementation, call.order, call.inputs)))
                device_ms = "" if result.device_ms is None else f"{result.device_ms:.4f}"
                print(
                    f"{rows:>6} x {keys:<9}{name:<34} device {device_ms:>9} ms"
                    f"   wall {result.wall_ms:9.4f} ms"
                )
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / f"{args.suite}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
