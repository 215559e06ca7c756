"""Nsight Compute: its command line, its CSV, and what its counters say of a call.

Counters are exact where nvidia-smi is not: cycles over time is the SM clock, whatever the
sampled one was.  ncu runs kernels one at a time, several times each, and empties the caches
before: what kernels overlap or leave in L2 for the next one is not in the counters.
"""

import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.trace import short_name

KERNELS = (
    "score_kernel",
    "threshold_kernel",
    "select_kernel",
    "top_k_filter_kernel",
    "few_scores_kernel",
    "sort_rows_kernel",
)
"""The package's kernels on the Hopper path; ncu passes over all others."""

TIME, CYCLES = "gpu__time_duration.sum", "sm__cycles_elapsed.max"
ACTIVE, MOST_ACTIVE = "sm__cycles_active.avg", "sm__cycles_active.max"
READ, WRITTEN, L2 = "dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_bytes.sum"
INSTRUCTIONS = "sm__inst_executed.sum"

UNITS = {
    TIME: ("ns", "nsecond"),
    CYCLES: ("cycle",),
    ACTIVE: ("cycle",),
    MOST_ACTIVE: ("cycle",),
    READ: ("byte",),
    WRITTEN: ("byte",),
    L2: ("byte",),
    INSTRUCTIONS: ("inst",),
}
"""Metrics, and the names that versions of ncu give their base units."""

Launch = dict[str, Any]
"""{"kernel": short name, metric: value in its base unit, ...} of one launch."""


def command(ncu: str, log: Path, child: Sequence[str]) -> list[str]:
    """The command that runs `child` under ncu, whose CSV goes to the file `log`."""
    options = ["--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    options += ["--metrics", ",".join(UNITS), "--kernel-name", f"regex:{'|'.join(KERNELS)}"]
    return [ncu, *options, "--log-file", str(log), *child]


def parse(text: str) -> list[Launch]:
    """The launches in ncu's output: a row of names, a row of units, a row for each launch.

    Raises:
      ValueError: if there are no such rows, or a metric is missing, is of another unit or
        is no number.
    """
    lines = [line for line in text.splitlines() if not line.startswith("==")]
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        raise ValueError(f"ncu's output must have a row of names, got {text[-2000:]!r}")
    names, units, *rows = csv.reader(line for line in lines[first:] if line.strip())
    for metric, known in UNITS.items():
        if metric not in names:
            raise ValueError(f"ncu's output must have the metric {metric}, got {names}")
        unit = units[names.index(metric)]
        if unit not in known:
            raise ValueError(f"{metric} must be in {' or '.join(known)}, got {unit!r}")
    return [_launch(dict(zip(names, row, strict=True))) for row in rows]


def _launch(row: dict[str, str]) -> Launch:
    launch: Launch = {"kernel": short_name(row["Kernel Name"])}
    for metric in UNITS:
        try:
            launch[metric] = float(row[metric].replace(",", ""))
        except ValueError:
            message = f"{metric} of {launch['kernel']} must be a number, got {row[metric]!r}"
            raise ValueError(message) from None
    return launch


def measured(launches: Sequence[Launch]) -> list[Launch]:
    """The launches of the second of two equal calls: the first was the warm-up.

    Raises:
      ValueError: if the two halves are not the same kernels, or there are none.
    """
    half = len(launches) // 2
    kernels = [launch["kernel"] for launch in launches]
    if not kernels or kernels[:half] != kernels[half:]:
        raise ValueError(f"two equal calls must launch the same kernels twice, got {kernels}")
    return list(launches[half:])


def total(launches: Iterable[Launch], metric: str) -> float:
    """The sum of a metric over launches, in its base unit."""
    return sum(launch[metric] for launch in launches)


def sm_mhz(launches: Sequence[Launch]) -> float:
    """The SM clock while the launches ran: cycles over time."""
    return total(launches, CYCLES) / total(launches, TIME) * 1e3


def imbalance(launches: Iterable[Launch]) -> float:
    """How much longer the busiest SM was at work than the average one, less 1.

    Of the kernel that takes the most cycles, all its launches together.
    """
    by_kernel: dict[str, list[Launch]] = defaultdict(list)
    for launch in launches:
        by_kernel[launch["kernel"]].append(launch)
    longest = max(by_kernel.values(), key=lambda kernel: total(kernel, CYCLES))
    return total(longest, MOST_ACTIVE) / total(longest, ACTIVE) - 1
