"""The suites on a CPU: the whole command line, inputs, and what runs side by side."""

import json
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from conftest import SHARED
from test_benchmark_records import line

import jax_fused_topk
from benchmarks import (
    __main__,
    controls,
    counts,
    hopper_library,
    implementations,
    inputs,
    records,
    runs,
    suites,
)


def test_the_cpu_suite_from_the_command_line(tmp_path, capsys):
    arguments = ["--suite", "cpu", "--repeats", "1", "--shapes", "8x512", "--out", str(tmp_path)]
    assert __main__.main(arguments) == 0
    printed = capsys.readouterr().out
    lines = [json.loads(text) for text in (tmp_path / "cpu.jsonl").read_text().splitlines()]

    for x in lines:
        records.check(x)
        assert len(x["wall_ms_samples"]) == 1
        assert 0 < x["wall_ms"] < math.inf
        assert x["device_ms"] is None and x["device_ms_samples"] == []
        assert (x["q"], x["n"], x["topk"]) == (8, 512, 128)
        assert x["input_sets"] == 2
        assert len(x["source_sha256"]) == 64
        assert x["implementation"] in printed and x["case"] in printed
    assert len({x["run_id"] for x in lines}) == 1
    calls = {(x["implementation"], x["order"]): x["agreement"] for x in lines}
    scored = {("index_topk", order) for order in ("any", "index", "score")}
    exact = {*scored, ("index_scores+top_k", "any"), ("top_k", "any"), ("top_k", "score")}
    others = {("lax.top_k", "score"), ("reference", "index"), ("index_scores", None)}
    assert calls.keys() == exact | others
    assert {calls[call] for call in exact} == {1.0}
    assert calls["lax.top_k", "score"] == 1
    assert calls["reference", "index"] > 0.99  # its own rounding
    assert calls["index_scores", None] is None


def test_gpu_suites_run_on_small_shapes(tmp_path, monkeypatch):
    """The same code that runs on a GPU, with a control and a function of the user's."""
    monkeypatch.setattr(
        implementations,
        "control_call",
        lambda kind, data: (lambda d: d["k_scale"] * 2) if kind == "tensor" else None,
    )
    arguments = ["--suite", "prefill,topk,adversarial", "--repeats", "1", "--shapes", "4x256"]
    assert __main__.main([*arguments, "--out", str(tmp_path)]) == 0
    lines = {suite: records.read(tmp_path / f"{suite}.jsonl") for suite in arguments[1].split(",")}

    prefill = {(x["implementation"], x["order"]): x["agreement"] for x in lines["prefill"]}
    assert ("control:tensor", None) in prefill and ("control:score", None) not in prefill
    assert prefill["jnp", "score"] > 0.98
    assert {x["implementation"] for x in lines["topk"]} == {"top_k", "lax.top_k"}
    unkind = records.choose(lines["adversarial"], order="any")
    assert {(x["implementation"], x["inputs"]) for x in unkind} == {
        (name, kind) for name in ("index_topk", "top_k") for kind in inputs.ADVERSARIAL
    }
    assert {x["agreement"] for x in unkind} == {1.0}


def test_implementations_by_name_and_of_the_users_own(tmp_path):
    arguments = ["--suite", "topk", "--repeats", "1", "--shapes", "4x256", "--out", str(tmp_path)]
    assert __main__.main([*arguments, "--implementations", "jax.lax:top_k,lax.top_k"]) == 0
    lines = records.read(tmp_path / "topk.jsonl")
    assert [(x["implementation"], x["agreement"]) for x in lines] == [
        ("jax.lax:top_k", 1.0),
        ("lax.top_k", 1.0),
    ]


def test_implementations_go_to_the_cases_that_have_them():
    def names(suite, *asked):
        options = suites.Options(shapes=[(4, 256)], implementations=asked)
        return [(make.func.__name__, make.args[1:]) for make in suites.cases(suite, options)]

    assert names("adversarial", "index_topk") == [("_unkind_index_case", (["index_topk"],))]
    assert names("adversarial", "top_k") == [("_unkind_top_k_case", (["top_k"],))]
    assert names("topk", "index_topk") == names("prefill", "top_k") == []
    assert names("cpu", "index_topk", "top_k") == [
        ("_top_k_case", (["top_k"],)),
        ("_index_case", ("random", ["index_topk"], None)),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "nonsense"], "suite must be one of prefill, small-q, .* got 'nonsense'"),
        (["--suite", "cpu", "--shapes", "8"], "shapes must be like 4096x8192,.* got '8'"),
        (["--suite", "cpu", "--shapes", "0x8"], "shapes must be like 4096x8192,.* got '0x8'"),
        (["--suite", "cpu", "--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--suite", "cpu", "--inputs", "zeros"], "--inputs must be random, replay or both"),
        (
            ["--suite", "topk", "--shapes", "4x64", "--implementations", "best"],
            "implementations must be of index_topk, .* or module:callable, got 'best'",
        ),
        (
            ["--suite", "topk", "--shapes", "4x64", "--implementations", "no_such:f"],
            "implementations: 'no_such:f' cannot be imported: No module named 'no_such'",
        ),
        (["--suite", "cpu,topk"], "without a GPU only --suite cpu runs as it is"),
        (["compare", "no_such_old", "no_such_new"], "No such file or directory: 'no_such_old'"),
    ],
)
def test_refusals(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        __main__.main(arguments)
    assert error.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_without_a_gpu_its_lines_are_not_written_over(tmp_path, capsys):
    path = tmp_path / "cpu.jsonl"
    committed = records.RESULTS / "h200" / "topk.jsonl"
    path.write_text(committed.read_text())
    with pytest.raises(SystemExit):
        __main__.main(["--suite", "cpu", "--out", str(tmp_path)])
    assert "cpu.jsonl holds a GPU's lines, and there is none here" in capsys.readouterr().err
    assert path.read_text() == committed.read_text()


def test_a_wrong_choice_of_an_exact_implementation_stops_the_benchmark(monkeypatch):
    def wrong(x, k, **kwargs):
        values, indices = jax.lax.top_k(x, k)
        return values, indices.at[0, 0].set(jnp.argmin(x[0]))

    monkeypatch.setattr(jax_fused_topk, "top_k", wrong)
    (make,) = suites.cases("topk", suites.Options(shapes=[(4, 256)]))
    with pytest.raises(RuntimeError, match=r"top-k 4 x 256 random: top_k any random must choose"):
        make()


def test_the_model_suite_needs_its_example(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(suites, "MODEL", tmp_path / "dsa_attention.py")
    with pytest.raises(ValueError, match=r"suite model is not available: no .*dsa_attention.py"):
        suites.cases("model", suites.Options())
    suites.MODEL.write_text("pass")
    with pytest.raises(ValueError, match="has no benchmark_cases"):
        suites.cases("model", suites.Options())
    suites.MODEL.write_text(
        "import jax.numpy as jnp\n"
        "import beside_the_example\n"
        "def benchmark_cases(shapes):\n"
        "    for q, n in shapes or [(4, 8)]:\n"
        "        yield q, n, 2, {'attention': (lambda x: x + 1, (jnp.ones((q, n)),))}\n"
    )
    (tmp_path / "beside_the_example.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path])
    lines = runs.run("model", suites.cases("model", suites.Options(shapes=[(2, 3)])), repeats=2)
    assert [(x["implementation"], x["case"], x["topk"]) for x in lines] == [
        ("attention", "model 2 x 3", 2)
    ]


def test_controls_are_none_without_a_hopper_gpu():
    data = inputs.random(0, 2, 300)
    for kind in controls.KINDS:
        assert controls.control_call(kind, data) is None
    with pytest.raises(ValueError, match="kind must be one of tensor, score, got 'memory'"):
        controls.control_call("memory", {})


@pytest.mark.skipif(hopper_library.find_nvcc() is None, reason="NO CUDA: nvcc was not found")
def test_kernels_of_the_benchmarks_compile(tmp_path):
    found = (*controls.SOURCES, counts.SOURCES[0])
    library = hopper_library.compile_library(
        hopper_library.find_nvcc(), tmp_path, found
    ).read_bytes()
    assert b"JftControl" in library and b"JftCount" in library


@pytest.mark.parametrize("kind", inputs.ADVERSARIAL)
def test_dialled_scores_are_the_values_exactly(kind):
    values = inputs.unkind(kind, inputs.values(3, 1, 600))[0]
    assert values.dtype == jnp.float32
    data = inputs.dial(values, 3)
    scores = jax_fused_topk.index_scores(**data)
    oracles.assert_same(scores, np.broadcast_to(np.asarray(values), (3, 600)), kind)


def test_unkind_rows_are_what_their_names_say():
    draws = inputs.values(0, 2, 1024)
    made = {kind: np.asarray(inputs.unkind(kind, draws)) for kind in inputs.ADVERSARIAL}
    np.testing.assert_array_equal(made["random"], draws)
    assert (np.diff(made["ascending"]) >= 0).all() and (np.diff(made["descending"]) <= 0).all()
    assert (made["constant"] == 1).all() and set(made["two values"].ravel()) == {0, 1}
    assert np.abs(made["narrow band"] - 10).max() < 1e-4
    assert (made["outlier"].argmax(axis=1) == 341).all()
    assert (made["plateau"] == 0).mean() > 0.98
    assert (made["spikes"][:, ::8] > 90).all() and made["spikes"][:, 1::8].max() < 10


def test_random_inputs_differ_by_seed_and_are_causal():
    one, two = (inputs.random(seed, 4, 32) for seed in (0, 1))
    assert one["q"].dtype == one["k"].dtype == jnp.float8_e4m3fn
    assert not np.array_equal(one["k_scale"], two["k_scale"])
    assert one["ends"].tolist() == [29, 30, 31, 32] and one["starts"].tolist() == [0] * 4


def test_replay_windows(replay):
    """The first turn is the loader's own window; the next ends before it."""
    expected = replay(64, 2048)
    first, second = (inputs.replay(SHARED / "replay", turn, 64, 2048) for turn in (0, 1))
    for name in expected:
        oracles.assert_same(first[name], expected[name], name)
    oracles.assert_same(second["k"][64:], expected["k"][:-64], "k")
    assert second["ends"].tolist() == first["ends"].tolist()
    assert not np.array_equal(second["weights"], first["weights"])
    assert inputs.replay_holds(4096, 163840)
    assert not inputs.replay_holds(8192, 131072) and not inputs.replay_holds(64, 32)


def test_shapes_that_the_replay_set_lacks_are_left_out(capsys):
    options = suites.Options(inputs=("random", "replay"), shapes=[(4096, 8192), (8192, 131072)])
    assert len(list(suites.cases("prefill", options))) == 3
    assert "no replay inputs of 8192 x 131072: left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("indices", "share"),
    [
        ([[0, 3, -1, -1], [1, 2, 4, 7]], 1),
        ([[3, 0, 5, 9], [7, 4, 2, 1]], 1),
        ([[0, 9, 5, 8], [1, 2, 4, 7]], 5 / 6),
        ([[-1, -1, -1, -1], [-1, -1, -1, -1]], 0),
    ],
)
def test_agreement_is_the_share_of_the_oracles_keys(indices, share):
    oracle = jnp.array([[0, 3, -1, -1], [1, 2, 4, 7]])
    assert float(implementations.agreement(jnp.array(indices), oracle)) == pytest.approx(share)


def test_no_keys_agree_fully():
    none = jnp.full((2, 3), -1)
    assert float(implementations.agreement(none, none)) == 1


def test_chosen_finds_indices_only():
    indices = jnp.zeros((2, 3), jnp.int32)
    assert implementations.chosen(indices) is indices
    assert implementations.chosen((jnp.zeros((2, 3)), indices)) is indices
    assert implementations.chosen(jnp.zeros((2, 3))) is None


def test_plain_jnp_leaves_out_what_takes_too_long():
    data = jax.eval_shape(lambda: inputs.random(0, 512, 1024))
    jaxpr = str(jax.make_jaxpr(implementations.plain(16))(data))
    assert "512,64,1024" in jaxpr.replace(" ", "")  # in one piece
    names = [
        make.args[2]
        for make in suites.cases("prefill", suites.Options(shapes=[(4096, 131072), (8192, 131072)]))
    ]
    assert ["jnp" in n for n in names] == [True, False]


def test_the_table_shows_medians_and_half_ranges():
    text = runs.table([line(device_ms=2.0, device_ms_samples=[1.8, 2.0, 2.4])])
    row = " ".join(text.splitlines()[1].split())
    assert row == (
        "indexer 4096 x 8192 random index_topk any random 2.0000 15.0% 3.0000 3.3% 1 1.000000"
    )
