"""What rules for convolutions and matrix products with a bias and an activation share."""

import abc
from typing import ClassVar

import tensorflow as tf

from tf_fused_ops.ops import _gradient
from tf_fused_ops.remapper import spellings
from tf_fused_ops.remapper.emission import emit, reshape
from tf_fused_ops.remapper.rule import AddSideInput, Fused, Rule

# Additions that are a bias if the other operand is a vector of the right length.
SUMS = ("AddV2", "Add")
# What autodiff makes of them, and of BiasAdd.
_BIAS_GRADIENTS = {"BiasAddGrad": "BiasAdd", "Sum": "AddV2"}
# Activations whose argument and output have the same sign, which alone decides the slope.
_SLOPE_FROM_SIGN = frozenset({"relu", "leaky_relu"})


class ContractionBiasAct(Rule):
    """act(bias_add(contraction, bias)).

    Variants, by attribute:
        bias_op: The type of the op that adds the bias.
        bias_first: Whether the bias is its first operand.
    """

    contraction: tuple

    def default_attrs(self):
        return super().default_attrs() | {"bias_op": "BiasAdd", "bias_first": False}

    def variants(self, view, anchor):
        for attrs in super().variants(view, anchor):
            if "bias" not in self.operands:
                yield attrs | {"bias_op": None}
                continue
            yield from (attrs | form for form in self.sums(view, anchor))

    def added_backward(self, view, dz):
        """Yields the attributes of what may be added to the product whose gradient is dz: a bias,
        an activation."""
        if self.activation.name != "none" and dz.op.type != f"{self.activation.own_op}Grad":
            return
        reads = {op.type for op in view.users(dz)}
        forms = [form for op_type, form in _BIAS_GRADIENTS.items() if op_type in reads]
        if bool(forms) == ("bias" in self.operands):
            groups = self.activation.captured.values()
            attrs = {name: dz.op.get_attr(name) for group in groups for name in group}
            for form in forms or [None]:
                yield self.default_attrs() | attrs | {"bias_op": form}

    @property
    def gradient_operands(self):
        return self.contraction

    def product(self, view, anchor):
        """Returns the tensor to which the bias is added."""
        return anchor.outputs[0]

    def sums(self, view, anchor):
        """Yields, as attributes of a variant, how the bias may be added."""
        return sums_with_bias(view, self.product(view, anchor), self.bias_rank(anchor))

    def bias_rank(self, anchor):
        """Returns the rank of the bias."""
        return 1

    def stock(self, attrs, **operands):
        return {"y": self.activate(self.linear(attrs, **operands), attrs)}

    @abc.abstractmethod
    def linear(self, attrs, **operands):
        """The stock chain up to the bias."""

    def add_bias(self, attrs, z, bias):
        """The stock addition of the bias, if there is one."""
        if bias is None:
            return z
        if attrs["bias_op"] == "BiasAdd":
            data_format = attrs.get("data_format", "NHWC")
            return tf.raw_ops.BiasAdd(value=z, bias=bias, data_format=data_format)
        operands = [bias, z] if attrs["bias_first"] else [z, bias]
        return getattr(tf.raw_ops, attrs["bias_op"])(x=operands[0], y=operands[1])

    def observed(self, nodes, operands, attrs):
        sums = (op for op in nodes if op.type in SUMS and "bias" in operands)
        first = any(op.inputs[0] is operands["bias"] for op in sums)
        return super().observed(nodes, operands, attrs) | {"bias_first": first}

    def check(self, match):
        if match.attrs["bias_op"] not in SUMS or "bias" not in match.operands:
            return None
        bias, product = match.operands["bias"], self.contraction_op(match).outputs[0]
        if match.attrs.get("data_format") == b"NCHW":
            return f"{bias.name} is added to the last dimension, which is not that of channels"
        if not bias.shape.is_fully_defined() or bias.shape != self.channels(match):
            return f"{bias.name} of shape {bias.shape} may not be a bias of {product.name}"
        return None

    def contraction_type(self, match):
        """Returns the type of the op that multiplies; a backward pass alone has none."""
        return self.anchor

    def contraction_op(self, match):
        """Returns the op that multiplies."""
        return match.node(self.contraction_type(match))

    def channels(self, match):
        """Returns the shape that the bias must have."""
        return match.node(self.anchor).outputs[0].shape[-1:]

    def fuse(self, match, training):
        save = training and self.activation.needs_pre_activation(match.attrs)
        fused = emit(
            self.fused_ops[0],
            *self.factors(match),
            [self.flat_bias(t) for t in self._optional(match, "bias")],
            [self.widen(match, t) for t in self._optional(match, "side_input")],
            *self.further_inputs(match),
            save_pre_activation=save,
            name=match.fused_name(),
            **self.forward_attributes(match),
            **self.attributes(match),
        )
        saved = ()
        if self.activation.name != "none":
            saved = (fused["pre_activation"] if save else fused["y"],)
        return Fused({"y": self.narrow(match, fused["y"])}, saved)

    def kept_nodes(self, attrs, dtype):
        if self.activation.name == "none":
            return ()
        # The code of the activation runs last, so its nodes are the last ones.
        last = spellings.traced(self.activation, self.spelling, dtype).nodes
        output, argument = -1, -1 - len(last)
        if self.activation.needs_pre_activation(attrs):
            return (argument,)
        return (output, argument) if self.activation.name in _SLOPE_FROM_SIGN else (output,)

    def stock_forward(self, match, kept):
        return Fused(match.outputs, () if kept is None else (self.widen(match, kept),))

    def fuse_gradient(self, match, fused, dy, wanted):
        found = emit_gradients(
            self.fused_ops[1],
            self.widen(match, dy),
            *self.factors(match),
            list(fused.saved),
            switches={name: name in wanted for name in (*self.contraction, "bias", "side_input")},
            wanted=wanted,
            device=match.nodes[0].device,
            name=match.fused_name("_grad"),
            **self.attributes(match),
        )
        return {name: self.narrow_gradient(match, name, t) for name, t in found.items()}

    def flat_bias(self, bias):
        """Gives the bias the rank that the fused op takes."""
        return bias

    def widen(self, match, tensor):
        """Gives a tensor of the output's shape the rank that the fused op takes."""
        return tensor

    def narrow(self, match, tensor):
        """Undoes `widen`."""
        return tensor

    def narrow_gradient(self, match, name, gradient):
        """Gives the gradient of an operand the operand's shape."""
        return gradient

    def label(self, match):
        parts = [
            *["BiasAdd"] * ("bias" in self.operands),
            *["Add"] * ("side_input" in self.operands),
            self.activation.label,
        ]
        added = " and ".join(filter(None, parts))
        return " with ".join(filter(None, [self.contraction_type(match), added]))

    def describe(self, match):
        activation = f"activation={match.outputs['y'].op.name} " if self.activation.label else ""
        bias_add = f"bias_add={self._linear_end(match).name} " if "bias" in match.operands else ""
        contraction = self.contraction_op(match).name
        return self.label(match), f"{activation or ' '}{bias_add}contraction={contraction}"

    def _linear_end(self, match):
        """Returns the op that the side input or the activation follows."""
        return match.node(match.attrs["bias_op"] or self.anchor)

    def factors(self, match):
        """Returns what the fused op multiplies."""
        return [match.operands[name] for name in self.contraction]

    def _optional(self, match, name):
        return [match.operands[name]] if name in match.operands else []

    def further_inputs(self, match):
        """Returns what the fused op takes after the side input."""
        return ()

    def forward_attributes(self, match):
        """Returns the attributes of the fused forward op alone."""
        return constant_filters(match, self.contraction[1])

    def attributes(self, match):
        """Returns the attributes of the fused ops."""
        names = [name for group in self.captured.values() for name in group]
        return {name: match.attrs[name] for name in names} | {"activation": self.activation.name}


class ImageBiasAct(ContractionBiasAct):
    """What rules for convolutions share, for transposed ones, too.

    Variants, by attribute:
        bias_rank: The rank of the bias: 1, or that of the images, as Keras adds the bias of a
            single channel.
    """

    def default_attrs(self):
        return super().default_attrs() | {"bias_rank": 1}

    def sums(self, view, anchor):
        yield from super().sums(view, anchor)
        product = self.product(view, anchor)
        rank = product.shape.rank
        sums = ((op, port) for op, port in view.consumers(product) if rank and op.type in SUMS)
        types = (op.type for op, port in sums if op.inputs[1 - port].shape == [1] * rank)
        yield from ({"bias_op": op_type, "bias_rank": rank} for op_type in dict.fromkeys(types))

    def operand_shape(self, name, attrs):
        if name == "bias":
            return [None] * attrs["bias_rank"]
        return super().operand_shape(name, attrs)

    def check(self, match):
        bias = _lone_bias(match)
        if bias is None:
            return super().check(match)
        product = self.contraction_op(match).outputs[0]
        channels = product.shape[1 if match.attrs["data_format"] == b"NCHW" else -1]
        if channels != 1 or set(bias.shape) != {1}:
            return f"{bias.name} of shape {bias.shape} is no bias of {channels} channels"
        return None

    def flat_bias(self, bias):
        return reshape(bias, [-1]) if bias.shape.rank != 1 else bias

    def narrow_gradient(self, match, name, gradient):
        bias = _lone_bias(match) if name == "bias" else None
        return gradient if bias is None else reshape(gradient, bias.shape.as_list())


def _lone_bias(match):
    """Returns a match's bias if that is of more than one dimension, or None."""
    bias = match.operands.get("bias")
    return None if bias is None or bias.shape.rank == 1 else bias


class AddAct(AddSideInput):
    """act(chain + side_input)."""

    # The chain without side input has the same gradient ops.
    gradient_ops: ClassVar = {}

    def scalable(self, attrs, shapes):
        return False

    def stock(self, attrs, side_input, **operands):
        z = self.add(attrs, self.linear(attrs, **operands), side_input)
        return {"y": self.activate(z, attrs)}

    def check(self, match):
        total = self._linear_end(match).outputs[0]
        return self.check_side_input(match, total) or super().check(match)


def constant_filters(match, name):
    """Returns the attribute that tells a fused op whether an operand is the same in every call."""
    op = match.operands[name].op
    while op.type == "Identity":
        op = op.inputs[0].op
    return {f"constant_{name}": op.type == "Const"}


def sums_with_bias(view, product, rank):
    """Yields, as attributes of a variant, how a bias of a rank may be added to a tensor."""
    ops = (op for op, port in view.consumers(product) if _adds_bias(op, port, rank))
    for bias_op in dict.fromkeys(op.type for op in ops):
        yield {"bias_op": bias_op}


def _adds_bias(op, port, rank):
    """Returns whether an op may add a bias of a rank to what is at a port."""
    is_sum = op.type in SUMS and op.inputs[1 - port].shape.rank == rank
    return is_sum or (op.type == "BiasAdd" and rank == 1)


def emit_gradients(op_type, *inputs, switches, wanted, device, **options):
    """Emits the gradient ops of a contraction.

    Args:
        op_type: Their type.
        *inputs: The incoming gradient, both operands, the list of what was saved.
        switches: {name: whether its gradient is wanted} for both operands, bias and side input.
        wanted: {name: the gradient that is replaced}.
        device: The device string of the forward pass.
        **options: Name and attributes.

    Returns:
        {name: gradient} of those that are wanted.
    """
    left = next(iter(switches))
    awaited = left in wanted and bool(wanted[left].consumers())
    found = {}
    for part in _gradient.parts(list(switches.values()), device, inputs[0], awaited):
        asked = dict(zip(switches, part, strict=True))
        asked_attrs = {f"{name}_gradient": switch for name, switch in asked.items()}
        outputs = emit(op_type, *inputs, **asked_attrs, **options)
        found |= {name: outputs[f"{name}_grad"] for name, switch in asked.items() if switch}
    return found
