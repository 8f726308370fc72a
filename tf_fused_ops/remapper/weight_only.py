"""Rules for products with weights of 8 or 4 bits that become numbers first."""

import tensorflow as tf
from tensorflow.python.framework import tensor_util

from tf_fused_ops._devices import device_type
from tf_fused_ops.remapper import product, quantized_chain, quantized_weights
from tf_fused_ops.remapper.emission import emit, reshape
from tf_fused_ops.remapper.rule import Fused

# What a custom gradient of Keras is of: inputs, integers, scales, zeros, numbers of groups.
_MOST_ARGUMENTS = 5
_DTYPES = (tf.float16, tf.bfloat16, tf.float32)
_ARGUMENTS = tuple(f"argument_{i}" for i in range(_MOST_ARGUMENTS))


class _WeightOnly:
    """What these rules add to those for a product of matrices in inference.

    Operand b are the numbers; how they are made is not part of the chain.

    Variants, by attribute:
        divided: The rank of the columns' scales, operand `divisor`, by which the product is
            divided; None if it is not.
        gradient: The code of the custom gradient around the product, None if there is none.
        arguments: What that is of, as (tf.DType, rank) each.
    """

    differentiable = ()
    backward_alone = False
    fused_ops = ("TfFusedOps>WeightOnlyMatMulBiasAct",)

    def variants(self, view, anchor):
        transposes = self.captured.get(self.anchor, ())
        if any(view.attr(anchor, name) for name in transposes):
            return
        weights = self._weights_at(view, anchor)
        if weights is None:
            return
        form = self._around(view, anchor)[0]
        if form["divided"] or weights.scale is not None:
            yield from (attrs | form for attrs in super().variants(view, anchor))

    def _weights_at(self, view, anchor):
        equation = view.attr(anchor, "equation") if anchor.type == "Einsum" else None
        summed = _summed(equation)
        return quantized_weights.find(anchor.inputs[1], summed) if summed else None

    def product(self, view, anchor):
        return self._around(view, anchor)[1]

    def _around(self, view, anchor):
        """Returns the attributes that tell what follows a product, and the end of that."""
        z = super().product(view, anchor)
        divided = quantized_chain.follow(view, z, "RealDiv")
        form = {"divided": None, "gradient": None, "arguments": ()}
        if divided is not None and divided.op.inputs[0] is z:
            divisor = divided.op.inputs[1]
            rank, weights = divisor.shape.rank, self._weights_at(view, anchor)
            # With more dimensions than the product it would give these to the result; and what is
            # scaled already may be divided by anything, as by a temperature.
            known = None not in (rank, z.shape.rank) and 0 < rank <= z.shape.rank
            if known and (weights is None or weights.scale is None or _is_one(divisor)):
                form["divided"], z = rank, divided
        gradient = quantized_chain.gradient_of(view, z)
        if gradient is not None:
            wrapped = quantized_chain.follow(view, z, quantized_chain.WRAPPER)
            arguments = tuple((t.dtype, t.shape.rank) for t in list(wrapped.op.inputs)[1:])
            if len(arguments) <= _MOST_ARGUMENTS and all(rank is not None for _, rank in arguments):
                form |= {"gradient": gradient, "arguments": arguments}
                z = wrapped
        return form, z

    def present(self, attrs):
        core = [name for name in self.operands if name not in (*_ARGUMENTS, "divisor")]
        divisor = [] if attrs["divided"] is None else ["divisor"]
        return (*core, *divisor, *_ARGUMENTS[: len(attrs["arguments"])])

    def operand_dtype(self, name, dtype, attrs):
        if name in _ARGUMENTS:
            return attrs["arguments"][_ARGUMENTS.index(name)][0]
        return super().operand_dtype(name, dtype, attrs)

    def operand_shape(self, name, attrs):
        if name in _ARGUMENTS:
            return [None] * attrs["arguments"][_ARGUMENTS.index(name)][1]
        if name == "divisor":
            return [None] * attrs["divided"]
        return super().operand_shape(name, attrs)

    def linear(self, attrs, a, b, bias=None, divisor=None, **arguments):
        z = super().linear(attrs, a, b)
        z = z if divisor is None else z / divisor
        if attrs["gradient"] is not None:
            gradient = quantized_chain.function_of(attrs["gradient"])
            z = tf.custom_gradient(lambda *_: (z, gradient))(*arguments.values())
        return self.add_bias(attrs, z, bias)

    def check(self, match):
        a, b = match.operands["a"], match.operands["b"]
        weights = quantized_weights.find(b, _summed(match.attrs.get("equation")))
        divisor = match.operands.get("divisor")
        device = device_type(match.nodes[0].device)
        if device != "CPU":
            return f"weights of few bits are TensorFlow's on {device}"
        if a.dtype not in _DTYPES:
            return f"{a.name} is of {a.dtype.name}"
        if weights is None:
            return f"{b.name} is no longer made of integers"
        if divisor is not None and not _is_one(divisor):
            columns = self.channels(match).as_list()
            if weights.scale is not None or not _scales(divisor, columns):
                return f"{divisor.name} of shape {divisor.shape} is no scale of {b.name}'s columns"
        return super().check(match)

    def fuse(self, match, training):
        a, b = match.operands["a"], match.operands["b"]
        summed, divisor = _summed(match.attrs.get("equation")), match.operands.get("divisor")
        weights, shape = quantized_weights.find(b, summed), quantized_weights.matrix(b, summed)
        if "equation" in match.attrs:
            a = reshape(a, [-1, shape[0]])
        if weights.divisor is not None:
            a = a / tf.cast(weights.divisor, a.dtype)
        if divisor is not None and _is_one(divisor):
            divisor = None
        integers, *numbers, group = quantized_weights.inputs(weights, shape, divisor)
        if match.attrs["gradient"] is not None:
            # As in stock code.
            numbers = tf.nest.map_structure(tf.stop_gradient, numbers)
        alpha = {"alpha": match.attrs["alpha"]} if "alpha" in match.attrs else {}
        outputs = emit(
            self.fused_ops[0],
            a,
            integers,
            *numbers,
            group,
            [self.flat_bias(t) for t in self._optional(match, "bias")],
            transpose_b=weights.transposed,
            bits=weights.bits,
            packed_axis=weights.packed_axis or 0,
            activation=self.activation.name,
            name=match.fused_name(),
            **alpha,
        )
        return Fused({"y": self.narrow(match, outputs["y"])})

    def label(self, match):
        return f"weight-only {super().label(match)}"


_FORMS = {
    "matmul": product.MatMulBiasAct,
    "dense": product.DenseBiasAct,
    "batch_matmul": product.BatchMatMulBiasAct,
    "heads": product.HeadsBiasAct,
    "einsum": product.EinsumBiasAct,
}


def _rule(form, base, biased):
    """Returns the rule for a form of product, with bias or without."""
    kept = {name: base.operands[name] for name in base.operands if biased or name != "bias"}
    around = {"divisor": (1, 2, 3, 4, 5, 6)} | dict.fromkeys(_ARGUMENTS, ())
    bias = "_bias" if biased else ""
    members = {
        "__doc__": f"{base.__doc__} With numbers for b{'' if biased else ', without bias'}.",
        "family": f"weight_only_{form}{bias}",
        "operands": kept | around,
    }
    return type(f"WeightOnly{base.__name__}", (_WeightOnly, base), members)


RULES = tuple(
    _rule(form, base, biased) for form, base in _FORMS.items() for biased in (True, False)
)


def _summed(equation):
    """Returns over how many dimensions a product sums, the first ones of the numbers; 0 for others.
    None is a product of matrices."""
    if equation is None:
        return 1
    summed, order = quantized_chain.order_of(equation) or (0, None)
    return summed if order is None else 0


def _scales(divisor, columns):
    """Returns whether the shape of a divisor is that of some columns, behind ones."""
    ones = divisor.shape.rank - len(columns)
    return ones >= 0 and divisor.shape == [1] * ones + columns


def _is_one(divisor):
    """Returns whether a divisor is known to change nothing."""
    value = tensor_util.constant_value(divisor)
    return value is not None and value.size == 1 and value.item() == 1
