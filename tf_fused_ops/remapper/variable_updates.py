"""Rules for what optimizers do to variables: several passes over memory become one.

What they stand for has no outputs but what it leaves in variables, so nothing but the order of the
program says what reads what. They are looked for only in a graph that is being traced, whose ops
are in that order and get their control dependencies later. The fused ops are TensorFlow's own.
"""

import dataclasses
import functools
from typing import ClassVar

import tensorflow as tf
from tensorflow.python.ops import handle_data_util

from tf_fused_ops.remapper import pattern
from tf_fused_ops.remapper.candidate import Candidate
from tf_fused_ops.remapper.emission import add, constant
from tf_fused_ops.remapper.matcher import Matcher
from tf_fused_ops.remapper.rule import Match, Rule

_FREE = {("AssignVariableOp", "validate_shape")}
_STEP = (pattern.Operand("gradient"), pattern.Operand("rate"))
# How far the fused op may be from a rate of Adam's, of which it is given the complement.
_MAX_ROUNDING = 1e-4
# What must be in the order of the stock code; arithmetic need not be.
_ORDERED = ("ReadVariableOp", "AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")


class VariableUpdate(Rule):
    """One formula by which optimizers change a variable.

    Attributes:
        resources: The operands that are variables.
        label_text: What is updated how, for the log.
        fused_attrs: The fused op's attributes.
    """

    resources: tuple
    label_text: str
    fused_attrs: ClassVar[dict] = {}
    differentiable = ()

    def inputs(self, match):
        """Returns the fused op's inputs."""
        return [match.operands[name] for name in self.operands]

    def check(self, match):
        gradient = _passed(match.operands["gradient"])
        handles = [match.operands[name] for name in self.resources]
        if len(set(map(id, handles))) < len(handles):
            return f"{' and '.join(self.resources)} are not different variables"
        for handle in handles:
            shape = _shape(handle)
            if not gradient.shape.is_fully_defined() or gradient.shape != shape:
                return (
                    f"{gradient.name} of shape {gradient.shape} may broadcast to "
                    f"{handle.op.name} of shape {shape}"
                )
        return None

    def fuse(self, match, training):
        name = f"{match.nodes[-1].name}_fused"
        (op_type,) = self.fused_ops
        return add(op_type, *self.inputs(match), name=name, use_locking=True, **self.fused_attrs)

    def describe(self, match):
        names = (f"{name}={match.operands[name].op.name}" for name in (*self.resources, "gradient"))
        return self.label_text, " ".join(names)


class GradientDescent(VariableUpdate):
    """variable -= rate * gradient."""

    family = "gradient_descent"
    label_text = "gradient descent"
    anchor = "AssignSubVariableOp"
    resources = ("variable",)
    operands: ClassVar = {"variable": (0,), "rate": (0,), "gradient": ()}
    fused_ops = ("ResourceApplyGradientDescent",)

    def stock(self, attrs, variable, rate, gradient):
        step = tf.raw_ops.Mul(x=gradient, y=rate)
        return {"variable": tf.raw_ops.AssignSubVariableOp(resource=variable, value=step)}


class Momentum(VariableUpdate):
    """velocity = momentum * velocity - rate * gradient; variable += velocity."""

    family = "momentum"
    label_text = "gradient descent with momentum"
    anchor = "AssignAddVariableOp"
    resources = ("variable", "velocity")
    operands: ClassVar = {
        "variable": (0,), "velocity": (0,), "rate": (0,), "gradient": (), "momentum": (0,)
    }  # fmt: skip
    fused_ops = ("ResourceApplyKerasMomentum",)

    def stock(self, attrs, variable, velocity, rate, gradient, momentum):
        old = tf.raw_ops.ReadVariableOp(resource=velocity, dtype=gradient.dtype)
        decayed = self._decayed(old, rate, gradient, momentum)
        kept = tf.raw_ops.AssignVariableOp(resource=velocity, value=decayed)
        new = tf.raw_ops.ReadVariableOp(resource=velocity, dtype=gradient.dtype)
        step = self._step(new, rate, gradient, momentum)
        changed = tf.raw_ops.AssignAddVariableOp(resource=variable, value=step)
        return {"velocity": kept, "variable": changed}

    def _decayed(self, velocity, rate, gradient, momentum):
        decayed = tf.raw_ops.Mul(x=velocity, y=momentum)
        return tf.raw_ops.Sub(x=decayed, y=tf.raw_ops.Mul(x=gradient, y=rate))

    def _step(self, velocity, rate, gradient, momentum):
        return velocity


class NesterovMomentum(Momentum):
    """As momentum, but variable += momentum * velocity - rate * gradient."""

    family = "nesterov_momentum"
    label_text = "gradient descent with Nesterov's momentum"
    fused_attrs: ClassVar = {"use_nesterov": True}

    def _step(self, velocity, rate, gradient, momentum):
        return self._decayed(velocity, rate, gradient, momentum)


class Adam(VariableUpdate):
    """variable -= alpha * m / (sqrt(v) + epsilon), m and v being moments of the gradient.

    First m += m_rate * (gradient - m) and v += v_rate * (gradient^2 - v). The rates are 1 - beta
    for both betas; alpha is the learning rate with the correction of the moments' bias. Kingma and
    Ba, "Adam: a method for stochastic optimization", 2015, end of section 2.
    """

    family = "adam"
    label_text = "Adam"
    anchor = "AssignSubVariableOp"
    resources = ("variable", "m", "v")
    operands: ClassVar = dict.fromkeys((*resources, "alpha", "epsilon"), (0,)) | {"gradient": ()}
    fused_ops = ("ResourceApplyAdam",)

    def parameters(self, attrs):
        return {"m_rate": (0, None), "v_rate": (0, None)}

    def stock(self, attrs, variable, m, v, alpha, epsilon, gradient):
        def read(handle):
            return tf.raw_ops.ReadVariableOp(resource=handle, dtype=gradient.dtype)

        def approach(handle, value, rate):
            step = tf.raw_ops.Mul(x=tf.raw_ops.Sub(x=value, y=read(handle)), y=rate)
            return tf.raw_ops.AssignAddVariableOp(resource=handle, value=step)

        kept = {
            "m": approach(m, gradient, attrs["m_rate"]),
            "v": approach(v, tf.raw_ops.Square(x=gradient), attrs["v_rate"]),
        }
        step = tf.raw_ops.Mul(x=read(m), y=alpha)
        root = tf.raw_ops.AddV2(x=tf.raw_ops.Sqrt(x=read(v)), y=epsilon)
        step = tf.raw_ops.RealDiv(x=step, y=root)
        changed = tf.raw_ops.AssignSubVariableOp(resource=variable, value=step)
        return kept | {"variable": changed}

    def check(self, match):
        for name in ("m_rate", "v_rate"):
            rate, beta = match.attrs[name], _complement(match.attrs[name])
            if abs(_complement(beta) - rate) > _MAX_ROUNDING * abs(rate):
                return f"1 - {rate:g} is rounded to {beta:g}, which says too little of {rate:g}"
        return super().check(match)

    def inputs(self, match):
        given, dtype = match.operands, match.operands["gradient"].dtype
        # Alpha is corrected already: with powers of zero it is taken as it is.
        zero = constant(0, dtype)
        betas = [constant(_complement(match.attrs[name]), dtype) for name in ("m_rate", "v_rate")]
        state = map(given.get, self.resources)
        return [*state, zero, zero, given["alpha"], *betas, given["epsilon"], given["gradient"]]


UPDATES = (GradientDescent(), Momentum(), NesterovMomentum(), Adam())
ANCHORS = frozenset(rule.anchor for rule in UPDATES)


@dataclasses.dataclass(frozen=True)
class UpdateCandidate(Candidate):
    """A proposed replacement of an update."""

    @property
    def root(self):
        return self.nodes[-1]

    @property
    def dtype(self):
        return self.match.operands["gradient"].dtype

    def _cycles(self):
        """Looks at the order of the program instead, in which the others become one op."""
        place = self.view.position
        begin = min(place[op] for op in self.nodes if op.type in _ORDERED)
        for name in self.rule.resources:
            handle = self.match.operands[name]
            for op, _ in self.view.consumers(handle):
                if begin < place[op] < place[self.root] and op not in self._inside:
                    return f"{op.name} uses {name} {handle.op.name} meanwhile"
        return None


def candidates(view, anchor, options):
    """Returns the updates that may end at an op, those that begin last first.

    Args:
        view: The GraphView of a graph whose ops are in the order of the program.
        anchor: A live op of a type in `ANCHORS`.
        options: RemapOptions.
    """
    dtype, found = anchor.inputs[1].dtype, []
    for rule in UPDATES:
        if rule.anchor == anchor.type and dtype.is_floating and options.allows(rule.name):
            traced = _pattern(rule, dtype)
            for binding in Matcher(traced, view).all_matches(anchor, traced.outputs):
                nodes = tuple(op for _, op in sorted(binding.nodes.items()))
                places = [view.position[op] for op in nodes if op.type in _ORDERED]
                if places == sorted(places):
                    match = Match(nodes, _operands(binding), {}, binding.parameters)
                    found.append((places, UpdateCandidate(rule, match, (), view)))
    return [candidate for _, candidate in sorted(found, key=lambda item: item[0], reverse=True)]


def _operands(binding):
    """Returns the operands of a binding with the factors rate and gradient the right way round."""
    operands = binding.operands
    rate, gradient = operands.get("rate"), operands["gradient"]
    if rate is not None and (rate.shape.rank or 0) > (gradient.shape.rank or 0):
        return operands | {"rate": gradient, "gradient": rate}
    return operands


@functools.cache
def _pattern(rule, dtype):
    """Returns the pattern of a rule's stock code for a dtype."""
    specs = dict.fromkeys(rule.operands, tf.TensorSpec([], dtype))
    specs |= dict.fromkeys(rule.resources, tf.TensorSpec([], tf.resource))
    specs["gradient"] = tf.TensorSpec(None, dtype)
    parameters = {name: tf.TensorSpec([], dtype) for name in rule.parameters({})}
    traced = pattern.trace(rule.stock, specs, rule.anchor, _FREE, parameters)
    # Rate and gradient may be told apart later, see `_operands`, so one order of them will do.
    nodes = (
        dataclasses.replace(node, commutative=node.inputs != _STEP and node.commutative)
        for node in traced.nodes
    )
    return dataclasses.replace(traced, nodes=tuple(nodes))


def _complement(rate):
    """Returns 1 - rate as the fused op computes it."""
    return rate.dtype.type(1) - rate


def _passed(tensor):
    """Returns what an optimizer was given, of which more may be known by now."""
    while tensor.op.type in ("Identity", "IdentityN"):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _shape(handle):
    """Returns the shape of the variable that a tensor stands for, as far as it is known."""
    data = handle_data_util.get_resource_handle_data(handle)
    known = data is not None and data.is_set and len(data.shape_and_type) == 1
    return tf.TensorShape(data.shape_and_type[0].shape if known else None)
