"""The JSON lines: schema, choosing, and ratios that two runs do not have."""

import json

import pytest

from benchmarks import records


def line(**fields):
    """A whole line, 2 ms on a device, with some fields of one's own."""
    whole = {
        "run_id": "run",
        "suite": "prefill",
        "case": "indexer 4096 x 8192 random",
        "source_sha256": "0" * 64,
        "card": "NVIDIA H200",
        "driver": "580.1",
        "version": "0.1.0",
        "jax": "0.11.2",
        "jaxlib": "0.11.2",
        "python": "3.12.3",
        "implementation": "index_topk",
        "order": "any",
        "inputs": "random",
        "input_sets": 2,
        "q": 4096,
        "n": 8192,
        "h": 64,
        "d": 128,
        "topk": 2048,
        "agreement": 1.0,
        "device_ms": 2.0,
        "span_ms": 2.0,
        "wall_ms": 3.0,
        "launches": 1,
        "kernels": {"index_topk_kernel": 2.0},
        "timeline": [["index_topk_kernel", 0.0, 2000.0]],
        "temp_bytes": 0,
        "sm_mhz": 1980.0,
        "clocks": {"sm_mhz": {"before": 1980.0, "during": [1980.0] * 3, "after": 1980.0}},
        "device_ms_samples": [2.0, 1.9, 2.1],
        "wall_ms_samples": [3.0, 2.9, 3.1],
    }
    return {**whole, **fields}


def test_ratio_of_one_case():
    control = line(implementation="control:tensor", device_ms=1.6, device_ms_samples=[1.6, 1.9, 1])
    assert records.ratio(line(), control) == pytest.approx(1.25)
    assert records.ratio_samples(line(), control) == pytest.approx([1.25, 1.0, 2.1])


@pytest.mark.parametrize("field", ["run_id", "case"])
@pytest.mark.parametrize("divide", [records.ratio, records.ratio_samples])
def test_no_ratio_of_two_runs_or_cases(divide, field):
    with pytest.raises(
        ValueError, match=f"no ratio of two {field}s: index_topk of .* and jnp of x"
    ):
        divide(line(), line(implementation="jnp", **{field: "x"}))


def test_no_ratio_of_device_and_wall_time():
    with pytest.raises(ValueError, match="no ratio of device and wall time: index_topk and jnp"):
        records.ratio(line(), line(implementation="jnp", device_ms=None, device_ms_samples=[]))


def test_wall_time_counts_where_there_is_no_device_time():
    on_cpu = line(device_ms=None, device_ms_samples=[])
    assert records.ms(on_cpu) == 3 and records.samples(on_cpu) == [3.0, 2.9, 3.1]
    assert records.ms(line()) == 2 and records.samples(line()) == [2.0, 1.9, 2.1]


def test_lines_are_read_as_they_were_written(tmp_path):
    lines = [line(), line(implementation="index_scores", order=None, agreement=None)]
    records.write(tmp_path / "h200" / "prefill.jsonl", lines)
    assert records.read(tmp_path / "h200" / "prefill.jsonl") == lines


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device_ms": "2"}, "device_ms must be float or NoneType, got '2'"),
        ({"wall_ms": None}, "wall_ms must be float, got None"),
        ({"q": 4096.0}, "q must be int, got 4096.0"),
    ],
)
def test_a_field_of_another_type_is_refused(tmp_path, change, message):
    (tmp_path / "x.jsonl").write_text(json.dumps(line(**change)) + "\n")
    with pytest.raises(ValueError, match=message):
        records.read(tmp_path / "x.jsonl")


def test_a_missing_field_is_refused():
    part = line()
    del part["run_id"]
    with pytest.raises(ValueError, match="a line needs the field 'run_id'"):
        records.check(part)


def test_choose_and_one():
    lines = [line(), line(order="index"), line(n=16384)]
    assert records.choose(lines, n=8192) == lines[:2]
    assert records.one(lines, n=8192, order="index") is lines[1]
    assert records.one(lines, n=1) is None
    with pytest.raises(ValueError, match=r"2 lines have .*'n': 8192.*, expected one"):
        records.one(lines, n=8192)


def test_stale_names_the_runs_of_other_kernel_sources():
    lines = [line(run_id="b", source_sha256="old"), line(), line(run_id="a", source_sha256="old")]
    assert records.stale(lines, "0" * 64) == ["a", "b"]
    assert records.stale(lines[1:2], "0" * 64) == []
