"""examples/wall_time.py: who runs when, on a clock that the calls turn themselves."""

import types

import pytest
import wall_time


@pytest.fixture
def recorded(monkeypatch):
    """A function of a name and a time in ms that makes a call, and the names in order of calls."""
    now, order = [0.0], []
    monkeypatch.setattr(wall_time, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def make(name, ms):
        def call():
            order.append(name)
            now[0] += ms / 1e3

        return call

    return make, order


def test_calls_take_turns_after_their_warm_up(recorded):
    make, order = recorded
    samples = wall_time.interleaved_ms({"a": make("a", 2.0), "b": make("b", 30.0)}, repeats=3)
    assert order == ["a", "a", "b", "b", *["a", "b"] * 3]
    assert samples == {"a": pytest.approx([2.0] * 3), "b": pytest.approx([30.0] * 3)}


def test_long_calls_join_the_first_rounds_and_the_longest_only_one(recorded):
    make, order = recorded
    limit = wall_time.LONG_MS
    long = {"slow": make("slow", limit + 1), "quick": make("quick", limit - 1)}
    samples = wall_time.interleaved_ms({"a": make("a", 2.0)}, 3, long, long_repeats=2)
    assert order == ["a", "a", "a", "slow", "quick", "a", "quick", "a"]
    assert samples == {
        "a": pytest.approx([2.0] * 3),
        "slow": pytest.approx([limit + 1]),
        "quick": pytest.approx([limit - 1] * 2),
    }


def test_long_calls_may_have_more_rounds(recorded):
    make, order = recorded
    wall_time.interleaved_ms({"a": make("a", 2.0)}, 1, {"b": make("b", 3.0)}, long_repeats=3)
    assert order == ["a", "a", "a", "b", "b", "b"]
