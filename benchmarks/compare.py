"""Says what got slower between two files of JSON lines.

Times of two runs have no ratio, so each call is measured by a control of its own case: the
time over the control's, round by round.  The control is the first of control:tensor,
index_scores and lax.top_k that both files have.  A call got slower if the lower quartile
of its new ratios is more than 3 % above the upper quartile of its old ones: half of the
rounds of a noisy run lie between the quartiles, and a change of clock moves the control
with the call.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import records
from benchmarks.records import Line

CONTROLS = ("control:tensor", "index_scores", "lax.top_k")
TOLERANCE = 0.03


class Change(NamedTuple):
    """One call in both files."""

    name: str
    control: str
    old: float  # median ratio to the control
    new: float
    slower: bool


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper quartile; of one sample, itself twice."""
    if len(samples) == 1:
        return samples[0], samples[0]
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, high


def compare(old: Sequence[Line], new: Sequence[Line]) -> tuple[list[Change], list[str]]:
    """The calls of both files, and the names of those that could not be compared.

    Raises:
      ValueError: if the files are of two cards.
    """
    cards = {line["card"] for line in (*old, *new)}
    if len(cards) > 1:
        raise ValueError(f"both files must be of one card, got {' and '.join(sorted(cards))}")
    before, after = _by_name(old), _by_name(new)
    changes, left_out = [], [f"{name}: only in the new file" for name in after.keys() - before]
    for name, line in before.items():
        if name not in after:
            left_out.append(f"{name}: only in the old file")
            continue
        controls = _controls(line, old), _controls(after[name], new)
        shared = [c for c in CONTROLS if c in controls[0] and c in controls[1]]
        if line["implementation"] in shared[:1]:
            continue  # the control itself
        if not shared:
            left_out.append(f"{name}: no control beside it in both files")
            continue
        ratios = [
            records.ratio_samples(x, of[shared[0]])
            for x, of in zip((line, after[name]), controls, strict=True)
        ]
        slower = quartiles(ratios[1])[0] > quartiles(ratios[0])[1] * (1 + TOLERANCE)
        medians = [statistics.median(r) for r in ratios]
        changes.append(Change(name, shared[0], medians[0], medians[1], slower))
    return changes, sorted(left_out)


def _by_name(lines: Sequence[Line]) -> dict[str, Line]:
    """Case, implementation, order and inputs -> the line of the last run that has it."""
    fields = ("case", "implementation", "order", "inputs")
    return {" ".join(str(line[f]) for f in fields if line[f]): line for line in lines}


def _controls(line: Line, lines: Sequence[Line]) -> dict[str, Line]:
    """The controls that took turns with a line: on its own inputs, else on random ones."""
    beside = records.choose(lines, run_id=line["run_id"], case=line["case"])
    found = {}
    for inputs in ("random", line["inputs"]):
        for other in records.choose(beside, inputs=inputs):
            if other["implementation"] in CONTROLS:
                found[other["implementation"]] = other
    return found


def main(arguments: list[str]) -> int:
    """Runs `python -m benchmarks compare`: 0 nothing slower, 1 something, 2 cannot tell."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    args = parser.parse_args(arguments)
    try:
        changes, left_out = compare(records.read(args.old), records.read(args.new))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for text in left_out:
        print(f"not compared: {text}")
    if not changes:
        parser.error("no call is in both files beside a control")
    for change in sorted(changes, key=lambda c: c.old / c.new):
        if change.slower:
            print(
                f"SLOWER: {change.name}: {change.old:.4f} -> {change.new:.4f} "
                f"times {change.control} ({change.new / change.old - 1:+.1%})"
            )
    slower = sum(change.slower for change in changes)
    print(
        f"{slower} of {len(changes)} calls got slower by more than {TOLERANCE:.0%} and the spread"
    )
    return 1 if slower else 0
