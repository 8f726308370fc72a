"""Near relatives of what decoders do with caches of keys and values: as exact as stock, and why
they are left to it; and such programs at random."""

import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from remapping import op_counts, reasons, rule_counts
from test_remapper_caches import (
    LENGTH,
    OP,
    STARTS,
    arguments,
    assert_equal,
    nexts,
    run,
    single,
    spelled,
    stacked,
    write,
    written,
)
from test_remapper_refusals import after, keep

from tf_fused_ops import RemapOptions, function


def key_part(cache, index, key, value):
    return write(cache[:, 0, ...], key, index)


def value_part(cache, index, key, value):
    return write(cache[:, 1, ...], value, index)


def one(keys=key_part, positions=value_part, axis=1, use=lambda x: []):
    """Returns the code of one layer, of which functions of the arguments update the parts."""

    def code(*args):
        parts = [keys(*args), positions(*args)]
        return tf.stack(parts, axis), use(parts)

    return code


def two(change=lambda x, cache: x, axis=1, use=lambda x: []):
    """Returns the code of two layers, whose next caches are changed before they are stacked."""

    def code(cache, index, *new):
        caches = nexts(cache, index, *new)
        return ops.stack(change(caches, cache), axis=axis), use(caches)

    return code


def sliced(part, new=lambda x: x):
    """Returns the code of one layer whose parts are taken another way."""
    code = spelled(part, STARTS["list"])
    return lambda cache, index, *others: code(cache, index, *map(new, others))


def reduced(key=lambda x: x, value=lambda x: x):
    """Returns the code of one layer which writes less than there is."""
    return lambda cache, index, *new: single(cache, index, key(new[0]), value(new[1]))


def shared(of, use):
    """Returns the code of two layers, of which a slice is used elsewhere, too."""

    def code(cache, index, *new):
        layer = cache[:, 0, ...]
        part = layer[:, 0, ...]
        first = ops.stack((write(part, new[0], index), write(layer[:, 1], new[1], index)), axis=1)
        last = single(cache[:, 1, ...], index, *new[2:])
        return ops.stack((first, last), axis=1), use({"layer": layer, "part": part}[of])

    return code


def two_caches(cache, index, *new):
    first, last = (nexts(x, index, *new)[i] for i, x in enumerate((cache, cache + 1)))
    return ops.stack((first, last), axis=1)


def crossed(cache, index, *new):
    """Layers that each need what the other one has updated."""
    layer = cache[:, 0]
    keys = write(layer[:, 0], new[0], index)
    last = written(cache[:, 1], index, new[2] + keys[:, 1:2], new[3])
    first = keys, write(layer[:, 1], new[1] + last[0][:, 1:2], index)
    return ops.stack((ops.stack(first, axis=1), ops.stack(last, axis=1)), axis=1)


def places(cache, index, *new):
    """A layer whose place depends on keys of one whose values come last."""
    layer = cache[:, 1]
    keys = write(layer[:, 0], new[2], index)
    first = written(cache[:, 0], index + tf.cast(keys[0, 0, 0, 0] > 9, "int32"), *new[:2])
    last = keys, write(layer[:, 1], new[3], index)
    return ops.stack((ops.stack(first, axis=1), ops.stack(last, axis=1)), axis=1)


def in_order(cache, index, *new):
    """A layer that is sliced after another one has been updated."""
    first = written(cache[:, 0], index, *new[:2])
    # Made inside, they would be all that could wait.
    begin, end, strides = (tf.constant(place) for place in ([0, 1], [0, 2], [1, 1]))
    with tf.control_dependencies([first[0] + 1]):
        layer = tf.strided_slice(
            cache, begin, end, strides, begin_mask=1, end_mask=1, shrink_axis_mask=2
        )
    last = written(layer, index, *new[2:])
    return ops.stack((ops.stack(first, axis=1), ops.stack(last, axis=1)), axis=1)


def within(change):
    """Returns the code of one layer whose values depend on its keys."""

    def code(cache, index, key, value):
        keys = key_part(cache, index, key, value)
        return ops.stack((keys, value_part(cache, index, key, change(keys, value))), axis=1)

    return code


def chained(cache, index, key, value):
    return write(key_part(cache, index, key, value), key * 2, index - 1)


def on_a_device(*args):
    with tf.device("CPU:0"):
        return key_part(*args)


def with_slice(use):
    """Returns what updates keys, of which a slice has a control edge or is kept."""

    def code(cache, index, key, value):
        part = use(cache[:, 0])
        return write(part, after(part, tf.identity(key)), index)

    return code


def strided(begin, new=lambda x: x, **masks):
    """Returns the code of one layer whose parts are slices of these masks."""

    def part(x, i):
        begins = [i if place is None else place for place in begin]
        ends = [i + 1 if place is None else LENGTH for place in begin]
        return tf.strided_slice(x, begins, ends, [1] * len(begin), **masks)

    def code(cache, index, *others):
        new_ones = [new(x) for x in others]
        starts = [0] * (new_ones[0].shape.rank - 2)
        return spelled(part, lambda _: [0, index, *starts])(cache, index, *new_ones)

    return code


def whole(x):
    """Fills all positions, of one part."""
    return tf.repeat(x, LENGTH, 1)[:, None]


def put(part, place):
    """Returns what updates a part at another place."""
    return lambda c, index, *new: write(c[:, part], new[part], place(index))


USED, OUTPUT, FILLS = "is also used by", "is an output of the graph", "may not fill positions of"
DEPENDS = "what is written depends on what was to be written later"
KEPT, EDGE = "is marked _grappler_do_not_remove", "has a control edge from"
# The code of two layers, how many of their caches are updated by fused ops, why not all at once.
LAYERS = {
    "one of two": (two(lambda x, cache: [x[0], cache[:, 1]]), 1, None),
    "the other way round": (two(lambda x, _: x[::-1]), 2, None),
    "one twice": (two(lambda x, _: [x[0], x[0]]), 1, None),
    "one more": (two(lambda x, cache: [*x, cache[:, 0]]), 2, None),
    "one less": (two(lambda x, _: x[1:]), 1, None),
    "one of two, the first": (two(lambda x, _: x[:1]), 1, None),
    "of two caches": (two_caches, 2, None),
    "in another dimension": (two(axis=2), 2, None),
    "in a dimension from the end": (two(axis=-5), 2, None),
    "one changed": (two(lambda x, _: [x[0] + 1, x[1]]), 2, None),
    "next cache as an output": (two(use=lambda x: x[1]), 2, OUTPUT),
    "next cache used elsewhere": (two(use=lambda x: x[0] + 1), 2, USED),
    "stacked twice": (two(use=lambda x: ops.stack(x, axis=1)), 2, USED),
    "kept next cache": (two(lambda x, _: [keep(x[0]), x[1]]), 1, KEPT),
    "edge from a next cache": (two(use=lambda x: after(x[0], tf.ones(1) + 1)), 2, EDGE),
    "layer as an output": (shared("layer", lambda x: x), 2, OUTPUT),
    "layer used elsewhere": (shared("layer", lambda x: x + 1), 2, USED),
    "part as an output": (shared("part", lambda x: x), 1, OUTPUT),
    "part used elsewhere": (shared("part", lambda x: x + 1), 1, USED),
    "that need each other": (crossed, 1, DEPENDS),
    "whose places depend on keys": (places, 2, DEPENDS),
    "one after the other": (in_order, 2, DEPENDS),
}
# The code of one layer, why it is left to stock.
PARTS = {
    "sequences backwards": (sliced(lambda x, i: x[::-1, i]), None),
    "all sequences but one": (sliced(lambda x, i: x[1:, i], lambda x: x[1:]), None),
    "every other sequence": (sliced(lambda x, i: x[::2, i], lambda x: x[::2]), None),
    "all positions but one": (sliced(lambda x, i: x[:, i, 1:]), None),
    "positions backwards": (sliced(lambda x, i: x[:, i, ::-1]), None),
    "all heads but one": (sliced(lambda x, i: x[:, i, :, 1:], lambda x: x[:, :, 1:]), None),
    "vectors backwards": (sliced(lambda x, i: x[:, i, ..., ::-1]), None),
    "parts from the end": (sliced(lambda x, i: x[:, i - 2]), None),
    "parts the other way round": (sliced(lambda x, i: x[:, 1 - i]), None),
    "one part twice": (sliced(lambda x, i: x[:, 0]), None),
    "of two tensors": (sliced(lambda x, i: (x + i)[:, i]), None),
    "changed": (sliced(lambda x, i: x[:, i] + 1), None),
    "ranges": (sliced(lambda x, i: x[:, i : i + 1][:, 0]), None),
    "masked": (strided([0, None], begin_mask=3, end_mask=3, shrink_axis_mask=2), None),
    "of one head": (
        strided(
            [0, None, 0, 0], lambda x: x[:, :, 0], begin_mask=5, end_mask=5, shrink_axis_mask=10
        ),
        None,
    ),
    "not shrunk": (strided([0, None], whole, begin_mask=1, end_mask=1), None),
    "with a new dimension": (
        strided([0, None, 0], whole, begin_mask=5, end_mask=5, shrink_axis_mask=2, new_axis_mask=4),
        None,
    ),
    "of a dimension behind": (
        lambda cache, *args: strided(
            [0, None, 0, 0, 0],
            whole,
            begin_mask=29,
            end_mask=29,
            shrink_axis_mask=2,
            ellipsis_mask=1,
        )(tf.stack([cache, cache * 2], 1), *args),
        None,
    ),
    "of a cache of three": (lambda x, *args: single(tf.concat([x, x[:, :1]], 1), *args), None),
    "computed": (sliced(lambda x, i: x[:, tf.shape(x[0, :i])[0]]), None),
    "unstacked": (sliced(lambda x, i: tf.unstack(x, axis=1)[i]), None),
    "gathered": (sliced(lambda x, i: tf.gather(x, i, axis=1)), None),
    "swapped": (one(value_part, key_part), None),
    "same keys twice": (lambda *args: tf.stack([key_part(*args)] * 2, 1), None),
    "keys alone": (lambda *args: tf.stack([key_part(*args)], 1), None),
    "three": (lambda *args: tf.stack([key_part(*args), value_part(*args), args[0][:, 0]], 1), None),
    "stacked behind positions": (one(axis=2), None),
    "stacked in a dimension from the end": (one(axis=-4), None),
    "keys at another place": (one(put(0, lambda index: index + 1)), None),
    "keys at the start": (one(put(0, lambda index: 0)), None),
    "values at the start": (one(positions=put(1, lambda index: 0)), None),
    "at two numbers": (one(put(0, lambda index: 2), put(1, lambda index: 3)), None),
    "keys written twice": (one(chained), None),
    "one head": (reduced(*[lambda x: x[:, :, :1]] * 2), FILLS),
    "one sequence": (reduced(*[lambda x: x[:1]] * 2), FILLS),
    "one head of keys": (reduced(lambda x: x[..., 1:, :]), FILLS),
    "shorter vectors of values": (reduced(value=lambda x: x[..., :2]), FILLS),
    "values that depend on keys": (within(lambda keys, value: value + keys[:, :1]), DEPENDS),
    "values that wait for keys": (within(lambda keys, value: after(keys, value + 1)), DEPENDS),
    "values that are keys": (within(lambda keys, value: keys), "is a value inside"),
    "on a device": (one(on_a_device), "the nodes are on different devices"),
    "kept stack": (lambda *args: keep(single(*args)), KEPT),
    "kept update": (one(lambda *args: keep(key_part(*args))), KEPT),
    "kept slice": (one(with_slice(keep)), KEPT),
    "edge from a slice": (one(with_slice(lambda x: x)), EDGE),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    code, fusions, reason = LAYERS[name]
    compiled = run(code, [arguments(2, index) for index in (3, -1, 9)], fusions)
    assert op_counts(compiled.get_concrete_function(*arguments(2)))[OP] == fusions
    check_reason(compiled, reason)


@pytest.mark.parametrize("name", PARTS)
def test_parts(name):
    code, reason = PARTS[name]
    check_reason(run(code, [arguments(0, index) for index in (3, -1, 9)], 0), reason)


def check_reason(compiled, reason):
    told = [refused.reason for report in compiled.remap_reports for refused in report.refused]
    assert any(reason in one for one in told) if reason else not told


@pytest.mark.parametrize("dtype", ["int32", "int64", "complex64"])
def test_dtypes_without_kernels(dtype):
    args = [tf.cast(arg, dtype if i != 1 else "int32") for i, arg in enumerate(arguments(2))]
    compiled = run(stacked, [args], 0)
    assert reasons(compiled)["update_cache"] == f"{OP} has no {dtype} kernel on CPU"


@pytest.mark.parametrize("disabled", ["update_cache", "update_*", "*"])
def test_switched_off(disabled):
    remap = RemapOptions(disable=[disabled])
    compiled = run(stacked, [arguments(2)], 0, remap=remap)
    assert not reasons(compiled)
    assert op_counts(compiled.get_concrete_function(*arguments(2)))["XlaDynamicUpdateSlice"] == 4


def test_compiled_by_xla():
    args = arguments(2)
    compiled = function(stacked, jit_compile=True)
    assert_equal(compiled(*args), tf.function(stacked)(*args))
    assert not rule_counts(compiled) and compiled.remap_reports[-1].skipped


def test_effects_that_slices_wait_for():
    """They still come first."""
    results = []
    for decorator in (tf.function, function):
        calls = tf.Variable(1.0)

        def code(cache, index, *new, calls=calls):
            with tf.control_dependencies([calls.assign_add(1.0)]):
                parts = written(cache, index, *new)
            with tf.control_dependencies([parts[0]]):
                calls.assign(calls * 3.0)
            return ops.stack(parts, axis=1)

        compiled = decorator(code)
        results.append([compiled(*arguments(0)), calls.value()])
    assert_equal(*results)
    assert rule_counts(compiled) == {"update_cache": 1}


class Program:
    """A program of some layers, which is now and then not quite that of a decoder."""

    def __init__(self, seed):
        self.seed = seed
        self.layers = int(np.random.default_rng(seed).integers(1, 4))

    def __call__(self, cache, index, *new):
        self.random = np.random.default_rng(self.seed + 1000)
        self.updated, self.extra = [], []
        caches, others = {}, [cache, cache + 1]
        for layer in self.random.permutation(self.layers):
            source = others[self.chance(0.05)]
            part = source[:, layer, ...] if self.chance(0.8) else source[:, int(layer)]
            caches[layer] = self.pair(part, index, *new[2 * layer : 2 * layer + 2])
        order = list(range(self.layers))
        if self.chance(0.1):
            order = self.random.permutation(order)
        return ops.stack([caches[layer] for layer in order], axis=1), self.extra

    def chance(self, probability):
        return int(self.random.uniform() < probability)

    def pair(self, part, index, *new):
        places = [index, index - 1, 2, 0]
        place = places[self.random.choice(4, p=[0.7, 0.1, 0.1, 0.1])]
        parts = []
        for i, update in enumerate(new):
            if self.updated and self.chance(0.5):
                # What layers have attended to.
                update = update + self.updated[self.random.integers(len(self.updated))][:, 1:2]
            if self.chance(0.05):
                place = places[self.random.integers(4)]
            taken = part[:, 1 - i if self.chance(0.05) else i, ...]
            parts.append(write(taken, update, place))
            self.updated += parts[-1:] if self.chance(0.7) else []
            self.extra += [taken] if self.chance(0.05) else []
            self.extra += [parts[-1]] if self.chance(0.3) else []
        self.updated += parts
        pair = ops.stack(parts, axis=1)
        self.extra += [part] * self.chance(0.05) + [pair + 1] * self.chance(0.05)
        return pair


def test_random_programs():
    fused, whole, refused = 0, 0, 0
    for seed in range(60):
        program = Program(seed)
        batch = 1 + seed % 2
        calls = [arguments(program.layers, index, batch=batch) for index in (3, 7)]
        compiled = run(lambda *args, program=program: program(*args), calls, None)
        counts = rule_counts(compiled).get("update_cache", 0)
        told = compiled.remap_reports[-1]
        fused += counts > 0
        whole += any(f"layers={program.layers}" in f.messages[0] for f in told.fused)
        refused += bool(told.refused)
    assert fused > 40 and whole > 20 and refused > 20, (fused, whole, refused)
