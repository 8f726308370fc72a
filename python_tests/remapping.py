"""What the tests of the remapper share: run a function stock and fused, and compare."""

import collections
import contextlib
import re

import keras
import numpy as np
import tensorflow as tf
import tolerances
from tensorflow.python.saved_model import loader_impl

from tf_fused_ops.function import function
from tf_fused_ops.remapper import convert

FUSED = {
    "Conv2D": "TfFusedOps>Conv2DBiasAct",
    "transposed convolution": "TfFusedOps>Conv2DTransposeBiasAct",
    "Conv3D": "TfFusedOps>Conv3DBiasAct",
    "MatMul": "TfFusedOps>MatMulBiasAct",
    "FusedBatchNormV3": "TfFusedOps>BatchNormAct",
    "MaxPool": "TfFusedOps>MaxPoolAct",
    "group norm": "TfFusedOps>GroupNormAct",
    "layer norm": "TfFusedOps>LayerNorm",
    "attention": "TfFusedOps>Attention",
    "softmax": "TfFusedOps>Softmax",
    "cross entropy": "TfFusedOps>SoftmaxCrossEntropy",
    "sparse cross entropy": "TfFusedOps>SparseSoftmaxCrossEntropy",
    "activation": "TfFusedOps>Act",
    "learned slope": "TfFusedOps>Prelu",
    "recurrent": "TfFusedOps>Recurrent",
    "quantized product": "TfFusedOps>QuantizedMatMulBiasAct",
    "weight-only product": "TfFusedOps>WeightOnlyMatMulBiasAct",
    "weights of few bits": "TfFusedOps>DequantizedWeights",
}
# Rules that emit no fused op.
OF_STOCK_OPS = {
    *("packed_lookup", "dilated_conv1d", "dilated_conv2d", "dilated_conv3d"),
    *("slice_gradient", "joined_slice_gradients"),
}
# Which is its own gradient.
DROPOUT = "TfFusedOps>Dropout"


def values(*shapes, dtype="float32", seed=0):
    """Returns one normally distributed tensor per shape."""
    rng = np.random.default_rng(seed)
    return [tf.constant(rng.standard_normal(shape), dtype) for shape in shapes]


def in_training(rule):
    """Returns the rule counts and gradients of a chain that a rule fuses in inference.

    The gradients of a product alone and of a sum with it are stock's, and those of what is around a
    product of integers or of attention in groups; those of tensordot read what is inside.
    """
    if rule == "dense_add":
        return {}, 0
    sums = "matmul_add", "batch_matmul_add"
    families = "quantized_matmul", "weight_only", "few_rows", "grouped_attention"
    stock = rule in sums or rule.startswith(families)
    return {rule: 1}, int(not stock)


def given(z, scale, offset, mean, variance, shape=None):
    """Batch norm in inference; Keras reshapes the vectors for some axes."""
    vectors = (mean, tf.abs(variance), offset, scale)
    if shape is not None:
        vectors = (tf.reshape(v, shape) for v in vectors)
    return tf.nn.batch_normalization(z, *vectors, 1e-3)


def given_op(z, scale, offset, mean, variance):
    """The same by TensorFlow's own op; all outputs."""
    return tf.raw_ops.FusedBatchNormV3(
        x=z, scale=scale, offset=offset, mean=mean, variance=tf.abs(variance), is_training=False
    )


@contextlib.contextmanager
def plain():
    """Without grappler's remapper, which makes of some graphs what does not run (convolution, bias,
    add and mish) or computes something else (relu of a batch norm's second output)."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"remapping": False})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"remapping": before.get("remapping", True)})


def op_counts(concrete):
    """Counts the op types of a ConcreteFunction, with those of the functions that it calls."""
    graph_def = concrete.graph.as_graph_def()
    definition = concrete.function_def
    counts = collections.Counter(node.op for node in definition.node_def)
    for inner in graph_def.library.function:
        counts.update(node.op for node in inner.node_def)
    return counts


def saved_op_counts(path):
    """Counts the op types in all graphs and functions of a SavedModel."""
    found = collections.Counter()
    for meta_graph in loader_impl.parse_saved_model(str(path)).meta_graphs:
        graph = meta_graph.graph_def
        for nodes in (graph.node, *(f.node_def for f in graph.library.function)):
            found.update(node.op for node in nodes)
    return found


def fused_ops(path):
    """The same of the fused ops alone, by their names."""
    counts = saved_op_counts(path)
    return {k.removeprefix("TfFusedOps>"): n for k, n in counts.items() if "TfFused" in k}


def rule_counts(compiled):
    """Returns {rule: number of fusions} over all traces of a decorated function."""
    counts = collections.Counter()
    for report in compiled.remap_reports:
        counts.update(report.counts())
    return dict(counts)


def asked_for(concrete, op_type, names):
    """Returns {name: number of gradient ops of a type that yield its gradient}."""
    ops = [op for op in concrete.graph.get_operations() if op.type == op_type]
    return {name: sum(op.get_attr(f"{name}_gradient") for op in ops) for name in names}


def gradient_op_counts(compiled):
    """Returns the numbers of gradient ops that the backward passes which the log tells of may have:
    one each, or two where both operands of a contraction have gradients."""
    fusions = [fusion for report in compiled.remap_reports for fusion in report.fused]
    messages = [m for fusion in fusions if fusion.rule not in OF_STOCK_OPS for m in fusion.messages]
    lines = [line for line in messages if "Fuse gradient of" in line]
    both = sum(bool(re.search(r": (input|a)=[^<]\S* (filters|b)=[^<]", line)) for line in lines)
    return range(len(lines), len(lines) + both + 1)


def gradient_count(compiled):
    """Returns the number of backward passes that were fused."""
    return sum(f.gradients for report in compiled.remap_reports for f in report.fused)


def reasons(compiled):
    """Returns {rule: reason} of all near misses."""
    return {r.rule: r.reason for report in compiled.remap_reports for r in report.refused}


def assert_same(found, expected, units=64):
    """Asserts that two structures of tensors agree to within rounding."""
    found, expected = tf.nest.flatten(found), tf.nest.flatten(expected)
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            tolerances.assert_close(f"output {i}", a, b, a.dtype.name, units=units)


def specs(args, unknown_batch=False):
    """Returns the TensorSpecs of arguments, if asked for with the first dimension unknown."""
    return [
        tf.TensorSpec([None, *a.shape[1:]] if unknown_batch else a.shape, a.dtype) for a in args
    ]


def trained(decorator, make_model, target):
    """Trains a model in a decorated step.

    Args:
        decorator: tf.function or ours.
        make_model: Returns a Keras model, which is the same every time.
        target: The shape of its output.

    Returns:
        The decorated step and the losses of five.
    """
    keras.utils.set_random_seed(0)
    model = make_model()
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    def step(x, target):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - target) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    compiled = decorator(step)
    x, target = values((4, *model.input_shape[1:]), target)
    return compiled, [compiled(x, target) for _ in range(5)]


def check_left(code, shapes, rules, rule, reason):
    """Asserts that `rule` leaves code alone for a reason, if there is one, or does not nearly fit,
    and that only `rules` fuse it."""
    found = reasons(check(code, values(*shapes), rules))
    if reason:
        assert reason in found[rule]
    else:
        assert not any(refused.startswith(rule) for refused in found)


def check_portable(code, operands, folder):
    """Asserts that stock ops stand for the fused ones of code where the package is not installed,
    and are fused again."""
    paths = [str(folder / name) for name in ("fused", "portable", "again")]
    module = tf.Module()
    signature = [tf.TensorSpec(x.shape, x.dtype) for x in operands]
    module.forward = function(code, input_signature=signature)
    expected = module.forward(*operands)
    tf.saved_model.save(module, paths[0])
    convert(paths[0], paths[1], to_stock=True)
    assert fused_ops(paths[1]) == {}
    assert_same(tf.saved_model.load(paths[1]).forward(*operands), expected)
    convert(paths[1], paths[2])
    assert_same(tf.saved_model.load(paths[2]).forward(*operands), expected)


def check_training(make_model, target):
    """Returns the step of ours after it has been found to train a model as stock's does."""
    with plain():
        _, expected = trained(tf.function, make_model, target)
        compiled, losses = trained(function, make_model, target)
    assert_same(losses, expected)
    assert expected[-1] < expected[0]
    return compiled


def taped(code, args):
    """Returns what code computes, and the gradients of its arguments by a tape outside of it."""
    with tf.GradientTape() as tape:
        tape.watch(args)
        y = code(*args)
    return y, tape.gradient(y, args, output_gradients=tf.sin(y))


def step_of(chain):
    """Returns the forward and the backward pass of a function of tensors."""

    def step(x, *others):
        with tf.GradientTape() as tape:
            tape.watch([x, *others])
            y = chain(x, *others)
            loss = tf.reduce_sum(y * y * y)
        return y, tape.gradient(loss, [x, *others])

    return step


def check(fn, args, rules, gradients=0, unknown_batch=(), units=64):
    """Runs a function stock and fused; asserts equal results and exactly these fusions.

    Args:
        fn: The function; a tf.function where stock, too, should run as a graph.
        args: Its arguments.
        rules: {rule name: number of fusions}.
        gradients: The number of fused backward passes.
        unknown_batch: Indices of the arguments whose first dimension is not known in tracing.
        units: Tolerance in units in the last place.

    Returns:
        The decorated function.
    """
    signature = [
        tf.TensorSpec([None, *a.shape[1:]] if i in unknown_batch else a.shape, a.dtype)
        for i, a in enumerate(args)
    ]
    code = getattr(fn, "python_function", fn)
    with plain():
        expected = fn(*args)
        compiled = function(code, input_signature=signature)
        found = compiled(*args)
    told = "\n".join(map(str, compiled.remap_reports))
    assert rule_counts(compiled) == rules, told
    assert gradient_count(compiled) == gradients, told
    counts = op_counts(compiled.get_concrete_function())
    dropouts = rules.get("dropout", 0)
    assert counts[DROPOUT] >= dropouts, counts
    fused = sum(counts[op] for op in FUSED.values()) + dropouts
    forward = {name for name in rules if not name.endswith("_grad")} - OF_STOCK_OPS
    assert fused == sum(rules[name] for name in forward), counts
    gradient_ops = sum(counts[f"{op}Grad"] for op in FUSED.values()) + counts[DROPOUT] - dropouts
    assert gradient_ops in gradient_op_counts(compiled), counts
    assert_same(found, expected, units)
    return compiled
