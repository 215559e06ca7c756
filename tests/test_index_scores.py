"""index_scores: the value of every score."""

import inputs
import numpy as np
import oracles
import pytest
import runners


@pytest.mark.parametrize("dtype", inputs.DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (5, 48), (32, 64), (64, 128), (3, 256)])
def test_within_the_bound_of_float64(implementation, dtype, heads, dim):
    """Oracle 2; the bound is derived at oracles.score_bound."""
    x = inputs.random(1, 9, 257, heads, dim, dtype)
    exact, size = oracles.scores64(x.q, x.k, x.weights, x.k_scale)
    error = np.abs(implementation.index_scores(x) - exact)
    bound = oracles.score_bound(size, heads, dim, implementation.arithmetic(x))
    assert np.all(error <= bound), f"worst error / bound: {(error / bound).max()}"


@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_every_finite_element_value(implementation, dtype):
    """Each byte of FP8, and BF16 values of every exponent, meets a query of ones exactly."""
    if dtype == "fp8":
        values = np.arange(256, dtype=np.uint8).view(inputs.FP8)
        values = values[~np.isnan(values.astype(np.float32))]
    else:
        # Large enough that no product is denormal, small enough that none overflows.
        bits = np.arange(0x0100, 0x7F00, 37, dtype=np.uint16)
        values = np.concatenate([bits, bits | 0x8000]).view(inputs.BF16)
    k = np.zeros((len(values), 16), values.dtype)
    k[:, 5] = values
    q = np.zeros((2, 1, 16), values.dtype)
    q[0, 0, 5], q[1, 0, 5] = 1, -1
    x = inputs.Inputs(q=q, k=k, weights=np.ones((2, 1), np.float32))
    wide = values.astype(np.float32)
    expected = oracles.canonical(np.maximum(np.stack([wide, -wide]), 0))
    oracles.assert_same(implementation.index_scores(x), expected)
    # The same values as a query's.
    x = inputs.Inputs(q=k[:, None, :], k=q[:, 0, :], weights=np.ones((len(values), 1), np.float32))
    oracles.assert_same(implementation.index_scores(x), expected.T.copy())


@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_dial_is_exact(implementation, dtype):
    """The dial that other tests rest on: scores are the numbers asked for."""
    scores = np.concatenate(
        [inputs.adversarial(n, 101) for n in ("narrow_band", "non_finite", "ascending")]
        + [np.float32([3e38, -3e38, 2**-126, -(2**-126), 0.0, -0.0, np.inf, -np.inf, np.nan])]
    )
    x = inputs.dial(scores, 3, dtype=dtype, row_weights=[1, -1, 0.5])
    expected = oracles.dialled(scores, [1, -1, 0.5], implementation.name)
    oracles.assert_same(implementation.index_scores(x), expected)


def test_kernels_keep_denormals(kernel):
    scores = inputs.adversarial("denormals", 1000)
    expected = np.stack([scores, -scores])
    got = kernel.index_scores(inputs.dial(scores, 2, row_weights=[1, -1]))
    oracles.assert_same(got, oracles.canonical(expected))


def test_canonical_nan_and_zero(implementation):
    """Six ways to a NaN, and two to a zero, give one pattern each."""
    fp8_nan = np.uint8(0xFF).view(inputs.FP8)
    inf = np.float32(np.inf)
    base = inputs.dial([1, 1, 1, 1], 1)

    def score(**change):
        x = base._replace(**{n: getattr(base, n).copy() for n in ("q", "k", "weights", "k_scale")})
        for name, (place, value) in change.items():
            getattr(x, name)[place] = value
        return implementation.index_scores(x)[0].view(np.uint32)

    nan = oracles.POSITIVE_NAN
    one = np.float32(1).view(np.uint32)
    assert list(score(q=((0, 0, 7), fp8_nan))) == [nan] * 4
    assert list(score(k=((2, 7), fp8_nan))) == [one, one, nan, one]
    negative_nan = np.uint32(0xFFC00001).view(np.float32)
    assert list(score(weights=((0, 0), negative_nan))) == [nan] * 4
    assert list(score(k_scale=(1, negative_nan))) == [one, nan, one, one]
    assert list(score(k_scale=(3, inf), k=((3, 0), 0))) == [one, one, one, nan]  # inf * 0
    # Weights inf and -inf on positive dots: inf - inf.
    assert list(score(weights=((0,), [inf, -inf]), k=((slice(None), 1), 1))) == [nan] * 4
    # A negative weight or scale on a zero sum.
    assert list(score(q=((0, 0, 0), 0), weights=((0, 0), -1.0))) == [0] * 4
    assert list(score(k=((0, 0), 0), k_scale=(0, -1.0))) == [0, one, one, one]


def test_scale_is_applied_last(implementation):
    """k_scale multiplies the head sum: negative and infinite scales follow the formula."""
    k_scale = np.float32([1, -1, -3, np.inf, -np.inf, 0.5])
    x = inputs.dial([1] * 6, 2, row_weights=[2, -1])._replace(k_scale=k_scale)
    expected = np.stack([2 * k_scale, -k_scale])
    oracles.assert_same(implementation.index_scores(x), expected)


def test_scales_of_every_power_of_two(implementation):
    exponents = np.arange(-126, 128)
    scores = np.ldexp(np.float32(1), exponents).astype(np.float32)
    x = inputs.dial(scores, 1, dim=128)
    oracles.assert_same(implementation.index_scores(x)[0], scores)
    indices = implementation.index_topk(x, 300, "score")[0]
    assert list(indices) == [*range(253, -1, -1), *[-1] * 46]


def test_overflow_of_the_scale_is_infinity(implementation):
    x = inputs.dial([3e38, 3e38], 1, row_weights=[2])
    x.k[1] = 0
    x.k[1, 1] = 1
    assert list(implementation.index_scores(x)[0]) == [np.inf, -np.inf]


@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_whole_numbers_are_exact(implementation, dtype):
    x = inputs.with_ranges(inputs.integer(2, 20, 700, 64, 128, dtype), 3)
    exact, size = oracles.scores64(x.q, x.k, x.weights, x.k_scale)
    assert size.max() / x.k_scale.min() < 2**24, "sums of these inputs are not exact"
    columns = np.arange(700)
    outside = (columns < x.starts[:, None]) | (columns >= x.ends[:, None])
    expected = np.where(outside, np.float32(-np.inf), oracles.canonical(exact))
    oracles.assert_same(implementation.index_scores(x), expected)


def test_nan_spreads_as_ieee_has_it(kernel):
    """Arbitrary bytes: NaN where float64 has NaN, and the implementations agree there."""
    rng = np.random.default_rng(4)
    x = inputs.random(5, 8, 300, 4, 32)
    k = x.k.copy()
    hit = rng.choice(300, 40, replace=False)
    k.view(np.uint8)[hit, rng.integers(0, 32, 40)] = rng.choice([0x7F, 0xFF], 40)
    x = x._replace(k=k)
    with np.errstate(invalid="ignore"):
        exact, _ = oracles.scores64(x.q, x.k, x.weights, x.k_scale)
    assert np.isnan(exact).sum() == 8 * 40
    got = kernel.index_scores(x)
    reference = runners.Runner("reference").index_scores(x)
    assert np.array_equal(np.isnan(got), np.isnan(exact))
    assert np.array_equal(np.isnan(reference), np.isnan(exact))
    assert np.all(got.view(np.uint32)[np.isnan(exact)] == oracles.POSITIVE_NAN)
