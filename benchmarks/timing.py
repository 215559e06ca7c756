"""Interleaved timing of several implementations on one shape.

Device time is the sum of a call's kernels in the JAX profiler's trace; on a CPU, which
has none, only wall time is taken.  A function that JAX does not trace (torch's) brings
its own device timer.  Calls go round and round, each waiting for its result.
"""

import collections
import dataclasses
import glob
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


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

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    device_timer: Callable[[], float] | None = None  # runs once, returns ms

    def __call__(self) -> None:
        """Runs to the end."""
        jax.block_until_ready(self.function(*self.arguments))


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` jitted under `name`, by which the trace attributes its kernels."""

    def call(*arguments: Any) -> Any:
        return function(*arguments)

    call.__name__ = call.__qualname__ = name
    return jax.jit(call)


def interleaved(calls: Mapping[str, Call], repeats: int) -> dict[str, Timed]:
    """Times calls by turns.  A key is the name that `named` gave the function."""
    for call in calls.values():
        call(), call()
    wall: dict[str, list[float]] = collections.defaultdict(list)
    for _ in range(repeats):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            wall[name].append((time.perf_counter() - begin) * 1e3)
    device: dict[str, list[float]] = collections.defaultdict(list)
    launches: dict[str, int] = collections.defaultdict(int)
    if jax.default_backend() == "gpu":
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(repeats):
                    for name, call in calls.items():
                        if call.device_timer is None:
                            call()
                        else:
                            device[name].append(call.device_timer())
            events = _device_events(folder)
        for name, call in calls.items():
            if call.device_timer is None:
                durations = events.get(f"jit_{name}", [])
                launches[name], rest = divmod(len(durations), repeats)
                if rest or not durations:
                    raise RuntimeError(f"{name}: {len(durations)} events for {repeats} calls")
                each = launches[name]
                device[name] = [sum(durations[i * each : (i + 1) * each]) for i in range(repeats)]
    return {name: Timed(device[name], wall[name], launches[name]) for name in calls}


def _device_events(folder: str) -> dict[str, list[float]]:
    """Durations in ms by HLO module, in order of their start."""
    (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    found: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for plane in jax.profiler.ProfileData.from_file(path).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                module = dict(event.stats).get("hlo_module")
                if module is not None:
                    found[str(module)].append((event.start_ns, event.duration_ns / 1e6))
    return {name: [ms for _, ms in sorted(events)] for name, events in found.items()}


def sm_mhz() -> int | None:
    """The GPU's SM clock at this moment, None without nvidia-smi."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    query = [smi, "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
