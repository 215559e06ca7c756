"""`python -m benchmarks compare` on made-up files: slowdowns, noise, another clock."""

import numpy as np
import pytest
from test_benchmark_records import line

from benchmarks import __main__, compare, records

NOISE = (0.998, 1.004, 1.0, 0.996, 1.002, 1.001, 0.999)


def run(
    run_id="old", topk=2.0, control=1.0, clock=1.0, noise=NOISE, implementation="control:tensor"
):
    """A case of index_topk and a control; `clock` slows both down."""
    rng = np.random.default_rng(len(run_id))

    def timed(ms, **fields):
        samples = [float(ms * clock * x) for x in rng.permutation(noise)]
        median = float(np.median(samples))
        return line(run_id=run_id, device_ms=median, device_ms_samples=samples, **fields)

    return [timed(topk), timed(control, implementation=implementation, order=None)]


def changes(old, new):
    return compare.compare(old, new)[0]


def test_a_slowdown_is_flagged():
    (change,) = changes(run(), run("new", topk=2.2))
    assert change.slower
    assert change.control == "control:tensor"
    assert change.old == pytest.approx(2.0, rel=0.01)
    assert change.new == pytest.approx(2.2, rel=0.01)


def test_the_same_again_and_a_speedup_are_not():
    assert [c.slower for c in changes(run(), run("new"))] == [False]
    assert [c.slower for c in changes(run(), run("new", topk=1.5))] == [False]


def test_less_than_the_tolerance_is_not():
    assert [c.slower for c in changes(run(), run("new", topk=2.0 * 1.02))] == [False]


def test_another_clock_is_not():
    """A slower clock makes the call 25 % slower and its control as well."""
    assert [c.slower for c in changes(run(), run("new", clock=1.25))] == [False]


def test_a_slowdown_at_a_faster_clock_is_flagged():
    """The time is what it was; at this clock it should have been less."""
    assert [c.slower for c in changes(run(), run("new", topk=2.2, clock=1 / 1.1))] == [True]


def test_noise_is_not():
    """The median is 6 % up, and the rounds scatter over 40 %."""
    noisy = (0.8, 0.85, 0.9, 1.06, 1.15, 1.18, 1.2)
    control = [0.999, 1.0, 1.0, 1.0, 1.0, 1.0, 1.001]
    old, new = run(), run("new")
    for lines, samples in ((old, NOISE), (new, noisy)):
        lines[0]["device_ms_samples"] = [2 * x for x in samples]
        lines[1]["device_ms_samples"] = control
    (change,) = changes(old, new)
    assert change.new / change.old > 1.05
    assert not change.slower
    # The same medians without the scatter are a slowdown.
    new[0]["device_ms_samples"] = [2 * 1.06 * x for x in NOISE]
    assert [c.slower for c in changes(old, new)] == [True]


def test_drift_of_the_clock_within_a_run_is_divided_out():
    """Both calls of a round drift together by 50 %."""
    drift = np.linspace(1, 1.5, len(NOISE))
    new = run("new", topk=2.2)
    for x in new:
        x["device_ms_samples"] = [
            float(a * b) for a, b in zip(x["device_ms_samples"], drift, strict=True)
        ]
    assert [c.slower for c in changes(run(), new)] == [True]


def test_the_control_is_the_first_that_both_files_have():
    new = run("new")
    scores = run("new", control=1.5, implementation="index_scores")[1:]
    (topk, control), old = run(), run(control=1.5, implementation="index_scores")
    assert {c.control for c in changes([topk, control], [*new, *scores])} == {"control:tensor"}
    assert {c.control for c in changes(old, [*new, *scores])} == {"index_scores"}


def test_a_control_on_random_rows_serves_unkind_rows():
    def unkind(run_id, ms):
        lines = run(run_id, ms, implementation="lax.top_k")
        lines[0]["inputs"] = "ascending"
        return lines

    assert [c.slower for c in changes(unkind("old", 2), unkind("new", 3))] == [True]


def test_a_control_of_another_run_or_case_does_not_serve():
    old, new = run(), run("new")
    new[1]["run_id"] = "another"
    found, left_out = compare.compare(old, new)
    assert found == []
    name = "indexer 4096 x 8192 random index_topk any random"
    assert left_out == [f"{name}: no control beside it in both files"]


def test_calls_of_one_file_are_named():
    extra = line(run_id="new", implementation="jnp", order="score")
    found, left_out = compare.compare(run(), [*run("new"), extra])
    assert len(found) == 1
    assert left_out == ["indexer 4096 x 8192 random jnp score random: only in the new file"]
    found, left_out = compare.compare(
        [*run(), line(run_id="old", implementation="jnp")], run("new")
    )
    assert left_out == ["indexer 4096 x 8192 random jnp any random: only in the old file"]


def test_two_cards_are_refused():
    other = [{**x, "card": "NVIDIA H100"} for x in run("new")]
    with pytest.raises(ValueError, match="one card, got NVIDIA H100 and NVIDIA H200"):
        compare.compare(run(), other)


def test_one_round_has_quartiles():
    assert compare.quartiles([2.0]) == (2.0, 2.0)
    assert compare.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)


@pytest.mark.parametrize(("topk", "code"), [(2.0, 0), (2.2, 1)])
def test_command_line_exits_1_when_something_got_slower(tmp_path, capsys, topk, code):
    records.write(tmp_path / "old.jsonl", run())
    records.write(tmp_path / "new.jsonl", run("new", topk=topk))
    paths = [str(tmp_path / name) for name in ("old.jsonl", "new.jsonl")]
    assert __main__.main(["compare", *paths]) == code
    out = capsys.readouterr().out
    assert f"{code} of 1 calls got slower" in out
    assert ("SLOWER: indexer 4096 x 8192 random index_topk any random" in out) == (code == 1)


def test_command_line_exits_2_when_nothing_can_be_compared(tmp_path, capsys):
    records.write(tmp_path / "old.jsonl", run()[:1])
    records.write(tmp_path / "new.jsonl", run("new")[:1])
    with pytest.raises(SystemExit) as error:
        __main__.main(["compare", str(tmp_path / "old.jsonl"), str(tmp_path / "new.jsonl")])
    assert error.value.code == 2
    assert "no call is in both files beside a control" in capsys.readouterr().err
