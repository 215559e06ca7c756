"""What each picture shows, as plain data taken from the committed JSON lines."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

from benchmarks import floors, records
from benchmarks.records import Line
from benchmarks.tables import by_case, lines_of

Data = dict[str, Any]
Series = dict[str, list[tuple[float, float]]]

INDEXERS = (
    ("index_topk", "index"),
    ("index_scores", None),
    ("index_scores+top_k", "any"),
    ("jnp", "score"),
    ("control:tensor", None),
    ("control:score", None),
)
STANDALONE = (
    ("top_k", "any"),
    ("top_k", "score"),
    ("lax.top_k", "score"),
    ("torch.topk", "any"),
    ("flashinfer.top_k", "any"),
)
TIMELINE_SHAPE = {"q": 4096, "n": 65536}


def named(implementation: str, order: str | None) -> str:
    """How a picture calls an implementation; the order where there are several."""
    orders = {"index_topk", "top_k"}
    return f"{implementation}, {order}" if implementation in orders else implementation


def _series(
    lines: list[Line],
    which: tuple[tuple[str, str | None], ...],
    x: str,
    y: Callable[[Line], float | None] = records.ms,
) -> Series:
    found: Series = {}
    for implementation, order in which:
        chosen = records.choose(lines, implementation=implementation, order=order)
        points = [(line[x], value) for line in chosen if (value := y(line)) is not None]
        if points:
            found[named(implementation, order)] = sorted(points)
    return found


def _floor(lines: list[Line], x: str, y: Callable[[Line], float | None]) -> list[Any]:
    """One point an x of a floor that is the same for all implementations."""
    points = {line[x]: value for line in lines if (value := y(line)) is not None}
    return sorted(points.items())


def _prefill() -> list[Line]:
    return records.choose(lines_of("prefill"), q=4096, inputs="random")


def latency() -> Data:
    """Time against N at Q = 4096, with the arithmetic floor."""
    lines = _prefill()
    series = _series(lines, INDEXERS, "n")
    series["arithmetic floor"] = _floor(lines, "n", floors.arithmetic_ms)
    return {"series": series}


def queries() -> Data:
    """Time against Q at N = 131072, with the arithmetic floor."""
    lines = records.choose(lines_of("small-q"), inputs="random", n=131072)
    series = _series(lines, INDEXERS, "q")
    series["arithmetic floor"] = _floor(lines, "q", floors.arithmetic_ms)
    return {"series": series}


def top_k() -> Data:
    """Time of standalone top-k against N at 4096 rows, with the time to read the values."""
    lines = records.choose(lines_of("topk"), q=4096)
    series = _series(lines, STANDALONE, "n")
    series["one read of x"] = _floor(lines, "n", floors.reading_ms)
    return {"series": series}


def peak() -> Data:
    """Share of the FP8 peak against N at Q = 4096, percent."""

    def share(line: Line) -> float | None:
        floor = floors.arithmetic_ms(line)
        return None if floor is None else 100 * floor / records.ms(line)

    which = tuple(pair for pair in INDEXERS if pair[0] != "jnp")
    return {"series": _series(_prefill(), which, "n", share)}


def speedup() -> Data:
    """How many times faster than what else there is: {panel: {name: [(N, times)]}}."""
    panels = {
        "index_topk": (
            _prefill(),
            (("jnp", "score", "index"), ("index_scores+top_k", "any", "index")),
        ),
        "top_k": (
            records.choose(lines_of("topk"), q=4096),
            # What does not sort is compared with what does not.
            (
                ("lax.top_k", "score", "score"),
                ("torch.topk", "any", "any"),
                ("flashinfer.top_k", "any", "any"),
            ),
        ),
    }
    return {
        "panels": {
            ours: {
                implementation: times
                for implementation, order, own in others
                if (times := _times(lines, (ours, own), (implementation, order)))
            }
            for ours, (lines, others) in panels.items()
        }
    }


def _times(
    lines: list[Line], ours: tuple[str, str | None], other: tuple[str, str | None]
) -> list[tuple[float, float]]:
    found = []
    for case in by_case(lines):
        a = records.one(case, implementation=other[0], order=other[1])
        b = records.one(case, implementation=ours[0], order=ours[1])
        if a is not None and b is not None:
            found.append((case[0]["n"], records.ratio(a, b)))
    return sorted(found)


def timeline() -> Data:
    """The kernels of one call at `TIMELINE_SHAPE`: {name: [[kernel, start_us, end_us]]}."""
    lines = records.choose(_prefill(), **TIMELINE_SHAPE)
    shown = (("index_topk", "any"), ("index_topk", "score"), ("index_scores+top_k", "any"))
    calls = {}
    for implementation, order in shown:
        line = records.one(lines, implementation=implementation, order=order)
        if line is not None and line["timeline"] is not None:
            calls[named(implementation, order)] = line["timeline"]
    return {"calls": calls}


FIGURES: dict[str, Callable[[], Data]] = {
    "latency": latency,
    "queries": queries,
    "speedup": speedup,
    "peak": peak,
    "top_k": top_k,
    "timeline": timeline,
}


def digest(data: Data) -> str:
    """The SHA-256 of what a picture shows: it is in the PNG's metadata as "Data"."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
