"""A proposed replacement and everything that can be said against it."""

import dataclasses
import functools

from tf_fused_ops._devices import device_type
from tf_fused_ops.remapper import kernels
from tf_fused_ops.remapper.rule import Match, Rule


@dataclasses.dataclass(frozen=True, eq=False)
class Backward:
    """One gradient computation of a forward match.

    Attributes:
        nodes: The matched ops, inputs first.
        dy: The gradient that comes in.
        gradients: Operand name -> the gradient tensor that the graph computes.
        spare: Operand name -> tensors from elsewhere that the graph adds to the gradient.
    """

    nodes: tuple
    dy: object
    gradients: dict
    spare: dict


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A forward match with the backward passes that are to be replaced along with it.

    Attributes:
        rule: The Rule.
        match: Its Match.
        backward: A tuple of Backward.
        view: The GraphView.
        forward: Whether the forward pass is to be replaced, too.
        kept: Where it is not, the tensor of it that the gradient op takes besides the operands.
    """

    rule: Rule
    match: Match
    backward: tuple
    view: object
    forward: bool = True
    kept: object = None

    @property
    def name(self):
        """The name under which the replacement is reported and switched off."""
        return self.rule.name if self.forward else f"{self.rule.name}_grad"

    @property
    def forward_nodes(self):
        """The ops of the forward pass that are to be replaced."""
        return self.match.nodes if self.forward else ()

    @property
    def root(self):
        """The op by which reports name the place."""
        return self.match.outputs["y"].op if self.forward else self.nodes[-1]

    @property
    def dtype(self):
        """The dtype for which there must be kernels."""
        return self.match.outputs["y"].dtype

    @functools.cached_property
    def nodes(self):
        """All ops to replace, forward first."""
        ops = [*self.forward_nodes, *(op for backward in self.backward for op in backward.nodes)]
        return tuple(dict.fromkeys(ops))

    @functools.cached_property
    def _inside(self):
        return set(self.nodes)

    @functools.cached_property
    def _signatures(self):
        """The different signatures among the nodes."""
        return set(map(self.view.signature, self.nodes))

    def wanted(self, backward):
        """Returns the gradients of a backward pass that anything outside uses."""
        return {name: t for name, t in backward.gradients.items() if self._used_outside(t)}

    def controls(self, nodes):
        """Returns the ops outside that some of the replaced ones have to wait for."""
        found = (op for node in nodes for op in node.control_inputs if op not in self._inside)
        return list(dict.fromkeys(found))

    def objection(self):
        """Returns why the replacement would not be equivalent, in words, or None."""
        checks = (self._ranks, self._kernels, self._devices, self._preserved, self._control_edges)
        graph = (self._leaks, self._incoming, self._cycles, self._missing)
        for check in (self._differentiated, *checks, *graph):
            reason = check()
            if reason:
                return reason
        return self.rule.check(self.match)

    def _differentiated(self):
        if self.rule.forward_alone or any(map(self.wanted, self.backward)):
            return None
        return "no gradient of it is in the graph, and without one stock is as fast"

    def _ranks(self):
        for name, tensor in self.match.operands.items():
            ranks = self.rule.operands.get(name)
            if ranks and tensor.shape.rank not in ranks:
                allowed = " or ".join(map(str, ranks))
                return f"{name} {tensor.name} has rank {tensor.shape.rank}, not {allowed}"
        return None

    def _kernels(self):
        device = device_type(self.view.signature(self.nodes[-1]).device)
        for op_type in self.rule.fused_ops:
            if not kernels.has_kernel(op_type, self.dtype, device):
                return f"{op_type} has no {self.dtype.name} kernel on {device}"
        return None

    def _devices(self):
        devices = sorted({signature.device for signature in self._signatures})
        return (
            f"the nodes are on different devices: {', '.join(devices)}"
            if len(devices) > 1
            else None
        )

    def _preserved(self):
        kept = any(signature.kept for signature in self._signatures)
        for op in self.nodes:
            if kept and self.view.signature(op).kept:
                return f"{op.name} is marked _grappler_do_not_remove"
            if self.view.is_fetched(op):
                return f"{op.name} is an output of the graph"
        return None

    def _control_edges(self):
        replaced = {tensor.op for tensor in self._offered}
        for op in self.nodes:
            # An edge from what is replaced becomes one from the replacement.
            for user in op._control_outputs if op not in replaced else ():
                if user not in self._inside and not self._is_moot(user):
                    return f"{user.name} has a control edge from {op.name}"
        return None

    def _is_moot(self, user):
        """Returns whether it does not matter when an op runs: it is dead or ours."""
        if not self.view.is_live(user):
            return True
        return user.type == "Const" and not self._used_outside(user.outputs[0])

    @functools.cached_property
    def _offered(self):
        """The tensors that are replaced one by one."""
        offered = [self.match.outputs] if self.forward else []
        offered += [backward.gradients for backward in self.backward]
        return [tensor for tensors in offered for tensor in tensors.values()]

    @functools.cached_property
    def shape_users(self):
        """The ops outside that read nothing of values inside but a shape that the rule emits."""
        offered = {id(tensor) for tensor in self._offered}
        inner = [t for op in self.forward_nodes for t in op.outputs if id(t) not in offered]
        told = (tensor for tensor in inner if self.rule.has_inner_shape(self.match, tensor))
        # In their order, so that ops are emitted in the same one from run to run.
        users = dict.fromkeys(op for tensor in told for op in self.view.users(tensor))
        shapes = (op for op in users if self.view.types[op] == "Shape")
        return tuple(op for op in shapes if op not in self._inside)

    def _leaks(self):
        for name, tensor in self.match.operands.items():
            if tensor.op in self.forward_nodes:
                return f"{name} {tensor.name} is a value inside"
        replaced = {id(tensor) for tensor in self._offered}
        for op in self.nodes:
            for tensor in op.outputs:
                if id(tensor) in replaced:
                    continue
                if self.view.is_fetched(tensor):
                    return f"{tensor.name} is an output of the graph"
                told = self.shape_users if self.rule.has_inner_shape(self.match, tensor) else ()
                user = self.view.user_besides(tensor, self._inside.union(told))
                if user is not None:
                    return f"{tensor.name} is also used by {user.name}"
        return None

    def _incoming(self):
        for backward in self.backward:
            y, dy = self.match.outputs["y"], backward.dy
            # A forward pass that is out of sight has no output here. Stock ops broadcast values of
            # it to a gradient, or that to them.
            if y.op not in backward.nodes and not _may_be_of_shape(dy, y):
                given = f"{dy.name} of shape {dy.shape}"
                return f"{given} is no gradient of {y.name} of shape {y.shape}"
        return None

    def _cycles(self):
        after = self._users(self._offered)
        before = [t.op for t in self.match.operands.values()] + self.controls(self.forward_nodes)
        before += [] if self.forward else self.match.nodes
        if self.view.reaches(after, before):
            return "its inputs depend on its outputs"
        for backward in self.backward:
            after = self._users(backward.gradients.values())
            if self.view.reaches(after, [backward.dy.op, *self.controls(backward.nodes)]):
                return "the incoming gradient depends on the outgoing ones"
        return None

    def _missing(self):
        read = [self.kept, *map(self.match.operands.get, self.rule.gradient_operands)]
        for tensor in read if not self.forward else ():
            if tensor is not None and self.view.is_withheld(tensor):
                return f"{tensor.name} is not handed over to the gradient"
        return None

    def _users(self, tensors):
        users = {op for tensor in tensors for op in self.view.users(tensor)}
        users |= {op for tensor in tensors for op in self.control_users(tensor.op)}
        return users - self._inside

    def control_users(self, op):
        """Returns the live ops outside that wait for an op."""
        return [user for user in self.view.waiting(op) if user not in self._inside]

    def _used_outside(self, tensor):
        return (
            self.view.is_fetched(tensor)
            or self.view.user_besides(tensor, self._inside) is not None
            or bool(self.control_users(tensor.op))
        )


def _may_be_of_shape(a, b):
    """Returns whether a tensor may have the shape of another one; not where it is known to have
    size 1 and the other is not."""
    if not a.shape.is_compatible_with(b.shape):
        return False
    pairs = zip(a.shape, b.shape, strict=True) if a.shape.rank and b.shape.rank else ()
    return all(other == 1 for size, other in pairs if size == 1)
