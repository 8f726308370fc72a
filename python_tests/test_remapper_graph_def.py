"""`remap` on GraphDefs and ConcreteFunctions."""

import collections

import pytest
import tensorflow as tf
from remapping import assert_same, values
from tensorflow.python.eager import wrap_function

from tf_fused_ops.remapper import RemapOptions, remap

X, W, B = (value.numpy() for value in values((6, 7), (7, 7), (7,)))


def layer(x, w=W, b=B):
    return tf.nn.relu(tf.nn.bias_add(tf.matmul(x, w), b))


def counts(graph_def):
    """Counts op types in a GraphDef and its library."""
    found = collections.Counter(node.op for node in graph_def.node)
    for function in graph_def.library.function:
        found.update(node.op for node in function.node_def)
    return found


def run(graph_def, inputs, outputs):
    """Runs a GraphDef: imported under names, given tensors, fetched tensors."""

    def load():
        tf.graph_util.import_graph_def(graph_def, name="")

    wrapped = wrap_function.wrap_function(load, [])
    graph = wrapped.graph
    pruned = wrapped.prune(
        [graph.get_tensor_by_name(name) for name in inputs],
        [graph.get_tensor_by_name(name) for name in outputs],
    )
    return pruned(*map(tf.convert_to_tensor, inputs.values()))


def graph_of(fn):
    """Returns the GraphDef of a function of the placeholder x."""
    graph = tf.Graph()
    with graph.as_default():
        fn(tf.compat.v1.placeholder(tf.float32, [None, 7], name="x"))
    return graph.as_graph_def()


def test_graph_def_keeps_the_names_of_its_outputs():
    source = graph_of(
        lambda x: tf.nn.relu(layer(x) @ W + 1.0, name="end") + 0.0 * layer(x, W * 2.0, B)
    )
    untouched = source.SerializeToString()
    result = remap(source)
    assert source.SerializeToString() == untouched
    assert result.report.counts() == {"matmul_bias_relu": 2}
    assert counts(result.graph_def)["BiasAdd"] == 0
    (name,) = result.outputs
    assert_same(run(result.graph_def, {"x:0": X}, [name]), run(source, {"x:0": X}, [name]))


def test_replaced_output_keeps_its_name():
    source = graph_of(lambda x: tf.identity(layer(x)))
    result = remap(source, outputs=["Relu"])
    assert result.outputs == ("Relu:0",)
    assert_same(run(result.graph_def, {"x:0": X}, ["Relu:0"]), layer(X))


def test_fetched_interior_is_kept():
    source = graph_of(lambda x: layer(x))
    result = remap(source, outputs=["BiasAdd:0", "Relu:0"])
    assert result.report.counts() == {"matmul_bias": 1}
    expected = run(source, {"x:0": X}, ["BiasAdd:0", "Relu:0"])
    assert_same(run(result.graph_def, {"x:0": X}, result.outputs), expected)


def test_library_functions():
    """Bodies of While, If and calls are graphs like any other."""
    inner = tf.function(layer)

    @tf.function
    def model(x, flag):
        y = tf.cond(flag, lambda: layer(x), lambda: x)
        _, y = tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, layer(y)), [0, y])
        return inner(y), layer(x)

    flag = tf.constant(True)
    concrete = model.get_concrete_function(X, flag)
    result = remap(concrete)
    assert counts(result.graph_def)["BiasAdd"] == 0
    assert result.report.counts()["matmul_bias_relu"] >= 4
    captured = dict(
        zip((t.name for t in concrete.inputs[2:]), concrete.captured_inputs, strict=True)
    )
    inputs = {concrete.inputs[0].name: X, concrete.inputs[1].name: flag, **captured}
    assert_same(run(result.graph_def, inputs, result.outputs), model(X, flag))


def test_idempotent():
    once = remap(graph_of(lambda x: layer(layer(x))))
    twice = remap(once.graph_def)
    assert len(once.report.fused) == 2
    assert twice.report.fused == []
    assert counts(twice.graph_def) == counts(once.graph_def)


def test_training_graph():
    @tf.function
    def step(x, w, b):
        with tf.GradientTape() as tape:
            tape.watch([w, b])
            y = tf.nn.gelu(tf.nn.bias_add(tf.matmul(x, w), b))
        return y, tape.gradient(y, [w, b])

    concrete = step.get_concrete_function(X, W, B)
    result = remap(concrete)
    assert counts(result.graph_def)["TfFusedOps>MatMulBiasActGrad"] == 1
    inputs = dict(zip((t.name for t in concrete.inputs), (X, W, B), strict=True))
    assert_same(run(result.graph_def, inputs, result.outputs), step(X, W, B))


def test_options_and_wrong_arguments():
    source = graph_of(lambda x: layer(x))
    assert remap(source, options=RemapOptions(disable=["matmul_*"])).report.fused == []
    with pytest.raises(ValueError, match=r"outputs: .*nowhere"):
        remap(source, outputs=["nowhere:0"])
    with pytest.raises(TypeError, match=r"target must be .*; got int"):
        remap(3)
