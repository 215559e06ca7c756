"""`python -m benchmarks counters`: ncu's CSV, what it says of a call, the tables."""

import csv
import io
import json
import os
import sys

import jax
import numpy as np
import pytest

from benchmarks import (
    __main__,
    counters,
    floors,
    implementations,
    inputs,
    nsight,
    records,
    runs,
    tables,
)

NAMES = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"]
SCORE = (
    "void jax_fused_topk::hopper::<unnamed>::score_kernel<(jax_fused_topk::hopper::Mode)2, "
    "(int)64>(jax_fused_topk::hopper::TensorMaps, jax_fused_topk::hopper::ScoreArgs)"
)
SELECT = "select_kernel(jax_fused_topk::hopper::ScoreArgs)"
UNITS = ["ns", "cycle", "cycle", "cycle", "byte", "byte", "byte", "inst"]
LAUNCHES = [  # two equal calls of two kernels
    (SCORE, "900", "2,000", "1,000", "1,500", "7", "8", "9", "10"),
    (SELECT, "300", "700", "350.50", "400", "70", "80", "90", "100"),
    (SCORE, "1,000", "1,600", "1,500.50", "1,600", "1,000,000", "200", "3,000", "4,000"),
    (SELECT, "250", "400", "350", "390", "60", "50", "40", "30"),
]


def ncu_csv(launches=LAUNCHES, units=UNITS, metrics=tuple(nsight.UNITS)):
    """What ncu writes with --csv --page raw."""
    text = io.StringIO()
    write = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n").writerow
    write([*NAMES, *metrics])
    write([*("" for _ in NAMES), *units])
    for number, (kernel, *values) in enumerate(launches):
        write([number, "77", "python3.12", "127.0.0.1", kernel, "1", "13", *values])
    return f"==PROF== Connected to process 77\n{text.getvalue()}==PROF== Disconnected\n"


def launch(kernel, ms, cycles, active=1.0, most=1.0, read=0.0, written=0.0, l2=0.0, instructions=0):
    values = (ms * 1e6, cycles, active, most, read, written, l2, instructions)
    return {"kernel": kernel, **dict(zip(nsight.UNITS, values, strict=True))}


def line(**fields):
    """A line of `counters`: 1 ms at 1.5 GHz by default."""
    whole = {
        "run_id": "run",
        "suite": "counters",
        "source_sha256": "0" * 64,
        "card": "NVIDIA H200",
        "implementation": "index_topk",
        "order": "any",
        "inputs": "random",
        "q": 4096,
        "n": 8192,
        "h": 64,
        "d": 128,
        "topk": 2048,
        "launches": [launch("score_kernel", 1.0, 1.5e6)],
    }
    return {**whole, **fields}


def test_launches_of_the_csv():
    found = nsight.parse(ncu_csv())
    assert [x["kernel"] for x in found] == ["score_kernel", "select_kernel"] * 2
    assert found[2] == {
        "kernel": "score_kernel",
        "gpu__time_duration.sum": 1000,
        "sm__cycles_elapsed.max": 1600,
        "sm__cycles_active.avg": 1500.5,
        "sm__cycles_active.max": 1600,
        "dram__bytes_read.sum": 1_000_000,
        "dram__bytes_write.sum": 200,
        "lts__t_bytes.sum": 3000,
        "sm__inst_executed.sum": 4000,
    }
    # Metrics in another order, and the unit as older versions name it.
    order = [7, 6, 5, 4, 3, 2, 1, 0]
    turned = ncu_csv(
        [(kernel, *(values[i] for i in order)) for kernel, *values in LAUNCHES],
        [*(UNITS[i] for i in order[:-1]), "nsecond"],
        [list(nsight.UNITS)[i] for i in order],
    )
    assert nsight.parse(turned) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM\n", "must have a row of names, got '==ERROR== ERR_NV"),
        (
            ncu_csv(units=["us", *UNITS[1:]]),
            r"gpu__time_duration.sum must be in ns or nsecond, got 'us'",
        ),
        (ncu_csv(units=[*UNITS[:4], "Kbyte", *UNITS[5:]]), "read.sum must be in byte, got 'Kbyte'"),
        (
            ncu_csv(metrics=["x", *list(nsight.UNITS)[1:]]),
            "must have the metric gpu__time_duration.sum",
        ),
        (
            ncu_csv([(SELECT, "n/a", *LAUNCHES[1][2:])]),
            "duration.sum of select_kernel must be a number, got 'n/a'",
        ),
    ],
)
def test_a_csv_that_says_something_else_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        nsight.parse(text)


def test_the_second_call_is_the_measured_one():
    found = nsight.parse(ncu_csv())
    assert nsight.measured(found) == found[2:]
    with pytest.raises(ValueError, match=r"the same kernels twice, got \['score_kernel', 'sel"):
        nsight.measured(found[:2])
    with pytest.raises(ValueError, match=r"the same kernels twice, got \['score_kernel'\]"):
        nsight.measured(found[:1])
    with pytest.raises(ValueError, match=r"the same kernels twice, got \[\]"):
        nsight.measured([])


def test_the_clock_is_cycles_over_time():
    found = [launch("a", 2.0, 3e6), launch("b", 1.0, 1.8e6)]
    assert nsight.sm_mhz(found) == pytest.approx(1600)
    assert nsight.total(found, nsight.CYCLES) == pytest.approx(4.8e6)


def test_imbalance_is_of_the_longest_kernel_all_launches_together():
    found = [
        launch("a", 1.0, 1e6, active=80.0, most=100.0),
        launch("b", 1.0, 1.5e6, active=10.0, most=20.0),
        launch("a", 1.0, 1e6, active=120.0, most=130.0),
    ]
    assert nsight.imbalance(found) == pytest.approx(230 / 200 - 1)


def test_the_share_of_the_peak_counts_the_cycles_of_all_launches():
    """At 4096 x 8192 there are 4096 rows of 4097 to 8192 keys: 25167872 pairs."""
    pairs = 25_167_872
    assert sum(range(4097, 8193)) == pairs
    found = [launch("a", 1.0, 3e5), launch("b", 9.0, 1e5)]
    expected = 2 * 64 * 128 * pairs / (4e5 * 132 * 8192)
    assert expected == pytest.approx(0.9533, abs=1e-4)
    assert floors.peak_share(line(launches=found)) == pytest.approx(expected)
    assert floors.peak_share(line(card="NVIDIA B200")) is None


@pytest.mark.parametrize(
    ("implementation", "results"),
    [
        ("index_topk", 33_554_432),  # 4096 x 2048 int32
        ("index_scores", 134_217_728),  # 4096 x 8192 float32
        ("control:tensor", 0),
        ("control:score", 0),
    ],
)
def test_the_floor_of_bytes(implementation, results):
    """At 4096 x 8192, H = 64, D = 128."""
    q, k, weights, k_scale, ranges = 33_554_432, 1_048_576, 1_048_576, 32_768, 2 * 16_384
    expected = q + k + weights + k_scale + ranges + results
    assert floors.moved_bytes(line(implementation=implementation)) == expected


def test_the_floor_of_bytes_is_the_size_of_the_arrays():
    data = jax.eval_shape(lambda: inputs.random(0, 24, 96))
    (variant, *_) = implementations.index_variants("index_topk", data, 16)
    sizes = [x.size * x.dtype.itemsize for x in data.values()]
    result = jax.eval_shape(variant.function, data)
    fields = {"q": 24, "n": 96, "topk": 16}
    assert floors.moved_bytes(line(**fields)) == sum(sizes) + result.size * result.dtype.itemsize


@pytest.fixture
def committed(tmp_path, monkeypatch):
    """Replaces the committed lines by made-up ones."""
    monkeypatch.setattr(records, "RESULTS", tmp_path)

    def write(lines):
        (tmp_path / "h200").mkdir()
        text = "".join(json.dumps(x) + "\n" for x in lines)
        (tmp_path / "h200" / "counters.jsonl").write_text(text)

    return write


def test_the_tables_from_lines(committed):
    score = launch("score_kernel", 0.4, 6e5, 5e5, 5.5e5, 5e7, 4e6, 2e8, 1e8)
    select = launch("select_kernel", 0.1, 1.75e5, 9e4, 1.7e5, 1e7, 3e7, 1e8, 2e7)
    committed(
        [
            line(launches=[score, select]),
            line(implementation="control:tensor", order=None, launches=[score], card="NVIDIA B200"),
        ]
    )
    # 412350414848 FLOP over 775000 cycles of 132 x 8192; 32 x 1.2e8 / 25167872.
    assert tables.TABLES["counters"]().splitlines() == [
        "| Q x N | call | ms | SM MHz | of the FP8 peak | imbalance | instructions a pair |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| 4096 x 8192 | `index_topk`, any | 0.500 | 1550 | 49.2 % | 10.0% | 153 |",
        "| 4096 x 8192 | `control:tensor` | 0.400 | 1500 |  | 10.0% | 127 |",
    ]
    # Floors of 69271552 and 35717120 bytes.
    assert tables.TABLES["bytes moved"]().splitlines() == [
        "| Q x N | call | floor | DRAM read | DRAM written | L2 | DRAM / floor |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| 4096 x 8192 | `index_topk`, any | 69.3 | 60.0 | 34.0 | 300 | 1.36 |",
        "| 4096 x 8192 | `control:tensor` | 35.7 | 50.0 | 4.00 | 200 | 1.51 |",
    ]


def test_without_lines_the_tables_say_so(committed):
    assert tables.TABLES["counters"]() == tables.TABLES["bytes moved"]() == "(not measured yet)"


def test_committed_counters():
    """The calls at every shape, of one run."""
    lines = tables.other_lines("counters")
    if not lines:
        pytest.skip("the counters were not measured yet: no results/h200/counters.jsonl")
    assert len({x["run_id"] for x in lines}) == 1
    measured = [(x["q"], x["n"], x["implementation"]) for x in lines]
    assert len(set(measured)) == len(measured)
    # ncu takes its time: a run may have been cut short at the controls of the last shape.
    assert set(measured) >= {
        (*shape, name)
        for shape in counters.SHAPES
        for name in ("index_topk", "index_scores", "control:tensor")
    }
    for x in lines:
        assert 0 < floors.peak_share(x) < 1
        assert 300 < nsight.sm_mhz(x["launches"]) < 2100
        assert nsight.imbalance(x["launches"]) >= 0


def fake_ncu(folder, monkeypatch, script):
    """Puts an ncu on the path: Python, with its arguments in `a`, its log file in `log`."""
    ncu = folder / "ncu"
    ncu.write_text(
        f"#!{sys.executable}\nimport json, pathlib, sys\na = sys.argv[1:]\n"
        f"log = pathlib.Path(a[a.index('--log-file') + 1])\n{script}\n"
    )
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    monkeypatch.setattr(counters, "machine", lambda: runs.describe("counters"))


def test_the_command_writes_a_line_a_call(tmp_path, monkeypatch, capsys):
    (tmp_path / "made_up.csv").write_text(ncu_csv())
    script = (
        f"log.write_text(pathlib.Path({str(tmp_path / 'made_up.csv')!r}).read_text())\n"
        f"with open({str(tmp_path / 'seen')!r}, 'a') as seen: print(json.dumps(a), file=seen)"
    )
    fake_ncu(tmp_path, monkeypatch, script)
    out = tmp_path / "out" / "counters.jsonl"
    assert __main__.main(["counters", "--shapes", "32x256,32x512", "--out", str(out)]) == 0
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    assert [(x["n"], x["implementation"]) for x in lines] == [
        (n, name) for n in (256, 512) for name in counters.CALLS
    ]
    for x in lines:
        assert x["launches"] == nsight.parse(ncu_csv())[2:]
        assert (x["q"], x["h"], x["d"], x["topk"]) == (32, 64, 128, x["n"] // 4)
        assert {"card", "driver", "jax", "jaxlib", "version", "source_sha256"} <= x.keys()
    assert len({x["run_id"] for x in lines}) == 1
    assert "32 x 512     control:score      0.0013 ms   1600 MHz" in capsys.readouterr().out

    seen = [json.loads(text) for text in (tmp_path / "seen").read_text().splitlines()]
    assert len(seen) == 8
    first = " ".join(seen[0])
    assert first.startswith(
        "--clock-control none --csv --page raw --print-units base --metrics gpu"
    )
    assert "sm__cycles_active.max,dram__bytes_read.sum" in first
    assert "--kernel-name regex:score_kernel|threshold_kernel|select_kernel|" in first
    assert "-m benchmarks counters --child index_topk --shapes 32x256 --inputs random" in first
    assert "--child control:score --shapes 32x512 --inputs random" in " ".join(seen[-1])


def test_what_ncu_complained_about_is_shown(tmp_path, monkeypatch):
    script = "log.write_text('==ERROR== ERR_NVGPUCTRPERM'); sys.exit('the child failed')"
    fake_ncu(tmp_path, monkeypatch, script)
    with pytest.raises(RuntimeError) as error:
        __main__.main(["counters", "--shapes", "32x256"])
    for part in ("ended with 1: --child index_topk", "ERR_NVGPUCTRPERM", "the child failed"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "counters needs ncu, the command line of Nsight Compute: none on PATH"),
        (["--shapes", "8"], "shapes must be like 4096x8192,512x131072, got '8'"),
        (["--child", "jnp"], "argument --child: invalid choice: 'jnp'"),
        (
            ["--inputs", "replay", "--replay", "x", "--shapes", "4096x999999"],
            "the replay set holds no window of 4096x999999",
        ),
    ],
)
def test_refusals(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as error:
        __main__.main(["counters", *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_without_a_hopper_gpu_the_command_says_so(tmp_path, monkeypatch, capsys):
    fake_ncu(tmp_path, monkeypatch, "")
    monkeypatch.undo()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SystemExit):  # asked of a process of its own
        __main__.main(["counters"])
    assert "counters needs a Hopper GPU and nvcc" in capsys.readouterr().err


def test_a_child_calls_twice(monkeypatch):
    """On a CPU as on a GPU; a host callback in a stand-in counts."""
    seen = []

    def stand_in(kind, data):
        def call(data):
            jax.debug.callback(lambda x: seen.append(float(x)), data["k_scale"].sum())
            return data["k_scale"] * 2

        return call if kind == "tensor" else None

    monkeypatch.setattr(implementations, "control_call", stand_in)
    assert __main__.main(["counters", "--child", "control:tensor", "--shapes", "4x64"]) == 0
    jax.effects_barrier()
    assert len(seen) == 2 and seen[0] == seen[1] > 0
    with pytest.raises(RuntimeError, match="control:score cannot run here"):
        counters.call_twice("control:score", (4, 64), "random")
    indices = counters.call_twice("index_topk", (4, 64), "random")
    data = inputs.random(0, 4, 64)
    (variant, *_) = implementations.index_variants("index_topk", data, 16)
    assert variant.order == counters.CALLS["index_topk"]
    np.testing.assert_array_equal(indices, variant.function(data))
