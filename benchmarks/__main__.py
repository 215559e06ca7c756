"""Times suites and writes JSON lines; makes tables and pictures from them; compares two runs.

    python -m benchmarks --suite prefill,small-q,topk,adversarial --out benchmarks/results/h200
    python -m benchmarks tables             the tables of docs/performance.md and README.md
    python -m benchmarks figures            the pictures of docs/figures/
    python -m benchmarks compare OLD NEW    what got slower; exit code 1 if something did
    python -m benchmarks counts --out FILE  how often sampled thresholds misled, on a Hopper GPU
    python -m benchmarks counters --out FILE    cycles and bytes by Nsight Compute, on the same
    python -m benchmarks loops              the Hopper score loops as ptxas wrote them; no GPU

Every line holds one implementation on one shape of one interleaved run.  Divide times of
one run_id only: a card's clock follows its power.
"""

import argparse
import importlib
import sys
from pathlib import Path

import jax

from benchmarks import inputs, records, runs, suites

COMMANDS = ("tables", "figures", "compare", "counts", "counters", "loops")


def main(arguments: list[str]) -> int:
    """Runs the command line and returns the exit code."""
    if arguments and arguments[0] in COMMANDS:
        # Imported here: a machine that only times needs no matplotlib.
        module = importlib.import_module(f"benchmarks.{arguments[0]}")
        code: int = module.main(arguments[1:])
        return code
    return _run(arguments)


def _run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--suite", type=_list, required=True, help=f"one or more of {','.join(suites.SUITES)}"
    )
    parser.add_argument("--shapes", help="QxN,QxN,... instead of the suite's own")
    parser.add_argument(
        "--inputs", type=_list, default=["random"], help="random, replay or both (%(default)s)"
    )
    parser.add_argument(
        "--replay",
        type=Path,
        default=inputs.REPLAY,
        help="folder of the replay set (%(default)s)",
    )
    parser.add_argument(
        "--implementations",
        type=_list,
        help="names, or module:callable, instead of the suite's own",
    )
    parser.add_argument("--repeats", type=int, default=7, help="timed rounds (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder for <suite>.jsonl")
    args = parser.parse_args(arguments)
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    if unknown := set(args.inputs) - {"random", "replay"}:
        parser.error(f"--inputs must be random, replay or both, got {unknown.pop()!r}")
    if "replay" in args.inputs and args.replay is None:
        parser.error("--inputs replay needs --replay, the folder of the replay set")

    try:
        shapes = suites.parse_shapes(args.shapes) if args.shapes else None
        options = suites.Options(shapes, args.inputs, args.replay, args.implementations)
        planned = [(suite, suites.cases(suite, options)) for suite in args.suite]
    except ValueError as error:
        parser.error(str(error))
    if jax.default_backend() == "cpu":
        if args.shapes is None and set(args.suite) != {"cpu"}:
            parser.error("without a GPU only --suite cpu runs as it is; others need small --shapes")
        for suite in args.suite if args.out is not None else ():
            path = args.out / f"{suite}.jsonl"
            if path.exists() and any(line["driver"] for line in records.read(path)):
                parser.error(f"--out: {path} holds a GPU's lines, and there is none here")
    for suite, cases in planned:
        lines = runs.run(suite, cases, args.repeats)
        print(runs.table(lines))
        if args.out is not None:
            path = args.out / f"{suite}.jsonl"
            records.write(path, lines)
            print(f"wrote {path}")
    return 0


def _list(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
