"""Takes grouped convolutions out of the functions that Keras has XLA compile.

Stock TensorFlow on the CPU has a gradient of a grouped convolution for some dtypes and by oneDNN
alone, so Keras calls one, and nothing else, by a function with `jit_compile=True`; XLA needs a
multiple of the fused op's time. What such a call, or that of its backward function, computes is put
into the graph around it as stock ops, which the rules then match. None of these may be left in the
end, see `alone`.
"""

import dataclasses

from tensorflow.python.framework import op_def_registry

from tf_fused_ops._devices import device_type
from tf_fused_ops.remapper import hiding
from tf_fused_ops.remapper.alone import SIZES
from tf_fused_ops.remapper.attributes import KEEP
from tf_fused_ops.remapper.convolution import GROUPED, are_grouped, images
from tf_fused_ops.remapper.emission import add, emitting

_CALLS = ("StatefulPartitionedCall", "PartitionedCall")
_COMPILED, _SHAPES = "_XlaMustCompile", "_output_shapes"
CONVOLUTIONS = ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")
_SIZE_OPS = ("Shape", "ShapeN")
_READ = "ReadVariableOp"
# What tf.nn.convolution and its gradient have around the convolution.
_AROUND = {"BatchToSpaceND", "Cast", "Const", "ExpandDims", "Identity", "NoOp", "Reshape",
           "SpaceToBatchND", "Squeeze", _READ, *_SIZE_OPS}  # fmt: skip
_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})


def is_compiled_call(op):
    """Returns whether an op calls a function that XLA compiles."""
    return op.type in _CALLS and _COMPILED in op.node_def.attr and op.get_attr(_COMPILED)


def inline(view, options, find_function):
    """Inlines the calls that compute a grouped convolution or gradients of one.

    Args:
        view: A GraphView, which is out of date afterwards but for its outputs.
        options: RemapOptions.
        find_function: Returns the function of a name, with its FunctionDef as `cached_definition`
            and its `graph`; None if it is not known.

    Returns:
        {convolution or gradient op that is in the graph now: the call, now hidden, in whose place}.
    """
    calls = [op for op_type in _CALLS for op in view.ops(op_type) if is_compiled_call(op)]
    inlined, replaced, reads = {}, [], {}
    # What a backward function is given comes from its forward function.
    for call in sorted(calls, key=view.position.get):
        body = _body(call, options, find_function)
        if body is not None:
            copy = _copy(call, body)
            _put_in_place(view, call, copy)
            inlined |= {op: call for op in copy.ops if op.type in CONVOLUTIONS}
            replaced.insert(0, call)
            reads.update((call, op) for op in copy.ops if op.type == _READ)
    if replaced:
        hiding.hide(view.graph, replaced, reads)
    return inlined


@dataclasses.dataclass(frozen=True)
class _Copy:
    """A function's body in the calling graph: its ops, and the tensors that it returns."""

    ops: tuple
    outputs: tuple


def _body(call, options, find_function):
    """Returns the FunctionDef of a call that is to be inlined, or None."""
    if KEEP in call.node_def.attr or device_type(call.device) != "CPU":
        return None
    function = find_function(call.get_attr("f").name)
    if function is None:
        return None
    definition = function.cached_definition
    nodes = {node.name: node for node in definition.node_def}
    types = [node.op for node in nodes.values()]
    convolutions = [node for node in nodes.values() if node.op in CONVOLUTIONS]
    names = [GROUPED.name, *(f"{GROUPED.name}_grad" for node in convolutions if node.op in SIZES)]
    if (
        not convolutions
        or not _AROUND.union(CONVOLUTIONS).issuperset(types)
        or types.count(_READ) > 1
        or not all(map(options.allows, names))
        or not all(_sizes_are_read(nodes, node) for node in convolutions)
    ):
        return None
    traced = [op for op in function.graph.get_operations() if op.type in CONVOLUTIONS]
    return definition if all(map(_is_supported, traced)) else None


def _sizes_are_read(nodes, node):
    """Returns whether the sizes that a gradient op takes are those of a tensor at hand."""
    if node.op not in SIZES:
        return True
    maker = nodes.get(node.input[SIZES[node.op]].split(":")[0])
    return maker is not None and maker.op in _SIZE_OPS


def _is_supported(op):
    """Returns whether an op is a grouped convolution, or a gradient of one, with a kernel."""
    return are_grouped(*images(op), op.get_attr("data_format")) and (
        op.outputs[0].dtype.name in _DTYPES
    )


def _copy(call, definition):
    """Adds the ops of a function to the graph that calls it."""
    arguments = (argument.name for argument in definition.signature.input_arg)
    values = {name: [tensor] for name, tensor in zip(arguments, call.inputs, strict=True)}
    ops = []

    def value(reference):
        # An argument, or "node:name of an output:number".
        name, *port = reference.split(":")
        return values[name][int(port[-1]) if port else 0]

    with emitting(call, call.control_inputs):
        for node in _sorted(definition.node_def):
            inputs = [value(name) for name in node.input if not name.startswith("^")]
            if node.op == "Identity":
                values[node.name] = inputs
            elif node.op != "NoOp":
                attrs = {name: v for name, v in node.attr.items() if not name.startswith("_")}
                listed = any(arg.number_attr for arg in op_def_registry.get(node.op).input_arg)
                inputs = [inputs] if listed else inputs
                op = add(node.op, *inputs, name=f"{call.name}/{node.name}", **attrs)
                # A variable that is read may not say its shape where graphs were saved.
                for tensor, shape in zip(op.outputs, _known_shapes(node), strict=False):
                    tensor.set_shape(shape)
                values[node.name] = op.outputs
                ops.append(op)
    results = (definition.ret[result.name] for result in definition.signature.output_arg)
    return _Copy(tuple(ops), tuple(map(value, results)))


def _known_shapes(node):
    return node.attr[_SHAPES].list.shape if _SHAPES in node.attr else ()


def _sorted(nodes):
    """Yields the nodes of a function, those that others read first."""
    waiting = {node.name: node for node in nodes}

    def visit(node):
        for name in node.input:
            maker = waiting.pop(name.removeprefix("^").split(":")[0], None)
            if maker is not None:
                yield from visit(maker)
        yield node

    while waiting:
        yield from visit(waiting.pop(next(iter(waiting))))


def _put_in_place(view, call, copy):
    """Lets all that used the results of a call, or waited for it, use what was inlined."""
    # The variable that is read is all that tells when the call runs.
    awaited = [op for op in copy.ops if op.type == _READ] or [t.op for t in copy.outputs]
    for user in view.waiting(call):
        view.replace_control_input(user, call, awaited[0])
    view.replace_output(call, awaited[0])
    for old, new in zip(call.outputs, copy.outputs, strict=True):
        if not new.shape.is_fully_defined():
            new.set_shape(old.shape)
        view.redirect(old, new)
