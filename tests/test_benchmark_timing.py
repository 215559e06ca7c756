"""Device time from traces, interleaving, and the sampling of clocks."""

import os
import time
import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks import clocks, timing, trace
from benchmarks.trace import Interval

# Two kernels that overlap, a gap, a third: us.
OVERLAPPING = [Interval("score", 10, 30), Interval("select", 25, 40), Interval("sort", 50, 55)]


def test_union_counts_overlaps_once_and_gaps_not_at_all():
    assert trace.union_ms(OVERLAPPING) == pytest.approx(0.035)
    assert trace.union_ms(reversed(OVERLAPPING)) == pytest.approx(0.035)
    assert trace.union_ms([Interval("a", 0, 100), Interval("b", 10, 20)]) == pytest.approx(0.1)
    assert trace.union_ms([]) == 0


def test_span_reaches_from_the_first_start_to_the_last_end():
    assert trace.span_ms(OVERLAPPING) == pytest.approx(0.045)


def test_kernels_are_summed_by_name_within_a_call_and_then_their_median_taken():
    calls = [
        [Interval("score", 0, 10), Interval("score", 10, 30), Interval("sort", 30, 31)],
        [Interval("score", 0, 40), Interval("sort", 40, 43)],
        [Interval("score", 0, 50), Interval("sort", 50, 55)],
    ]
    found = trace.kernel_ms(calls)
    assert list(found) == ["score", "sort"]
    assert found["score"] == pytest.approx(0.040)
    assert found["sort"] == pytest.approx(0.003)


def test_timeline_is_of_the_median_call_from_its_first_start():
    calls = [[Interval("a", 5, 6)], OVERLAPPING, [Interval("a", 5, 6000)]]
    assert trace.timeline(calls) == [["score", 0, 20], ["select", 15, 30], ["sort", 40, 45]]
    many = [Interval("a", i, i + 1) for i in range(trace.TIMELINE_LAUNCHES + 1)]
    assert trace.timeline([many]) is None


def test_split_drops_what_comes_before_the_first_separator():
    events = [Interval(name, i, i + 1) for i, name in enumerate("xsabssc")]
    assert [[e.name for e in segment] for segment in trace.split(events, "s")] == [
        ["a", "b"],
        [],
        ["c"],
    ]


def plane(name, **lines):
    """A plane of a trace with events (name, start_ns, duration_ns) on its lines."""

    def event(e):
        return types.SimpleNamespace(name=e[0], start_ns=e[1], duration_ns=e[2], stats=())

    return types.SimpleNamespace(
        name=name,
        lines=[types.SimpleNamespace(name=n, events=map(event, es)) for n, es in lines.items()],
    )


def test_intervals_of_a_trace_are_those_of_gpu_streams_by_start():
    planes = [
        plane("/host:CPU", **{"Stream #1": [("host", 0, 1)]}),
        plane(
            "/device:GPU:0",
            **{
                "Stream #13(Compute)": [("b", 2000, 500), ("d", 9000, 1)],
                "Stream #14(MemcpyD2D)": [("a", 1000, 5000)],
                "XLA Ops": [("op", 0, 1)],
            },
        ),
    ]
    assert trace.intervals(planes) == [
        Interval("a", 1, 6),
        Interval("b", 2, 2.5),
        Interval("d", 9, 9.001),
    ]


class FakeGpu:
    """A device whose calls append kernels to a trace: what `device_intervals` then returns."""

    def __init__(self, monkeypatch):
        self.now, self.events, self.order = 0.0, [], []
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(trace, "device_intervals", self.record)
        monkeypatch.setattr(
            timing, "_separator", lambda: (self.kernel("separator", 1), "separator")
        )

    def record(self, run):
        self.events.clear()
        run()
        return list(self.events)

    def kernel(self, name, us):
        def launch(*arguments):
            self.order.append((name, *arguments))
            self.events.append(Interval(name, self.now, self.now + us))
            self.now += us + 5

        return launch


def test_interleaved_gives_each_call_its_own_kernels_whatever_the_order(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    calls = [
        timing.Call(name, gpu.kernel(name, us), [(0,), (1,)])
        for name, us in {"a": 10, "b": 200, "c": 3000}.items()
    ]
    timed = timing.interleaved(calls, repeats=6)
    assert [t.fields["device_ms_samples"] for t in timed] == [
        pytest.approx([ms] * 6) for ms in (0.01, 0.2, 3.0)
    ]
    assert [t.fields["kernels"] for t in timed] == [
        {"a": pytest.approx(0.01)},
        {"b": pytest.approx(0.2)},
        {"c": pytest.approx(3.0)},
    ]
    assert timed[1].fields["timeline"] == [["b", 0, 200]]
    assert [t.fields["launches"] for t in timed] == [1, 1, 1]

    # Each round runs every call once, on the round's input set; orders differ.
    ran = [entry for entry in gpu.order if entry[0] != "separator"]
    warm_up, rounds = ran[:6], [ran[i : i + 3] for i in range(6, len(ran), 3)]
    assert sorted(warm_up) == [(name, turn) for name in "abc" for turn in (0, 1)]
    assert len(rounds) == 12
    for i, round_ in enumerate(rounds):
        assert sorted(round_) == [(name, i % 2) for name in "abc"]
    assert len({tuple(name for name, _ in round_) for round_ in rounds}) > 1


def test_a_call_without_kernels_in_the_trace_is_an_error(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    calls = [timing.Call("silent", lambda: None, [()]), timing.Call("a", gpu.kernel("a", 1), [()])]
    with pytest.raises(RuntimeError, match="silent random: no kernels in the trace"):
        timing.interleaved(calls, repeats=1)


def test_on_a_cpu_there_is_wall_time_only():
    call = timing.Call("sin", jax.jit(jnp.sin), [(jnp.ones(3),)])
    (timed,) = timing.interleaved([call], repeats=3)
    fields = timed.fields
    assert len(fields["wall_ms_samples"]) == 3 and min(fields["wall_ms_samples"]) > 0
    assert fields["device_ms"] is fields["span_ms"] is fields["launches"] is None
    assert fields["device_ms_samples"] == [] and fields["kernels"] == {}


def fake_smi(tmp_path, monkeypatch, script):
    """Puts an nvidia-smi on the path."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{script}\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_clocks_before_during_and_after(tmp_path, monkeypatch):
    script = 'for mhz in 345 1500 1600 1980 600 600 600; do echo "$mhz, $mhz.5"; sleep 0.1; done'
    fake_smi(tmp_path, monkeypatch, script)
    with clocks.Clocks() as sampled:
        begin = time.perf_counter() + 0.05
        while len(sampled.samples) < 4:
            time.sleep(0.01)
        found = sampled.between(begin, time.perf_counter())
    assert found["sm_mhz"]["before"] == 345
    assert found["sm_mhz"]["during"] == [1500, 1600, 1980]
    assert found["sm_mhz"]["after"] == 600
    assert found["power_w"]["during"] == [1500.5, 1600.5, 1980.5]
    assert found["samples"] == 3


def test_clocks_of_a_span_without_a_sample_are_those_around_it(tmp_path, monkeypatch):
    fake_smi(tmp_path, monkeypatch, 'echo "1000, 1"; sleep 0.3; echo "2000, 3"; exec sleep 9')
    with clocks.Clocks() as sampled:
        now = time.perf_counter()
        found = sampled.between(now, now + 1e-6)
    assert found["samples"] == 0
    assert found["sm_mhz"] == {"before": 1000, "during": [1000, 1500, 2000], "after": 2000}


def test_no_nvidia_smi_no_clocks(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with clocks.Clocks() as sampled:
        assert sampled.between(0, time.perf_counter()) is None
    assert clocks.driver() is None


def test_a_field_that_the_card_does_not_report_is_passed_over(tmp_path, monkeypatch):
    fake_smi(tmp_path, monkeypatch, 'echo "[N/A], [N/A]"; echo "1000, 5"; exec sleep 9')
    with clocks.Clocks() as sampled:
        deadline = time.perf_counter() + 5
        while not sampled.samples and time.perf_counter() < deadline:
            time.sleep(0.01)
    assert [s.sm_mhz for s in sampled.samples] == [1000]
