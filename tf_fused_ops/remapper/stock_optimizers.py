"""Rules for formulas of optimizers that TensorFlow has ops for, where `UpdateVariable` has no
kernel."""

from typing import ClassVar

from tf_fused_ops.remapper.emission import constant
from tf_fused_ops.remapper.optimizers import Adam, Momentum, NesterovMomentum

# How far the op may be from a rate of Adam's, of which it is given the complement.
_MAX_ROUNDING = 1e-4


class StockMomentum(Momentum):
    """As momentum, by TensorFlow's op."""

    fused_ops = ("ResourceApplyKerasMomentum",)
    fused_attrs: ClassVar = {"use_locking": True}

    def inputs(self, match):
        names = ("variable", "velocity", "rate", "gradient", "momentum")
        return [match.operands[name] for name in names]


class StockNesterovMomentum(StockMomentum, NesterovMomentum):
    """As Nesterov's momentum, by TensorFlow's op."""

    fused_attrs: ClassVar = {"use_locking": True, "use_nesterov": True}


class StockAdam(Adam):
    """As Adam, by TensorFlow's op."""

    fused_ops = ("ResourceApplyAdam",)
    fused_attrs: ClassVar = {"use_locking": True}
    constants = ("m_rate", "v_rate")

    def stock(self, attrs, **others):
        return super().stock(attrs, **others, **attrs)

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


UPDATES = (StockMomentum(), StockNesterovMomentum(), StockAdam())


def _complement(rate):
    """Returns 1 - rate as the fused op computes it."""
    return rate.dtype.type(1) - rate
