"""Finds a pattern in a graph: depth-first unification that walks edges in both directions.

Starting from one pair (pattern node, op), inputs are unified upwards and the remaining pattern
nodes are looked for among the consumers of values that are already known. Output ports must agree
exactly, commutative inputs are tried in every order, and constants must agree to within `_MAX_ULP`
units in the last place.

Layers of a model are alike, so the route by which a search found a pattern is followed first at the
next place. There is a search only where that does not lead to a match.
"""

import dataclasses
import functools
import itertools

import ml_dtypes
import numpy as np
import tensorflow as tf

from tf_fused_ops.remapper import routes
from tf_fused_ops.remapper.custom_gradients import ATTRIBUTE as GRADIENT
from tf_fused_ops.remapper.pattern import Literal, Operand, Port

_MAX_ULP = 2
# Beyond this many inputs a commutative op (AddN) is matched in the order given.
_MAX_PERMUTED = 4
# How many inputs a sum of gradients may have.
_MAX_SUMMED = 8


@dataclasses.dataclass
class Binding:
    """What a pattern's nodes and operands stand for.

    Attributes:
        nodes: Pattern node index -> op.
        operands: Operand name -> tensor.
        parameters: Parameter name -> array.
        orders: Pattern node index -> the places of its inputs among those of its op, where there
            was a choice.
        mismatch: In words, the one constant or attribute that differs, if a near miss was asked
            for.
    """

    nodes: dict = dataclasses.field(default_factory=dict)
    operands: dict = dataclasses.field(default_factory=dict)
    parameters: dict = dataclasses.field(default_factory=dict)
    orders: dict = dataclasses.field(default_factory=dict)
    mismatch: str | None = None

    def copy(self):
        """Returns a copy that may be changed without changing this one."""
        return Binding(
            dict(self.nodes),
            dict(self.operands),
            dict(self.parameters),
            dict(self.orders),
            self.mismatch,
        )


class Matcher:
    """Matches one pattern against one graph."""

    def __init__(self, pattern, view, allow_mismatch=False):
        """Creates a matcher.

        Args:
            pattern: A Pattern.
            view: A GraphView.
            allow_mismatch: Whether to return, when nothing fits, a binding that is wrong in one
                constant or attribute.
        """
        self._pattern = pattern
        self._nodes = pattern.nodes
        self._view = view
        self._allow_mismatch = allow_mismatch
        self._excluded = frozenset()

    def match(self, op, names):
        """Matches the pattern's anchor with an op.

        Args:
            op: The op that the anchor should stand for.
            names: The pattern outputs whose nodes must all be found.

        Returns:
            A Binding or None.
        """
        key, start = tuple(names), Binding(nodes={self._pattern.anchor: op})
        found = self._follow(key, start)
        if found is None:
            found = self._best(self.matches(op, names))
            if found is not None and found.mismatch is None:
                self._record(key, found, Binding())
        return found

    def all_matches(self, op, names):
        """Returns every Binding that `match` may return.

        Where a recorded route leads, there is but one: it ends where more than one op would do.
        """
        key = tuple(names)
        found = self._follow(key, Binding(nodes={self._pattern.anchor: op}))
        if found is not None:
            return [found]
        every = list(self.matches(op, names))
        if len(every) == 1:
            self._record(key, every[0], Binding())
        return every

    def matches(self, op, names):
        """Yields every Binding that `match` may return."""
        steps = self._steps(Binding(), self._pattern.anchor, op)
        return self._branch(Binding(), steps, [], self._pattern.ancestors(names))

    def resume(self, binding, names):
        """Adds the nodes that the named outputs need to a binding of the pattern's first nodes.

        Args:
            binding: A Binding that another pattern with the same first nodes gave; left as it is.
            names: The pattern outputs whose nodes must all be found.

        Returns:
            A Binding or None.
        """
        return self._best(self._solve(binding.copy(), [], self._pattern.ancestors(names)))

    def assume(self, nodes, operands, names):
        """Returns the binding of what another pattern of the same code matched.

        Args:
            nodes: The ops that it matched, in the order of its nodes.
            operands: Operand name -> tensor.
            names: The outputs that they make.

        Returns:
            A Binding, or None if this pattern does not begin with the same nodes.
        """
        if self._pattern.ancestors(names) != tuple(reversed(range(len(nodes)))):
            return None
        first = self._nodes[: len(nodes)]
        if any(node.type != self._view.types[op] for node, op in zip(first, nodes, strict=True)):
            return None
        return Binding(dict(enumerate(nodes)), dict(operands))

    def extend(self, binding, names, excluded=frozenset()):
        """Adds the nodes of further outputs to a binding.

        Args:
            binding: A Binding; left as it is.
            names: Pattern outputs.
            excluded: Ops that new nodes must not stand for.

        Returns:
            A Binding or None.
        """
        self._excluded = excluded
        key = (*names, *binding.nodes)
        found = self._follow(key, binding)
        if found is None:
            found = next(self._solve(binding.copy(), [], self._pattern.ancestors(names)), None)
            if found is not None:
                self._record(key, found, binding)
        self._excluded = frozenset()
        return found

    def spare(self, binding, node):
        """Returns the inputs of what a node stands for that the pattern does not account for."""
        order = binding.orders.get(node)
        if order is None:
            return ()
        inputs = self._view.inputs[binding.nodes[node]]
        return tuple(tensor for place, tensor in enumerate(inputs) if place not in order)

    def _best(self, bindings):
        near_miss = None
        for binding in bindings:
            if binding.mismatch is None:
                return binding
            near_miss = near_miss or binding
        return near_miss

    def _record(self, key, found, start):
        self._pattern.routes[key] = routes.record(self._nodes, self._view, found, start)

    def _follow(self, key, start):
        """Returns the binding to which a recorded route leads, or None."""
        route = self._pattern.routes.get(key)
        if route is None:
            return None
        binding, agenda = start.copy(), []
        nodes, inputs, types = binding.nodes, self._view.inputs, self._view.types
        for node, count, order, reader, value, place in route:
            if reader is not None:
                op = inputs[nodes[reader]][place].op
            elif value is not None:
                choices = self._readers(node, place, self._tensor(binding, value))
                if len(choices) > 1:
                    choices = {choice for choice in choices if self._steps(binding, *choice)}
                if len(choices) != 1:
                    return None
                ((_, op),) = choices
            else:
                op = nodes[node]
            if types[op] != self._nodes[node].type or op in self._excluded:
                return None
            if len(inputs[op]) != count or not self._take(binding, (node, op, order), agenda):
                return None
        for value, tensor in agenda:
            if nodes[value.node] is not tensor.op or tensor.value_index != value.port:
                return None
        return None if binding.mismatch else binding

    def _solve(self, binding, agenda, todo):
        """Yields bindings that satisfy the (Port, tensor) pairs and bind the nodes in todo.

        Args:
            binding: A Binding that is changed.
            agenda: A list that is changed.
            todo: Pattern nodes, those that need others before these.
        """
        nodes = binding.nodes
        while True:
            if agenda:
                value, tensor = agenda.pop()
                if tensor.value_index != value.port:
                    return
                node, op = value.node, tensor.op
                known = nodes.get(node)
                if known is op:
                    continue
                if known is not None:
                    return
                steps = self._steps(binding, node, op)
            else:
                choices = self._reachable(binding, todo)
                if choices is None:
                    yield binding
                    return
                steps = [step for node, op in choices for step in self._steps(binding, node, op)]
            if len(steps) != 1:
                yield from self._branch(binding, steps, agenda, todo)
                return
            if not self._take(binding, steps[0], agenda):
                return

    def _branch(self, binding, steps, agenda, todo):
        """Yields the bindings to which any of the steps leads."""
        for step in steps:
            found, rest = binding.copy(), list(agenda)
            if self._take(found, step, rest):
                yield from self._solve(found, rest, todo)

    def _steps(self, binding, node, op):
        """Returns the ways in which a pattern node may stand for an op: (node, op, the places of
        the node's inputs among the op's or None if they are as given)."""
        wanted = self._nodes[node]
        if wanted.type != self._view.types[op] or op in self._excluded:
            return ()
        inputs, count = self._view.inputs[op], len(wanted.inputs)
        if not wanted.open and (count == 1 or not wanted.commutative or count > _MAX_PERMUTED):
            return ((node, op, None),) if len(inputs) == count else ()
        if not count <= len(inputs) <= (_MAX_SUMMED if wanted.open else count):
            return ()
        return [
            (node, op, order)
            for order in _permutations(len(inputs), count)
            if all(
                self._plausible(binding, value, inputs[place])
                for value, place in zip(wanted.inputs, order, strict=True)
            )
        ]

    def _take(self, binding, step, agenda):
        """Lets a pattern node stand for an op; returns whether the op's attributes and inputs allow
        it, as far as they are known."""
        node, op, order = step
        wanted, operands, inputs = self._nodes[node], binding.operands, self._view.inputs[op]
        if not self._allows(binding, wanted, op):
            return False
        binding.nodes[node] = op
        if order is not None:
            binding.orders[node] = order
            inputs = [inputs[place] for place in order]
        for value, tensor in zip(wanted.inputs, inputs, strict=True):
            kind = type(value)
            if kind is Port:
                agenda.append((value, tensor))
            elif kind is Operand:
                if operands.setdefault(value.name, tensor) is not tensor:
                    return False
            elif not self._unify_constant(binding, value, tensor):
                return False
        return True

    def _unify_constant(self, binding, value, tensor):
        """Returns whether a Literal or Parameter may stand for a tensor."""
        if isinstance(value, Literal):
            return self._unify_literal(binding, value, tensor)
        return self._unify_parameter(binding, value, tensor)

    def _plausible(self, binding, value, tensor):
        """Looks one op ahead, so that most wrong orders of commutative inputs are never entered."""
        kind = type(value)
        if kind is Port:
            op = binding.nodes.get(value.node)
            if op is None:
                return self._view.types[tensor.op] == self._nodes[value.node].type
            return op is tensor.op and tensor.value_index == value.port
        if kind is Operand:
            return binding.operands.get(value.name, tensor) is tensor
        # Most constants need not be read for that.
        return self._view.types[tensor.op] == "Const" or self._view.constant(tensor) is not None

    def _reachable(self, binding, todo):
        """Returns the (node, op) candidates for the missing node that has the fewest; None if no
        node is missing."""
        fewest, complete, nodes = None, True, binding.nodes
        # The later a node, the more of the others are among its inputs.
        for node in todo:
            if node in nodes:
                continue
            complete = False
            for place, value in enumerate(self._nodes[node].inputs):
                tensor = self._tensor(binding, value)
                if tensor is None:
                    continue
                choice = self._readers(node, place, tensor)
                if len(choice) < 2:
                    return choice
                if fewest is None or len(choice) < len(fewest):
                    fewest = choice
        if complete:
            return None
        # A tape that is asked twice leaves dead ops beside the live ones.
        fewest = dict.fromkeys(fewest or ())
        return sorted(fewest, key=lambda choice: not self._view.is_live(choice[1]))

    def _readers(self, node, place, tensor):
        """Returns the (node, op) pairs in which an op reads a tensor at that place of the node."""
        wanted, types, excluded = self._nodes[node], self._view.types, self._excluded
        return [
            (node, op)
            for op, other in self._view.consumers(tensor)
            if types[op] == wanted.type
            and (other == place or wanted.commutative)
            and op not in excluded
        ]

    def _tensor(self, binding, value):
        kind = type(value)
        if kind is Port:
            op = binding.nodes.get(value.node)
            return None if op is None else op.outputs[value.port]
        return binding.operands.get(value.name) if kind is Operand else None

    def _allows(self, binding, wanted, op):
        """Returns whether the attributes of an op are those of a pattern node."""
        found = self._view.signature(op)
        if wanted not in found.differing:
            found.differing[wanted] = _differing_attr(wanted.attrs, found.attrs)
        name = found.differing[wanted]
        if name is None:
            return True
        if name == GRADIENT and name not in wanted.attrs:
            return self._tolerate(binding, f"the gradient of {op.name} is overridden")
        words = f"attribute {name} of {op.name} differs from what the rule stands for"
        return self._tolerate(binding, words)

    def _unify_literal(self, binding, literal, tensor):
        if self._view.types[tensor.op] != "Const":
            value = self._view.constant(tensor)
            return value is not None and _differing_value(value, literal.value) is None
        found = self._view.signature(tensor.op)
        if literal not in found.differing:
            found.differing[literal] = _differing_value(found.array, literal.value)
        difference = found.differing[literal]
        if difference is None:
            return True
        words = f"constant {tensor.op.name} is {difference}"
        return bool(difference) and self._tolerate(binding, words)

    def _unify_parameter(self, binding, parameter, tensor):
        value = self._view.constant(tensor)
        if value is None or (value.ndim, tensor.dtype) != (parameter.rank, parameter.dtype):
            return False
        known = binding.parameters.setdefault(parameter.name, value)
        return known is value or np.array_equal(known, value)

    def _tolerate(self, binding, words):
        if not self._allow_mismatch or binding.mismatch not in (None, words):
            return False
        binding.mismatch = words
        return True


@functools.cache
def _permutations(given, count):
    return tuple(itertools.permutations(range(given), count))


def _differing_attr(wanted, given):
    """Returns the name of an attribute in which an op is not as a pattern wants it, or None."""
    if GRADIENT in given and GRADIENT not in wanted:
        return GRADIENT
    for name, value in wanted.items():
        # An op whose gradient is not overridden has the true one, as the fused op does.
        if given.get(name) != value and (name in given or name != GRADIENT):
            return name
    return None


def _differing_value(value, wanted):
    """Returns what a constant is instead of that wanted, in words; None if it is the same up to
    rounding, no words if it is of another kind."""
    if value.shape != wanted.shape or value.dtype != wanted.dtype:
        return ""
    return None if same_constant(value, wanted) else f"{_text(value)}, not {_text(wanted)}"


def _text(value):
    return f"{float(value):.6g}" if value.ndim == 0 else str(value.tolist())


def same_constant(a, b):
    """Returns whether two arrays of one dtype and shape differ by rounding only."""
    if a.tobytes() == b.tobytes() or np.array_equal(a, b):
        return True
    if not tf.as_dtype(a.dtype).is_floating:
        return False
    a, b, epsilon = a.astype(np.float64), b.astype(np.float64), float(ml_dtypes.finfo(a.dtype).eps)
    ulp = epsilon * np.exp2(np.frexp(b)[1] - 1)
    return bool(np.all(np.abs(a - b) <= _MAX_ULP * ulp))
