"""Patterns: what TensorFlow makes of a piece of stock code, obtained by tracing that code.

A pattern is never written by hand. `trace` runs a Python function over placeholders and keeps the
ops between the placeholders (operands) and the returned tensors (outputs), so a pattern follows
whatever this TensorFlow emits.
"""

import dataclasses
import functools
import operator

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import func_graph, tensor_util

from tf_fused_ops.remapper.attributes import semantic_attrs

# Of a tensor, in elements.
_MAX_SIZE = 2**53
_COMMUTATIVE = frozenset({"Add", "AddV2", "AddN", "Mul", "Maximum", "Minimum", "SquaredDifference"})


@dataclasses.dataclass(frozen=True)
class Operand:
    """A value that comes from outside the pattern."""

    name: str


@dataclasses.dataclass(frozen=True)
class Port:
    """One output of a pattern node."""

    node: int
    port: int


@dataclasses.dataclass(frozen=True, eq=False)
class Literal:
    """A constant."""

    value: np.ndarray


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A constant of any value."""

    name: str
    dtype: tf.DType
    rank: int


@dataclasses.dataclass(frozen=True, eq=False)
class PatternNode:
    """One op of a pattern.

    Attributes:
        type: The op type.
        attrs: The attributes to compare, name -> AttrValue.
        inputs: Operand, Port, Literal or Parameter per input.
        commutative: Whether the inputs may be permuted.
        open: Whether an op may have further inputs: the sum of a gradient with those that come
            from elsewhere.
    """

    type: str
    attrs: dict
    inputs: tuple
    commutative: bool
    open: bool = False

    def reading(self, replace):
        """Returns the node with its inputs replaced by what a function makes of them."""
        inputs = tuple(map(replace, self.inputs))
        same = all(map(operator.is_, inputs, self.inputs))
        return self if same else dataclasses.replace(self, inputs=inputs)

    def opened(self):
        """Returns the node as one that may have further inputs."""
        attrs = {name: value for name, value in self.attrs.items() if name != "N"}
        return dataclasses.replace(self, attrs=attrs, open=True)


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A directed acyclic graph of ops with named operands and outputs.

    Attributes:
        nodes: PatternNodes, inputs first.
        outputs: Name -> Port, or Operand if it is one.
        spec: The tf.TensorSpec of the output "y", if there is one.
        anchor: Index of the node at which a search begins, if it begins in this pattern.
        entry: For code that follows other code, the types of the ops that read what that makes.
        routes: The routes by which matchers found it, to be shared by patterns of the same nodes.
    """

    nodes: tuple
    outputs: dict
    spec: tf.TensorSpec | None
    anchor: int | None = None
    entry: frozenset = frozenset()
    routes: dict = dataclasses.field(default_factory=dict, compare=False)

    def ancestors(self, names):
        """Returns the indices of all nodes that the named outputs need, the last first."""
        key = tuple(names)
        if key not in self._found:
            ports = (self.outputs[name] for name in key)
            groups = (self._ancestors[port.node] for port in ports if isinstance(port, Port))
            self._found[key] = tuple(sorted(frozenset().union(*groups), reverse=True))
        return self._found[key]

    @functools.cached_property
    def op_types(self):
        """The types of all nodes."""
        return frozenset(node.type for node in self.nodes)

    @functools.cached_property
    def _found(self):
        """What `ancestors` has returned so far."""
        return {}

    @functools.cached_property
    def _ancestors(self):
        """Node -> itself and all nodes it needs."""
        found = []
        for index, node in enumerate(self.nodes):
            inputs = (found[value.node] for value in node.inputs if isinstance(value, Port))
            found.append(frozenset([index]).union(*inputs))
        return found


def trace(function, specs, anchor=None, free=(), parameters=None):
    """Traces a function into a pattern.

    Args:
        function: Takes a dict of the parameters, and the operands by name; returns a dict of named
            output tensors, or of ops for what they do to variables; None entries are dropped.
        specs: Operand name -> tf.TensorSpec.
        anchor: The op type at which a search begins (its first occurrence), if one does.
        free: (op type, attribute) pairs that a match may have any value of.
        parameters: Parameter name -> tf.TensorSpec.

    Returns:
        A Pattern.
    """
    graph = func_graph.FuncGraph("pattern")
    with graph.as_default():
        operands = _placeholders(specs)
        constants = _placeholders(parameters or {})
        outputs = function(constants, **operands)
    return _extract(graph, operands, outputs, anchor, free, constants)


def trace_joint(function, specs, differentiable, anchor):
    """Traces a function together with the gradient that autodiff makes of it.

    Args:
        function: Takes the operands by name; the output named "y" is differentiated.
        specs: As for `trace`; every known dimension counts, because autodiff folds it into
            constants.
        differentiable: Names of the operands to differentiate by.
        anchor: As for `trace`.

    Returns:
        A Pattern with the further operand "dy" and an output "d_<operand>" per gradient that
        exists. See `matchable`.
    """
    graph = func_graph.FuncGraph("pattern")
    with graph.as_default():
        operands = _placeholders(specs)
        sources = {name: operands[name] for name in differentiable}
        with tf.GradientTape() as tape:
            tape.watch(list(sources.values()))
            outputs = function(**operands)
        dy = tf.compat.v1.placeholder(outputs["y"].dtype, outputs["y"].shape)
        gradients = tape.gradient(outputs["y"], sources, output_gradients=dy)
    outputs |= {f"d_{name}": gradient for name, gradient in gradients.items()}
    return _extract(graph, operands | {"dy": dy}, outputs, anchor)


def join(first, second):
    """Returns the pattern of code whose output "y" goes into other code as its operand "z".

    If both are patterns of forward and backward, so is the result: the second's gradient by "z" is
    the first's "dy".

    Args:
        first: A Pattern.
        second: A Pattern with the single output "y", besides gradients.
    """
    begin = first.ancestors(name for name in first.outputs if not name.startswith("d_"))[::-1]
    places = {node: place for place, node in enumerate(begin)}
    shift = len(begin)
    rest = [node for node in range(len(first.nodes)) if node not in places]
    places |= {node: shift + len(second.nodes) + place for place, node in enumerate(rest)}

    def of_first(value):
        if value == Operand("dy"):
            return of_second(second.outputs["d_z"])
        return Port(places[value.node], value.port) if isinstance(value, Port) else value

    def of_second(value):
        if value == Operand("z"):
            return of_first(first.outputs["y"])
        return Port(shift + value.node, value.port) if isinstance(value, Port) else value

    nodes = [first.nodes[node].reading(of_first) for node in begin]
    nodes += [node.reading(of_second) for node in second.nodes]
    nodes += [first.nodes[node].reading(of_first) for node in rest]
    outputs = {name: of_first(value) for name, value in first.outputs.items()}
    outputs |= {name: of_second(value) for name, value in second.outputs.items() if name != "d_z"}
    entry = frozenset(node.type for node in second.nodes if Operand("z") in node.inputs)
    return Pattern(tuple(nodes), outputs, second.spec, first.anchor, entry)


def matchable(pattern):
    """Returns a pattern of forward and backward as graphs have it, where its gradients may be added
    to others from elsewhere."""
    # A gradient that is dy itself is nobody's work.
    outputs = {name: value for name, value in pattern.outputs.items() if isinstance(value, Port)}
    ends = {port.node for name, port in outputs.items() if name.startswith("d_")}
    # What is added to a gradient from which others follow would have to reach those.
    ends -= {
        value.node for node in pattern.nodes for value in node.inputs if isinstance(value, Port)
    }
    nodes = (
        node.opened() if place in ends and node.type == "AddN" else node
        for place, node in enumerate(pattern.nodes)
    )
    return dataclasses.replace(pattern, nodes=tuple(nodes), outputs=outputs, routes={})


def backward_part(pattern, forward, given, output):
    """Returns what a pattern of forward and backward does after the forward pass.

    Args:
        pattern: A Pattern that `trace_joint` returned.
        forward: The number of its first nodes that are the forward pass.
        given: {Port of the forward pass: name of the operand that it is from now on}.
        output: Name of the output at whose node a search begins.

    Returns:
        A Pattern of the outputs after the forward pass, or None if it reads more of the forward
        pass.
    """

    def value(old):
        if not isinstance(old, Port):
            return old
        return Port(old.node - forward, old.port) if old.node >= forward else Operand(given[old])

    later = pattern.nodes[forward:]
    read = {port for node in later for port in node.inputs if isinstance(port, Port)}
    if any(port.node < forward and port not in given for port in read):
        return None
    outputs = {n: value(port) for n, port in pattern.outputs.items() if port.node >= forward}
    nodes = tuple(node.reading(value) for node in later)
    return Pattern(nodes, outputs, pattern.spec, outputs[output].node)


def rescale(pattern, sizes):
    """Returns a pattern for operands of other sizes.

    Args:
        pattern: A Pattern traced with primes for sizes.
        sizes: Prime -> size.

    Returns:
        A Pattern in which every constant that is a product of these primes is that of the sizes.
    """

    def value(old):
        if not isinstance(old, Literal):
            return old
        new = _rescaled(old.value, sizes)
        return old if new is old.value else Literal(new)

    # With the same routes, since the nodes are the same but for constants.
    return dataclasses.replace(pattern, nodes=tuple(node.reading(value) for node in pattern.nodes))


def _rescaled(array, sizes):
    if array.dtype.kind not in "if" or not np.any(np.abs(array) >= min(sizes, default=np.inf)):
        return array
    result = array.copy()
    for index, number in np.ndenumerate(array):
        # Larger numbers are no sizes, nor infinity.
        if abs(float(number)) < _MAX_SIZE and number == np.floor(number):
            rest, scaled = int(number), 1
            for prime, size in sizes.items():
                while rest and rest % prime == 0:
                    rest, scaled = rest // prime, scaled * size
            result[index] = rest * scaled
    return result


def _placeholders(specs):
    return {name: tf.compat.v1.placeholder(s.dtype, s.shape) for name, s in specs.items()}


def _extract(graph, operands, outputs, anchor, free=(), parameters=None):
    """Returns the pattern between operands and outputs of a traced graph."""
    outputs = {name: tensor for name, tensor in outputs.items() if tensor is not None}
    given = {id(tensor): Operand(name) for name, tensor in operands.items()}
    for name, tensor in (parameters or {}).items():
        given[id(tensor)] = Parameter(name, tensor.dtype, tensor.shape.rank)
    ops = needed_ops(graph, outputs.values())
    index = {op: i for i, op in enumerate(ops)}

    def value(tensor):
        if id(tensor) in given:
            return given[id(tensor)]
        if isinstance(tensor, tf.Operation):
            return Port(index[tensor], 0)
        if tensor.op.type == "Const":
            return Literal(tensor_util.MakeNdarray(tensor.op.get_attr("value")))
        return Port(index[tensor.op], tensor.value_index)

    def node(op):
        attrs = {k: v for k, v in semantic_attrs(op.node_def).items() if (op.type, k) not in free}
        return PatternNode(op.type, attrs, tuple(map(value, op.inputs)), op.type in _COMMUTATIVE)

    y = outputs.get("y")
    return Pattern(
        nodes=tuple(map(node, ops)),
        outputs={name: value(tensor) for name, tensor in outputs.items()},
        spec=None if y is None else tf.TensorSpec(y.shape, y.dtype),
        anchor=next((index[op] for op in ops if op.type == anchor), None),
    )


def needed_ops(graph, outputs):
    """Returns the ops between placeholders and outputs (tensors or ops), inputs first, without
    constants."""
    stack, needed = [getattr(output, "op", output) for output in outputs], set()
    while stack:
        op = stack.pop()
        if op not in needed and op.type not in ("Placeholder", "Const"):
            needed.add(op)
            stack.extend(tensor.op for tensor in op.inputs)
    return [op for op in graph.get_operations() if op in needed]
