"""The GPU's clock and power while a benchmark runs, sampled with nvidia-smi in a thread."""

import contextlib
import shutil
import statistics
import subprocess
import threading
import time
from types import TracebackType
from typing import Any, NamedTuple

PERIOD_S = 0.1


class Sample(NamedTuple):
    """One reading."""

    at: float  # time.perf_counter()
    sm_mhz: float
    power_w: float


class Clocks:
    """A context that samples GPU 0 every 0.1 s; without nvidia-smi it holds no samples."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Clocks":
        smi = shutil.which("nvidia-smi")
        if smi is not None:
            query = ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
            self._process = subprocess.Popen(
                [smi, *query, "--id=0", f"--loop-ms={round(PERIOD_S * 1e3)}"],
                stdout=subprocess.PIPE,
                text=True,
            )
            threading.Thread(target=self._read, daemon=True).start()
            self._wait_after(float("-inf"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            # A field that the card does not report reads "[N/A]".
            with contextlib.suppress(ValueError):
                mhz, watts = (float(field) for field in line.split(","))
                self.samples.append(Sample(time.perf_counter(), mhz, watts))

    def _wait_after(self, moment: float) -> None:
        """Waits for a sample taken after `moment`, for at most 20 periods."""
        deadline = time.perf_counter() + 20 * PERIOD_S
        while time.perf_counter() < deadline:
            if self.samples and self.samples[-1].at > moment:
                return
            time.sleep(PERIOD_S / 4)

    def between(self, begin: float, end: float) -> dict[str, Any] | None:
        """The clock and the power before, during and after a span of time.

        Args:
          begin: its begin, of time.perf_counter().
          end: its end.

        Returns:
          {"sm_mhz": {"before": x, "during": [least, median, most], "after": y},
          "power_w": the same, "samples": their number within the span}.  A span that
          holds no sample takes the two around it.  None if there is no sample at all.
        """
        if self._process is not None:
            self._wait_after(end)
        samples = list(self.samples)
        if not samples:
            return None
        before = [s for s in samples if s.at <= begin][-1:] or samples[:1]
        after = [s for s in samples if s.at >= end][:1] or samples[-1:]
        inside = [s for s in samples if begin < s.at < end]
        during = inside or [*before, *after]
        summary: dict[str, Any] = {
            field: {
                "before": getattr(before[0], field),
                "during": [f(getattr(s, field) for s in during) for f in _SPREAD],
                "after": getattr(after[0], field),
            }
            for field in ("sm_mhz", "power_w")
        }
        return {**summary, "samples": len(inside)}


_SPREAD = (min, statistics.median, max)


def driver() -> str | None:
    """The NVIDIA driver's version, None without nvidia-smi."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    query = [smi, "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip() or None
