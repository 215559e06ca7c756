"""Device time by named scope: op_names of compiled functions, events of made-up traces."""

import types

import dsa_attention
import jax
import jax.numpy as jnp
import pytest
from dsa.config import SMALL
from jax import lax
from test_benchmark_records import line

from benchmarks import records, scopes, suites, tables, timing, trace
from benchmarks.trace import Interval


@pytest.mark.parametrize(
    ("op_name", "scope"),
    [
        ("jit(f)/indexer/sin", "indexer"),
        ("jit(f)/jit(main)/indexer/jit(g)/inner/dot_general", "indexer/inner"),
        ("jit(f)/sin", ""),
        ("sin", ""),
        (r"params[\'layers/0/kernel\']", ""),
        ("", ""),
        ("jit(f)/indexer/while/body/closed_call/tanh", "indexer"),
        ("jit(f)/indexer/vmap()/while/cond/lt", "indexer"),
        ("jit(f)/attention/cond/branch_1_fun/jit(sort)/sort", "attention"),
        ("jit(f)/indexer/thd,rhd->thr/dot_general", "indexer"),
        ("jit(f)/vmap(jvp(indexer))/inner/mul", "indexer/inner"),
        ("jit(f)/transpose(jvp(attention))/jvp(attention)/checkpoint/mul", "attention"),
        ("jit(f)/transpose(jvp(a))/mul;jit(f)/b/neg", "a"),
    ],
)
def test_scopes_of_an_op_name(op_name, scope):
    assert scopes.of_op_name(op_name) == scope


def test_instructions_of_a_modules_text():
    text = """
HloModule jit_f

%fused (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %sine.1 = f32[8]{0} sine(%x), metadata={op_name="jit(f)/indexer/sin" stack_frame_id=2}
}

ENTRY main.1 {
  Arg_0 = f32[8]{0} parameter(0), metadata={op_name="x"}
  %loop_fusion.2 = f32[8]{0} fusion(%Arg_0), kind=kLoop, calls=%fused, metadata={op_type="sin" \
op_name="jit(f)/indexer/sin"}, backend_config={"a":{"b":"op_name=\\"no\\""}}
  %copy.3 = f32[8]{0} copy(%loop_fusion.2)
  ROOT %custom-call.4 = f32[8]{0} custom-call(%copy.3), custom_call_target="jax_fused_topk_x", \
metadata={op_name="jit(f)/attention/inner/x"}
}
"""
    assert scopes.by_instruction(text) == {
        "sine.1": "indexer",
        "loop_fusion.2": "indexer",
        "custom-call.4": "attention/inner",
    }


def test_instructions_of_a_compiled_function():
    """Nested scopes, a loop, an inner jit; no scope around the last product."""

    def f(x):
        with jax.named_scope("indexer"):
            x = jnp.sort(x)
            with jax.named_scope("choice"):
                x = jax.jit(lambda a: a @ a)(x)
        with jax.named_scope("attention"):
            x = lax.map(jnp.cumsum, x)
        return lax.sort(-x, dimension=0)

    with jax.default_device(jax.devices("cpu")[0]):  # elsewhere a sort may be a custom call
        text = jax.jit(f).lower(jnp.ones((32, 32))).compile().as_text()
    found = scopes.by_instruction(text)
    assert set(found.values()) == {"indexer", "indexer/choice", "attention"}

    def of(opcode):
        """The scopes of the instructions of an opcode, by the text itself."""
        names = {
            part[0].split()[-1].lstrip("%")
            for part in (text_line.split(" = ") for text_line in text.splitlines())
            if len(part) == 2 and f" {opcode}(" in part[1]
        }
        assert names
        return {found.get(name, "") for name in names}

    assert of("sort") == {"indexer", ""}
    assert "attention" in of("while")


def test_a_function_without_scopes_has_none():
    compiled = jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((4, 4))).compile()
    assert scopes.by_instruction(compiled.as_text()) == {}
    assert scopes.scope_ms([[Interval("sin", 0, 1000, "sine.1")]], {}) == {}


NAMED = {"fusion.1": "indexer", "gemm.2": "attention", "gemm.3": "attention"}


def test_time_by_scope_is_the_median_of_unions():
    """Overlapping kernels of a scope count once, those of two scopes in both."""
    first = [
        Interval("fusion", 0, 1000, "fusion.1"),
        Interval("gemm", 900, 2900, "gemm.2"),
        Interval("gemm", 1900, 3900, "gemm.3"),
        Interval("copy", 4000, 4250, "copy.9"),
        Interval("in a graph", 5000, 5250),
    ]
    longer = [i._replace(start_us=2 * i.start_us, end_us=2 * i.end_us) for i in first]
    none = first[1:]
    assert scopes.scope_ms([first], NAMED) == {"indexer": 1.0, "attention": 3.0, "": 0.5}
    assert scopes.scope_ms([first, longer, longer], NAMED)["attention"] == 6.0
    assert scopes.scope_ms([none, none, first], NAMED)["indexer"] == 0.0
    assert list(scopes.scope_ms([first], NAMED)) == ["indexer", "attention", ""]


def test_events_name_their_instruction_except_in_a_graph():
    def event(name, **stats):
        return types.SimpleNamespace(name=name, start_ns=0, duration_ns=9, stats=stats.items())

    events = [
        event("gemm", hlo_op="gemm.2", hlo_module="jit_f", cuda_graph_id=0),
        event("captured", hlo_op="fusion.1", cuda_graph_id=7),
        event("memset"),
    ]
    stream = types.SimpleNamespace(name="Stream #13(Compute)", events=events)
    plane = types.SimpleNamespace(name="/device:GPU:0", lines=[stream])
    found = {i.name: i.hlo_op for i in trace.intervals([plane])}
    assert found == {"gemm": "gemm.2", "captured": "", "memset": ""}


def test_a_timed_call_has_its_own_scopes():
    work = [[Interval("fusion", 0, 1000, "fusion.1"), Interval("gemm", 1000, 3000, "gemm.2")]]
    timed = timing.Timed({"fusion.1": "indexer"}, [1.0], work)
    assert timed.fields["scopes"] == {"indexer": 1.0, "": 2.0}
    assert timing.Timed(wall_ms_samples=[1.0], device_work=work).fields["scopes"] == {}
    records.check(line(scopes={"indexer": 1.0}))
    with pytest.raises(ValueError, match=r"scopes must be dict, got \[\]"):
        records.check(line(scopes=[]))


def test_the_attention_block_has_scopes():
    cases = list(dsa_attention.benchmark_cases([(32, 96)], SMALL))
    ((q, n, topk, functions),) = cases
    assert (q, n, topk) == (32, 96, SMALL.topk)
    named = {name: call for name, call in functions.items() if "index_topk" in name}
    case = suites._model_case(q, n, topk, named, compiler=suites.NO_GRAPHS)
    found = {call.implementation: set(call.scopes.values()) for call in case.calls}
    assert found == {
        "block index_topk": {"indexer", "attention", "projections"},
        "indexer index_topk": {"indexer"},
    }


def test_the_scopes_suite_is_the_model_suite_without_graphs(monkeypatch):
    seen = []
    monkeypatch.setattr(suites, "_model", lambda options, compiler=None: seen.append(compiler))
    suites.cases("scopes", suites.Options())
    assert seen == [suites.NO_GRAPHS]


def test_the_table_from_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    assert tables.TABLES["scopes"]() == "(not measured yet)"
    fields = {"suite": "scopes", "case": "model 4096 x 8192", "order": None}
    block = {"": 0.25, "projections": 12.5, "attention": 1.5}
    lines = [
        line(implementation="block", device_ms=14.25, scopes=block, **fields),
        line(implementation="indexer", device_ms=2.0, scopes={"indexer": 1.98, "": 0.02}, **fields),
        line(implementation="of earlier sources", **fields),
    ]
    records.write(tmp_path / "h200" / "scopes.jsonl", lines)
    assert tables.TABLES["scopes"]().splitlines() == [
        "| Q x N | call | ms | projections | attention | indexer | no scope |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| 4096 x 8192 | `block` | 14.2 | 12.5 | 1.50 |  | 0.250 |",
        "| 4096 x 8192 | `indexer` | 2.00 |  |  | 1.98 | 0.0200 |",
    ]
