"""Interleaved timing of several implementations on one shape.

In every round each call runs once, in an order drawn for the round, and waits for its
result; the rounds take the input sets by turns, so that no cache holds a call's operands.
Wall times are taken first, unprofiled.  Then the rounds run again under the profiler, with
a small kernel of its own between calls that tells them apart in the trace; on a CPU there
is wall time only.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import trace
from benchmarks.scopes import scope_ms


@dataclasses.dataclass(frozen=True)
class Call:
    """One implementation, one order and the input sets that it runs on.

    `function` waits for its own result if it is not JAX's.
    """

    implementation: str
    function: Callable[..., Any]
    arguments: Sequence[tuple[Any, ...]]
    order: str | None = None
    inputs: str = "random"
    exact: bool = False  # must choose the oracle's keys
    temp_bytes: int | None = None  # scratch memory, where XLA compiled the function
    scopes: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by instruction

    @property
    def label(self) -> str:
        """Implementation, order and inputs, for people."""
        return " ".join(filter(None, (self.implementation, self.order, self.inputs)))

    def run(self, turn: int) -> Any:
        """Runs on the input set whose turn it is, to the end."""
        return jax.block_until_ready(self.function(*self.arguments[turn % len(self.arguments)]))


@dataclasses.dataclass
class Timed:
    """What a call took in each round, ms, and its device work in each round of the trace."""

    scopes: Mapping[str, str] = dataclasses.field(default_factory=dict)  # the call's
    wall_ms_samples: list[float] = dataclasses.field(default_factory=list)
    device_work: list[list[trace.Interval]] = dataclasses.field(default_factory=list)

    @property
    def fields(self) -> dict[str, Any]:
        """The JSON line's fields: device time is `trace.union_ms`, None on a CPU."""
        work = self.device_work
        device = [trace.union_ms(call) for call in work]
        return {
            "device_ms": statistics.median(device) if work else None,
            "wall_ms": statistics.median(self.wall_ms_samples),
            "span_ms": statistics.median(trace.span_ms(call) for call in work) if work else None,
            "launches": max(len(call) for call in work) if work else None,
            "kernels": trace.kernel_ms(work),
            "scopes": scope_ms(work, self.scopes),
            "timeline": trace.timeline(work) if work else None,
            "device_ms_samples": device,
            "wall_ms_samples": self.wall_ms_samples,
        }


def interleaved(calls: Sequence[Call], repeats: int) -> list[Timed]:
    """Times calls by turns, `repeats` rounds of wall time and as many of device time."""
    for call in calls:
        for turn in range(len(call.arguments)):
            call.run(turn)
    timed = [Timed(call.scopes) for call in calls]
    orders = [np.random.default_rng(turn).permutation(len(calls)) for turn in range(repeats)]
    for turn, order in enumerate(orders):
        for i in order:
            begin = time.perf_counter()
            calls[i].run(turn)
            timed[i].wall_ms_samples.append((time.perf_counter() - begin) * 1e3)
    if jax.default_backend() != "gpu":
        return timed

    separate, separator = _separator()

    def rounds() -> None:
        for turn, order in enumerate(orders):
            for i in order:
                separate()
                calls[i].run(turn)

    segments = trace.split(trace.device_intervals(rounds), separator)
    if len(segments) != repeats * len(calls):
        raise RuntimeError(f"{len(segments)} calls in the trace, not {repeats * len(calls)}")
    for i, segment in zip(np.concatenate(orders), segments, strict=True):
        if not segment:
            raise RuntimeError(f"{calls[i].label}: no kernels in the trace")
        timed[i].device_work.append(segment)
    return timed


def _separator() -> tuple[Callable[[], Any], str]:
    """A call that launches one kernel, and the kernel's name."""
    ones = jnp.ones(7)
    compiled = jax.jit(jnp.sin).lower(ones).compile()

    def separate() -> None:
        jax.block_until_ready(compiled(ones))

    separate()
    names = {interval.name for interval in trace.device_intervals(separate)}
    if len(names) != 1:
        raise RuntimeError(f"the separator launches {names}, not one kernel")
    return separate, names.pop()
