"""What one match leaves for the next: the route to it, and the attributes of ops that are alike."""

import pytest
import tensorflow as tf

from tf_fused_ops.remapper import pattern, reading
from tf_fused_ops.remapper.graph import GraphView
from tf_fused_ops.remapper.matcher import Matcher


def layer(x, side):
    """From the anchor, its product is found as what reads it, the sigmoid as what that reads."""
    z = tf.nn.relu(x)
    return tf.tanh(z * tf.sigmoid(x) + side)


@pytest.fixture
def traced():
    spec = tf.TensorSpec([None, None], tf.float32)
    return pattern.trace(
        lambda _, x, side: {"y": layer(x, side)}, {"x": spec, "side": spec}, anchor="Relu"
    )


def places(*functions):
    """Returns a view of a graph with one layer behind the other, and the layers' anchors."""
    graph = tf.Graph()
    with graph.as_default():
        y = tf.compat.v1.placeholder(tf.float32, [4, 4])
        side = tf.compat.v1.placeholder(tf.float32, [4, 4])
        for function in functions:
            y = function(y, side)
    view = GraphView(graph, [y])
    return view, [op for op in graph.get_operations() if op.type == "Relu"]


def found(binding):
    """Returns the names of what a binding holds."""
    nodes = {node: op.name for node, op in binding.nodes.items()}
    return nodes, {name: tensor.name for name, tensor in binding.operands.items()}


def test_the_next_place_takes_no_search(traced, monkeypatch):
    view, (first, second) = places(layer, layer)
    assert Matcher(traced, view).match(first, ["y"]) is not None
    searched = Matcher(traced, view).matches(second, ["y"])
    expected = found(next(searched))
    monkeypatch.setattr(Matcher, "_branch", lambda *_: pytest.fail("it was searched for"))
    assert found(Matcher(traced, view).match(second, ["y"])) == expected


@pytest.mark.parametrize(
    "other",
    [
        lambda x, side: tf.tanh(side + tf.nn.relu(x) * tf.sigmoid(x)),
        lambda x, side: tf.tanh(tf.sigmoid(x) * tf.nn.relu(x) + side),
    ],
    ids=["swapped_sum", "swapped_product"],
)
def test_where_the_route_does_not_lead_there_is_a_search(traced, other):
    view, (first, second, third) = places(layer, other, layer)
    for anchor in (first, second, third):
        binding = Matcher(traced, view).match(anchor, ["y"])
        assert found(binding) == found(next(Matcher(traced, view).matches(anchor, ["y"])))


@pytest.mark.parametrize(
    "other",
    [
        lambda x, side: tf.tanh(tf.nn.relu(x) * tf.sigmoid(side) + side),
        lambda x, side: tf.tanh(tf.nn.relu(x) * tf.tanh(x) + side),
        lambda x, side: tf.tanh(tf.nn.relu(x) - tf.sigmoid(x) + side),
    ],
    ids=["other_input", "other_activation", "other_sum"],
)
def test_a_route_leads_to_nothing_else(traced, other):
    view, (first, second) = places(layer, other)
    assert Matcher(traced, view).match(first, ["y"]) is not None
    assert Matcher(traced, view).match(second, ["y"]) is None


@pytest.mark.parametrize("length", [1, 200, 20000])
def test_names_do_not_count(length):
    with tf.Graph().as_default():
        x, y = (tf.compat.v1.placeholder(tf.float32, [2], "n" * n) for n in (3, length))
        made = [
            tf.add(x, x, name="a").op,
            tf.add(x, y, name="b" * length).op,
            tf.reduce_sum(x, name="c").op,
        ]
        with tf.device("/cpu:0"):
            made.append(tf.add(x, y, name="d").op)
    same, alike, other, elsewhere = (reading.anonymous(op) for op in made)
    assert same == alike
    assert len({same, other, elsewhere}) == 3


def fork(x, side):
    """Has two places that fit one anchor."""
    z, gate = tf.nn.relu(x), tf.sigmoid(x)
    return tf.tanh(z * gate + side) - tf.tanh(gate * z + side)


def test_where_a_route_leads_there_is_one_match(traced, monkeypatch):
    view, (first, second, third) = places(layer, fork, layer)
    matcher = Matcher(traced, view)
    (expected,) = matcher.matches(third, ["y"])
    assert len(matcher.all_matches(first, ["y"])) == 1
    every = matcher.all_matches(second, ["y"])
    assert [found(one) for one in every] == [found(one) for one in matcher.matches(second, ["y"])]
    assert len(every) == 2
    monkeypatch.setattr(Matcher, "_branch", lambda *_: pytest.fail("it was searched for"))
    assert [found(one) for one in matcher.all_matches(third, ["y"])] == [found(expected)]
