"""Caches of keys and values, as decoders slice and stack them: updated by one op a layer, and left
to stock wherever something else sees what is in between."""

import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from remapping import assert_same, op_counts, reasons, rule_counts, values
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from tf_fused_ops import RemapOptions, function

LENGTH, HEADS, DEPTH = 6, 2, 3
OP = "TfFusedOps>UpdateCache"
STOCK = {"XlaDynamicUpdateSlice", "Pack", "StridedSlice"}


def inputs(layers, batch=2, rows=1, dtype="float32"):
    """Returns a cache, of layers if there are any, and keys and values of new positions."""
    slots = (layers, 2) if layers else (2,)
    new = (batch, rows, HEADS, DEPTH)
    return values((batch, *slots, LENGTH, HEADS, DEPTH), *[new] * 2 * (layers or 1), dtype=dtype)


def arguments(layers, index=3, **options):
    cache, *new = inputs(layers, **options)
    return [cache, tf.constant(index), *new]


def write(part, update, index):
    return ops.slice_update(part, [0, index, 0, 0], update)


def written(cache, index, key, value):
    """The keys and the values of one layer's cache."""
    return write(cache[:, 0, ...], key, index), write(cache[:, 1, ...], value, index)


def single(cache, index, *new):
    return ops.stack(written(cache, index, *new), axis=1)


def nexts(cache, index, *new):
    """The next caches of the layers."""
    layers = range(len(new) // 2)
    return [single(cache[:, i, ...], index, *new[2 * i : 2 * i + 2]) for i in layers]


def stacked(cache, index, *new):
    return ops.stack(nexts(cache, index, *new), axis=1)


def run(code, calls, fusions, signature=None, **options):
    """Checks code against stock, to the bit; returns the decorated function.

    Args:
        code: What is called, of tensors.
        calls: Lists of arguments of the same shapes, which must stay what they are.
        fusions: How many caches are updated by fused ops, if that matters.
        signature: The input signature.
        **options: Those of `function`.
    """
    stock = tf.function(code, input_signature=signature)
    compiled = function(code, input_signature=signature, **options)
    for args in calls:
        before = [arg.numpy().copy() for arg in args]
        assert_equal(compiled(*args), stock(*args))
        assert_equal(args, before)
    told = "\n".join(map(str, compiled.remap_reports))
    assert fusions in (None, rule_counts(compiled).get("update_cache", 0)), told
    return compiled


def assert_equal(found, expected):
    found, expected = tf.nest.flatten(found), tf.nest.flatten(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_whole_prompt_and_one_position(layers, batch, dtype):
    code = stacked if layers else single
    prompt = inputs(layers, batch, LENGTH - 2, dtype)
    places = (3, -2, 0, LENGTH - 1, LENGTH + 5)
    calls = [arguments(layers, i, batch=batch, dtype=dtype) for i in places]
    programs = [(lambda cache, *new: code(cache, 0, *new), [prompt]), (code, calls)]
    for program, calls in programs:
        compiled = run(program, calls, 1)
        found = op_counts(compiled.get_concrete_function(*calls[0]))
        assert found[OP] == (layers or 1) and not STOCK & found.keys()
        (report,) = compiled.remap_reports
        (fusion,) = report.fused
        told = f"Fuse cache of keys and values: cache=cache layers={layers or 1}"
        assert fusion.messages == (told,) and not report.refused
        assert len(fusion.fused) == (layers or 1) and fusion.source.startswith(__file__)


def attend(query, keys, positions):
    scores = tf.einsum("bqhd,bkhd->bhqk", query, keys)
    return tf.einsum("bhqk,bkhd->bqhd", tf.nn.softmax(scores), positions)


def step(cache, x, index, update=written):
    """Layers whose keys and values depend on what the one before has attended to."""
    caches = []
    for i in range(cache.shape[1]):
        keys, positions = update(cache[:, i, ...], index, x * (i + 1.5), x - 0.5)
        caches.append(ops.stack((keys, positions), axis=1))
        x += attend(x, keys, positions)
    return x, ops.stack(caches, axis=1)


def in_loop(loop, update=written):
    def code(cache, x):
        def body(index, cache, x):
            x, cache = step(cache, x, index, update)
            return index + 1, cache, x

        return loop(lambda index, *_: index < LENGTH - 1, body, (tf.constant(1), cache, x))[1:]

    return code


def by_autograph(cache, x):
    for index in tf.range(1, LENGTH - 1):
        x, cache = step(cache, x, index)
    return cache, x


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("code", [in_loop(tf.while_loop), in_loop(ops.while_loop), by_autograph])
def test_loops(code, layers, batch):
    cache, x, *_ = inputs(layers, batch)
    compiled = function(code)
    assert_same(compiled(cache, x), tf.function(code)(cache, x), units=512)
    assert rule_counts(compiled) == {"update_cache": 1, "attention": layers}
    found = op_counts(compiled.get_concrete_function(cache, x))
    assert found[OP] == layers and not STOCK & found.keys()


def specs(args, *unknown):
    """Returns TensorSpecs of which some axes, counted from the end, are not known."""

    def sizes(shape):
        return [None if i - shape.rank in unknown else n for i, n in enumerate(shape)]

    return [tf.TensorSpec(sizes(arg.shape), arg.dtype) for arg in args]


@pytest.mark.parametrize("layers", [0, 2])
def test_unknown_sizes(layers):
    code, args = stacked if layers else single, arguments(layers)
    run(code, [args], 1, specs(args[:1], -3) + specs(args[1:]))
    run(code, [args], 1, [*specs(args[:1]), tf.TensorSpec(None, tf.int32), *specs(args[2:])])
    x = tf.repeat(args[2], 3, 1)
    run(
        lambda cache, x: code(cache, 0, *(x * float(i) for i in range(2 * (layers or 1)))),
        [[args[0], x]],
        1,
        specs([args[0], x], -3),
    )
    # Nothing says that there are as many sequences in the cache as in what is new.
    batch = -args[0].shape.rank
    for unknown in ([batch], [batch, -3], [-2], [-1]):
        others = [-4 if axis == batch else axis for axis in unknown]
        signature = specs(args[:1], *unknown) + specs(args[1:], *others)
        compiled = run(code, [args], 0, signature)
        assert "may not fill positions of" in reasons(compiled)["update_cache"]
    for sizes in ([None] * args[0].shape.rank, None):
        run(code, [args], 0, [tf.TensorSpec(sizes), *specs(args[1:])])


@pytest.mark.parametrize("unknown", [(0,), (1,), (0, 1)])
def test_unknown_rank_of_what_is_new(unknown):
    args = arguments(0)
    ranks = [tf.TensorSpec(None if i in unknown else x.shape) for i, x in enumerate(args[2:])]
    run(single, [args], 0, [*specs(args[:2]), *ranks])


STARTS = {
    "list": lambda index: [0, index, 0, 0],
    "constant": lambda index: tf.constant([0, 4, 0, 0], index.dtype),
    "constant behind the end": lambda index: tf.constant([0, 99, 0, 0], index.dtype),
    "constant before the start": lambda index: [0, -99, 0, 0],
    "constant that is large": lambda index: tf.constant([0, 2**40, 0, 0], tf.int64),
    "constant that is small": lambda index: tf.constant([0, -(2**40), 0, 0], tf.int64),
    # Moved to where there is room for all.
    "others than 0": lambda index: [1, index, -1, 7],
}
SLICES = {
    "short": lambda x, i: x[:, i],
    "in full": lambda x, i: x[:, i, :, :, :],
    "with both": lambda x, i: x[:, i, :, ...],
    "in steps of 1": lambda x, i: x[::1, i, ::1],
}


def spelled(part, starts):
    def code(cache, index, *new):
        parts = [
            gen_xla_ops.xla_dynamic_update_slice(part(cache, i), update, starts(index))
            for i, update in enumerate(new)
        ]
        return tf.stack(parts, 1)

    return code


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("starts", STARTS)
def test_spellings_of_places(starts, dtype):
    cache, *new = inputs(0)
    places = (2, 9, -9) if dtype == "int32" else (2, 2**40, -(2**40))
    calls = [[cache, tf.constant(place, dtype), *new] for place in places]
    run(spelled(SLICES["short"], STARTS[starts]), calls, 1)


@pytest.mark.parametrize("part", SLICES)
def test_spellings_of_slices(part):
    run(spelled(SLICES[part], STARTS["list"]), [arguments(0)], 1)


def test_places_that_are_given_as_a_vector():
    cache, *new = inputs(0)
    run(spelled(SLICES["short"], lambda i: i), [[cache, tf.constant([0, 3, 0, 0]), *new]], 0)


@pytest.mark.parametrize("shape", [(), (3,), (3, 2), (3, 2, 2, 1, 2)])
def test_other_ranks(shape):
    """Of positions alone, of vectors, and of more than heads."""
    cache, *new = values((2, 2, 6, *shape), (2, 1, *shape), (2, 1, *shape))
    starts = [0] * len(shape)
    code = spelled(SLICES["short"], lambda index: [0, index, *starts])
    run(code, [[cache, tf.constant(2), *new]], 1)


@pytest.mark.parametrize("index", [None, 3])
def test_sequences_without_positions(index):
    code = spelled(SLICES["short"], lambda i: tf.stack([i if index is None else index]))
    run(code, [[*values((5, 2)), tf.constant(1), *values((1,), (1,))]], 0)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("layers", [0, 2])
def test_more_keys_than_values(layers, known):
    """Which stock writes to where there is room for either."""
    code, args = stacked if layers else single, arguments(layers, 5)
    args[2] = tf.repeat(args[2], 2, 1)
    run(code, [args], None, None if known else specs(args, -3))


@pytest.mark.parametrize("known", [True, False])
def test_more_than_there_is_room_for(known):
    """Found when it runs, if it does."""

    def code(cache, index, *new):
        return tf.cond(index < 0, lambda: single(cache, index, *new), lambda: cache)

    args = arguments(0, rows=LENGTH + 1)
    compiled = run(code, [args], None, None if known else specs(args, -3))
    for decorated in (compiled, tf.function(code)):
        with pytest.raises(tf.errors.InvalidArgumentError):
            decorated(args[0], tf.constant(-1), *args[2:])


def apart(cache, index, *new):
    """Layers that write other numbers of positions, and to elsewhere."""
    first = single(cache[:, 0, ...], index - 2, *(tf.repeat(x, 4, 1) for x in new[:2]))
    return ops.stack((first, single(cache[:, 1, ...], 1, *new[2:])), axis=1)


def everything(cache, index, *new):
    """Whose results are needed elsewhere, too."""
    layers = [written(cache[:, i, ...], index, *new[2 * i :][:2]) for i in (0, 1)]
    with tf.control_dependencies([layers[0][1]]):
        waited = tf.identity(index)
    updated = ops.stack([ops.stack(layer, axis=1) for layer in layers], axis=1)
    return updated, waited, updated + 1, cache + 1, layers, [x * 2 for x in layers[1]]


def last_first(cache, index, *new):
    last = written(cache[:, 1, ...], index, *new[2:])
    first = single(cache[:, 0, ...], index, last[0][:, 1:2], new[1] + last[1][:, :1])
    return ops.stack((first, ops.stack(last, axis=1)), axis=1)


def twice(cache, index, *new):
    """Parts of the old cache, which outlive it."""
    layers = written(cache, index, *new)
    updated = ops.stack(layers, axis=1)
    again = written(updated, index - 1, new[1], new[0])
    return layers, again, ops.stack(again, axis=1), updated


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("code", [apart, everything, last_first, twice])
def test_programs_that_are_fused(code, batch):
    args = arguments(0 if code is twice else 2, batch=batch)
    compiled = run(code, [args], 2 if code is twice else 1)
    found = op_counts(compiled.get_concrete_function(*args))
    assert found[OP] == 2 and not found["XlaDynamicUpdateSlice"] and not reasons(compiled)


def test_constant_and_variable():
    """Neither is changed where it lies."""
    cache, *new = inputs(0, batch=1)
    constant, variable = cache.numpy(), tf.Variable(cache)

    def code(index, *new):
        first = single(tf.constant(constant), index, *new)
        return first, single(tf.convert_to_tensor(variable), index, *new), variable + 0

    run(code, [[tf.constant(i), *new] for i in (1, 4, 2)], 2)
    np.testing.assert_array_equal(variable, cache)


def test_cache_that_is_a_variable():
    results = []
    for decorator in (tf.function, function):
        variable = tf.Variable(inputs(2, batch=1)[0])

        def code(index, *new, variable=variable):
            cache = tf.convert_to_tensor(variable)
            variable.assign(stacked(cache, index, *new))
            return cache[:, 0, 0], variable.read_value()

        compiled = decorator(code)
        results.append([compiled(*arguments(2, i, batch=1)[1:]) for i in (1, 4, 2)])
    assert_equal(*results)
    assert rule_counts(compiled) == {"update_cache": 1}


def test_cache_of_the_step_before_stays():
    _, index, *new = args = arguments(2, batch=1)
    compiled = function(stacked)
    first = compiled(*args)
    before = first.numpy().copy()
    np.testing.assert_array_equal(compiled(first, index - 1, *new), stacked(first, index - 1, *new))
    np.testing.assert_array_equal(first, before)


def concatenated(cache, index, *new):
    """The keys and the values of one layer's cache, by ops that have gradients."""
    parts = (cache[:, 0], cache[:, 1])
    return tuple(
        tf.ensure_shape(tf.concat([part[:, :index], x, part[:, index + 1 :]], 1), part.shape)
        for part, x in zip(parts, new, strict=True)
    )


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("loop", [False, True])
def test_gradients_from_outside(loop, batch):
    """Which stock does not have."""

    def code(update):
        if loop:
            return in_loop(tf.while_loop, update)
        return lambda cache, x: step(cache, x, tf.constant(2), update)

    cache, x, *_ = inputs(2, batch=batch)

    def gradients(decorated):
        with tf.GradientTape() as tape:
            tape.watch([cache, x])
            loss = tf.add_n([tf.reduce_sum(tf.sin(y)) for y in decorated(cache, x)])
        return tape.gradient(loss, [cache, x])

    compiled = function(code(written))
    assert_same(gradients(compiled), gradients(tf.function(code(concatenated))), units=2048)
    assert rule_counts(compiled)["update_cache"] == 1
    left = function(code(written), remap=RemapOptions(disable=["update_cache"]))
    for decorated in (tf.function(code(written)), left):
        with pytest.raises(LookupError, match="XlaDynamicUpdateSlice"):
            gradients(decorated)


def test_gradients_from_inside():
    cache, x, *_ = inputs(2)
    weight = tf.constant(0.5)

    def of_others(cache, x):
        """Such as those of what comes behind."""
        with tf.GradientTape() as tape:
            tape.watch(weight)
            y, cache = step(cache, x, tf.constant(2))
            loss = tf.reduce_sum(tf.stop_gradient(y) * weight)
        return tape.gradient(loss, weight), y, cache

    def through(cache, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y, _ = step(cache, x, tf.constant(2))
        return tape.gradient(y, x)

    compiled = function(of_others)
    assert_same(compiled(cache, x), tf.function(of_others)(cache, x), units=512)
    assert rule_counts(compiled)["update_cache"] == 1
    for decorator in (tf.function, function):
        with pytest.raises(LookupError, match="XlaDynamicUpdateSlice"):
            decorator(through, autograph=False)(cache, x)
