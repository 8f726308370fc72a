"""SavedModels: their graphs are rewritten in the file, so signatures, variables, assets and tags
stay what they are."""

import os
import shutil
import tempfile
from pathlib import Path

import tensorflow as tf
from tensorflow.core.protobuf import control_flow_pb2, saved_object_graph_pb2
from tensorflow.python.framework import meta_graph as meta_graphs
from tensorflow.python.saved_model import fingerprinting_utils, loader_impl

from tf_fused_ops.remapper import graph_def, portable
from tf_fused_ops.remapper.custom_gradients import ATTRIBUTE as GRADIENT
from tf_fused_ops.remapper.rewriter import RemapOptions

_FILES = ("saved_model.pb", "saved_model.pbtxt", "fingerprint.pb")
_CONTEXTS = {
    tf.compat.v1.GraphKeys.COND_CONTEXT: control_flow_pb2.CondContextDef,
    tf.compat.v1.GraphKeys.WHILE_CONTEXT: control_flow_pb2.WhileContextDef,
}
_NOTHING = saved_object_graph_pb2.SavedUserObject(identifier="_generic_user_object")
_NOTHING.version.producer = _NOTHING.version.min_consumer = 1


def convert(source, target, to_stock=False, options=None):
    """Rewrites a SavedModel and saves it again.

    Args:
        source: The folder of the SavedModel.
        target: The folder to make.
        to_stock: False replaces chains of stock ops by fused ops; who loads the result has to
            import tf_fused_ops before. True replaces every fused op by stock ops, so that it can
            be loaded where tf_fused_ops is not installed.
        options: A `RemapOptions`.

    Returns:
        A list with one Report per graph and function.

    Raises:
        ValueError: `source` holds no SavedModel, or `target` exists.
    """
    source, target = Path(source), Path(target)
    saved_model = _read(source)
    if target.exists():
        raise ValueError(f"{target} exists already")
    reports = []
    for meta_graph in saved_model.meta_graphs:
        remap_all = graph_def.Remap(options or RemapOptions(), meta_graph.graph_def)
        reports += _rewrite(meta_graph, portable.ToStock() if to_stock else remap_all)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
        made = Path(folder, target.name)
        shutil.copytree(source, made, ignore=shutil.ignore_patterns(*_FILES))
        (made / "saved_model.pb").write_bytes(saved_model.SerializeToString(deterministic=True))
        fingerprinting_utils.write_fingerprint(str(made))
        os.replace(made, target)
    return reports


def remap(folder, options):
    """Rewrites the first graph of a SavedModel.

    Returns:
        (GraphDef, names of the outputs of its signatures, Reports).

    Raises:
        ValueError: The folder holds no SavedModel.
    """
    meta_graph = _read(Path(folder)).meta_graphs[0]
    reports = _rewrite(meta_graph, graph_def.Remap(options, meta_graph.graph_def))
    return meta_graph.graph_def, tuple(info.name for info in _outputs(meta_graph)), tuple(reports)


def _read(folder):
    try:
        saved_model = loader_impl.parse_saved_model(str(folder))
    except OSError as error:
        raise ValueError(f"{folder} holds no SavedModel: {error}") from None
    if not saved_model.meta_graphs:
        raise ValueError(f"the SavedModel in {folder} has no graphs")
    return saved_model


def _rewrite(meta_graph, transform):
    """Rewrites a MetaGraphDef; returns the Reports."""
    source, kept = meta_graph.graph_def, {"": _named_nodes(meta_graph)}
    title = ", ".join(meta_graph.meta_info_def.tags)
    names = [info.name for info in _outputs(meta_graph)]
    while True:
        result, names_after, reports = graph_def.rewrite(
            source, names, transform, title, kept, rename=False
        )
        missing = _missing_captures(meta_graph, result)
        if not missing:
            break
        for function, name in missing:
            kept.setdefault(function, []).append(name)
    source.CopyFrom(result)
    for info, name in zip(_outputs(meta_graph), names_after, strict=True):
        info.name = name
    _forget_gradients(meta_graph)
    operators = meta_graphs.stripped_op_list_for_graph(source)
    meta_graph.meta_info_def.stripped_op_list.CopyFrom(operators)
    if meta_graph.meta_info_def.stripped_default_attrs:
        meta_graphs.strip_graph_default_valued_attrs(meta_graph)
    return reports


def _outputs(meta_graph):
    """Returns the TensorInfos of all outputs of signatures."""
    signatures = sorted(meta_graph.signature_def.items())
    return [
        info
        for _, signature in signatures
        for _, info in sorted(signature.outputs.items())
        # An initialization op stands there without a port.
        if ":" in info.name
    ]


def _named_nodes(meta_graph):
    """Returns names of what is to stay in the main graph: all ends, and what collections name."""
    nodes = meta_graph.graph_def.node
    read = {name.lstrip("^").partition(":")[0] for node in nodes for name in node.input}
    named = [node.name for node in nodes if node.name not in read]
    for key, collection in meta_graph.collection_def.items():
        named += collection.node_list.value
        # Control flow of TensorFlow 1 lists all that is in it.
        for context in collection.bytes_list.value if key in _CONTEXTS else ():
            named += _CONTEXTS[key].FromString(context).values_def.values
    present = {node.name for node in nodes}
    fetched = {info.name.partition(":")[0] for info in _outputs(meta_graph)}
    return [name for name in named if name.partition(":")[0] in present - fetched]


def _used_gradients(graph):
    """Returns the names of the overridden gradients in a GraphDef."""
    bodies = [graph.node, *(function.node_def for function in graph.library.function)]
    nodes = (node for body in bodies for node in body if GRADIENT in node.attr)
    return {node.attr[GRADIENT].s.decode() for node in nodes}


def _captured(meta_graph, function):
    """Returns the ids of the objects that a saved custom gradient reads."""
    functions = meta_graph.object_graph_def.concrete_functions
    nodes = meta_graph.object_graph_def.nodes
    bound = functions[function].bound_inputs if function in functions else ()
    return [i for i in bound if nodes[i].WhichOneof("kind") == "captured_tensor"]


def _missing_captures(meta_graph, result):
    """Returns (function, tensor name) of what saved custom gradients read and is gone."""
    used = _used_gradients(result)
    present = {
        function.signature.name: {
            *(node.name for node in function.node_def),
            *(argument.name for argument in function.signature.input_arg),
        }
        for function in result.library.function
    }
    captured = [
        meta_graph.object_graph_def.nodes[i].captured_tensor
        for gradient in result.library.registered_gradients
        if gradient.registered_op_type in used
        for i in _captured(meta_graph, gradient.gradient_func)
    ]
    pairs = {(tensor.concrete_function, tensor.name) for tensor in captured}
    return sorted(
        (function, name)
        for function, name in pairs
        if name.partition(":")[0] not in present[function]
    )


def _forget_gradients(meta_graph):
    """Removes saved custom gradients of ops that are gone: they read what is gone as well."""
    library, objects = meta_graph.graph_def.library, meta_graph.object_graph_def
    used = _used_gradients(meta_graph.graph_def)
    all_gradients = list(library.registered_gradients)
    remaining = [g for g in all_gradients if g.registered_op_type in used]
    gone = {g.gradient_func for g in all_gradients} - {g.gradient_func for g in remaining}
    read = {i for g in all_gradients for i in _captured(meta_graph, g.gradient_func)}
    read -= {i for g in remaining for i in _captured(meta_graph, g.gradient_func)}
    for i in read:
        # Other objects are known by their place in the list, so it cannot be deleted.
        objects.nodes[i].user_object.CopyFrom(_NOTHING)
    for name in gone:
        objects.concrete_functions.pop(name, None)
    functions = [f for f in library.function if f.signature.name not in gone]
    for field, values in (("function", functions), ("registered_gradients", remaining)):
        library.ClearField(field)
        getattr(library, field).extend(values)
    if gone:
        # Gradients of their own ops are gone by now, too.
        _forget_gradients(meta_graph)
