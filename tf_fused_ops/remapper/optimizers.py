"""Rules for the formulas of optimizers, as Keras and others write them."""

from typing import ClassVar

import tensorflow as tf

from tf_fused_ops.remapper import rows
from tf_fused_ops.remapper.variable_update import FormulaUpdate, VariableUpdate


class GradientDescent(VariableUpdate):
    """variable -= rate * gradient."""

    family = "gradient_descent"
    label_text = "gradient descent"
    anchor = "AssignSubVariableOp"
    resources = ("variable",)
    operands: ClassVar = {"variable": (0,), "rate": (0,), "gradient": ()}
    fused_ops = ("ResourceApplyGradientDescent",)
    fused_attrs: ClassVar = {"use_locking": True}

    def stock(self, attrs, variable, rate, gradient):
        step = tf.raw_ops.Mul(x=gradient, y=rate)
        return {"variable": tf.raw_ops.AssignSubVariableOp(resource=variable, value=step)}


class Momentum(FormulaUpdate):
    """velocity = momentum * velocity - rate * gradient; variable += velocity."""

    family = "momentum"
    label_text = "gradient descent with momentum"
    anchor = "AssignAddVariableOp"
    states = ("velocity",)
    factors = ("rate", "momentum")

    def stock(self, attrs, variable, velocity, rate, momentum, gradient):
        decayed = self._decayed(self.read(velocity, gradient), rate, momentum, gradient)
        kept = tf.raw_ops.AssignVariableOp(resource=velocity, value=decayed)
        step = self._step(self.read(velocity, gradient), rate, momentum, gradient)
        changed = tf.raw_ops.AssignAddVariableOp(resource=variable, value=step)
        return {"velocity": kept, "variable": changed}

    def _decayed(self, velocity, rate, momentum, gradient):
        decayed = tf.raw_ops.Mul(x=velocity, y=momentum)
        return rows.sub(decayed, rows.mul(gradient, rate))

    def _step(self, velocity, rate, momentum, gradient):
        return velocity


class NesterovMomentum(Momentum):
    """As momentum, but variable += momentum * velocity - rate * gradient."""

    family = "nesterov_momentum"
    label_text = "gradient descent with Nesterov's momentum"

    def _step(self, velocity, rate, momentum, gradient):
        return self._decayed(velocity, rate, momentum, gradient)


class Adam(FormulaUpdate):
    """variable -= alpha * m / (sqrt(v) + epsilon), m and v being moments of the gradient.

    First m += m_rate * (gradient - m) and v += v_rate * (gradient^2 - v). The rates are 1 - beta
    for both betas; alpha is the learning rate with the correction of the moments' bias. Kingma and
    Ba, "Adam: a method for stochastic optimization", 2015, end of section 2.
    """

    family = "adam"
    label_text = "Adam"
    anchor = "AssignSubVariableOp"
    states = ("m", "v")
    factors = ("alpha", "m_rate", "v_rate", "epsilon")

    def stock(self, attrs, variable, m, v, alpha, m_rate, v_rate, epsilon, gradient):
        kept = self._moments(m, v, m_rate, v_rate, gradient)
        return kept | self._move(variable, m, v, alpha, epsilon, gradient)

    def _moments(self, m, v, m_rate, v_rate, gradient):
        return {
            "m": self.approach(m, gradient, m_rate),
            "v": self.approach(v, rows.square(gradient), v_rate),
        }

    def _move(self, variable, m, v, alpha, epsilon, gradient):
        step = tf.raw_ops.Mul(x=self.read(m, gradient), y=alpha)
        root = tf.raw_ops.AddV2(x=tf.raw_ops.Sqrt(x=self.read(v, gradient)), y=epsilon)
        step = tf.raw_ops.RealDiv(x=step, y=root)
        return {"variable": tf.raw_ops.AssignSubVariableOp(resource=variable, value=step)}


class Adamw(Adam):
    """As Adam, after variable -= variable * decay * rate.

    Loshchilov and Hutter, arXiv:1711.05101.
    """

    family = "adamw"
    label_text = "AdamW"
    factors = (*Adam.factors, "decay", "rate")

    def stock(self, attrs, variable, decay, rate, **adam):
        lost = tf.raw_ops.Mul(x=self.read(variable, adam["gradient"]), y=decay)
        lost = tf.raw_ops.Mul(x=lost, y=rate)
        kept = {"decayed": tf.raw_ops.AssignSubVariableOp(resource=variable, value=lost)}
        return kept | super().stock(attrs, variable, **adam)


class Amsgrad(Adam):
    """As Adam, but with the largest v so far (Reddi et al., arXiv:1904.09237)."""

    family = "amsgrad"
    label_text = "Adam with the largest second moment"
    states = (*Adam.states, "largest")

    def stock(self, attrs, variable, m, v, largest, alpha, m_rate, v_rate, epsilon, gradient):
        kept = self._moments(m, v, m_rate, v_rate, gradient)
        larger = tf.raw_ops.Maximum(x=self.read(largest, gradient), y=self.read(v, gradient))
        kept["largest"] = tf.raw_ops.AssignVariableOp(resource=largest, value=larger)
        return kept | self._move(variable, m, largest, alpha, epsilon, gradient)


class Nadam(Adam):
    """As Adam, with Nesterov's momentum (Dozat, 2016)."""

    family = "nadam"
    label_text = "Adam with Nesterov's momentum"
    factors = (
        *("rate", "m_rate", "v_rate", "epsilon", "m_share", "m_correction"),
        *("gradient_share", "gradient_correction", "v_correction"),
    )

    def stock(
        self, attrs, variable, m, v, rate, m_rate, v_rate, epsilon, m_share, m_correction,
        gradient_share, gradient_correction, v_correction, gradient,
    ):  # fmt: skip
        kept = self._moments(m, v, m_rate, v_rate, gradient)
        ahead = tf.raw_ops.Mul(x=m_share, y=self.read(m, gradient))
        ahead = tf.raw_ops.RealDiv(x=ahead, y=m_correction)
        now = rows.div(rows.mul(gradient_share, gradient), gradient_correction)
        step = tf.raw_ops.Mul(x=rows.add(ahead, now), y=rate)
        square = tf.raw_ops.RealDiv(x=self.read(v, gradient), y=v_correction)
        root = tf.raw_ops.AddV2(x=tf.raw_ops.Sqrt(x=square), y=epsilon)
        step = tf.raw_ops.RealDiv(x=step, y=root)
        changed = tf.raw_ops.AssignSubVariableOp(resource=variable, value=step)
        return kept | {"variable": changed}


class Adamax(FormulaUpdate):
    """As Adam, by the infinity norm (Kingma and Ba, arXiv:1412.6980, section 7.1)."""

    family = "adamax"
    label_text = "Adam by the infinity norm"
    anchor = "AssignSubVariableOp"
    states = ("m", "norm")
    factors = ("rate", "m_rate", "decay", "epsilon", "correction")

    def stock(self, attrs, variable, m, norm, rate, m_rate, decay, epsilon, correction, gradient):
        kept = {"m": self.approach(m, gradient, m_rate)}
        decayed = tf.raw_ops.Mul(x=decay, y=self.read(norm, gradient))
        larger = tf.raw_ops.Maximum(x=decayed, y=rows.dense(rows.absolute(gradient)))
        kept["norm"] = tf.raw_ops.AssignVariableOp(resource=norm, value=larger)
        step = tf.raw_ops.Mul(x=rate, y=self.read(m, gradient))
        divisor = tf.raw_ops.AddV2(x=self.read(norm, gradient), y=epsilon)
        step = tf.raw_ops.RealDiv(x=step, y=tf.raw_ops.Mul(x=correction, y=divisor))
        changed = tf.raw_ops.AssignSubVariableOp(resource=variable, value=step)
        return kept | {"variable": changed}


class Rmsprop(FormulaUpdate):
    """variable -= rate * gradient / sqrt(square + epsilon), square being a mean of gradient^2.

    First square = decay * square + gain * gradient^2. Hinton, "Neural networks for machine
    learning", lecture 6e, 2012.
    """

    family = "rmsprop"
    label_text = "RMSprop"
    anchor = "AssignSubVariableOp"
    states = ("square",)
    factors = ("rate", "decay", "gain", "epsilon")

    def stock(self, attrs, variable, square, rate, decay, gain, epsilon, gradient):
        kept = self.mix(square, rows.square(gradient), decay, gain)
        step = self._step(gradient, rate, self.read(square, gradient), epsilon)
        changed = rows.assign_sub(variable, step)
        return {"square": kept, "variable": changed}

    def _step(self, gradient, rate, variance, epsilon):
        root = tf.raw_ops.Sqrt(x=tf.raw_ops.AddV2(x=variance, y=epsilon))
        return rows.div(rows.mul(rate, gradient), root)


class RmspropMomentum(Rmsprop):
    """As RMSprop, but velocity = momentum * velocity + step; variable -= velocity."""

    family = "rmsprop_momentum"
    label_text = "RMSprop with momentum"
    states = ("square", "velocity")
    factors = (*Rmsprop.factors, "momentum")

    def stock(
        self, attrs, variable, square, velocity, rate, decay, gain, epsilon, momentum, gradient
    ):
        kept = self.mix(square, rows.square(gradient), decay, gain)
        step = self._step(gradient, rate, self.read(square, gradient), epsilon)
        return {"square": kept} | self._move(variable, velocity, step, momentum)

    def _move(self, variable, velocity, step, momentum):
        old = tf.raw_ops.Mul(x=momentum, y=self.read(velocity, step))
        kept = tf.raw_ops.AssignVariableOp(resource=velocity, value=rows.add(old, step))
        new = self.read(velocity, step)
        changed = tf.raw_ops.AssignSubVariableOp(resource=variable, value=new)
        return {"velocity": kept, "variable": changed}


class CenteredRmsprop(Rmsprop):
    """As RMSprop, but with square - mean^2, mean being one of the gradient.

    Also mean = decay * mean + gain * gradient. Graves, arXiv:1308.0850, section 4.2.
    """

    family = "centered_rmsprop"
    label_text = "centered RMSprop"
    states = ("square", "mean")
    constants = ("decay", "gain")

    def stock(self, attrs, variable, square, mean, rate, epsilon, gradient):
        kept, variance = self._moments(attrs, square, mean, gradient)
        step = self._step(gradient, rate, variance, epsilon)
        changed = rows.assign_sub(variable, step)
        return kept | {"variable": changed}

    def _moments(self, attrs, square, mean, gradient):
        mixed = {"square": (square, rows.square(gradient)), "mean": (mean, gradient)}
        kept = {
            name: self.mix(handle, value, attrs["decay"], attrs["gain"])
            for name, (handle, value) in mixed.items()
        }
        bias = tf.raw_ops.Square(x=self.read(mean, gradient))
        return kept, tf.raw_ops.Sub(x=self.read(square, gradient), y=bias)


class CenteredRmspropMomentum(CenteredRmsprop, RmspropMomentum):
    """As centered RMSprop, with the velocity of RMSprop with momentum."""

    family = "centered_rmsprop_momentum"
    label_text = "centered RMSprop with momentum"
    states = ("square", "mean", "velocity")
    factors = RmspropMomentum.factors

    def stock(self, attrs, variable, square, mean, velocity, rate, epsilon, momentum, gradient):
        kept, variance = self._moments(attrs, square, mean, gradient)
        step = self._step(gradient, rate, variance, epsilon)
        return kept | self._move(variable, velocity, step, momentum)


class Adagrad(FormulaUpdate):
    """square += gradient^2; variable -= rate * gradient / sqrt(square + epsilon)."""

    family = "adagrad"
    label_text = "Adagrad"
    anchor = "AssignSubVariableOp"
    states = ("square",)
    factors = ("rate", "epsilon")

    def stock(self, attrs, variable, square, rate, epsilon, gradient):
        squared = rows.square(gradient)
        kept = rows.assign_add(square, squared)
        step = rows.mul(rate, gradient)
        root = tf.raw_ops.Sqrt(x=tf.raw_ops.AddV2(x=self.read(square, gradient), y=epsilon))
        step = rows.div(step, root)
        changed = rows.assign_sub(variable, step)
        return {"square": kept, "variable": changed}


class Adadelta(FormulaUpdate):
    """variable -= rate * step, step being gradient * sqrt(step_square + e) / sqrt(square + e).

    First square = decay * square + gain * gradient^2, then likewise step_square of step^2. Zeiler,
    arXiv:1212.5701.
    """

    family = "adadelta"
    label_text = "Adadelta"
    anchor = "AssignAddVariableOp"
    states = ("square", "step_square")
    factors = ("rate", "decay", "gain", "epsilon")
    constants = factors[1:]

    def stock(self, attrs, variable, square, step_square, rate, gradient):
        decay, gain = attrs["decay"], attrs["gain"]
        kept = {"square": self.mix(square, rows.square(gradient), decay, gain)}
        step = rows.mul(self._norm(step_square, attrs, gradient), gradient)
        step = rows.negative(rows.div(step, self._norm(square, attrs, gradient)))
        kept["step_square"] = self.mix(step_square, rows.square(step), decay, gain)
        step = rows.mul(rate, step)
        changed = rows.assign_add(variable, step)
        return kept | {"variable": changed}

    def _norm(self, handle, attrs, like):
        return tf.raw_ops.Sqrt(x=tf.raw_ops.AddV2(x=self.read(handle, like), y=attrs["epsilon"]))


class Lion(FormulaUpdate):
    """variable -= rate * sign(m_share * m + gradient_share * gradient).

    Then m = decay * m + gain * gradient. Chen et al., arXiv:2302.06675.
    """

    family = "lion"
    label_text = "Lion"
    anchor = "AssignVariableOp"
    states = ("m",)
    factors = ("rate", "m_share", "gradient_share", "decay", "gain")

    def stock(self, attrs, variable, m, rate, m_share, gradient_share, decay, gain, gradient):
        old = tf.raw_ops.Mul(x=self.read(m, gradient), y=m_share)
        ahead = rows.add(old, rows.mul(gradient, gradient_share))
        step = tf.raw_ops.Mul(x=rate, y=tf.raw_ops.Sign(x=ahead))
        changed = tf.raw_ops.AssignSubVariableOp(resource=variable, value=step)
        return {"variable": changed, "m": self.mix(m, gradient, decay, gain)}


UPDATES = (
    *(GradientDescent(), Momentum(), NesterovMomentum(), Adam(), Adamw(), Amsgrad()),
    *(Nadam(), Adamax(), Rmsprop(), RmspropMomentum(), CenteredRmsprop()),
    *(CenteredRmspropMomentum(), Adagrad(), Adadelta(), Lion()),
)
