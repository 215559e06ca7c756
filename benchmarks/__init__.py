"""Benchmarks: `python -m benchmarks --help`.

Measuring:

- `__main__`: the command line.
- `suites`: shapes, inputs and implementations of each suite, as cases.
- `inputs`: random, replay and unkind input sets.
- `implementations`, `controls`: what runs side by side, and what is compared with an oracle.
- `counts`: how often a sampled threshold misled.
- `hopper_library`: compiles the kernels of the two.
- `counters`, `nsight`: hardware counters of a call, by Nsight Compute.
- `loops`: the score loops as ptxas wrote them.
- `timing`, `trace`, `clocks`: interleaved rounds, device time from traces, clock and power.
- `scopes`: device time by `jax.named_scope`.
- `runs`: a suite's JSON lines and its table on the screen.

From the JSON lines:

- `records`: their schema, and ratios within one run.
- `tables`: the tables of docs/performance.md and README.md.
- `figure_data`, `figures`: the pictures of docs/figures/.
- `floors`: what a card allows at best.
- `compare`: what got slower between two files.
- `sources`: the digest of the kernel sources.
"""
