"""What the pictures are drawn from: programs read, passes applied, differences found."""

import pytest
import tensorflow as tf
import viz_programs
from google.protobuf import text_format
from viz_programs import CONV_SPECS, LOOP_SPECS, MATMUL_SPECS

import tf_fused_ops
from tf_fused_ops.viz import VizError, costs, diff, model, passes, sources


def _load(function, specs=CONV_SPECS):
    return sources.load(function, input_signature=specs)


def _compare(function, names, specs=CONV_SPECS):
    return passes.apply(_load(function, specs), names).comparison


def _ops(graph):
    return sorted(node.op.removeprefix("TfFusedOps>") for node in graph.nodes.values())


def test_nodes_know_their_tensors_inputs_and_lines():
    source = _load(viz_programs.conv_bias_relu)
    nodes = model.read(source.graph_def, source.outputs, "p", source.lines).graph.nodes
    conv = nodes["Conv2D"]
    assert conv.inputs == (("x", 0), ("w", 0))
    assert [str(tensor) for tensor in conv.outputs] == ["float32[2,8,8,8]"]
    assert conv.outputs[0].bytes == 2 * 8 * 8 * 8 * 4
    assert conv.attrs["strides"] == "[1, 1, 1, 1]" and conv.attrs["padding"] == "SAME"
    assert conv.source.startswith(viz_programs.__file__)


def test_function_bodies_have_shapes_and_lines():
    source = _load(viz_programs.loop, LOOP_SPECS)
    program = model.read(source.graph_def, source.outputs, "p", source.lines)
    (loop,) = (node for node in program.graph.nodes.values() if node.calls)
    bodies = dict(loop.calls)
    assert set(bodies) == {"body", "cond"}
    body = program.functions[bodies["body"]]
    (conv,) = (node for node in body.nodes.values() if node.op == "Conv2D")
    assert str(conv.outputs[0]) == "float32[2,8,8,4]"
    assert conv.source.startswith(viz_programs.__file__)
    assert len(body.arguments) == len(body.results) == len(loop.inputs)


def test_control_edges_and_unknown_shapes():
    def program(x):
        with tf.control_dependencies([tf.debugging.assert_positive(x)]):
            return tf.square(x)

    source = sources.load(program, input_signature=[tf.TensorSpec([None, 3])])
    nodes = model.read(source.graph_def, source.outputs).graph.nodes
    assert nodes["Square"].controls
    assert str(nodes["Square"].outputs[0]) == "float32[?,3]"
    assert nodes["Square"].outputs[0].bytes is None


def test_our_pass_on_a_chain():
    comparison = _compare(viz_programs.conv_bias_relu, "tf_fused_ops")
    assert _ops(comparison.after.graph) == ["Conv2DBiasAct", "Identity"] + ["Placeholder"] * 3
    removed = {name for (_, name), c in comparison.changes_before.items() if c.kind == diff.REMOVED}
    assert removed == {"Conv2D", "BiasAdd", "Relu"}
    assert comparison.counts() == {"removed": 3, "altered": 0, "rewired": 1, "added": 1}
    (region,) = comparison.regions
    assert region.rule == "conv2d_bias_relu"
    assert {name for _, name in region.before} == removed
    assert region.source.startswith(viz_programs.__file__)
    assert region.notes[0].startswith("Fuse Conv2D with BiasAdd and Relu")


def test_our_pass_forward_and_backward():
    comparison = _compare(viz_programs.step, "tf_fused_ops")
    (region,) = comparison.regions
    kinds = [comparison.after.graph.nodes[name].op for _, name in region.after]
    assert kinds == ["TfFusedOps>Conv2DBiasAct", "TfFusedOps>Conv2DBiasActGrad"]
    before, after = comparison.costs()
    assert after.kernels < before.kernels and after.bytes < before.bytes


def test_our_pass_in_a_loop_body():
    comparison = _compare(viz_programs.loop, "tf_fused_ops", LOOP_SPECS)
    (region,) = comparison.regions
    graphs = {graph for graph, _ in (*region.before, *region.after)}
    assert graphs <= {*comparison.before.functions, *comparison.after.functions}
    kinds = {change.kind for change in comparison.changes_before.values()}
    assert diff.REMOVED in kinds
    unchanged = comparison.before.functions.keys() - {graph for graph, _ in region.before}
    assert not any(graph in unchanged for graph, _ in comparison.changes_before)


@pytest.mark.parametrize("name", ["remap", "remapper"])
def test_tensorflows_remapper(name):
    comparison = _compare(viz_programs.conv_bias_relu, name)
    assert "_FusedConv2D" in _ops(comparison.after.graph)
    (region,) = comparison.regions
    assert region.rule == "_FusedConv2D (BiasAdd, Relu)"
    assert {name for _, name in region.before} == {"Conv2D", "BiasAdd", "Relu"}
    assert all(node.device == "" for node in comparison.after.graph.nodes.values())


def test_passes_in_sequence():
    both = _compare(viz_programs.matmul_bias_gelu, ("remap", "tf_fused_ops"), MATMUL_SPECS)
    ours = _compare(viz_programs.matmul_bias_gelu, ("tf_fused_ops", "remap"), MATMUL_SPECS)
    assert any(region.rule.startswith("_FusedMatMul") for region in both.regions)
    assert "MatMulBiasAct" in _ops(ours.after.graph)


def test_altered_attributes_are_seen():
    comparison = _compare(viz_programs.conv_bias_relu, "auto_mixed_precision_onednn_bfloat16")
    change = comparison.changes_after["", "Conv2D"]
    assert change.kind == diff.ALTERED
    assert "T: float32 → bfloat16" in change.notes
    assert any(note.startswith("input 0: x:0 → ") for note in change.notes)


@pytest.mark.parametrize("name", sorted(passes.GRAPPLER))
def test_every_pass_of_tensorflows_runs(name):
    comparison = _compare(viz_programs.step, name)
    assert comparison.after.graph.nodes


def test_a_pass_that_does_nothing_changes_nothing():
    comparison = _compare(viz_programs.conv_bias_relu, "debug_stripper")
    assert not comparison.changes_before and not comparison.changes_after
    assert comparison.costs()[0] == comparison.costs()[1]


def test_what_really_ran():
    comparison = _compare(viz_programs.conv_bias_relu, "executed")
    assert "_FusedConv2D" in _ops(comparison.after.graph)
    ours = _compare(viz_programs.conv_bias_relu, ("tf_fused_ops", "executed"))
    assert "Conv2DBiasAct" in _ops(ours.after.graph)
    devices = {
        node.device for node in _compare(viz_programs.step, "partitions").after.graph.nodes.values()
    }
    assert devices and all("device:" in device for device in devices)


def test_what_really_ran_of_a_graph_def_and_a_concrete_function():
    source = _load(viz_programs.conv_bias_relu)
    for thing in (source.graph_def, source.concrete):
        comparison = passes.apply(sources.load(thing), ("executed",)).comparison
        assert "_FusedConv2D" in _ops(comparison.after.graph)


def test_costs_of_a_chain():
    comparison = _compare(viz_programs.conv_bias_relu, "tf_fused_ops")
    before, after = comparison.costs()
    x, w, b, y = (size * 4 for size in (2 * 8 * 8 * 4, 3 * 3 * 4 * 8, 8, 2 * 8 * 8 * 8))
    # Conv2D and BiasAdd each write y and have it read; nobody reads what Relu writes.
    assert (before.ops, before.kernels, before.bytes) == (7, 3, x + w + b + 4 * y)
    assert (after.ops, after.kernels, after.bytes) == (5, 1, x + w + b)
    assert before.unknown == after.unknown == 0


def test_costs_count_function_bodies_once_per_call():
    @tf.function
    def inner(x):
        return tf.exp(x)

    def twice(x):
        return inner(inner(x))

    source = sources.load(twice, input_signature=[tf.TensorSpec([4])])
    assert costs.measure(model.read(source.graph_def, source.outputs)).kernels == 2


def test_every_kind_of_thing_loads(tmp_path):
    concrete = tf.function(viz_programs.conv_bias_relu).get_concrete_function(*CONV_SPECS)
    graph_def = concrete.graph.as_graph_def()
    binary, text = tmp_path / "g.pb", tmp_path / "g.pbtxt"
    binary.write_bytes(graph_def.SerializeToString())
    text.write_text(text_format.MessageToString(graph_def))
    layers = [tf.keras.Input([8, 8, 4]), tf.keras.layers.Conv2D(3, 3, activation="relu")]
    keras_model = tf.keras.Sequential(layers)
    keras_model.save(tmp_path / "m.keras")
    module = tf.Module()
    module.scale = tf.Variable(2.0)
    module.f = tf.function(lambda x: tf.nn.relu(x * module.scale), [tf.TensorSpec([3])])
    tf.saved_model.save(module, str(tmp_path / "saved"), signatures=module.f)
    decorated = tf_fused_ops.function(viz_programs.conv_bias_relu)
    things = (concrete, graph_def, binary, str(text), keras_model, tmp_path / "m.keras",
              tmp_path / "saved", module.f)  # fmt: skip
    loaded = [*map(sources.load, things), _load(decorated)]
    for source in loaded:
        program = model.read(source.graph_def, source.outputs, source.title)
        ops = [op for graph in program.graphs() for op in _ops(graph)]
        assert "Relu" in ops and "Conv2DBiasAct" not in ops
        assert source.outputs


def test_example_inputs():
    arrays = [tf.zeros(spec.shape) for spec in CONV_SPECS]
    assert sources.load(viz_programs.conv_bias_relu, inputs=arrays).title == "conv_bias_relu"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("float32[8,28,28,1], int32[?]", [([8, 28, 28, 1], tf.float32), ([None], tf.int32)]),
        ("bfloat16[]", [([], tf.bfloat16)]),
        ("f[2]", None),
        ("float32", None),
        ("float32[a]", None),
        ("[2]", None),
    ],
)
def test_signatures(text, expected):
    if expected is None:
        with pytest.raises(VizError, match="is not a dtype with a shape"):
            sources.parse_signature(text)
    else:
        specs = [tf.TensorSpec(shape, dtype) for shape, dtype in expected]
        assert sources.parse_signature(text) == specs


def _broken_graph():
    graph_def = tf.compat.v1.GraphDef()
    graph_def.node.add(name="a", op="NoSuchOp")
    return graph_def


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: sources.load("nowhere.pb"), "does not exist"),
        (lambda: sources.load(3), "not a int"),
        (lambda: sources.load(viz_programs.untraceable, [1.0]), "this one is broken$"),
        (lambda: sources.load(viz_programs.conv_bias_relu), "cannot be traced"),
        (lambda: sources.import_object("viz_programs:nix"), "has no nix"),
        (lambda: sources.import_object("no_such_module:f"), "cannot be imported"),
        (lambda: sources.load(_broken_graph(), outputs=["b"]), "no node b"),
        (lambda: passes.apply(sources.load(_broken_graph()), "remap"), "NoSuchOp"),
        (lambda: passes.canonical("polish"), "there is no pass 'polish'"),
        (lambda: passes.canonical(["executed", "remap"]), "can only come last"),
        (lambda: _compare(viz_programs.step, ("remap", "executed")), "can come before"),
    ],
)
def test_bad_input_is_one_sentence(act, message):
    with pytest.raises(VizError, match=message) as raised:
        act()
    assert "\n" not in str(raised.value)


def test_running_needs_known_shapes():
    source = sources.load(tf.exp, input_signature=[tf.TensorSpec([None])])
    with pytest.raises(VizError, match="known shapes"):
        passes.apply(source, "executed")
