"""The rule for attention: two products with a softmax between them."""

from typing import ClassVar, NamedTuple

import tensorflow as tf

from tf_fused_ops.remapper.emission import emit
from tf_fused_ops.remapper.rule import Fused
from tf_fused_ops.remapper.softmax import Softmax, below_cast, scaled_op, sizes_of

_PRODUCTS = ("Einsum", "BatchMatMulV2")


class Attention(Softmax):
    """softmax(where(mask, query key^T * scale, masked)) value.

    Variants, by attribute, besides those of the softmax:
        to_scores, to_output: How the products are spelled: ("Einsum", equation, whether key or
            value come first), or ("BatchMatMulV2", whether the key is transposed by an op of its
            own).
        heads_first: Whether heads are a dimension of the batch, not beside the depth.
        rank: That of the operands.
    """

    family = "attention"
    operands: ClassVar = {"query": (), "key": (), "value": (), "mask": ()}
    differentiable = ("query", "key", "value")
    fused_ops = ("TfFusedOps>Attention", "TfFusedOps>AttentionGrad")

    def variants(self, view, anchor):
        for attrs in super().variants(view, anchor):
            # Where nothing is kept, the fused op's keys count alike.
            if attrs["zeroed"]:
                continue
            source = below_cast(anchor.inputs[0].op)
            product = scaled_op(source, attrs)
            if attrs["scaled"]:
                product = _product_under(view, product)
            if product is None or product.type not in _PRODUCTS:
                continue
            spellings = []
            for output in _products_over(view, anchor, attrs):
                spellings += [s for s in _spellings(product, output) if s not in spellings]
            for spelling in spellings:
                yield attrs | spelling | {"rank": product.inputs[0].shape.rank}

    def present(self, attrs):
        names = ("query", "key", "value")
        return (*names, "mask") if attrs["masked"] else names

    def operand_shape(self, name, attrs):
        return None if name == "mask" else [None] * attrs["rank"]

    def stock(self, attrs, query, key, value, mask=None):
        x = _product(attrs["to_scores"], query, key, True)
        y = super().stock(attrs, x, mask)["y"]
        return {"y": _product(attrs["to_output"], y, value, False)}

    def inner_shape(self, match, dtype):
        queries, keys = (tf.shape(match.operands[name], dtype) for name in ("query", "key"))
        if match.attrs["heads_first"]:
            return tf.concat([queries[:-1], keys[-2:-1]], 0)
        return tf.stack([queries[0], queries[2], queries[1], keys[1]])

    def check(self, match):
        attrs, operands = match.attrs, match.operands
        query, key, value = (operands[name] for name in ("query", "key", "value"))
        queries, keys = sizes_of(query), sizes_of(key)
        if attrs["heads_first"]:
            leading = queries[:-2]
            # Products of batches broadcast; letters of an einsum have one size, or it fails.
            for other in (key, value) if attrs["to_scores"][0] == "BatchMatMulV2" else ():
                if sizes_of(other)[:-2] != leading:
                    return f"{other.name} of shape {other.shape} may not go with {query.name}"
            sizes = [*leading, queries[-2], keys[-2]]
        else:
            sizes = [queries[0], queries[2], queries[1], keys[1]]
        if attrs["masked"]:
            reason = self.mask_objection(operands["mask"], sizes, f"the scores of {query.name}")
            if reason:
                return reason
        return self.number_objection(attrs, query)

    def fuse(self, match, training):
        attrs = match.attrs
        query = match.operands["query"]
        outputs = emit(
            self.fused_ops[0],
            *self._factors(match),
            self.mask_of(match),
            U=tf.float64 if query.dtype == tf.float64 else tf.float32,
            scale=self.scale_of(attrs),
            heads_first=attrs["heads_first"],
            name=match.fused_name(),
            **self.masked_of(attrs),
        )
        saved = tuple(outputs[name] for name in ("y", "largest", "inverse_sum"))
        return Fused({"y": outputs["y"]}, saved)

    def fuse_gradient(self, match, fused, dy, wanted):
        attrs = match.attrs
        outputs = emit(
            self.fused_ops[1],
            dy,
            *self._factors(match),
            *fused.saved,
            self.mask_of(match),
            scale=self.scale_of(attrs),
            heads_first=attrs["heads_first"],
            name=match.fused_name("_grad"),
            **self.masked_of(attrs),
        )
        return {name: outputs[f"{name}_grad"] for name in self.differentiable}

    def describe(self, match):
        attrs = match.attrs
        scores, output = (attrs[name][0] for name in ("to_scores", "to_output"))
        parts = [
            scores,
            attrs["scaled"],
            "SelectV2" if attrs["masked"] else None,
            "Softmax",
            output,
        ]
        query = match.operands["query"].op.name
        return " + ".join(filter(None, parts)), f"attention={match.fused_name()} query={query}"

    def _factors(self, match):
        return [match.operands[name] for name in ("query", "key", "value")]


def _product_under(view, scaling):
    """Returns the op whose output is scaled, or None."""
    found = [below_cast(tensor.op) for tensor in scaling.inputs if view.constant(tensor) is None]
    return found[0] if len(found) == 1 else None


def _products_over(view, anchor, attrs):
    """Returns the products of a softmax, which may be cast first."""
    tensors = [anchor.outputs[0]]
    if attrs["half"]:
        casts = (op for op in view.users(anchor.outputs[0]) if view.types[op] == "Cast")
        tensors = [op.outputs[0] for op in casts]
    return [op for t in tensors for op in view.users(t) if view.types[op] in _PRODUCTS]


class _Roles(NamedTuple):
    """What an einsum's operands are.

    Attributes:
        heads_first: Whether they have batch and heads in front of the other dimensions.
        swapped: Whether the right factor comes first.
    """

    heads_first: bool
    swapped: bool


def _spellings(product, output):
    """Yields {attribute: value} of the products' spellings."""
    if product.type != output.type or product.inputs[0].shape.rank is None:
        return
    rank = product.inputs[0].shape.rank
    if any(t.shape.rank != rank for op in (product, output) for t in op.inputs):
        return
    if product.type == "Einsum":
        equations = [op.get_attr("equation") for op in (product, output)]
        scores, values = (
            _einsum_roles(equation.decode(), to_scores)
            for equation, to_scores in zip(equations, (True, False), strict=True)
        )
        if scores and values and scores.heads_first == values.heads_first:
            yield {
                "to_scores": ("Einsum", equations[0], scores.swapped),
                "to_output": ("Einsum", equations[1], values.swapped),
                "heads_first": scores.heads_first,
            }
    elif rank >= 3 and not any(
        (product.get_attr("adj_x"), output.get_attr("adj_x"), output.get_attr("adj_y"))
    ):
        apart = not product.get_attr("adj_y")
        if not apart or product.inputs[1].op.type == "Transpose":
            yield {
                "to_scores": ("BatchMatMulV2", apart),
                "to_output": ("BatchMatMulV2", False),
                "heads_first": True,
            }


def _einsum_roles(equation, to_scores):
    """Returns the _Roles of an equation that makes scores, or that sums values by weights, or
    None."""
    inputs, _, result = equation.partition("->")
    factors = inputs.split(",")
    if len(factors) != 2 or not (inputs.replace(",", "") + result).isalpha():
        return None
    for swapped, (left, right) in ((False, factors), (True, factors[::-1])):
        for heads_first in (False, True):
            if (left, right, result) == _letters(left, right, heads_first, to_scores):
                return _Roles(heads_first, swapped)
    return None


def _letters(left, right, heads_first, to_scores):
    """Returns the letters that factors and result of a product of attention have, if the left
    factor has these and the right one a new one where it has to; or None."""
    if len(left) != len(right) or len(left) < 3 or (not heads_first and len(left) != 4):
        return None
    if to_scores:
        # left is the query, right the key.
        if heads_first:
            *batch, queries, depth = left
            keys = right[-2]
            found = ([*batch, queries, depth], [*batch, keys, depth], [*batch, queries, keys])
        else:
            b, queries, h, depth = left
            keys = right[1]
            found = ([b, queries, h, depth], [b, keys, h, depth], [b, h, queries, keys])
    elif heads_first:
        *batch, queries, keys = left
        depth = right[-1]
        found = ([*batch, queries, keys], [*batch, keys, depth], [*batch, queries, depth])
    else:
        b, h, queries, keys = left
        depth = right[3]
        found = ([b, h, queries, keys], [b, keys, h, depth], [b, queries, h, depth])
    distinct = len(set(left + right)) == len(left) + 1
    return tuple("".join(letters) for letters in found) if distinct else None


def _product(spelling, left, right, to_scores):
    """Computes a product as its spelling says."""
    if spelling[0] == "Einsum":
        _, equation, swapped = spelling
        inputs = [right, left] if swapped else [left, right]
        return tf.raw_ops.Einsum(inputs=inputs, equation=equation)
    _, apart = spelling
    if apart:
        rank = right.shape.rank
        right = tf.transpose(right, [*range(rank - 2), rank - 1, rank - 2])
    return tf.raw_ops.BatchMatMulV2(x=left, y=right, adj_y=to_scores and not apart)
