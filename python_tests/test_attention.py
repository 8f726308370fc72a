"""Attention: numbers and gradients of every order, masks, shapes, memory, errors."""

import cases
import numpy as np
import pytest
import tensorflow as tf
from gradient_problems import assert_all_close, gradients_of, second_order, weights_for
from hypothesis import given
from hypothesis import strategies as st
from memo import remembered
from tolerances import assert_as_exact, assert_close

from tf_fused_ops import _library, attention
from tf_fused_ops.ops import reference

# Batch, queries, keys, heads, depth, value depth: one block and several, parts of a vector and of a
# step, few heads, whose keys are divided, and many; queries
# for which keys are read as they lie.
SHAPES = [
    (2, 10, 10, 3, 16, 16),
    (1, 64, 256, 2, 64, 64),
    (1, 130, 601, 1, 40, 24),
    (3, 67, 33, 6, 17, 5),
    (2, 197, 197, 4, 64, 64),
    (1, 1, 300, 2, 8, 70),
    (2, 2, 257, 3, 33, 17),
    (1, 3, 601, 2, 64, 5),
    (3, 4, 40, 1, 7, 64),
    (2, 300, 1, 1, 3, 1),
    (1, 1100, 7, 1, 9, 33),
]
NAMES = ("y", "query_grad", "key_grad", "value_grad")
MASKED = -3e38
# Of dropout.
SEED = (7, 5)


def layout(heads_first):
    """Returns what makes a shape of batch, length, heads and depth, and the equations."""
    if heads_first:
        return (lambda b, n, h, d: (b, h, n, d)), "bhqd,bhkd->bhqk", "bhqk,bhkd->bhqd"
    return (lambda *sizes: sizes), "bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd"


def tensors(shape, dtype, heads_first=False, seed=0):
    """Returns query, key, value and dy as NumPy arrays."""
    batch, queries, keys, heads, depth, value_depth = shape
    place, rng = layout(heads_first)[0], np.random.default_rng(seed)
    lengths = (queries, depth), (keys, depth), (keys, value_depth), (queries, value_depth)
    values = [rng.normal(0.2, 1, place(batch, n, heads, d)) for n, d in lengths]
    return [tf.cast(tf.constant(value), dtype).numpy() for value in values]


def mask_for(shape, seed=0):
    return np.random.default_rng(seed).uniform(size=shape) < 0.7


def stock(mask=None, scale=1.0, heads_first=False, zero_masked=False, rate=0.0, dtype=None):
    """As people write it; half precision in float32 where Keras has it. The random numbers of a
    dropout are of a dtype, if it is not that of the operands."""
    _, to_scores, to_output = layout(heads_first)

    def function(query, key, value, bias=None):
        z = tf.einsum(to_scores, query, key)
        z = (tf.cast(z, tf.float32) if z.dtype.size == 2 else z) * scale
        if bias is not None:
            z += tf.cast(bias, z.dtype)
        if mask is not None:
            z = tf.where(mask, z, tf.constant(MASKED, z.dtype))
        weights = tf.cast(tf.nn.softmax(z), value.dtype)
        if zero_masked:
            weights = tf.where(mask, weights, tf.zeros_like(weights))
        if rate:
            ones = tf.ones(weights.shape, dtype or weights.dtype)
            factors = tf.nn.experimental.stateless_dropout(ones, rate, seed=SEED)
            weights *= tf.cast(factors, weights.dtype)
        return tf.einsum(to_output, weights, value)

    return function


def outputs(function, *args):
    """Returns y and the gradients of query, key, value and bias, if there is one, given these and
    dy."""
    *operands, dy = map(tf.constant, args)
    return [function(*operands), *gradients_of(function, operands, dy)]


def bias_for(shape, dtype, seed=0):
    return tf.cast(tf.constant(np.random.default_rng(seed).normal(0, 0.5, shape)), dtype).numpy()


def sums_of(args, scale):
    """Returns how large the sums are of which y and its gradients may be small ones."""
    query, key, value, *_, dy = (np.abs(x).max() for x in args)
    # A gradient of a score is a difference of two sums, which may be all of it.
    dz = dy * value * np.sqrt(args[-1].shape[-1])
    return [0, abs(scale) * dz * key, abs(scale) * dz * query, 0, dz]


@remembered
def expected(shape, dtype, mask, scale, heads_first, zero_masked, rate, seed, bias):
    """Returns operands and dy, and what to compare with: outputs of stock in the dtype and in
    float64, and how large the sums are of which each may be a small one."""
    args = tensors(shape, dtype, heads_first, seed)
    args[3:3] = [bias_for(sizes, dtype, seed) for sizes in bias]
    theirs = stock(mask, scale, heads_first, zero_masked, rate, tf.as_dtype(dtype))
    wide = [value.astype(np.float64) for value in args]
    return args, outputs(theirs, *args), outputs(theirs, *wide), sums_of(wide, scale)


def check(
    shape,
    dtype,
    mask=None,
    scale=0.2,
    heads_first=False,
    zero_masked=False,
    rate=0.0,
    seed=0,
    bias=(),
):
    """Compares with stock; `bias` is empty or has its shape."""
    args, *others = expected(shape, dtype, mask, scale, heads_first, zero_masked, rate, seed, bias)
    options = {"heads_first": heads_first, "zero_masked": zero_masked}
    if rate:
        options |= {"dropout_rate": rate, "seed": SEED}

    def ours(query, key, value, bias=None):
        return attention(query, key, value, mask, scale, bias=bias, **options)

    found = outputs(ours, *args)
    assert len(found) == len(args)
    for name, *compared, total in zip((*NAMES, "bias_grad"), found, *others, strict=False):
        assert_as_exact(name, *compared, dtype, total)


def assert_same_through_all_outputs(ours, theirs, operands, watched):
    """Compares the gradients of one operand by all outputs of two functions."""
    gradients = []
    for function in (ours, theirs):
        with tf.GradientTape() as tape:
            tape.watch(operands[watched])
            y, largest, inverse_sum = function(*operands)
            loss = tf.reduce_sum(y) + tf.reduce_sum(largest**2) + tf.reduce_sum(inverse_sum)
        gradients.append(tape.gradient(loss, operands[watched]))
    assert_all_close(*([gradient] for gradient in gradients))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_gradient(shape, heads_first, dtype, isa):
    batch, queries, keys, *_ = shape
    mask = mask_for((batch, 1, queries, keys)) if heads_first else None
    check(shape, dtype, mask, heads_first=heads_first)
    assert _library.isa() == isa


@given(
    shape=st.tuples(*(st.integers(1, n) for n in (3, 150, 600, 3, 40, 40))),
    kept=st.integers(0, 31),
    dtype=st.sampled_from(cases.DTYPES),
    scale=st.sampled_from([1.0, 0.1, -0.3]),
    heads_first=st.booleans(),
    zero_masked=st.booleans(),
    rate=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 1000),
    biased=st.integers(0, 31),
)
def test_random_shapes(shape, kept, dtype, scale, heads_first, zero_masked, rate, seed, biased):
    """Of masks and biases, some dimensions, and the first ones, are broadcast."""
    batch, queries, keys, heads, *_ = shape

    def broadcast(bits):
        sizes = [size if bits >> i & 1 else 1 for i, size in enumerate((batch, heads, queries))]
        return [*sizes, keys][bits % 4 :]

    mask = mask_for(broadcast(kept), seed) if kept & 16 else None
    zero_masked &= mask is not None
    bias = [broadcast(biased)] if biased & 16 else []
    check(shape, dtype, mask, scale, heads_first, zero_masked, rate, seed, bias)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias(shape, masked, dtype, isa):
    """Of all scores, whose gradient is theirs, or of all heads and keys."""
    batch, queries, keys, heads, *_ = shape
    mask = np.tri(queries, keys, dtype=bool) if masked else None
    sizes = [heads, 1, keys] if masked else [batch, heads, queries, keys]
    check(shape, dtype, mask, heads_first=masked, bias=[sizes])
    assert _library.isa() == isa


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES[2:8:2], ids=str)
def test_dropout(shape, masked, dtype, isa):
    """The weights that stock drops out for the seed; half of a number is exact in all dtypes."""
    batch, queries, keys, *_ = shape
    mask = mask_for((batch, 1, queries, keys)) if masked else None
    check(shape, dtype, mask, heads_first=masked, zero_masked=masked, rate=0.5)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_zeros_where_nothing_is_kept(dtype, isa):
    shape = (1, 5, 300, 2, 8, 4)
    mask = mask_for((5, 300))
    mask[1] = False
    check(shape, dtype, mask, zero_masked=True)
    args = tensors(shape, dtype)
    found = [
        outputs(lambda *a, m=m: attention(*a, mask, masked=m, zero_masked=True), *args)
        for m in (MASKED, -np.inf)
    ]
    for value, other in zip(*found, strict=True):
        np.testing.assert_array_equal(value, other)
    assert not tf.cast(found[0][0][:, 1], tf.float32).numpy().any()
    assert tf.cast(attention(*args[:3], mask)[:, 1], tf.float32).numpy().all()


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_causal_mask(dtype, isa):
    shape = (1, 300, 300, 2, 16, 16)
    check(shape, dtype, np.tri(300, dtype=bool))


def left_padding(queries, keys):
    return np.broadcast_to(np.arange(keys) >= keys - 5, (queries, keys))


def window(queries, keys):
    distance = np.arange(queries)[:, None] - np.arange(keys)
    return (distance >= 0) & (distance < 70)


def some_nothing(queries, keys):
    """Causal, but for rows of which nothing is kept, in a block of those of which some is."""
    mask = np.tri(queries, keys, dtype=bool)
    mask[queries // 2] = False
    return mask


# Of which blocks of keys are left out first, last or on both sides, for all or for some queries.
BLOCKS = [left_padding, window, some_nothing]


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("make_mask", BLOCKS)
@pytest.mark.parametrize("lengths", [(700, 700), (3, 1100)], ids=str)
def test_blocks_of_which_nothing_is_kept(lengths, make_mask, dtype, isa):
    queries, keys = lengths
    check((2, queries, keys, 2, 24, 17), dtype, make_mask(queries, keys))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("make_mask", [window, some_nothing])
def test_bias_beside_blocks_of_which_nothing_is_kept(make_mask, dtype, isa):
    check((1, 700, 700, 2, 8, 8), dtype, make_mask(700, 700), bias=[[1, 2, 700, 700]])


@pytest.mark.parametrize("empty", range(6))
def test_bias_of_no_elements(empty, isa):
    """Batch, queries, keys, heads, depth or value depth are zero."""
    shape = [2, 3, 4, 2, 5, 6]
    shape[empty] = 0
    batch, queries, keys, heads, *_ = shape
    args = tensors(shape, "float32")
    args[3:3] = [bias_for((batch, heads, queries, keys), "float32")]
    found = outputs(lambda q, k, v, b: attention(q, k, v, scale=0.5, bias=b), *args)
    for value, other in zip(found, outputs(stock(None, 0.5), *args), strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-6, atol=1e-6)


def test_bias_as_mask(isa):
    """Minus infinity for keys of padding, in a gradient that does not ask for the bias's."""
    args = tensors((2, 150, 600, 2, 8, 5), "float64")
    bias = np.where(np.arange(600) < [[70], [599]], 0, -np.inf)[:, None, None]
    found = outputs(lambda *a: attention(*a, scale=0.5, bias=bias), *args)
    expected = outputs(stock(bias == 0, 0.5), *args)
    assert_all_close(found, expected)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("queries", [1, 150])
def test_what_no_block_keeps_is_not_read(queries, dtype, isa):
    """As where a cache of keys and values is not full yet."""
    query, key, value, dy = tensors((2, queries, 1000, 2, 16, 8), dtype)
    short = [query, key[:, :70], value[:, :70]]
    key[:, 256:], value[:, 256:] = np.nan, np.nan
    mask = np.arange(1000) < 70
    found = outputs(lambda *a: attention(*a, mask), query, key, value, dy)
    expected = outputs(attention, *short, dy)
    for name, ours, theirs in zip(NAMES, found, expected, strict=True):
        length = theirs.shape[1]
        assert_close(name, ours[:, :length], theirs, dtype, units=64)
        assert not tf.cast(ours[:, length:], tf.float32).numpy().any()


def test_no_number_among_the_keys_that_are_kept(isa):
    """Makes no number of all weights of a row, also of those that are masked."""
    query, key, value, dy = tensors((1, 150, 600, 1, 8, 5), "float32")
    key[0, 3] = np.nan
    mask = np.arange(600) < 70
    value_grad = outputs(lambda *a: attention(*a, mask), query, key, value, dy)[3]
    assert np.isnan(value_grad).all()


def test_what_no_block_keeps_counts_where_it_has_a_weight():
    """Masked by a number that is not far below the scores."""
    args = tensors((1, 150, 600, 1, 8, 5), "float64")
    mask = np.arange(600) < 70

    def theirs(query, key, value):
        z = tf.where(mask, tf.einsum("bqhd,bkhd->bhqk", query, key) * 0.5, -3.0)
        return tf.einsum("bhqk,bkhd->bqhd", tf.nn.softmax(z), value)

    assert_all_close(
        outputs(lambda *a: attention(*a, mask, 0.5, masked=-3.0), *args), outputs(theirs, *args)
    )


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_queries_without_anything_kept(dtype, isa):
    """Their keys count alike, and only values have a gradient of them."""
    shape = (1, 3, 600, 1, 8, 4)
    args = tensors(shape, dtype)
    mask = np.ones((3, 600), bool)
    mask[1] = False
    dy = np.zeros_like(args[3])
    dy[:, 1] = 1
    y, query_grad, key_grad, value_grad = outputs(lambda *a: attention(*a, mask), *args[:3], dy)
    wide = args[2].astype(np.float64)
    assert_close("y", y[:, 1], wide.mean(1), dtype)
    assert_close("value_grad", value_grad, np.full_like(wide, 1 / 600), dtype)
    for gradient in (query_grad, key_grad):
        assert not tf.cast(gradient, tf.float32).numpy().any()


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_large_scores(dtype, isa):
    """The largest are subtracted first, also where they come in a later block of keys."""
    query, numbers = tf.ones([1, 2, 1, 1], dtype), [-6e4] * 300 + [0.0] * 299 + [6e4]
    key = tf.reshape(tf.cast(tf.constant(numbers), dtype), [1, 600, 1, 1])
    value = tf.reshape(tf.cast(tf.range(600), dtype), [1, 600, 1, 1])
    found = attention(query, key, value, scale=1.0)
    np.testing.assert_array_equal(found, tf.broadcast_to(value[:, -1:], [1, 2, 1, 1]))
    found = attention(query, key[:, :300], value[:, :300], scale=1.0)
    expected = tf.reduce_mean(tf.cast(value[:, :300], tf.float64))
    assert_close("y", found, np.full((1, 2, 1, 1), expected), dtype)


def test_special_numbers(isa):
    """NaN and infinity stay in their rows; minus infinity is no weight."""
    query, key, value, dy = tensors((1, 5, 300, 1, 2, 3), "float32")
    query[0, 1, 0, 0], key[..., 0], key[0, :280, 0, 1] = np.nan, 1, -np.inf
    query[..., 1] = np.abs(query[..., 1])
    y, query_grad, key_grad, value_grad = (
        x.numpy() for x in outputs(attention, query, key, value, dy)
    )
    rows = [0, 2, 3, 4]
    expected = stock(None, 2**-0.5)(query[:, rows], key[:, 280:], value[:, 280:])
    np.testing.assert_allclose(y[:, rows], expected, rtol=1e-5)
    assert np.isnan(y[:, 1]).all() and np.isnan(query_grad[:, 1]).all()
    assert np.isnan(value_grad).all() and np.isnan(key_grad).any()
    nothing = attention(query[:, rows], key[:, :280], value[:, :280])
    assert np.isnan(nothing).all()


@pytest.mark.parametrize(
    "shape",
    [
        (0, 3, 4, 2, 5, 6),
        (2, 0, 4, 2, 5, 6),
        (2, 3, 0, 2, 5, 6),
        (2, 3, 4, 0, 5, 6),
        (2, 3, 4, 2, 0, 6),
        (2, 3, 4, 2, 5, 0),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_empty(shape, masked, isa):
    """What no key leads to is zero, and so is the gradient of a key without queries."""
    args = tensors(shape, "float32")
    mask = tf.ones([1, shape[2]], tf.bool) if masked else None
    found = outputs(lambda *a: attention(*a, mask, 0.5), *args)
    for name, value, other in zip(NAMES, found, outputs(stock(mask, 0.5), *args), strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-6, err_msg=name)


def test_dimensions_in_front():
    """Any number of them, heads among them."""
    args = tensors((6, 9, 11, 2, 5, 4), "float64", heads_first=True)
    mask = mask_for((6, 1, 9, 11))

    def ours(*operands):
        return attention(*operands, mask, heads_first=True)

    expected = outputs(ours, *args)
    mask = mask.reshape(3, 2, 1, 9, 11)
    found = outputs(ours, *(x.reshape(3, 2, *x.shape[1:]) for x in args))
    for value, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(tf.reshape(value, other.shape), other)
    mask = None
    expected = ours(*(x[:1, 0] for x in args[:3]))
    np.testing.assert_array_equal(ours(*(x[0, 0] for x in args[:3])), expected[0])


@pytest.mark.parametrize("depth", [8, None])
def test_scale_by_default(depth):
    args = tensors((2, 3, 4, 2, 8, 5), "float64")[:3]
    signature = [tf.TensorSpec([None, None, None, d], tf.float64) for d in (depth, depth, None)]
    in_function = tf.function(attention, input_signature=signature, autograph=False)
    expected = stock(None, 8**-0.5)(*args)
    for found in (attention(*args), in_function(*args)):
        np.testing.assert_allclose(found, expected, rtol=1e-13)


def test_more_digits_than_an_attribute():
    args = tensors((2, 3, 4, 2, 8, 5), "float64")[:3]
    found = attention(*args, scale=10**-0.5)
    np.testing.assert_allclose(found, stock(None, 10**-0.5)(*args), rtol=1e-13)
    with pytest.raises(ValueError, match="masked has more digits"):
        attention(*args, mask_for((3, 4)), masked=-1e300)


def test_another_number_where_masked():
    args = tensors((2, 9, 7, 2, 8, 5), "float64")
    mask = mask_for((9, 7))

    def theirs(query, key, value):
        z = tf.where(mask, tf.einsum("bqhd,bkhd->bhqk", query, key) * 0.5, -1.0)
        return tf.einsum("bhqk,bkhd->bqhd", tf.nn.softmax(z), value)

    assert_all_close(
        outputs(lambda *a: attention(*a, mask, 0.5, masked=-1.0), *args), outputs(theirs, *args)
    )


MASK = mask_for((2, 1, 1, 4), 3)


def problem():
    """Returns query, key, value, bias and dy."""
    *operands, dy = tensors((2, 3, 4, 2, 5, 3), "float64")
    return [tf.constant(v) for v in (*operands, bias_for((2, 1, 4), "float64"), dy)]


def masked(query, key, value, bias):
    return attention(query, key, value, MASK, 0.5, dropout_rate=0.5, seed=SEED, bias=bias)


def by_reference(query, key, value, bias):
    random = tf.raw_ops.StatelessRandomGetKeyCounter(seed=SEED)
    options = {"scale": 0.5, "masked": MASKED, "dropout_rate": 0.5, "dropout_scale": 2.0}
    return reference.attention(query, key, value, MASK, bias, random, **options)[0]


def test_against_finite_differences():
    theory, numbers = tf.test.compute_gradient(masked, problem()[:4], delta=1e-4)
    for found, expected in zip(theory, numbers, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6, rtol=1e-5)


def test_second_order():
    *operands, dy = problem()
    weights = weights_for(operands)
    in_function = tf.function(second_order, autograph=False)
    expected = second_order(by_reference, operands, dy, weights)
    assert_all_close(second_order(masked, operands, dy, weights), expected)
    assert_all_close(in_function(masked, operands, dy, weights), expected)


@pytest.mark.parametrize("watched", range(4))
def test_what_the_op_keeps_has_gradients(watched):
    """They are stock's."""
    operands = problem()[:4]
    options = {"scale": 0.5, "masked": MASKED, "dropout_rate": 0.25, "dropout_scale": 1.5}
    random = tf.raw_ops.StatelessRandomGetKeyCounter(seed=SEED)

    def ours(query, key, value, bias):
        rng_key, rng_counter = ([words] for words in random)
        return _library.ops.tf_fused_ops_attention(
            query=query,
            key=key,
            value=value,
            mask=[MASK],
            bias=[bias],
            rng_key=rng_key,
            rng_counter=rng_counter,
            U=tf.float64,
            **options,
        )

    def theirs(query, key, value, bias):
        return reference.attention(query, key, value, MASK, bias, random, **options)

    assert_same_through_all_outputs(ours, theirs, operands, watched)
