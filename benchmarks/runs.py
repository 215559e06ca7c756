"""Runs a suite: times its cases, fills the JSON lines, prints the table."""

import datetime
import os
import platform
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from tqdm import tqdm

from benchmarks import records, sources, suites
from benchmarks.clocks import Clocks, driver
from benchmarks.timing import interleaved
from jax_fused_topk import build_info


def run(suite: str, cases: Iterable[suites.Make], repeats: int) -> list[records.Line]:
    """Times every case of a suite.

    Args:
      suite: its name.
      cases: what `suites.cases` gave.
      repeats: rounds of wall time, and of device time.

    Returns:
      One line for each call of each case, all of one run_id.
    """
    common = describe(suite)
    print(f"{suite}: {common['card']}, jax {common['jax']}, run {common['run_id']}")
    lines = []
    with Clocks() as clocks:
        for make in tqdm(cases, desc=suite, disable=None):
            case = make()
            begin = time.perf_counter()
            timed = interleaved(case.calls, repeats)
            measured = clocks.between(begin, time.perf_counter())
            for call, share, result in zip(case.calls, case.agreements, timed, strict=True):
                line = {
                    **common,
                    **case.fields,
                    "implementation": call.implementation,
                    "order": call.order,
                    "inputs": call.inputs,
                    "input_sets": len(call.arguments),
                    "agreement": share,
                    "temp_bytes": call.temp_bytes,
                    "sm_mhz": measured["sm_mhz"]["during"][1] if measured else None,
                    "clocks": measured,
                    **result.fields,
                }
                lines.append(records.check(line))
            del case, call  # the next case needs the memory of their inputs
    return lines


def describe(suite: str) -> dict[str, Any]:
    """The fields that all lines of a run share: when, which sources, on what."""
    info = build_info()
    device = jax.devices()[0]
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    return {
        "run_id": f"{stamp}-{suite}",
        "suite": suite,
        "source_sha256": sources.sha256(),
        "card": device.device_kind if device.platform == "gpu" else f"{os.cpu_count()} CPU cores",
        "driver": driver() if device.platform == "gpu" else None,
        "python": platform.python_version(),
        **{name: info[name] for name in ("version", "jax", "jaxlib", "cuda_toolkit", "cpu_isa")},
    }


def table(lines: Sequence[records.Line]) -> str:
    """The lines for people: medians, and the range of the samples as a share of them."""
    rows = [("case", "implementation", "device ms", "+-", "wall ms", "+-", "launches", "agrees")]
    for line in lines:
        name = " ".join(filter(None, (line["implementation"], line["order"], line["inputs"])))
        share = "" if line["agreement"] is None else f"{line['agreement']:.6f}"
        times = (
            field
            for kind in ("device_ms", "wall_ms")
            for field in _median_and_spread(line[kind], line[f"{kind}_samples"])
        )
        rows.append((line["case"], name, *times, str(line["launches"] or ""), share))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            field.ljust(width) if i < 2 else field.rjust(width)
            for i, (field, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _median_and_spread(median: float | None, samples: Sequence[float]) -> tuple[str, str]:
    if median is None:
        return "", ""
    return f"{median:.4f}", f"{(max(samples) - min(samples)) / 2 / median:.1%}"
