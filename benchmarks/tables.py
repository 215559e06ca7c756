"""Writes the tables of docs/performance.md and README.md from the committed JSON lines.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.  Its ratios are of calls
that took turns in one run: `records.ratio` refuses others.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks import floors, inputs, nsight, records, sources
from benchmarks.records import Line

PAGES = ("docs/performance.md", "docs/sharding.md", "docs/model.md", "README.md")
H200 = ("prefill", "small-q", "lengths", "topk", "adversarial")

Cell = Callable[[Sequence[Line]], str]  # of the lines of one case


def lines_of(suite: str, card: str = "h200") -> list[Line]:
    """The committed lines of a suite on a card, none where there is no file."""
    path = records.RESULTS / card / f"{suite}.jsonl"
    return records.read(path) if path.exists() else []


def other_lines(name: str) -> list[Line]:
    """The committed lines of a program with fields of its own, none where there is no file."""
    path = records.RESULTS / "h200" / f"{name}.jsonl"
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def digits(x: float) -> str:
    """Three significant digits, without an exponent."""
    exponent = int(f"{x:.2e}".partition("e")[2])
    return f"{x:.{max(0, 2 - exponent)}f}"


def time(implementation: str, order: str | None = None) -> Cell:
    """The median time of an implementation, ms."""

    def cell(case: Sequence[Line]) -> str:
        line = records.one(case, implementation=implementation, order=order)
        return "" if line is None else digits(records.ms(line))

    return cell


def ratio(a: tuple[str, str | None], b: tuple[str, str | None]) -> Cell:
    """The time of implementation and order `a` over that of `b`."""

    def cell(case: Sequence[Line]) -> str:
        pair = [records.one(case, implementation=name, order=order) for name, order in (a, b)]
        if pair[0] is None or pair[1] is None:
            return ""
        return digits(records.ratio(pair[0], pair[1]))

    return cell


def share_of_peak(implementation: str, order: str | None = None) -> Cell:
    """The arithmetic floor over the time of an implementation."""

    def cell(case: Sequence[Line]) -> str:
        line = records.one(case, implementation=implementation, order=order)
        floor = None if line is None else floors.arithmetic_ms(line)
        if line is None or floor is None:
            return ""
        return f"{digits(100 * floor / records.ms(line))} %"

    return cell


def workspace(implementation: str, order: str | None = None) -> Cell:
    """Scratch memory of an implementation, MiB."""

    def cell(case: Sequence[Line]) -> str:
        line = records.one(case, implementation=implementation, order=order)
        known = line is not None and line["temp_bytes"] is not None
        return digits(line["temp_bytes"] / 2**20) if line is not None and known else ""

    return cell


def shape(case: Sequence[Line]) -> str:
    """Q x N of a case."""
    return f"{case[0]['q']} x {case[0]['n']}"


def _call(line: Line) -> str:
    return f"`{line['implementation']}`" + (f", {line['order']}" if line["order"] else "")


def by_case(lines: Iterable[Line]) -> list[list[Line]]:
    """The lines of each case of each run, in order."""
    found: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        found.setdefault((line["run_id"], line["case"]), []).append(line)
    return list(found.values())


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns that are empty in every row are left out."""
    rows = list(rows)
    if not rows:
        return "(not measured yet)"
    kept = [i for i in range(len(header)) if any(row[i] for row in rows)]
    marks = ["---"] * len(kept)
    table = [[header[i] for i in kept], marks, *([row[i] for i in kept] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in table)


def cases_table(lines: Iterable[Line], columns: dict[str, Cell]) -> str:
    """One row a case, one column a cell function."""
    rows = [[cell(case) for cell in columns.values()] for case in by_case(lines)]
    return markdown(list(columns), rows)


def indexer(lines: list[Line]) -> str:
    """The indexer's table: times, the ratio to plain jnp, the share of the FP8 peak."""
    ours = ("index_topk", "any")
    columns = {
        "Q x N": shape,
        "any": time(*ours),
        "index": time("index_topk", "index"),
        "score": time("index_topk", "score"),
        "`index_scores`": time("index_scores"),
        "`index_scores` + `top_k`": time("index_scores+top_k", "any"),
        "plain jnp": time("jnp", "score"),
        "jnp / any": ratio(("jnp", "score"), ours),
        "tensor-only": time("control:tensor"),
        "any / tensor-only": ratio(ours, ("control:tensor", None)),
        "score-only": time("control:score"),
        "any / score-only": ratio(ours, ("control:score", None)),
        "any, of the FP8 peak": share_of_peak(*ours),
        "`index_scores`, of the peak": share_of_peak("index_scores"),
    }
    return cases_table(lines, columns)


def lengths() -> str:
    """Time against N at Q = 4096."""
    columns = {
        "N": lambda case: str(case[0]["n"]),
        "any": time("index_topk", "any"),
        "index": time("index_topk", "index"),
        "tensor-only": time("control:tensor"),
        "any / tensor-only": ratio(("index_topk", "any"), ("control:tensor", None)),
    }
    return cases_table(lines_of("lengths"), columns)


def model(block: str = "block", prefix: str = "") -> str:
    """The attention block of examples/dsa_attention.py, wall ms.

    Args:
      block: "block" for one step, "prefill" for all; lines without its time have no row.
      prefix: how the other fields' names begin.
    """

    def saving(line: Line, kind: str) -> str:
        ms = line[f"{prefix}{kind}_saving_ms"]
        return digits(ms) if ms else ""

    rows = [
        [
            str(line["n"]),
            f"`{line['implementation']}`",
            digits(line[f"{block}_ms"]),
            digits(line[f"{prefix}indexer_ms"]),
            f"{line[f'{prefix}indexer_share']:.0%}",
            saving(line, "measured"),
            saving(line, "predicted"),
        ]
        for line in other_lines("model")
        if f"{block}_ms" in line
    ]
    header = ["N", "choice", block, "indexer", "its share", "saved", "saved, predicted"]
    return markdown(header, rows)


def counts() -> str:
    """What the sampled thresholds led to, by kind of input."""
    rows = [
        [
            shape([line]),
            line["inputs"],
            f"{line['candidates_over_k']:.2f}",
            str(line["rows_cut"]),
            str(line["rows_scored_again"]),
        ]
        for line in other_lines("counts")
    ]
    return markdown(["Q x N", "rows", "candidates / K", "rows cut", "rows scored again"], rows)


def counters() -> str:
    """Share of the FP8 peak by cycles, and the clock, from ncu's counters."""
    rows = []
    for line in other_lines("counters"):
        found, share = line["launches"], floors.peak_share(line)
        pairs = inputs.causal_pairs(line["q"], line["n"])
        rows.append(
            [
                shape([line]),
                _call(line),
                digits(nsight.total(found, nsight.TIME) / 1e6),
                f"{nsight.sm_mhz(found):.0f}",
                "" if share is None else f"{digits(100 * share)} %",
                f"{nsight.imbalance(found):.1%}",
                digits(32 * nsight.total(found, nsight.INSTRUCTIONS) / pairs),
            ]
        )
    header = ["Q x N", "call", "ms", "SM MHz", "of the FP8 peak", "imbalance"]
    return markdown([*header, "instructions a pair"], rows)


def counter_bytes() -> str:
    """MB moved, from ncu's counters, beside the floor: each operand and result once."""
    rows = []
    for line in other_lines("counters"):
        floor = floors.moved_bytes(line)
        read, written, l2 = (
            nsight.total(line["launches"], metric)
            for metric in (nsight.READ, nsight.WRITTEN, nsight.L2)
        )
        figures = [digits(x / 1e6) for x in (floor, read, written, l2)]
        rows.append([shape([line]), _call(line), *figures, digits((read + written) / floor)])
    header = ["Q x N", "call", "floor", "DRAM read", "DRAM written", "L2", "DRAM / floor"]
    return markdown(header, rows)


def scopes() -> str:
    """Device ms of the attention block by named scope, of lines that have scopes."""
    lines = [line for line in lines_of("scopes") if line.get("scopes")]
    names = dict.fromkeys(name for line in lines for name in line["scopes"])
    named = sorted(names, key=lambda name: name == "")  # what has no scope comes last
    rows = [
        [
            shape([line]),
            f"`{line['implementation']}`",
            digits(records.ms(line)),
            *(digits(line["scopes"][name]) if name in line["scopes"] else "" for name in named),
        ]
        for line in lines
    ]
    return markdown(["Q x N", "call", "ms", *(name or "no scope" for name in named)], rows)


def devices() -> str:
    """One GPU against several of a host: examples/two_gpus.py, wall ms."""
    rows = [
        [
            shape([line]),
            line["layout"],
            str(line["devices"]),
            digits(line["wall_ms"]),
            f"{line['speed_up']:.2f}",
            "yes" if line["equal"] else "NO",
            f"`{line['source_sha256'][:12]}`",
        ]
        for line in other_lines("devices")
    ]
    header = ["Q x N", "layout", "GPUs", "ms", "times faster", "the same bits", "kernel sources"]
    return markdown(header, rows)


def memory() -> str:
    """Scratch memory of the indexer at Q = 4096, MiB."""
    columns = {
        "Q x N": shape,
        "`index_topk`": workspace("index_topk", "any"),
        "`index_scores` + `top_k`": workspace("index_scores+top_k", "any"),
        "plain jnp": workspace("jnp", "score"),
    }
    return cases_table(records.choose(lines_of("prefill"), q=4096, inputs="random"), columns)


def standalone(lines: list[Line]) -> str:
    """The table of standalone top-k."""
    columns = {
        "rows x N": shape,
        "any": time("top_k", "any"),
        "score": time("top_k", "score"),
        "`lax.top_k`": time("lax.top_k", "score"),
        "`torch.topk`, unsorted": time("torch.topk", "any"),
        "`flashinfer.top_k`": time("flashinfer.top_k", "any"),
        "`lax.top_k` / score": ratio(("lax.top_k", "score"), ("top_k", "score")),
        "`torch.topk` / any": ratio(("torch.topk", "any"), ("top_k", "any")),
    }
    return cases_table(lines, columns)


def unkind(implementation: str) -> str:
    """Times on unkind rows, order "any", each with its ratio to random rows."""
    ours = records.choose(lines_of("adversarial"), implementation=implementation, order="any")
    cases = by_case(ours)

    def cell(case: Sequence[Line], kind: str) -> str:
        line, random = (records.one(case, inputs=i) for i in (kind, "random"))
        if line is None or random is None:
            return ""
        return f"{digits(records.ms(line))} ({records.ratio(line, random):.2f})"

    rows = [[kind, *(cell(case, kind) for case in cases)] for kind in inputs.ADVERSARIAL]
    return markdown(["rows", *(shape(case) for case in cases)], rows)


def kernels() -> str:
    """Where the time of a call goes: its kernels at 4096 x 131072, or the last shape there."""
    rows = []
    for suite, implementation, order in (
        ("prefill", "index_topk", "any"),
        ("prefill", "index_scores+top_k", "any"),
        ("topk", "top_k", "score"),
    ):
        chosen = records.choose(
            lines_of(suite),
            implementation=implementation,
            order=order,
            inputs="random",
            q=4096,
            n=131072,
        )
        for line in chosen:
            for name, ms in line["kernels"].items():
                share = f"{ms / line['device_ms']:.1%}"
                rows.append([f"`{implementation}`, {order}", f"`{name}`", digits(ms), share])
    return markdown(["call", "kernel", "ms", "of the call"], rows)


def run_list() -> str:
    """Where the figures come from: one row a run."""
    rows = []
    for card, suites in (("h200", H200), ("cpu", ("cpu",))):
        for suite in suites:
            lines = lines_of(suite, card)
            for run in dict.fromkeys(line["run_id"] for line in lines):
                rows.append(_run_row(suite, records.choose(lines, run_id=run)))
    header = ["suite", "run", "card", "driver", "jax", "SM MHz", "rounds", "kernel sources"]
    return markdown(header, rows)


def _run_row(suite: str, lines: Sequence[Line]) -> list[str]:
    first = lines[0]
    clocks = [line["clocks"]["sm_mhz"]["during"] for line in lines if line["clocks"]]
    return [
        suite,
        first["run_id"],
        first["card"],
        first["driver"] or "",
        first["jax"],
        f"{min(c[0] for c in clocks):.0f} to {max(c[2] for c in clocks):.0f}" if clocks else "",
        str(len(first["wall_ms_samples"])),
        f"`{first['source_sha256'][:12]}`",
    ]


def cpu() -> str:
    """The table of the CPU suite."""
    rows = [
        [
            shape([line]),
            _call(line),
            digits(line["wall_ms"]),
        ]
        for line in lines_of("cpu", "cpu")
    ]
    return markdown(["rows x N", "call", "ms"], rows)


def readme() -> str:
    """README's table: both operations at 4096 rows beside what JAX has.

    The two halves are of two runs, and no figure divides one by the other.
    """
    prefill = records.choose(lines_of("prefill"), q=4096, inputs="random")
    standalone = {case[0]["n"]: case for case in by_case(records.choose(lines_of("topk"), q=4096))}
    rows = [
        [
            str(case[0]["n"]),
            time("index_topk", "index")(case),
            time("index_scores+top_k", "any")(case),
            time("jnp", "score")(case),
            time("top_k", "score")(standalone.get(case[0]["n"], [])),
            time("lax.top_k", "score")(standalone.get(case[0]["n"], [])),
        ]
        for case in by_case(prefill)
    ]
    header = [
        "N",
        "`index_topk`",
        "`index_scores` + `top_k`",
        "plain jnp",
        "`top_k`",
        "`lax.top_k`",
    ]
    return markdown(header, rows)


TABLES: dict[str, Callable[[], str]] = {
    "runs": run_list,
    "indexer, random": lambda: indexer(records.choose(lines_of("prefill"), inputs="random")),
    "indexer, replay": lambda: indexer(records.choose(lines_of("prefill"), inputs="replay")),
    "indexer, few queries": lambda: indexer(records.choose(lines_of("small-q"), inputs="random")),
    "lengths": lengths,
    "model": model,
    "model, whole prefill": lambda: model("prefill", "prefill_"),
    "counts": counts,
    "counters": counters,
    "bytes moved": counter_bytes,
    "scopes": scopes,
    "devices": devices,
    "memory": memory,
    "kernels": kernels,
    "top_k": lambda: standalone(lines_of("topk")),
    "unkind rows, index_topk": lambda: unkind("index_topk"),
    "unkind rows, top_k": lambda: unkind("top_k"),
    "cpu": cpu,
    "readme": readme,
}

_MARKED = re.compile(r"<!-- table: (.*?) -->\n(.*?)<!-- end -->", re.DOTALL)


def render(page: str) -> str:
    """The text of a page with its tables made anew.

    Raises:
      ValueError: if a marker names no table.
    """

    def table(match: re.Match[str]) -> str:
        name = match[1]
        if name not in TABLES:
            raise ValueError(f"table must be one of {', '.join(TABLES)}, got {name!r}")
        return f"<!-- table: {name} -->\n\n{TABLES[name]()}\n\n<!-- end -->"

    return _MARKED.sub(table, page)


def main(arguments: list[str]) -> int:
    """Runs `python -m benchmarks tables`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tables", description=__doc__)
    parser.parse_args(arguments)
    for page in PAGES:
        path: Path = inputs.ROOT / page
        path.write_text(render(path.read_text()))
        print(f"wrote {path}")
    suites = (*H200, "scopes")
    programs = ("model", "counts", "counters", "devices")
    for lines in (*map(lines_of, suites), *map(other_lines, programs)):
        for run in records.stale(lines, sources.sha256()):
            print(f"WARNING: {run} is of other kernel sources than those at hand")
    return 0
