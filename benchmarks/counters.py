"""Hardware counters of the indexer and its controls, by Nsight Compute.

    python -m benchmarks counters --out benchmarks/results/h200/counters.jsonl

nvidia-smi's clock is wrong under this load; cycles are exact.  For each call and shape ncu
starts a process of its own, which calls twice: a warm-up, then the call whose launches are
kept.  One JSON line holds a call's launches and their metrics.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import floors, hopper_library, implementations, inputs, nsight, records, suites
from benchmarks.runs import describe

CALLS: dict[str, str | None] = {
    "index_topk": "any",
    "index_scores": None,
    "control:tensor": None,
    "control:score": None,
}
"""Implementation -> the order it is called with."""

SHAPES: list[suites.Shape] = [(4096, 8192), (4096, 131072)]
KINDS = ("random", "replay")


def call_twice(
    implementation: str, shape: suites.Shape, kind: str, replay: Path | None = None
) -> Any:
    """What the process under ncu does: one call as warm-up and one to measure.

    Args:
      implementation: one of `CALLS`.
      shape: Q and N.
      kind: of input, one of `KINDS`.
      replay: folder of the replay set.

    Returns:
      The second call's result.

    Raises:
      RuntimeError: if the implementation cannot run here.
    """
    if kind == "replay" and replay is not None:
        data = inputs.replay(replay, 0, *shape)
    else:
        data = inputs.random(0, *shape)
    variants = implementations.index_variants(implementation, data, suites.chosen_count(shape[1]))
    order = CALLS[implementation]
    function = next((variant.function for variant in variants if variant.order == order), None)
    if function is None:
        raise RuntimeError(f"{implementation} cannot run here: it needs a Hopper GPU and nvcc")
    compiled = jax.jit(function).lower(data).compile()
    jax.block_until_ready(compiled(data))
    return jax.block_until_ready(compiled(data))


def launches(ncu: str, arguments: Sequence[str]) -> list[nsight.Launch]:
    """The measured launches of a child under ncu.

    Args:
      ncu: path of the program.
      arguments: of the child, after `python -m benchmarks counters`.

    Raises:
      RuntimeError: if ncu or the child fails.
      ValueError: as `nsight.parse` and `nsight.measured`.
    """
    child = [sys.executable, "-m", "benchmarks", "counters", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        done = subprocess.run(nsight.command(ncu, log, child), capture_output=True, text=True)
        text = log.read_text() if log.exists() else ""
    if done.returncode != 0:
        # The reason may stand in any of the three, the last lines say it.
        ends = "\n".join(part[-2000:] for part in (text, done.stdout, done.stderr) if part)
        raise RuntimeError(f"ncu ended with {done.returncode}: {' '.join(arguments)}\n{ends}")
    return nsight.measured(nsight.parse(text))


def summary(line: records.Line) -> str:
    """A line for people."""
    found = line["launches"]
    share = floors.peak_share(line)
    return (
        f"{line['q']} x {line['n']:<8}{line['implementation']:<16}"
        f"{nsight.total(found, nsight.TIME) / 1e6:9.4f} ms{nsight.sm_mhz(found):7.0f} MHz"
        + ("" if share is None else f"{share:8.1%} of the FP8 peak")
    )


def main(arguments: list[str]) -> int:
    """Runs `python -m benchmarks counters`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks counters",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shapes", help="QxN,QxN,... instead of 4096 x 8192 and 131072")
    parser.add_argument("--inputs", choices=KINDS, default="random", help="(%(default)s)")
    parser.add_argument(
        "--replay", type=Path, default=inputs.REPLAY, help="folder of the replay set (%(default)s)"
    )
    parser.add_argument("--out", type=Path, help="file for JSON lines")
    parser.add_argument(
        "--child", choices=CALLS, help="make this call twice on the first shape, for ncu to watch"
    )
    args = parser.parse_args(arguments)
    try:
        shapes = suites.parse_shapes(args.shapes) if args.shapes else SHAPES
    except ValueError as error:
        parser.error(str(error))
    if args.inputs == "replay":
        if args.replay is None:
            parser.error("--inputs replay needs --replay, the folder of the replay set")
        for shape in shapes:
            if not inputs.replay_holds(*shape):
                parser.error(f"--shapes: the replay set holds no window of {shape[0]}x{shape[1]}")
    if args.child is not None:
        call_twice(args.child, shapes[0], args.inputs, args.replay)
        return 0
    ncu = shutil.which("ncu")
    if ncu is None:
        parser.error("counters needs ncu, the command line of Nsight Compute: none on PATH")
    common = machine()
    if common is None:
        parser.error("counters needs a Hopper GPU and nvcc")
    _run(ncu, common, shapes, args.inputs, args.replay, args.out)
    return 0


def machine() -> dict[str, Any] | None:
    """The fields that all lines share; None without a Hopper GPU and nvcc.

    Found out by a process that ends: while another one holds the GPU, ncu waits.
    """
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(_describe_hopper).result()


def _describe_hopper() -> dict[str, Any] | None:
    return describe("counters") if hopper_library.available() else None


def _run(
    ncu: str,
    common: dict[str, Any],
    shapes: Sequence[suites.Shape],
    kind: str,
    replay: Path | None,
    out: Path | None,
) -> None:
    lines: list[records.Line] = []
    for queries, keys in shapes:
        given = ["--shapes", f"{queries}x{keys}", "--inputs", kind]
        if replay is not None:
            given += ["--replay", str(replay)]
        for implementation, order in CALLS.items():
            line = {
                **common,
                "implementation": implementation,
                "order": order,
                "inputs": kind,
                "q": queries,
                "n": keys,
                "h": inputs.HEADS,
                "d": inputs.DIM,
                "topk": suites.chosen_count(keys),
                "launches": launches(ncu, ["--child", implementation, *given]),
            }
            lines.append(line)
            print(summary(line), flush=True)
            if out is not None:  # after each call: a run cut short leaves what it has
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text("".join(json.dumps(x) + "\n" for x in lines))
    if out is not None:
        print(f"wrote {out}")
