"""Device time from the JAX profiler's trace: which kernels ran when.

With programmatic dependent launch the kernels of one call overlap, so a call takes the
length of the union of its kernels' intervals, not the sum of their durations.
"""

import glob
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

# A longer timeline is no picture, and would be most of a JSON line.
TIMELINE_LAUNCHES = 32


class Interval(NamedTuple):
    """One kernel or memory operation on the device, in us since the trace began."""

    name: str
    start_us: float
    end_us: float
    hlo_op: str = ""  # its instruction, "" inside a CUDA graph


def device_intervals(run: Callable[[], Any]) -> list[Interval]:
    """What `run` has the GPU do, in order of the starts."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        return intervals(jax.profiler.ProfileData.from_file(path).planes)


def intervals(planes: Iterable[Any]) -> list[Interval]:
    """The intervals on every stream of every GPU of a trace's planes, in order of the starts."""
    found = [
        Interval(
            event.name,
            event.start_ns / 1e3,
            (event.start_ns + event.duration_ns) / 1e3,
            _hlo_op(dict(event.stats)),
        )
        for plane in planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    return sorted(found, key=lambda interval: interval.start_us)


def _hlo_op(stats: dict[str, Any]) -> str:
    """The instruction that an event's stats name; in a CUDA graph they name the graph's."""
    return "" if stats.get("cuda_graph_id") else str(stats.get("hlo_op", ""))


def split(events: Iterable[Interval], separator: str) -> list[list[Interval]]:
    """The intervals after the first kernel named `separator` up to the next, and so on.

    What comes before the first separator is dropped.
    """
    segments: list[list[Interval]] = []
    for event in events:
        if event.name == separator:
            segments.append([])
        elif segments:
            segments[-1].append(event)
    return segments


def union_ms(call: Iterable[Interval]) -> float:
    """How long at least one of a call's kernels ran, in ms."""
    total, reached = 0.0, float("-inf")
    for interval in sorted(call, key=lambda interval: interval.start_us):
        total += max(0.0, interval.end_us - max(interval.start_us, reached))
        reached = max(reached, interval.end_us)
    return total / 1e3


def span_ms(call: Sequence[Interval]) -> float:
    """From the first start to the last end, gaps between launches included, in ms."""
    return (max(i.end_us for i in call) - min(i.start_us for i in call)) / 1e3


def short_name(kernel: str) -> str:
    """A C++ kernel's name without return type, namespaces, template and call arguments.

    Instances of one template share it.
    """
    while kernel != (shorter := re.sub(r"<[^<>]*>|\([^()]*\)", "", kernel)):
        kernel = shorter
    return kernel.split("::")[-1].strip().removeprefix("void ")


def kernel_ms(calls: Sequence[Sequence[Interval]]) -> dict[str, float]:
    """Short kernel name -> the median over the calls of the time its launches took, in ms.

    Names come in order of their first start.  Overlapping kernels count in full, so the
    sum may exceed the call's own time.
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(calls))
    for number, call in enumerate(calls):
        for interval in call:
            sums[short_name(interval.name)][number] += (interval.end_us - interval.start_us) / 1e3
    return {name: statistics.median(samples) for name, samples in sums.items()}


def timeline(calls: Sequence[Sequence[Interval]]) -> list[list[Any]] | None:
    """[[name, start_us, end_us], ...] of the call of median length, from its first start.

    None where that call has more than `TIMELINE_LAUNCHES` launches.
    """
    call = sorted(calls, key=union_ms)[len(calls) // 2]
    if len(call) > TIMELINE_LAUNCHES:
        return None
    first = min(i.start_us for i in call)
    return [
        [short_name(i.name), round(i.start_us - first, 3), round(i.end_us - first, 3)] for i in call
    ]
