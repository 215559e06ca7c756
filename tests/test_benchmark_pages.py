"""Tables and pictures are made from the committed JSON lines, and say what the lines say."""

import json
import statistics

import pytest
from PIL import Image
from test_benchmark_records import line

from benchmarks import (
    __main__,
    counts,
    figure_data,
    figures,
    floors,
    inputs,
    records,
    sources,
    tables,
)

OTHERS = ("counters", "counts", "devices", "model")  # lines with fields of their own
FILES = sorted(records.RESULTS.glob("*/*.jsonl"))
FILES = [path for path in FILES if path.stem not in OTHERS]


@pytest.mark.parametrize("page", tables.PAGES)
def test_pages_agree_with_the_committed_lines(page):
    text = (inputs.ROOT / page).read_text()
    assert tables.render(text) == text, "run `python -m benchmarks tables`"


def test_every_table_is_in_a_page():
    text = "".join((inputs.ROOT / page).read_text() for page in tables.PAGES)
    missing = [name for name in tables.TABLES if f"<!-- table: {name} -->" not in text]
    assert missing == []


@pytest.mark.parametrize("name", figure_data.FIGURES)
def test_pictures_agree_with_the_committed_lines(name):
    with Image.open(figures.FOLDER / f"{name}.png") as picture:
        assert picture.size == (1600, 900)
        shown = picture.text["Data"]
    expected = figure_data.digest(figure_data.FIGURES[name]())
    assert shown == expected, "run `python -m benchmarks figures`"


def test_there_is_no_other_picture():
    drawn = {f"{name}.png" for name in figure_data.FIGURES}
    assert {path.name for path in figures.FOLDER.iterdir()} == drawn
    assert figures.DRAW.keys() == figure_data.FIGURES.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_committed_lines(path):
    """The schema, medians that are the samples', exact calls that agree with their oracle."""
    lines = records.read(path)
    assert {line["suite"] for line in lines} == {path.stem}
    for x in lines:
        assert records.ms(x) == pytest.approx(statistics.median(records.samples(x)))
        assert min(records.samples(x)) > 0
        if x["implementation"] in ("index_topk", "index_scores+top_k", "top_k"):
            assert x["agreement"] == 1
        if x["device_ms"] is not None:
            assert x["device_ms"] <= x["span_ms"] * (1 + 1e-9)
            assert x["device_ms"] <= sum(x["kernels"].values()) * 1.05


def test_committed_counts():
    """Of the same kernels as the times; no row holds fewer than K candidates."""
    lines = tables.other_lines("counts")
    assert {(x["inputs"], x["n"]) for x in lines} == {
        *((kind, n) for kind in ("random", "replay") for n in counts.KEYS),
        *((kind, counts.UNKIND_KEYS) for kind in inputs.ADVERSARIAL),
    }
    timed = {x["source_sha256"] for x in tables.lines_of("prefill")}
    for x in lines:
        assert {x["source_sha256"]} == timed
        assert x["rows"] == x["q"] == counts.QUERIES
        assert x["candidates_over_k"] >= 1
        assert max(x["rows_cut"], x["rows_scored_again"]) <= x["rows"]


def test_committed_lines_are_found():
    assert len(FILES) >= 5


@pytest.fixture
def committed(tmp_path, monkeypatch):
    """Replaces the committed lines by made-up ones."""
    monkeypatch.setattr(records, "RESULTS", tmp_path)

    def write(suite, lines, card="h200"):
        records.write(tmp_path / card / f"{suite}.jsonl", lines)

    return write


def case(n, topk, jnp, **fields):
    """Two lines of one case."""
    common = {"case": f"indexer 4096 x {n} random", "n": n, **fields}
    return [
        line(device_ms=topk, **common),
        line(implementation="jnp", order="score", device_ms=jnp, **common),
    ]


def test_the_indexers_table_from_lines(committed):
    committed("prefill", [*case(8192, 0.5, 12.5), *case(16384, 1.0, 1234.5)])
    assert tables.TABLES["indexer, random"]().splitlines() == [
        "| Q x N | any | plain jnp | jnp / any | any, of the FP8 peak |",
        "| --- | --- | --- | --- | --- |",
        "| 4096 x 8192 | 0.500 | 12.5 | 25.0 | 38.5 % |",
        "| 4096 x 16384 | 1.00 | 1234 | 1234 | 44.9 % |",
    ]


def test_lines_of_two_runs_are_two_rows_and_no_ratio(committed):
    one, two = case(8192, 0.5, 12.5), case(8192, 0.6, 13.0, run_id="another")
    committed("prefill", [one[0], two[1]])
    *_, first, second = tables.TABLES["indexer, random"]().splitlines()
    assert first.startswith("| 4096 x 8192 | 0.500 |  |")
    assert second.startswith("| 4096 x 8192 |  | 13.0 |")
    assert figure_data.speedup()["panels"]["index_topk"] == {}


def test_the_table_of_unkind_rows_divides_by_random_rows(committed):
    fields = {"suite": "adversarial", "case": "unkind indexer 4096 x 8192"}
    kinds = {"random": 2.0, "ascending": 5.0}
    committed(
        "adversarial", [line(inputs=kind, device_ms=ms, **fields) for kind, ms in kinds.items()]
    )
    assert "| ascending | 5.00 (2.50) |" in tables.TABLES["unkind rows, index_topk"]()


def test_the_models_tables_from_lines_with_and_without_a_prefill(committed, tmp_path):
    step = {"n": 8192, "block_ms": 30.0, "indexer_ms": 12.0, "indexer_share": 0.4}
    whole = {"prefill_ms": 6550.4, "prefill_indexer_ms": 5895.36, "prefill_indexer_share": 0.9}
    saved = {"measured_saving_ms": 10.5, "predicted_saving_ms": 11.5}
    saved_whole = {"prefill_measured_saving_ms": 22.25, "prefill_predicted_saving_ms": -0.5}
    no_saving = dict.fromkeys(saved, 0.0)
    old = [
        {"implementation": "jnp+lax.top_k", **step, **no_saving},
        {"implementation": "index_topk", **step, **saved},
    ]
    path = tmp_path / "h200" / "model.jsonl"
    path.parent.mkdir()

    def write(lines):
        path.write_text("".join(json.dumps(x) + "\n" for x in lines))

    write(old)
    steps = [
        "| N | choice | block | indexer | its share | saved | saved, predicted |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| 8192 | `jnp+lax.top_k` | 30.0 | 12.0 | 40% |  |  |",
        "| 8192 | `index_topk` | 30.0 | 12.0 | 40% | 10.5 | 11.5 |",
    ]
    assert tables.TABLES["model"]().splitlines() == steps
    assert tables.TABLES["model, whole prefill"]() == "(not measured yet)"

    write([*old, {**old[1], "n": 16384, **whole, **saved_whole}])
    assert tables.TABLES["model"]().splitlines() == [*steps, steps[-1].replace("8192", "16384")]
    assert tables.TABLES["model, whole prefill"]().splitlines() == [
        steps[0].replace("block", "prefill"),
        steps[1],
        "| 16384 | `index_topk` | 6550 | 5895 | 90% | 22.2 | -0.500 |",
    ]


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (0, "0.00"),
        (0.00077, "0.000770"),
        (0.0328, "0.0328"),
        (0.5, "0.500"),
        (9.996, "10.0"),
        (186.5, "186"),
    ],
)
def test_digits(x, text):
    assert tables.digits(x) == text


def test_render_keeps_what_is_outside_the_markers(committed):
    committed("cpu", [line(suite="cpu", wall_ms=1.5)], card="cpu")
    page = "before\n<!-- table: cpu -->\nold\n<!-- end -->\nafter\n"
    made = tables.render(page)
    assert made.startswith("before\n<!-- table: cpu -->\n\n| rows x N |")
    assert made.endswith("| 4096 x 8192 | `index_topk`, any | 1.50 |\n\n<!-- end -->\nafter\n")
    assert tables.render(made) == made
    with pytest.raises(ValueError, match=r"table must be one of .*, got 'nonsense'"):
        tables.render(page.replace("cpu", "nonsense"))


def test_the_tables_command_warns_of_other_kernel_sources(committed, monkeypatch, tmp_path, capsys):
    committed("prefill", [line(run_id="of old sources"), line(source_sha256=sources.sha256())])
    monkeypatch.setattr(tables, "PAGES", [tmp_path / "page.md"])
    (tmp_path / "page.md").write_text("<!-- table: memory -->\n<!-- end -->")
    assert __main__.main(["tables"]) == 0
    assert "WARNING: of old sources is of other kernel sources" in capsys.readouterr().out
    assert "| 4096 x 8192 | 0.00 |" in (tmp_path / "page.md").read_text()


def test_the_figures_command_draws_every_picture(committed, monkeypatch, tmp_path):
    """Controls, overlapping kernels and N that is no power of two can be drawn too."""
    prefill = [x for n in (8192, 65536, 163840) for x in case(n, n / 8192, n / 500)]
    kernels = [["scores", 0.0, 900.0], ["select", 850.0, 1000.0]]
    prefill[2]["timeline"] = kernels
    control = {**prefill[0], "implementation": "control:tensor", "order": None, "device_ms": 0.4}
    committed("prefill", [*prefill, control])
    committed("small-q", [{**x, "q": 8, "n": 131072} for x in case(131072, 1.0, 10.0)])
    standalone = [
        line(implementation=name, order=order, h=None, d=None, device_ms=1.0)
        for name, order in (("top_k", "score"), ("lax.top_k", "score"))
    ]
    committed("topk", standalone)
    monkeypatch.setattr(figures, "FOLDER", tmp_path / "figures")
    assert __main__.main(["figures"]) == 0
    for name, data in figure_data.FIGURES.items():
        with Image.open(tmp_path / "figures" / f"{name}.png") as picture:
            assert picture.text["Data"] == figure_data.digest(data())
    assert figure_data.timeline()["calls"] == {"index_topk, any": kernels}
    assert figure_data.latency()["series"]["control:tensor"] == [(8192, 0.4)]
    assert figure_data.speedup()["panels"]["top_k"] == {"lax.top_k": [(8192, 1.0)]}


def test_the_digest_changes_with_a_figure():
    data = figure_data.latency()
    other = json.loads(json.dumps(data))
    assert figure_data.digest(other) == figure_data.digest(data)
    other["series"]["index_topk, index"][0][1] += 1e-3
    assert figure_data.digest(other) != figure_data.digest(data)


def test_arithmetic_floor():
    """4096 causal rows of 131072 keys at 1600 MHz: 8.66 TFLOP at 1.73 PFLOP/s."""
    x = line(n=131072, sm_mhz=1600.0)
    pairs = sum(range(131072 - 4096 + 1, 131072 + 1))
    assert inputs.causal_pairs(4096, 131072) == pairs
    expected = 2 * 64 * 128 * pairs / (132 * 8192 * 1.6e9) * 1e3
    assert floors.arithmetic_ms(x) == pytest.approx(expected) == pytest.approx(5.01, abs=0.01)
    assert floors.arithmetic_ms({**x, "card": "2 CPU cores"}) is None
    assert floors.arithmetic_ms({**x, "sm_mhz": None}) is None
    assert floors.reading_ms(x) == pytest.approx(0.4474, abs=1e-4)
    assert inputs.causal_pairs(3, 2) == 0 + 1 + 2
