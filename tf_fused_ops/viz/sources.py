"""What can be drawn: Python functions, models, GraphDefs, SavedModels; how they become graphs."""

import dataclasses
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf
from google.protobuf import text_format
from tensorflow.core.framework import graph_pb2
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
from tensorflow.python.framework import op_def_registry

from tf_fused_ops.remapper.source import user_line
from tf_fused_ops.viz.errors import VizError, sentence


@dataclasses.dataclass(frozen=True)
class Source:
    """A program to draw.

    Attributes:
        title: What it is called.
        graph_def: Its GraphDef.
        outputs: Names of the fetched tensors.
        lines: {(function name or "", node name): "file:line" of the user's code}.
        python_function: The Python function that it was traced from, or None.
        concrete: The ConcreteFunction, or None.
    """

    title: str
    graph_def: graph_pb2.GraphDef
    outputs: tuple
    lines: dict = dataclasses.field(default_factory=dict)
    python_function: Callable | None = None
    concrete: ConcreteFunction | None = None


def load(thing, inputs=None, input_signature=None, outputs=None, title=None):
    """Makes a Source of anything that can be drawn.

    Args:
        thing: A Python function, tf.function, ConcreteFunction, Keras model, GraphDef, or the path
            of a .pb, .pbtxt or .keras file or of a SavedModel's folder.
        inputs: Example arguments of a function: a sequence.
        input_signature: Instead of them, a sequence of tf.TensorSpec.
        outputs: Names of the tensors to fetch from a GraphDef; by default the outputs of all nodes
            that no other node reads.
        title: What to call it.

    Returns:
        A Source.

    Raises:
        VizError: The thing cannot be loaded or traced.
    """
    if isinstance(thing, (str, os.PathLike)):
        title = title or Path(thing).name
        thing = _read_path(Path(thing))
    if isinstance(thing, graph_pb2.GraphDef):
        return Source(title or "graph", thing, tuple(_fetches(thing, outputs)))
    if isinstance(thing, ConcreteFunction):
        return _from_concrete(thing, title or _text(thing.name))
    if isinstance(thing, tf.keras.Model):
        specs = input_signature if inputs is None else None
        if inputs is None and specs is None:
            specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in thing.inputs]
        return _trace(_inference(thing), inputs, specs, title or thing.name)
    if callable(thing):
        return _trace(thing, inputs, input_signature, title)
    raise VizError(
        "only a Python function, ConcreteFunction, Keras model, GraphDef, .pb, .pbtxt, .keras or "
        f"SavedModel can be drawn, not a {type(thing).__name__}"
    )


def import_object(text):
    """Returns what "package.module:name" or "file.py:name" refers to.

    Args:
        text: The reference.

    Raises:
        VizError: There is no such module or name, or importing it fails.
    """
    module_name, _, name = text.rpartition(":")
    try:
        if module_name.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            if os.getcwd() not in sys.path:
                sys.path.insert(0, os.getcwd())
            module = importlib.import_module(module_name)
    except Exception as error:
        raise VizError(f"{module_name} cannot be imported: {sentence(error)}") from error
    for part in name.split("."):
        if not hasattr(module, part):
            raise VizError(f"{module_name} has no {name}")
        module = getattr(module, part)
    return module


def parse_signature(text):
    """Returns the TensorSpecs of a text such as "float32[8,28,28,1], int32[?]".

    Raises:
        VizError: The text is not a list of dtypes with shapes.
    """
    specs = []
    for part in filter(None, (part.strip() for part in text.split("]"))):
        dtype, bracket, dims = part.lstrip(", ").partition("[")
        try:
            if not bracket:
                raise ValueError
            dims = [dim.strip() for dim in dims.split(",") if dim.strip()]
            shape = [None if dim in ("?", "None") else int(dim) for dim in dims]
            specs.append(tf.TensorSpec(shape, tf.as_dtype(dtype.strip())))
        except (TypeError, ValueError):
            raise VizError(
                f"'{part.lstrip(', ')}' is not a dtype with a shape such as float32[8,28,28,1]"
            ) from None
    return specs


def _read_path(path):
    """Returns a GraphDef, ConcreteFunction or Keras model read from a path."""
    if not path.exists():
        raise VizError(f"{path} does not exist")
    try:
        if path.is_dir():
            return _signature(path)
        if path.suffix == ".keras":
            return tf.keras.models.load_model(path, compile=False)
        if path.suffix in (".pbtxt", ".pb.txt"):
            return text_format.Parse(path.read_text(), graph_pb2.GraphDef())
        if path.suffix == ".pb":
            graph_def = graph_pb2.GraphDef.FromString(path.read_bytes())
            if graph_def.node:
                return graph_def
            raise ValueError("there are no nodes in it")
    except VizError:
        raise
    except Exception as error:
        raise VizError(f"{path} cannot be read as a graph: {sentence(error)}") from error
    raise VizError(f"{path} is not a .pb, .pbtxt or .keras file nor the folder of a SavedModel")


def _signature(folder):
    """Returns a SavedModel's serving function, or its first one."""
    if not (folder / "saved_model.pb").exists():
        raise VizError(f"{folder} holds no saved_model.pb")
    loaded = tf.saved_model.load(str(folder))
    functions = dict(loaded.signatures)
    if not functions:
        raise VizError(f"{folder} has no signatures")
    function = functions.get("serving_default") or next(iter(functions.values()))
    function._tfo_owner = loaded  # The function alone does not keep the variables alive.
    return function


def _inference(model):
    def infer(*inputs):
        return model(inputs[0] if len(inputs) == 1 else list(inputs), training=False)

    return infer


def _trace(function, inputs, input_signature, title):
    """Traces a Python function as tf.function would."""
    stock = _stock(function)
    try:
        if inputs is not None:
            arguments = list(inputs)
        elif input_signature is not None:
            arguments = list(input_signature)
        else:
            arguments = list(stock.input_signature or ())
        concrete = stock.get_concrete_function(*arguments)
    except Exception as error:
        name = getattr(function, "__name__", str(function))
        raise VizError(f"{name} cannot be traced: {sentence(error)}") from error
    name = title or getattr(stock.python_function, "__name__", "function")
    return dataclasses.replace(
        _from_concrete(concrete, name), python_function=stock.python_function
    )


def _stock(function):
    """Returns a fresh tf.function of the same Python function, whatever it is decorated with."""
    if isinstance(function, polymorphic_function.Function):
        return tf.function(
            function.python_function,
            input_signature=function.input_signature,
            autograph=function._autograph,
        )
    return tf.function(function)


def _from_concrete(concrete, title):
    graph_def = concrete.graph.as_graph_def(add_shapes=True)
    graphs = {"": concrete.graph}
    for definition in graph_def.library.function:
        body = getattr(concrete.graph._get_function(definition.signature.name), "graph", None)
        if body is not None:
            graphs[definition.signature.name] = body
    lines = {
        (name, op.name): line
        for name, graph in graphs.items()
        for op in graph.get_operations()
        if (line := user_line(op))
    }
    outputs = tuple(tensor.name for tensor in concrete.outputs)
    return Source(title, graph_def, outputs, lines, concrete=concrete)


def _fetches(graph_def, outputs):
    """Returns the tensor names to fetch from a GraphDef."""
    names = {node.name for node in graph_def.node}
    if outputs is not None:
        wanted = [name if ":" in name else f"{name}:0" for name in outputs]
        for name in wanted:
            if name.rpartition(":")[0] not in names:
                raise VizError(f"the graph has no node {name.rpartition(':')[0]}")
        return wanted
    read = {name.lstrip("^").partition(":")[0] for node in graph_def.node for name in node.input}
    return [f"{node.name}:0" for node in graph_def.node if node.name not in read and _makes(node)]


def _makes(node):
    """Returns whether a node makes a tensor; an unknown op is complained of elsewhere."""
    definition = op_def_registry.get(node.op)
    return definition is None or bool(definition.output_arg)


def _text(name):
    return name.decode() if isinstance(name, bytes) else name
