"""The rule for leaky relus with a learned slope."""

from typing import ClassVar

import tensorflow as tf

from tf_fused_ops.remapper.emission import emit
from tf_fused_ops.remapper.rule import Fused, Rule


class Prelu(Rule):
    """relu(x) - alpha * relu(-x).

    Variants, by attribute:
        negated: Whether it is written as relu(x) + -alpha * relu(-x), as in `keras.layers.PReLU`.
    """

    family = "prelu"
    anchor = "Neg"
    operands: ClassVar = {"x": (), "alpha": ()}
    differentiable = ("x", "alpha")
    fused_ops = ("TfFusedOps>Prelu", "TfFusedOps>PreluGrad")

    def default_attrs(self):
        return super().default_attrs() | {"negated": True}

    def variants(self, view, anchor):
        for negated in (True, False):
            yield {"negated": negated}

    def stock(self, attrs, x, alpha):
        if attrs["negated"]:
            return {"y": tf.nn.relu(x) + -alpha * tf.nn.relu(-x)}
        return {"y": tf.nn.relu(x) - alpha * tf.nn.relu(-x)}

    def check(self, match):
        x, alpha = (match.operands[name] for name in ("x", "alpha"))
        if x.shape.rank is None or not alpha.shape.is_fully_defined():
            return f"the shapes of {x.name} and {alpha.name} are not known"
        sizes = alpha.shape.as_list()
        while sizes and sizes[0] == 1:
            del sizes[0]
        fits = alpha.shape.rank <= x.shape.rank
        if not fits or sizes != x.shape.as_list()[x.shape.rank - len(sizes) :]:
            return (
                f"{alpha.name} of shape {alpha.shape} is not of the last dimensions of "
                f"{x.name}, which has shape {x.shape}"
            )
        return None

    def fuse(self, match, training):
        return Fused(self._emit(match, 0, match.fused_name()))

    def fuse_gradient(self, match, fused, dy, wanted):
        found = self._emit(match, 1, match.fused_name("_grad"), dy)
        return {name: found[f"{name}_grad"] for name in wanted}

    def _emit(self, match, index, name, *gradients):
        operands = [match.operands[name] for name in ("x", "alpha")]
        return emit(self.fused_ops[index], *gradients, *operands, name=name)

    def describe(self, match):
        y, x = match.outputs["y"].op.name, match.operands["x"].op.name
        return "Prelu", f"activation={y} input={x}"
