"""Interleaved timing of several implementations on one shape.

Device time is the sum of a call's kernels in the JAX profiler's trace, which a small
kernel of its own separates from the next call's; on a CPU only wall time is taken.  A
function that is not JAX's (torch's) brings its own device timer.  Calls go round and
round, each waiting for its result.
"""

import dataclasses
import glob
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass
class Timed:
    """What one implementation took on one shape, in ms."""

    device_ms_samples: list[float]
    wall_ms_samples: list[float]
    launches: int  # kernels and memory operations of a call on the device

    @property
    def device_ms(self) -> float | None:
        """The median, None where there is no device time."""
        return statistics.median(self.device_ms_samples) if self.device_ms_samples else None

    @property
    def wall_ms(self) -> float:
        """The median."""
        return statistics.median(self.wall_ms_samples)


@dataclasses.dataclass
class Call:
    """A jitted function and its arguments, or any function with its own device timer."""

    implementation: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    order: str | None = None
    inputs: str = "random"
    device_timer: Callable[[], float] | None = None  # runs once, returns ms

    def __call__(self) -> None:
        """Runs to the end."""
        jax.block_until_ready(self.function(*self.arguments))


def interleaved(calls: Sequence[Call], repeats: int) -> list[Timed]:
    """Times calls by turns, first their wall time and then, traced, their device time."""
    for call in calls:
        call(), call()
    timed = [Timed([], [], 0) for _ in calls]
    for _ in range(repeats):
        for call, result in zip(calls, timed, strict=True):
            begin = time.perf_counter()
            call()
            result.wall_ms_samples.append((time.perf_counter() - begin) * 1e3)
    if jax.default_backend() != "gpu":
        return timed
    separate = Call("separator", jax.jit(jnp.sin), (jnp.ones(7),))
    separator = _separator_name(separate)

    def run() -> None:
        for _ in range(repeats):
            for call, result in zip(calls, timed, strict=True):
                separate()
                if call.device_timer is None:
                    call()
                else:
                    result.device_ms_samples.append(call.device_timer())

    _, *segments = _split(_device_events(run), separator)
    if len(segments) != repeats * len(calls):
        raise RuntimeError(f"{len(segments)} calls in the trace, not {repeats * len(calls)}")
    for i, segment in enumerate(segments):
        call, result = calls[i % len(calls)], timed[i % len(calls)]
        if call.device_timer is None:
            result.device_ms_samples.append(sum(segment))
            result.launches = len(segment)
    return timed


def _separator_name(separate: Call) -> str:
    """The name of the kernel that `separate` launches."""
    separate()
    names = {name for name, _ in _device_events(separate)}
    if len(names) != 1:
        raise RuntimeError(f"the separator launches {names}")
    return names.pop()


def _split(events: list[tuple[str, float]], separator: str) -> list[list[float]]:
    """Durations before the first separator, between it and the next, ..."""
    segments: list[list[float]] = [[]]
    for name, ms in events:
        if name == separator:
            segments.append([])
        else:
            segments[-1].append(ms)
    return segments


def _device_events(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """Names and durations in ms of what `run` has the GPU do, in order of their start."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        events = [
            (event.start_ns, event.name, event.duration_ns / 1e6)
            for plane in jax.profiler.ProfileData.from_file(path).planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
    return [(name, ms) for _, name, ms in sorted(events)]


def sm_mhz() -> int | None:
    """The GPU's SM clock at this moment, None without nvidia-smi."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    query = [smi, "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
