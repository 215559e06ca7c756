"""Benchmarks: `python -m benchmarks --help`.

- `__main__`: the command line, the table and the JSON lines.
- `suites`: what is timed, at which shapes, on which inputs.
- `timing`: interleaved runs; device time from the JAX profiler's trace.
"""
