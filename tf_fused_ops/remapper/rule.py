"""What a rule is: the row of the table, and a place in a graph that it fits."""

import abc
import dataclasses
from typing import ClassVar

import tensorflow as tf

from tf_fused_ops.remapper import shapes, spellings

# When rules get their turn: before others, for which they prepare the graph; with most; after
# others, for what those have left.
FIRST, TOGETHER, LAST = range(3)


@dataclasses.dataclass(frozen=True)
class Match:
    """A place in a graph that a rule fits.

    Attributes:
        nodes: The matched ops, inputs first.
        operands: Operand name -> tensor.
        outputs: Output name -> tensor.
        attrs: Name -> value of captured attributes, of parameters and of what the variant says;
            when ops are emitted, also `winograd`, as the options have it, `take_moments`, whether
            the output's moments are wanted, and `moments`, those of the input or None.
    """

    nodes: tuple
    operands: dict
    outputs: dict
    attrs: dict

    def node(self, op_type):
        """Returns the first matched op of a type."""
        return next(op for op in self.nodes if op.type == op_type)

    def fused_name(self, suffix=""):
        """Returns a name for the op that replaces the match."""
        return f"{self.outputs['y'].op.name}_fused{suffix}"

    def reading(self, tensor, instead_of):
        """Returns the match with another tensor for every operand that is a certain one."""
        operands = {n: tensor if t is instead_of else t for n, t in self.operands.items()}
        return dataclasses.replace(self, operands=operands)

    def separated(self):
        """Returns the match with operands that are tensors of their own.

        One tensor may be two operands, or one operand be made of another: the gradient by one of
        them must not contain that by the other.
        """
        operands = {name: tf.identity(tensor) for name, tensor in self.operands.items()}
        return dataclasses.replace(self, operands=operands)


@dataclasses.dataclass(frozen=True)
class Fused:
    """A fused forward op: outputs by the match's names, what the gradient op reads."""

    outputs: dict
    saved: tuple = ()


class Rule(abc.ABC):
    """One chain of stock ops with one spelling of one activation.

    Attributes:
        family: First part of the name.
        anchor: The op type at which matching begins.
        operands: Operand name -> the ranks it may have; none for any, known or not.
        differentiable: Operands that may have a gradient.
        captured: {op type: {attribute: default}}: attributes that a match may have any value of.
        keyed: Captured attributes of the anchor that other nodes of the chain depend on: one
            pattern per value.
        unscaled: Operands whose own sizes are none of data.
        optional: Attributes of variants that say whether a part is there that may also stay as it
            is, so that the chain without it is tried, too.
        fused_ops: The op types that are emitted: forward, gradient.
        devices: Where it is tried, if the fused ops have kernels there.
        forward_alone: Whether a forward pass is replaced also where no gradient follows.
        backward_alone: Whether a backward pass is replaced also where its forward pass may not be.
        gradient_ops: {op type that stock gradients are made of: operand whose gradient it yields},
            at which backward passes without forward pass are recognized; see `backward_variants`.
        core: What the rule adds its activation or side input to; where that is not found, the rule
            need not be tried.
        turn: FIRST, TOGETHER or LAST.
    """

    family: str
    anchor: str
    operands: ClassVar[dict]
    differentiable: tuple
    captured: ClassVar[dict] = {}
    keyed: tuple = ()
    unscaled: tuple = ()
    optional: tuple = ()
    fused_ops: tuple
    devices = ("CPU", "GPU")
    forward_alone = True
    backward_alone = False
    gradient_ops: ClassVar[dict] = {}
    turn = TOGETHER

    def __init__(self, activation=spellings.NONE, spelling=None, core=None):
        self.activation = activation
        self.spelling = spelling or activation.spellings[0]
        self.core = core or self
        self.captured = type(self).captured | activation.captured
        self.name = f"{self.family}_{activation.name}" if activation.label else self.family

    @property
    def adds_activation(self):
        """Whether the stock code is that of the core, followed by the activation."""
        return self.activation is not self.core.activation

    @property
    def anchors(self):
        """The op types that the anchor may have, as far as they are known before anything is
        traced."""
        return (self.anchor,)

    @property
    def added(self):
        """What the stock code does with the output of the core's: a function of that and, by name,
        of `added_operands` and `added_attrs`; None if that is not known."""
        return self.spelling if self.adds_activation else None

    @property
    def added_operands(self):
        """The operands that the core has not."""
        return tuple(name for name in self.operands if name not in self.core.operands)

    @property
    def added_attrs(self):
        """The attributes that the core does not depend on."""
        return tuple(name for group in self.activation.captured.values() for name in group)

    @property
    def gradient_operands(self):
        """The operands that the gradient op reads."""
        return tuple(self.operands)

    @property
    def autodiff(self):
        """Whether the gradient is that which is registered for what `fuse` emits."""
        return type(self).fuse_gradient is Rule.fuse_gradient

    def activate(self, x, attrs):
        """Applies the activation's stock spelling."""
        names = [name for group in self.activation.captured.values() for name in group]
        return self.spelling(x, **{name: attrs[name] for name in names})

    def default_attrs(self):
        """Returns the captured attributes with their defaults, by name."""
        return {name: value for group in self.captured.values() for name, value in group.items()}

    def variants(self, view, anchor):
        """Yields the forms that a core may have at an anchor, as {attribute: value}."""
        yield {name: view.attr(anchor, name) for name in self.keyed}

    def forms(self, view):
        """Yields the forms of what is added to the core, as {attribute: value}."""
        yield {}

    def present(self, attrs):
        """Returns the names of the operands that a variant has."""
        return tuple(self.operands)

    def parameters(self, attrs):
        """Returns {name: (rank, tf.DType or None for that of the anchor)}: constants that a match
        may have any value of."""
        return {}

    def operand_dtype(self, name, dtype, attrs):
        """Returns an operand's dtype, given that of the anchor's output and the variant."""
        return dtype

    def operand_shape(self, name, attrs):
        """Returns what has to be known of an operand's shape to trace the forward pattern."""
        ranks = self.operands[name]
        return [None] * ranks[0] if len(ranks) == 1 else None

    def scalable(self, attrs, shapes):
        """Returns whether what autodiff makes of the chain depends on sizes only through constants
        that are sizes of operands or products of them; `shapes` are theirs by name."""
        return False

    def scale(self, attrs, sizes):
        """Returns the attributes with sizes replaced, for rules that are scalable."""
        return attrs

    @abc.abstractmethod
    def stock(self, attrs, **operands):
        """The stock code, as a dict of the outputs that code outside may use."""

    def observed(self, nodes, operands, attrs):
        """Returns further attributes, which autodiff depends on, of a forward match."""
        return {}

    def has_inner_shape(self, match, tensor):
        """Returns whether a value inside a match has the shape that `inner_shape` emits."""
        return False

    def inner_shape(self, match, dtype):
        """Emits the shape of values inside a match, which code outside may read, as a vector."""
        raise NotImplementedError

    def check(self, match):
        """Returns why the fused call would not be equivalent, in words, or None."""
        return None

    @abc.abstractmethod
    def fuse(self, match, training):
        """Emits the fused forward op; `training` says that a gradient op follows."""

    def kept_nodes(self, attrs, dtype):
        """Returns of which node of the forward pass, counted from the end, the gradient op takes
        the output, and of which others it may; for rules with `backward_alone`."""
        return ()

    def takes_moments_of(self, match):
        """Returns the tensor whose moments the fused op takes unless they are given, as
        `match.attrs["moments"]`; None if it takes none."""
        return None

    def stock_forward(self, match, kept):
        """Returns what `fuse` returns, made of the stock tensor that `kept_nodes` tells or None,
        for a gradient op behind a forward pass that stays as it is."""
        raise NotImplementedError

    def backward_variants(self, view, op):
        """Yields ({attribute: value}, {operand: static shape}) that a backward pass may have at a
        stock gradient op."""
        return ()

    def fuse_gradient(self, match, fused, dy, wanted):
        """Emits the fused gradient op and returns {operand: gradient} for the wanted operands.

        The gradient that is registered for what `fuse` emitted, unless a rule knows a better one.
        """
        sources = [match.operands[name] for name in wanted]
        return dict(zip(wanted, tf.gradients(fused.outputs["y"], sources, dy), strict=True))

    def label(self, match):
        """Returns what is fused, as grappler's remapper words it."""
        return self.describe(match)[0]

    def describe(self, match):
        """Returns (what is fused, which nodes) as grappler's remapper words it."""
        return self.name, f"{self.anchor}={match.node(self.anchor).name}"


class AddSideInput:
    """What rules with a side input, added before the activation, share.

    Forms, by attribute:
        sum: The type of the op that adds.
        side_first: Whether the side input is its first operand.
    """

    @property
    def added(self):
        return super().added or (None if self.core is self else _sum)

    @property
    def added_attrs(self):
        return super().added_attrs if self.adds_activation else ("sum", "side_first")

    def forms(self, view):
        return ({"sum": name} for name in ("AddV2", "AddN") if view.has([name]))

    def add(self, attrs, z, side_input):
        """The stock sum."""
        operands = [side_input, z] if attrs["side_first"] else [z, side_input]
        if attrs["sum"] == "AddN":
            return tf.raw_ops.AddN(inputs=operands)
        return tf.raw_ops.AddV2(x=operands[0], y=operands[1])

    def default_attrs(self):
        return super().default_attrs() | {"sum": "AddV2", "side_first": False}

    def observed(self, nodes, operands, attrs):
        side = operands["side_input"]
        sums = (op for op in nodes if op.type == attrs["sum"])
        first = any(op.inputs[0] is side for op in sums)
        return super().observed(nodes, operands, attrs) | {"side_first": first}

    def check_side_input(self, match, like):
        """Returns why the side input may not be of the shape of tensor `like`, or None."""
        side = match.operands["side_input"]
        if shapes.same_shape(like, side):
            return None
        return (
            f"{side.name} of shape {side.shape} may broadcast to {like.name} of shape {like.shape}"
        )


def _sum(z, side_input, **attrs):
    """The stock sum, the same function for all rules."""
    return AddSideInput().add(attrs, z, side_input)
