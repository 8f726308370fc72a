"""An index over a TensorFlow graph: consumers, liveness, order and cached attributes.

An op is live if outputs or side effects depend on it. Dead ops still take part in matching
(autodiff leaves the last op of an activation dead where only its gradient is used), but they have
no say in what may be replaced.

The matcher and the rewriter see a graph only through `GraphView`, which is kept up to date while
nodes are replaced.
"""

import collections
import functools
import math

from tensorflow.python.client import pywrap_tf_session

from tf_fused_ops.remapper import attributes, custom_gradients, folding, hiding, reading


class GraphView:
    """A graph while it is being rewritten.

    Attributes:
        graph: The tf.Graph.
        outputs: The tensors (or ops) that leave it now; a list.
        types: Op -> its type. Like `inputs`, this takes long to ask the op itself for.
        inputs: Op -> the tensors that it reads.
        position: Op -> place in one topological order; a replacement takes the place of a replaced
            op.
    """

    def __init__(
        self,
        graph,
        outputs,
        identify_gradient=custom_gradients.identify,
        withheld=(),
        places=None,
    ):
        """Indexes a graph.

        Args:
            graph: A tf.Graph.
            outputs: The tensors (or ops) that leave the graph before it is rewritten.
            identify_gradient: What tells the overridden gradients of its ops apart.
            withheld: Tensors that new ops must not read.
            places: Op -> number: the order to take them in, but for what needs another.
        """
        self.graph = graph
        self.types, self.inputs, self._before, self._anonymous = reading.read(graph)
        self._identify_gradient = identify_gradient
        self.outputs = list(outputs)
        # Where each stands among the outputs.
        self._fetched = collections.defaultdict(list)
        for place, output in enumerate(self.outputs):
            self._fetched[id(output)].append(place)
        self._withheld = {id(tensor) for tensor in withheld}
        self._signatures = {}
        # By what ops that are alike share; a model has few different ones.
        self._distinct = {}
        self._read_by_removed = set()
        self._by_type = collections.defaultdict(list)
        self._consumers = collections.defaultdict(list)
        for op, op_type in self.types.items():
            self._by_type[op_type].append(op)
        if places is not None:
            roots = sorted(self._before, key=lambda op: places.get(op, math.inf))
            self._before = {op: self._before[op] for op in roots}
        ops = _topological(self._before)
        self.position = {op: place for place, op in enumerate(ops)}
        stateful = {op_type for op_type, alike in self._by_type.items() if alike[0]._is_stateful}
        effects = (op for op_type in stateful for op in self._by_type[op_type])
        self._live = _live_ops(ops, self._before, [*self.outputs, *effects])
        self._note_uses(ops)

    def _note_inputs(self, op):
        """Notes what an op reads and waits for."""
        self.inputs[op], self._before[op] = reading.inputs(op)

    def _note_uses(self, ops):
        inputs, consumers = self.inputs, self._consumers
        for op in ops:
            for port, tensor in enumerate(inputs[op]):
                consumers[id(tensor)].append((op, port))

    def ops(self, op_type):
        """Returns the live ops of a type."""
        return [op for op in self._by_type.get(op_type, ()) if op in self._live]

    def has(self, op_types):
        """Returns whether the graph has ops of all these types."""
        return all(op_type in self._by_type for op_type in op_types)

    @functools.cached_property
    def cast_types(self):
        """The dtypes that the graph casts from."""
        return {self.inputs[op][0].dtype for op in self._by_type.get("Cast", ())}

    def is_live(self, op):
        """Returns whether outputs or side effects depend on an op."""
        return op in self._live

    def consumers(self, tensor):
        """Returns the (op, input port) pairs that read a tensor."""
        return self._consumers.get(id(tensor), ())

    def users(self, tensor):
        """Returns the live ops that read a tensor."""
        return [op for op, _ in self.consumers(tensor) if op in self._live]

    def user_besides(self, tensor, ops=()):
        """Returns the first live op that reads a tensor and is none of some ops, or None."""
        for user, _ in self.consumers(tensor):
            if user in self._live and user not in ops:
                return user
        return None

    def waiting(self, op):
        """Returns the live ops that have a control edge from an op."""
        return [user for user in op._control_outputs if user in self._live]

    def is_fetched(self, output):
        """Returns whether a tensor, or an op, leaves the graph."""
        return id(output) in self._fetched

    def is_withheld(self, tensor):
        """Returns whether new ops must not read a tensor."""
        return id(tensor) in self._withheld

    def signature(self, op):
        """Returns the `Signature` of an op."""
        found = self._signatures.get(op)
        if found is None:
            key = self._anonymous.get(op) or reading.anonymous(op)
            found = self._distinct.get(key)
            if found is None:
                found = self._distinct[key] = attributes.Signature(key, self._identify_gradient)
            self._signatures[op] = found
        return found

    def attr(self, op, name):
        """Returns the value of an attribute, as `get_attr` of the op does, in less time."""
        found = self.signature(op)
        return attributes.value(found.attrs[name]) if name in found.attrs else op.get_attr(name)

    def constant(self, tensor):
        """Returns the value of a tensor made by a Const op, or of a scalar that is as good as one,
        as an array, or None."""
        op = tensor.op
        return self.signature(op).array if self.types[op] == "Const" else folding.scalar(tensor)

    def remove(self, ops):
        """Takes ops out of the index (not out of the graph)."""
        self._live.difference_update(ops)
        for op in ops:
            self._read_by_removed.update(self._before[op])
            for port, tensor in enumerate(self.inputs[op]):
                uses = self._consumers[id(tensor)]
                if (op, port) in uses:
                    uses.remove((op, port))

    def adopt(self, op, replaced=None):
        """Indexes a new op, and new ops that it reads, once its outputs are used.

        It takes the place of the op that it replaces where that is between its inputs and users.
        """
        if op in self.types:
            return
        self._note_inputs(op)
        before = self._before[op]
        for other in before:
            if other not in self.types:
                self.adopt(other)
        self._enter(op)
        after = [user for tensor in op.outputs for user in self.users(tensor)]
        after += op._control_outputs
        low = max((self.position[other] for other in before), default=-1)
        place = self.position.get(replaced, low)
        end = max(low, place) + 1
        high = min((self.position.get(other, end) for other in after), default=end)
        if low < high:
            self.position[op] = place if low < place < high else (low + high) / 2
        else:
            for other in self.graph.get_operations():
                if other not in self.inputs:
                    self._note_inputs(other)
            ops = _topological(self._before)
            self.position = {op: place for place, op in enumerate(ops)}

    def swap(self, replacements):
        """Puts new tensors in the place of others.

        Args:
            replacements: Pairs of an old tensor, whose maker has been removed, and a new one.
        """
        for old, new in {old.op: new.op for old, new in reversed(replacements)}.items():
            for user in self.waiting(old):
                self.replace_control_input(user, old, new)
        for old, new in replacements:
            if not new.shape.is_fully_defined():
                new.set_shape(old.shape)
            self.redirect(old, new)
        for old, new in replacements:
            self.adopt(new.op, old.op)

    def _enter(self, op):
        self._live.add(op)
        self.types[op] = op.type
        self._by_type[op.type].append(op)
        self._note_uses([op])

    def reaches(self, starts, ends):
        """Returns whether any of `ends` is, or depends on, any of `starts`."""
        if not starts:
            return False
        floor = min(self.position[op] for op in starts)
        stack, seen = list(ends), set()
        while stack:
            op = stack.pop()
            if op in starts:
                return True
            if op not in seen and self.position[op] > floor:
                seen.add(op)
                stack += self._before[op]
        return False

    def bury(self):
        """Lets those ops be dead that nothing needs any more."""
        waiting = list(self._read_by_removed)
        self._read_by_removed.clear()
        while waiting:
            op = waiting.pop()
            if op in self._live and not self._is_needed(op):
                self._live.discard(op)
                waiting += self._before[op]

    def leftovers(self):
        """Returns the ops that nothing needs any more, consumers first."""
        self.bury()
        ops = self.graph.get_operations()
        dead = [op for op in ops if op not in self._live]
        dead = [op for op in dead if (self.types.get(op) or op.type) != "Placeholder"]
        # New ops that were never used come last.
        dead.sort(key=lambda op: self.position.get(op, len(ops)))
        return dead[::-1]

    def _is_needed(self, op):
        """Returns whether live ops or the outputs need an op."""
        for tensor in op.outputs:
            if self.is_fetched(tensor) or self.user_besides(tensor) is not None:
                return True
        return (
            self.types[op] == "Placeholder"
            or op._is_stateful
            or self.is_fetched(op)
            or bool(self.waiting(op))
        )

    def redirect(self, old, new):
        """Makes all consumers of one tensor, and the graph's outputs, use another."""
        uses = self._consumers.pop(id(old), None)
        if uses:
            maker, end = new.op, new._as_tf_output()
            with self.graph._c_graph.get() as c_graph:
                for op, port in uses:
                    pywrap_tf_session.UpdateEdge(c_graph, end, op._tf_input(port))
                    # Not asked for anew, which takes long.
                    inputs = self.inputs[op]
                    self.inputs[op] = op._inputs_val = (*inputs[:port], new, *inputs[port + 1 :])
                    self._before[op][port] = maker
            self._consumers[id(new)] += uses
        self.replace_output(old, new)

    def replace_output(self, old, new):
        """Lets another tensor, or op, leave the graph where one does."""
        if self.is_fetched(old):
            places = self._fetched.pop(id(old))
            self._fetched[id(new)] += places
            for place in places:
                self.outputs[place] = new

    def replace_control_input(self, op, old, new):
        """Makes an op wait for another op than before."""
        hiding.replace_control_input(op, old, new)
        self._note_inputs(op)


def _live_ops(ops, before, ends):
    """Returns those of topologically sorted ops on which some tensors and ops depend."""
    live = {getattr(end, "op", end) for end in ends}
    for op in reversed(ops):
        if op in live:
            live.update(before[op])
    return live


def _topological(before):
    """Sorts ops so that those which others read come first.

    Args:
        before: Op -> the ops that it reads or waits for.

    Returns:
        A list of the keys.
    """
    order, seen = [], set()
    for root in before:
        # In a graph that is being traced, as good as always.
        if root not in seen and seen.issuperset(before[root]):
            order.append(root)
            seen.add(root)
            continue
        stack = [(root, False)]
        while stack:
            op, ready = stack.pop()
            if ready:
                order.append(op)
            elif op not in seen:
                seen.add(op)
                stack.append((op, True))
                stack += [(o, False) for o in before[op] if o in before and o not in seen]
    return order
