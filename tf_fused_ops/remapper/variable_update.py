"""The frame of rules for what an optimizer does to one variable."""

from typing import ClassVar

import tensorflow as tf
from tensorflow.python.ops import handle_data_util

from tf_fused_ops.remapper import rows
from tf_fused_ops.remapper.emission import add, constant
from tf_fused_ops.remapper.rule import Rule


class VariableUpdate(Rule):
    """One formula by which optimizers change a variable.

    Attributes:
        resources: The operands that are variables.
        label_text: What is updated how, for the log.
        fused_attrs: The fused op's attributes.
        integers: Operands that say which rows the gradient is of.
        needed: Op types, besides the anchor, without which a graph has no such update.
    """

    resources: tuple
    label_text: str
    integers: tuple = ()
    needed: tuple = ()
    fused_attrs: ClassVar[dict] = {}
    differentiable = ()

    def inputs(self, match):
        """Returns the fused op's inputs."""
        return [match.operands[name] for name in self.operands]

    def dense_shape(self, match):
        """Returns the shape that the gradient has, as far as it is known; the variables must have
        it, too."""
        return _passed(match.operands["gradient"]).shape

    def check(self, match):
        handles = [match.operands[name] for name in self.resources]
        if len(set(map(id, handles))) < len(handles):
            return f"{' and '.join(self.resources)} are not different variables"
        gradient, found = match.operands["gradient"], self.dense_shape(match)
        for handle in handles:
            shape = _shape(handle)
            if not found.is_fully_defined() or found != shape:
                return (
                    f"{gradient.name} of shape {found} may broadcast to "
                    f"{handle.op.name} of shape {shape}"
                )
        return None

    def fuse(self, match, training):
        name = f"{match.nodes[-1].name}_fused"
        (op_type,) = self.fused_ops
        return add(op_type, *self.inputs(match), name=name, **self.fused_attrs)

    def describe(self, match):
        names = (f"{name}={match.operands[name].op.name}" for name in (*self.resources, "gradient"))
        return self.label_text, " ".join(names)

    def read(self, handle, like):
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=like.dtype)

    def approach(self, handle, value, rate):
        step = tf.raw_ops.Mul(x=rows.sub(value, self.read(handle, value)), y=rate)
        return tf.raw_ops.AssignAddVariableOp(resource=handle, value=step)

    def mix(self, handle, value, decay, gain):
        kept = tf.raw_ops.Mul(x=decay, y=self.read(handle, value))
        mixed = rows.add(kept, rows.mul(gain, value))
        return tf.raw_ops.AssignVariableOp(resource=handle, value=mixed)


class FormulaUpdate(VariableUpdate):
    """A formula that `UpdateVariable` knows; the first of the integers are its indices, if any.

    Attributes:
        states: What the optimizer keeps, in the order of the op's `states`.
        factors: The formula's scalars, in the order of the op's `factors`.
        constants: Those of them that the stock code has in several places, where Keras makes a
            constant for each.
    """

    states: tuple
    factors: tuple
    constants: tuple = ()
    fused_ops = ("TfFusedOps>UpdateVariable",)

    @property
    def formula(self):
        """What `UpdateVariable` calls it."""
        return self.family

    @property
    def fused_attrs(self):
        return {"formula": self.formula}

    def __init_subclass__(cls):
        cls.resources = ("variable", *cls.states)
        scalars = dict.fromkeys((*cls.resources, *cls.factors), (0,))
        operands = {name: ranks for name, ranks in scalars.items() if name not in cls.constants}
        cls.operands = operands | dict.fromkeys(("gradient", *cls.integers), ())

    def parameters(self, attrs):
        return dict.fromkeys(self.constants, (0, None))

    def inputs(self, match):
        given, dtype = match.operands, match.operands["gradient"].dtype
        constants = {name: constant(match.attrs[name], dtype) for name in self.constants}
        states, factors = (
            [(given | constants)[name] for name in names] for names in (self.states, self.factors)
        )
        indices = [given[name] for name in self.integers[:1]]
        return [given["variable"], states, given["gradient"], factors, indices]

    def stock_of(self, op):
        """Emits the stock code of a fused op; returns what `stock` does."""
        names = ("variable", *self.states, "gradient", *self.factors, *self.integers[:1])
        given = dict(zip(names, op.inputs, strict=True))
        constants = {name: given.pop(name) for name in self.constants}
        return self.stock(constants, **given, **self.sizes(given["variable"]))

    def sizes(self, variable):
        """Emits the other integers that the stock code takes, by name."""
        return {}


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
