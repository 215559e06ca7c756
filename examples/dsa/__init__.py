"""A DeepSeek-V3.2-style sparse attention block in plain JAX, around `index_topk`.

- `config`: the dimensions, DeepSeek-V3.2's and a small set.
- `layers`: norms, rotary positions, the Hadamard transform.
- `indexer`: FP8 index queries and keys, and three ways to choose keys with them.
- `attention`: latent attention over the chosen keys, and over all keys as its check.
- `block`: parameters, cache, and the step that prefill and decoding share.
- `chunks`: a whole prefill as a loop of one jitted step, for the benchmark.
- `benchmark`: the block at DeepSeek-V3.2's dimensions on a GPU.

Functions take one sequence; `jax.vmap` adds a batch.  Source of the formulas: DeepSeek-V3.2's
report (section 2, the lightning indexer and DSA under MLA) and the inference code beside it.
YaRN's stretching of positions is left out.
"""
