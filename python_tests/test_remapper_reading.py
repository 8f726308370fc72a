"""The ops of a graph, read all at once."""

import contextlib
import functools
import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import tf_fused_ops as tfo
from tf_fused_ops import _graph_def
from tf_fused_ops.remapper import hiding, reading
from tf_fused_ops.remapper.graph import GraphView


def traced():
    """Returns a graph with ops of many outputs, control inputs, variables, branches and calls."""
    variable = tf.Variable(1.0)

    def many(x, n):
        low, high = tf.split(x, 2)
        with tf.control_dependencies([variable.assign_add(1.0), low.op]):
            y = tf.cond(n > 0, lambda: low + high, lambda: high - low)
        y = tf.while_loop(lambda i, _: i < n, lambda i, y: (i + 1, y * 2.0), [0, y])[1]
        return tf.function(tf.nn.relu)(y) + variable, tf.unique(tf.cast(high, tf.int32)).idx

    signature = tf.TensorSpec([4]), tf.TensorSpec([], tf.int32)
    return tf.function(many).get_concrete_function(*signature).graph


def cyclic():
    """Returns an imported graph whose loop is one of its ops, with edges that lead back."""
    graph = tf.Graph()
    tf.compat.v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as source:
            tf.compat.v1.while_loop(lambda i: i < 3.0, lambda i: i + 1.0, [0.0])
    finally:
        tf.compat.v1.enable_control_flow_v2()
    with graph.as_default():
        tf.import_graph_def(source.as_graph_def())
    assert "NextIteration" in {op.type for op in graph.get_operations()}
    return graph


def partly_hidden():
    """Returns a graph that does not list all of its ops."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2])
        y = tf.nn.relu(x)
        unused = tf.tanh(x)
        tf.sigmoid(y)
    hiding.hide(graph, [unused.op])
    assert unused.op not in graph.get_operations()
    return graph


def attributes(op):
    node_def = op.node_def
    for field in ("name", "op", "input"):
        node_def.ClearField(field)
    return node_def


@pytest.mark.parametrize("too_long", [False, True])
@pytest.mark.parametrize("make", [traced, cyclic, partly_hidden])
def test_as_every_op_says_itself(make, too_long, monkeypatch):
    graph = make()
    if too_long:
        monkeypatch.setattr(reading, "_MAX_SERIALIZED", 0)
    types, inputs, before, shared = reading.read(graph)
    assert list(types.items()) == [(op, op.type) for op in graph.get_operations()]
    for found in (inputs, before, shared):
        assert list(found) == list(types)
    for op in types:
        tensors = op.inputs
        assert list(map(id, inputs[op])) == list(map(id, tensors)), op.name
        assert before[op][: len(tensors)] == [tensor.op for tensor in tensors], op.name
        # In an order of their own.
        controls = before[op][len(tensors) :]
        assert sorted(controls, key=id) == sorted(op.control_inputs, key=id), op.name
        if too_long:
            assert shared[op] is None
        else:
            assert tf.compat.v1.NodeDef.FromString(shared[op]) == attributes(op), op.name


def test_alike_ops_share_what_is_read():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2])
        first, second = tf.nn.relu(x, name="a"), tf.nn.relu(x, name="another")
        tf.nn.relu(tf.cast(x, tf.float64))
    shared = reading.read(graph)[3]
    assert shared[first.op] is shared[second.op]
    assert len({shared[op] for op in graph.get_operations() if op.type == "Relu"}) == 2
    assert reading.anonymous(first.op) == shared[first.op]


def test_large_constants_are_not_copied():
    value = np.random.default_rng(0).random(10_000, np.float32)
    with tf.Graph().as_default() as graph:
        y = tf.nn.relu(tf.constant(value))
    *_, shared = reading.read(graph)
    assert shared[y.op.inputs[0].op] is None
    assert np.array_equal(GraphView(graph, [y]).constant(y.op.inputs[0]), value)


@pytest.mark.parametrize("damage", ["truncated", "renamed", "another_port"])
def test_a_damaged_graph_def_is_an_error(damage):
    with tf.Graph().as_default() as graph:
        tf.nn.relu(tf.nn.relu(tf.compat.v1.placeholder(tf.float32, [2], "x"), "y"))
    graph_def, ops = graph.as_graph_def(), graph.get_operations()
    if damage == "renamed":
        graph_def.node[1].name = "z"
    if damage == "another_port":
        graph_def.node[2].input[0] = "y:1"
    serialized = graph_def.SerializeToString()
    _graph_def.read(graph.as_graph_def().SerializeToString(), ops)
    with pytest.raises((ValueError, IndexError), match=r"damaged|index out of range"):
        _graph_def.read(serialized[:40] if damage == "truncated" else serialized, ops)


@given(place=st.integers(0, 10_000), byte=st.integers(0, 255), length=st.integers(0, 10_000))
def test_no_damage_is_worse_than_an_error(place, byte, length):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2], "x")
        with tf.control_dependencies([tf.no_op("n")]):
            tf.split(tf.nn.relu(x, "y"), 2, name="z")
    serialized = bytearray(graph.as_graph_def().SerializeToString())
    serialized[place % len(serialized)] = byte
    with contextlib.suppress(ValueError, IndexError):
        _graph_def.read(bytes(serialized[:length]), graph.get_operations())
    with contextlib.suppress(ValueError):
        _graph_def.anonymous(bytes(serialized[place % len(serialized) :]))


def test_another_number_of_ops_is_an_error():
    graph = traced()
    serialized, ops = graph.as_graph_def().SerializeToString(), graph.get_operations()
    with pytest.raises(ValueError, match=f"graph_def has {len(ops)} nodes, not the {len(ops) - 1}"):
        _graph_def.read(serialized, ops[1:])


def test_what_was_read_is_gone_after_the_pass(monkeypatch):
    views = []
    monkeypatch.setattr(GraphView, "__init__", _seen(GraphView.__init__, views))

    @tfo.function(input_signature=[tf.TensorSpec([2, 8, 8, 4]), tf.TensorSpec([3, 3, 4, 4])])
    def layer(x, filters):
        return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, filters, 1, "SAME"), tf.ones([4])))

    gc.disable()
    try:
        layer.get_concrete_function()
        assert layer.remap_reports[0].counts() == {"conv2d_bias_relu": 1}
        assert [view() for view in views] == [None]
    finally:
        gc.enable()


def _seen(function, seen):
    """Returns a function that keeps a weak reference to each object whose method it is."""

    @functools.wraps(function)
    def method(self, *args, **kwargs):
        seen.append(weakref.ref(self))
        function(self, *args, **kwargs)

    return method
