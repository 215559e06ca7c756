"""The JSON lines of a benchmark: their fields, reading, choosing, and ratios within a run."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]

RESULTS = Path(__file__).resolve().parent / "results"

_MAYBE_INT, _MAYBE_FLOAT, _MAYBE_STR = (int, type(None)), (float, type(None)), (str, type(None))
FIELDS: dict[str, tuple[type, ...]] = {
    "run_id": (str,),  # one interleaved run of one suite
    "suite": (str,),
    "case": (str,),  # the calls that took turns
    "source_sha256": (str,),  # of cuda/ and ffi/, as in the GPU receipt
    "card": (str,),
    "driver": _MAYBE_STR,
    "version": (str,),
    "jax": (str,),
    "jaxlib": (str,),
    "python": (str,),
    "implementation": (str,),
    "order": _MAYBE_STR,
    "inputs": (str,),
    "input_sets": (int,),
    "q": (int,),
    "n": (int,),
    "h": _MAYBE_INT,
    "d": _MAYBE_INT,
    "topk": (int,),
    "agreement": _MAYBE_FLOAT,  # share of the oracle's keys that the call chose
    "device_ms": _MAYBE_FLOAT,  # union of the call's kernel intervals, median
    "span_ms": _MAYBE_FLOAT,  # first start to last end, median
    "wall_ms": (float,),  # the jitted call, unprofiled, median
    "launches": _MAYBE_INT,  # kernels and memory operations of a call
    "kernels": (dict,),  # name -> median ms
    "timeline": (list, type(None)),  # [name, start_us, end_us] of one call
    "temp_bytes": _MAYBE_INT,
    "sm_mhz": _MAYBE_FLOAT,  # median while the case ran
    "clocks": (dict, type(None)),
    "device_ms_samples": (list,),
    "wall_ms_samples": (list,),
}
OPTIONAL: dict[str, tuple[type, ...]] = {  # earlier lines lack them
    "scopes": (dict,),  # named scope -> median ms, "" for what has none
}


def check(line: Line) -> Line:
    """Returns the line.

    Raises:
      ValueError: if a field is missing or of another type than `FIELDS` or `OPTIONAL` says.
    """
    for name, types in (FIELDS | OPTIONAL).items():
        if name not in line:
            if name in OPTIONAL:
                continue
            raise ValueError(f"a line needs the field {name!r}, got {sorted(line)}")
        if not isinstance(line[name], types):
            expected = " or ".join(t.__name__ for t in types)
            raise ValueError(f"{name} must be {expected}, got {line[name]!r}")
    return line


def read(path: Path) -> list[Line]:
    """The checked lines of a file."""
    return [check(json.loads(text)) for text in path.read_text().splitlines()]


def write(path: Path, lines: Iterable[Line]) -> None:
    """Writes checked lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(check(line)) + "\n" for line in lines))


def choose(lines: Iterable[Line], **fields: Any) -> list[Line]:
    """The lines whose fields have these values."""
    return [line for line in lines if all(line[name] == x for name, x in fields.items())]


def one(lines: Iterable[Line], **fields: Any) -> Line | None:
    """The only line whose fields have these values, None if there is none.

    Raises:
      ValueError: if there are several.
    """
    found = choose(lines, **fields)
    if len(found) > 1:
        raise ValueError(f"{len(found)} lines have {fields}, expected one")
    return found[0] if found else None


def ms(line: Line) -> float:
    """Device time where there is one, else wall time; the median, in ms."""
    time_ms: float = line["wall_ms"] if line["device_ms"] is None else line["device_ms"]
    return time_ms


def samples(line: Line) -> list[float]:
    """The samples whose median is `ms`, one a round, in ms."""
    taken: list[float] = line["device_ms_samples"] or line["wall_ms_samples"]
    return taken


def require_comparable(a: Line, b: Line) -> None:
    """Raises unless two lines took turns in one run.

    A card's clock follows its power, so times that were not taken by turns have no ratio.

    Raises:
      ValueError: if they are of two runs or of two cases, or one has device time and the
        other only wall time.
    """
    for field in ("run_id", "case"):
        if a[field] != b[field]:
            raise ValueError(
                f"no ratio of two {field}s: {a['implementation']} of {a[field]} "
                f"and {b['implementation']} of {b[field]}"
            )
    if (a["device_ms"] is None) != (b["device_ms"] is None):
        raise ValueError(
            f"no ratio of device and wall time: {a['implementation']} and {b['implementation']}"
        )


def ratio(a: Line, b: Line) -> float:
    """The time of `a` over the time of `b`.

    Raises:
      ValueError: as `require_comparable`.
    """
    require_comparable(a, b)
    return ms(a) / ms(b)


def ratio_samples(a: Line, b: Line) -> list[float]:
    """`ratio` round by round: the two calls of a round ran next to each other.

    Raises:
      ValueError: as `require_comparable`.
    """
    require_comparable(a, b)
    return [x / y for x, y in zip(samples(a), samples(b), strict=True)]


def stale(lines: Sequence[Line], source_sha256: str) -> list[str]:
    """The runs whose kernels were not those of `source_sha256`, in order."""
    return sorted({line["run_id"] for line in lines if line["source_sha256"] != source_sha256})
