"""The pictures: their structure, not their pixels."""

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree

import pytest
import tensorflow as tf
import viz_programs
from google.protobuf import text_format
from tensorflow.python.eager import context
from viz_programs import CONV_SPECS, LOOP_SPECS, MATMUL_SPECS

from tf_fused_ops import viz
from tf_fused_ops.viz import VizError, engine, html, model, passes, payload, sources

mini_racer = pytest.importorskip("py_mini_racer", reason="mini-racer, which lays out, is missing")

# [from, to] of all edges of the program before with everything open.
EDGES = """(function (data) {
  const tree = buildTree(data.sides[0]);
  const view = visible(tree, new Set(tree.items.map((item) => item.key)), { constants: true });
  return view.edges.map((edge) => [edge.from.id, edge.to.id]);
})"""
SVG = "{http://www.w3.org/2000/svg}"


def _payload(function, specs=CONV_SPECS, names=("tf_fused_ops",)):
    result = passes.apply(sources.load(function, input_signature=specs), names)
    return payload.make("title", "subtitle", result.comparison)


def _groups(svg, name):
    """Returns the keys of the groups of an SVG text that have a class."""
    root = ElementTree.fromstring(svg)
    groups = (g for g in root.iter(f"{SVG}g") if name in g.get("class", "").split())
    return [group.get("data-key") for group in groups]


def _texts(svg):
    return ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_svg_of_a_chain(tmp_path):
    path = tmp_path / "chain.svg"
    comparison = viz.draw(viz_programs.conv_bias_relu, path, input_signature=CONV_SPECS)
    svg = path.read_text()
    assert comparison.regions[0].rule == "conv2d_bias_relu"
    legend = [None] * 2  # The legend shows one of each.
    assert sorted(filter(None, _groups(svg, "removed"))) == ["BiasAdd", "Conv2D", "Relu"]
    assert _groups(svg, "fused") == ["Relu_fused", None]
    assert _groups(svg, "rewired") == ["Identity", "Identity", None]
    assert len(_groups(svg, "region")) == len(legend) + 1  # a box and its name
    texts = _texts(svg)
    assert "conv_bias_relu" in texts and "through tf_fused_ops" in texts
    assert "before: 7 ops · 3 kernels · 19.2 KiB between ops" in texts
    assert texts.count("conv2d_bias_relu") == 2  # on the box before, in the fused op after
    assert "f32[2,8,8,8]" in texts


def test_svg_is_self_contained(tmp_path):
    path = tmp_path / "chain.svg"
    viz.draw(viz_programs.conv_bias_relu, path, input_signature=CONV_SPECS)
    links = re.findall(r"(?:href|src)=|url\(|https?://", path.read_text())
    assert links == ["http://"]  # the name of SVG's own namespace


def test_the_same_program_gives_the_same_picture(tmp_path):
    for name in ("one.svg", "two.svg"):
        viz.draw(viz_programs.step, tmp_path / name, input_signature=CONV_SPECS)
    assert (tmp_path / "one.svg").read_text() == (tmp_path / "two.svg").read_text()


def test_function_bodies_and_scopes_open_and_close():
    data = _payload(viz_programs.loop, LOOP_SPECS)
    closed = engine.draw(data, expand=["nothing"])["visible"][0]
    assert "while" in closed and not any("!" in key for key in closed)
    opened = engine.draw(data, expand=["while", "while!body/while", "while!body"])["visible"][0]
    assert "while" not in opened
    assert "while!body/while/Conv2D" in opened
    everything = engine.draw(data, expand="all", constants=True)["visible"][0]
    assert set(opened) <= {*everything, "while!cond/", *opened} and len(everything) > len(opened)


def test_edges_enter_and_leave_opened_functions():
    data = _payload(viz_programs.loop, LOOP_SPECS)
    svg = engine.draw(data, expand="all")["svg"]
    assert "while!body/while/Conv2D" in _groups(svg, "removed")
    view = engine.call(EDGES, data)
    sources_of = {}
    for source, target in view:
        sources_of.setdefault(target, set()).add(source)
    inside = next(key for key in sources_of if key.startswith("while!body/while_placeholder"))
    assert sources_of[inside]
    assert any("!body/" in source for source in sources_of["Identity"])


def test_unchanged_constants_are_left_out():
    data = _payload(viz_programs.matmul_bias_gelu, MATMUL_SPECS, ("debug_stripper",))
    without, with_all = (engine.draw(data, "all", constants=c)["visible"][0] for c in (False, True))
    assert len(with_all) == len(without) + 5


def test_graphs_that_others_collect_are_not_drawn():
    large = tf.function(lambda x: tf.add_n([x * float(i) for i in range(40)]))
    state = context.context()
    state.enable_graph_collection()
    try:
        large(tf.zeros([5, 6]))
        data = _payload(viz_programs.conv_bias_relu, names=("partitions",))
    finally:
        state.disable_graph_collection()
    texts = _texts(engine.draw(data, details=("shapes",))["svg"])
    assert "f32[3,3,4,8]" in texts and "f32[5,6]" not in texts


def test_details():
    data = _payload(viz_programs.conv_bias_relu, names=("partitions",))
    texts = _texts(engine.draw(data, details=("devices", "layouts", "shapes"))["svg"])
    assert "CPU:0" in texts and "NHWC" in texts and "f32[3,3,4,8]" in texts


def test_control_edges_are_dashed(tmp_path):
    def program(x):
        with tf.control_dependencies([tf.debugging.assert_positive(x)]):
            return tf.square(x)

    path = tmp_path / "c.svg"
    viz.draw(program, path, (), input_signature=[tf.TensorSpec([3])], expand="all")
    assert len(_groups(path.read_text(), "control")) >= 1
    assert "before:" not in path.read_text()


def _wide_graph(scopes, per_scope):
    graph_def = tf.compat.v1.GraphDef()
    graph_def.node.add(name="x", op="Placeholder").attr["dtype"].type = 1
    before = "x"
    for scope in range(scopes):
        for index in range(per_scope):
            prefix = f"block_{scope}/" if per_scope > 1 else ""
            node = graph_def.node.add(name=f"{prefix}relu_{scope}_{index}", op="Relu")
            node.input.append(before)
            node.attr["T"].type = 1
            before = node.name
    return graph_def


@pytest.mark.parametrize(("scopes", "per_scope"), [(50, 400), (20_000, 1)])
def test_20000_nodes_open_at_the_scope_level(scopes, per_scope):
    program = model.read(_wide_graph(scopes, per_scope))
    data = payload.make("large", "", viz.compare(program, program))
    drawn = engine.draw(data)
    assert all(1 < len(keys) <= 150 for keys in drawn["visible"])
    assert len(drawn["svg"]) < 300_000


def test_page_holds_everything(tmp_path):
    path = tmp_path / "loop.html"
    viz.draw(viz_programs.loop, path, input_signature=LOOP_SPECS)
    text = path.read_text()
    assert "%" + "DATA%" not in text and "default-src 'none'" in text
    written = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    data = json.loads(written[1])
    assert [side["label"] for side in data["sides"]] == ["before", "after"]
    assert {graph["name"] for graph in data["sides"][0]["graphs"]} >= {""}
    assert [region["rule"] for region in data["regions"]] == ["conv2d_bias_relu"]
    assert not re.search(r'(?:src|href)="', text)


def test_names_cannot_break_out_of_the_page():
    nasty = "</script><script>alert(1)</script>&\"'"
    data = payload.make(nasty, nasty, viz.compare(*[model.read(_wide_graph(2, 1))] * 2))
    page = html.page(data)
    assert page.count("<script") == 2 and "<title>&lt;/script&gt;" in page
    ElementTree.fromstring(engine.draw(data)["svg"])


def test_dot_has_every_node_and_edge(tmp_path):
    path = tmp_path / "loop.dot"
    comparison = viz.draw(viz_programs.loop, path, input_signature=LOOP_SPECS)
    text = path.read_text()
    programs = (comparison.before, comparison.after)
    nodes = [node for program in programs for g in program.graphs() for node in g.nodes.values()]
    assert text.count("tooltip=") == len(nodes)
    assert text.count(" -> ") == sum(len(node.inputs) + len(node.controls) for node in nodes)
    assert text.count("{") == text.count("}")


@pytest.mark.parametrize("ending", ["png", "pdf"])
def test_graphviz_formats(ending, tmp_path):
    if shutil.which("dot") is None:
        pytest.skip("graphviz is not installed")
    path = tmp_path / f"loop.{ending}"
    viz.draw(viz_programs.loop, path, input_signature=LOOP_SPECS)
    assert path.read_bytes()[:4] in (b"\x89PNG", b"%PDF")


def test_missing_graphviz_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(VizError, match="apt-get install graphviz"):
        viz.draw(viz_programs.loop, tmp_path / "l.png", input_signature=LOOP_SPECS)


def test_pbtxt_pair(tmp_path):
    viz.draw(viz_programs.conv_bias_relu, tmp_path / "g.pbtxt", input_signature=CONV_SPECS)
    ops = []
    for label in ("before", "after"):
        text = (tmp_path / f"g.{label}.pbtxt").read_text()
        graph_def = text_format.Parse(text, tf.compat.v1.GraphDef())
        ops.append({node.op for node in graph_def.node})
    assert "Relu" in ops[0] and "TfFusedOps>Conv2DBiasAct" in ops[1]


def test_tensorboard(tmp_path):
    viz.draw(viz_programs.conv_bias_relu, tmp_path / "runs", input_signature=CONV_SPECS,
             format="tensorboard")  # fmt: skip
    (events,) = (tmp_path / "runs" / "after").iterdir()
    graphs = [
        tf.compat.v1.GraphDef.FromString(event.graph_def)
        for event in tf.compat.v1.train.summary_iterator(str(events))
        if event.graph_def
    ]
    assert any(node.op.startswith("TfFusedOps>") for node in graphs[0].node)


def test_a_pair_of_things(tmp_path):
    before = tf.function(viz_programs.conv_bias_relu).get_concrete_function(*CONV_SPECS)
    comparison = viz.draw((before, before), tmp_path / "same.svg")
    assert sum(comparison.counts().values()) == 0


def test_bad_paths(tmp_path):
    with pytest.raises(VizError, match="has to end in"):
        viz.draw(viz_programs.step, tmp_path / "picture.jpeg", input_signature=CONV_SPECS)
    (tmp_path / "file").write_text("")
    with pytest.raises(VizError, match="cannot be written"):
        viz.draw(viz_programs.step, tmp_path / "file" / "a.dot", input_signature=CONV_SPECS)


def test_missing_engine_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "py_mini_racer", None)
    with pytest.raises(VizError, match="pip install mini-racer"):
        viz.draw(viz_programs.step, tmp_path / "a.svg", input_signature=CONV_SPECS)
    viz.draw(viz_programs.step, tmp_path / "a.html", input_signature=CONV_SPECS)
