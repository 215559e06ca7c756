"""examples/train_indexer.py: the losses against plain numpy, and that training lowers them."""

import jax
import numpy as np
import pytest
import train_indexer
from dsa import block
from dsa.config import SMALL


@pytest.fixture(scope="module")
def batch():
    frozen = train_indexer.frozen_attention(jax.random.key(1), SMALL)
    return train_indexer.make_batch(jax.random.key(2), SMALL, frozen)


@pytest.fixture(scope="module")
def params():
    drawn = jax.jit(block.init_params, static_argnums=1)(jax.random.key(3), SMALL)
    return {name: p for name, p in drawn.items() if name.startswith("index")}


def test_targets_are_causal_distributions(batch):
    target = np.asarray(batch.target)
    np.testing.assert_allclose(target.sum(-1), 1, atol=1e-5)
    assert np.all(np.triu(target, 1) == 0) and np.all(target >= 0)
    # Peaked: half of the keys would hold half of a flat row.
    ranked = np.sort(target[:, -1], axis=-1)[:, ::-1]
    assert np.all(ranked[:, : SMALL.topk].sum(-1) > 3 * SMALL.topk / train_indexer.TOKENS)


@pytest.mark.parametrize("topk", [train_indexer.TOKENS, SMALL.topk])
def test_loss_is_the_divergence_over_the_chosen_keys(batch, params, topk):
    choose = jax.jit(train_indexer.choose, static_argnums=(1, 3))
    scores, indices = (np.asarray(x) for x in choose(params, SMALL, batch, topk))
    divergences = []
    for b, t in np.ndindex(indices.shape[:2]):
        used = indices[b, t] >= 0
        assert used.sum() == min(t + 1, topk)
        p = np.asarray(batch.target)[b, t, indices[b, t, used]].astype(np.float64)
        p /= p.sum()
        q = np.exp(scores[b, t, used].astype(np.float64))
        q /= q.sum()
        divergences.append((p * np.log(np.where(p > 0, p, 1) / q)).sum())
    loss = jax.jit(train_indexer.kl_loss, static_argnums=(1, 3))(params, SMALL, batch, topk)
    np.testing.assert_allclose(loss, np.mean(divergences), rtol=1e-4)
    assert loss > 0.1


def test_both_stages_lower_the_loss_and_find_the_attention():
    """Held-out loss: below 0.6 of its start in the warm-up, lower again in the sparse stage."""
    result = train_indexer.train(steps=25)
    before, after = result.losses[train_indexer.WARM_UP]
    assert after < 0.6 * before
    before, after = result.losses[train_indexer.SPARSE]
    assert after < 0.97 * before
    mass = list(result.mass.values())
    assert mass[1] > 1.5 * mass[0] and mass[2] > 1.5 * mass[0]


def test_script(capsys):
    assert train_indexer.main(["--steps", "3"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("step") == 2 * 3 and printed.count("held-out loss") == 2
    assert printed.count("% of the attention on 16 of 128 keys") == 3


def test_arguments(capsys):
    for flags, message in (
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--topk", "129"], "--topk must be 1 to 128, got 129"),
    ):
        with pytest.raises(SystemExit):
            train_indexer.main(flags)
        assert message in capsys.readouterr().err
