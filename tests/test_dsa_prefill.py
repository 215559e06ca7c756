"""examples/dsa: the whole prefill that the benchmark times, and what its lines say of it."""

import collections
import dataclasses
import json

import dsa_attention
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from dsa import benchmark, block, chunks
from dsa.config import SMALL

TOKENS, CHUNK = 96, 32


def stale_cache(config, tokens):
    """A cache in which every entry is NaN: the worst that may stand in an unwritten one."""
    empty = block.empty_cache(config, tokens)
    return jax.tree.map(lambda rows: jnp.full_like(rows, jnp.nan), empty)


@pytest.fixture(scope="module", params=["some keys chosen", "all keys chosen"])
def timed(request):
    """Config, parameters, the prompt, its cache and the calls that are timed, at one length."""
    everything = dataclasses.replace(SMALL, topk=TOKENS)
    config = SMALL if request.param == "some keys chosen" else everything
    params = benchmark.make_params(config)
    programs = {
        key: (jax.jit(f), arguments)
        for key, (f, arguments) in benchmark.calls(params, config, TOKENS, CHUNK).items()
    }
    prompt = benchmark.make_prompt(params, config, TOKENS, CHUNK)
    return config, params, prompt, programs, benchmark.prefill_calls(programs, prompt)


def test_every_part_and_choice_is_called(timed):
    *_, calls = timed
    parts = (benchmark.PREFILL, benchmark.PREFILL_INDEXER)
    assert set(calls) == {(part, name) for part in parts for name in benchmark.CHOICES}


def test_the_prompt_is_what_the_cache_holds(timed):
    config, params, prompt, programs, _ = timed
    _, (_, last, cache, start) = programs[benchmark.BLOCK, benchmark.FUSED]
    assert [int(chunk.start) for chunk in prompt] == [0, 32, 64]
    oracles.assert_same(prompt[-1].x, last)
    assert int(start) == 64
    x = jnp.concatenate([chunk.x for chunk in prompt])
    latents = block.append(params, config, x, block.empty_cache(config, TOKENS), 0).latents
    np.testing.assert_allclose(cache.latents, latents, atol=1e-5)


@pytest.mark.parametrize("name", benchmark.CHOICES)
def test_output_is_that_of_block_prefill_and_of_dense(timed, name):
    """Whatever stood in the cache before: the prompt's own entries, or NaN everywhere."""
    config, params, prompt, programs, calls = timed
    x = jnp.concatenate([chunk.x for chunk in prompt])
    empty = block.empty_cache(config, TOKENS)
    run = jax.jit(block.prefill, static_argnames=("config", "chunk"))
    expected = run(params, config, x, empty, chunk=CHUNK)
    chosen = np.concatenate(calls[benchmark.PREFILL_INDEXER, name]())
    same = (np.sort(chosen) == np.sort(expected.indices)).all(axis=1)
    step, _ = programs[benchmark.BLOCK, name]
    outputs = (
        calls[benchmark.PREFILL, name](),
        chunks.prefill(step, params, prompt, stale_cache(config, TOKENS)),
    )
    for out in outputs:
        y = np.concatenate(out.y)
        comparison = dsa_attention.compare(y, expected.y, same)
        assert y.shape == x.shape and comparison.agrees, comparison
        np.testing.assert_allclose(out.cache.latents, expected.cache.latents, atol=1e-5)
        if config.topk == TOKENS:
            dense = dsa_attention.compare(y, block.dense(params, config, x))
            assert dense.agrees and same.all(), dense


def test_chunks_must_divide_the_length():
    with pytest.raises(ValueError, match="chunk must divide length 96, got 36"):
        benchmark.make_prompt({}, SMALL, TOKENS, 36)


# Lines


BLOCK_MS = {benchmark.BASELINE: [30, 32, 34], benchmark.UNFUSED: [20, 21, 22]}
BLOCK_MS[benchmark.FUSED] = [19, 20, 24]
INDEXER_MS = {benchmark.BASELINE: [12, 16, 13], benchmark.UNFUSED: [2, 2, 3]}
INDEXER_MS[benchmark.FUSED] = [1, 2, 1]
PREFILL_MS = {benchmark.BASELINE: [6000], benchmark.UNFUSED: [700, 720]}
PREFILL_MS[benchmark.FUSED] = [680, 640]
PREFILL_INDEXER_MS = {benchmark.BASELINE: [5500], benchmark.UNFUSED: [210, 220]}
PREFILL_INDEXER_MS[benchmark.FUSED] = [160, 170]
SAMPLES = {
    (part, name): times
    for part, by_name in (
        (benchmark.BLOCK, BLOCK_MS),
        (benchmark.INDEXER, INDEXER_MS),
        (benchmark.PREFILL, PREFILL_MS),
        (benchmark.PREFILL_INDEXER, PREFILL_INDEXER_MS),
    )
    for name, times in by_name.items()
}


def test_fields_of_a_step():
    assert benchmark.time_fields(SAMPLES, benchmark.FUSED) == {
        "block_ms": 20,
        "indexer_ms": 1,
        "indexer_share": 1 / 20,
        "measured_saving_ms": 32 - 20,
        "predicted_saving_ms": 13 - 1,
        "block_ms_samples": [19, 20, 24],
        "indexer_ms_samples": [1, 2, 1],
    }


def test_fields_of_a_prefill():
    """The baseline, too slow for a second round, has one sample."""
    assert benchmark.time_fields(SAMPLES, benchmark.FUSED, "prefill_") == {
        "prefill_ms": 660,
        "prefill_indexer_ms": 165,
        "prefill_indexer_share": 0.25,
        "prefill_measured_saving_ms": 6000 - 660,
        "prefill_predicted_saving_ms": 5500 - 165,
        "prefill_ms_samples": [680, 640],
        "prefill_indexer_ms_samples": [160, 170],
    }
    baseline = benchmark.time_fields(SAMPLES, benchmark.BASELINE, "prefill_")
    assert baseline["prefill_ms_samples"] == [6000]
    assert baseline["prefill_measured_saving_ms"] == baseline["prefill_predicted_saving_ms"] == 0


# The script


def test_script_times_both_with_one_program_a_length_and_choice(tmp_path, capsys, monkeypatch):
    traced = collections.Counter()

    def counted(name, choose):
        def call(*arguments):
            traced[name] += 1
            return choose(*arguments)

        return call

    choices = {name: counted(name, choose) for name, choose in benchmark.CHOICES.items()}
    monkeypatch.setattr(benchmark, "CHOICES", choices)
    out = tmp_path / "model.jsonl"
    arguments = ["--benchmark", "--small", "--lengths", "32", "48", "--chunk", "16"]
    arguments += ["--repeats", "1", "--prefill-repeats", "2", "--out", str(out)]
    assert dsa_attention.main(arguments) == 0
    # Lengths 32 and 48, the step and the indexer alone: nothing more for their prefills.
    assert traced == dict.fromkeys(choices, 4)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(x["q"], x["n"], x["implementation"]) for x in lines] == [
        (16, length, name) for length in (32, 48) for name in choices
    ]
    for x in lines:
        assert len(x["block_ms_samples"]) == 1
        assert len(x["prefill_ms_samples"]) == len(x["prefill_indexer_ms_samples"]) == 2
        assert x["prefill_ms"] == pytest.approx(np.mean(x["prefill_ms_samples"]))
        assert x["prefill_indexer_ms"] > 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.split()[1] in choices]
    assert [row[:3] for row in rows] == [
        [length, name, timed]
        for length in ("32", "48")
        for name in choices
        for timed in ("step", "prefill")
    ]
    assert rows[1][3:5] == [f"{lines[0][x]:.2f}" for x in ("prefill_ms", "prefill_indexer_ms")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefill-repeats", "-1"], "--prefill-repeats must be at least 0, got -1"),
        (
            ["--benchmark", "--small", "--lengths", "64", "40", "--chunk", "32"],
            "--lengths must be multiples of --chunk 32 for the whole prefill, got 64 40; "
            "--prefill-repeats 0 leaves it out",
        ),
    ],
)
def test_script_refuses(arguments, message, capsys):
    with pytest.raises(SystemExit):
        dsa_attention.parse_arguments(arguments)
    assert message in capsys.readouterr().err


def test_lengths_need_not_be_multiples_without_the_prefill():
    arguments = ["--benchmark", "--small", "--lengths", "40", "--chunk", "32"]
    assert dsa_attention.parse_arguments([*arguments, "--prefill-repeats", "0"]).lengths == [40]
