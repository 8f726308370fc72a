"""Rules for batch normalization with side input and activation, around TensorFlow's own op."""

import abc
from typing import ClassVar

import tensorflow as tf

from tf_fused_ops.remapper.emission import emit
from tf_fused_ops.remapper.rule import AddSideInput, Fused, Rule


class BatchNorm(Rule):
    """act(batch_norm(x)), however stock code spells the normalization."""

    differentiable = ("x", "scale", "offset")
    fused_ops = ("TfFusedOps>BatchNormAct", "TfFusedOps>BatchNormActGrad")

    @abc.abstractmethod
    def normalize(self, attrs, **operands):
        """The stock normalization, as a dict of outputs; "y" is the normalized tensor."""

    @abc.abstractmethod
    def in_training(self, match):
        """Returns whether the statistics are those of the batch."""

    @abc.abstractmethod
    def arguments(self, match):
        """Returns (vectors, attributes): what the fused op takes besides x and the side input.

        The vectors are scale, offset, mean, variance; the attributes include `training` and
        `data_format`.
        """

    @abc.abstractmethod
    def statistics(self, fused):
        """Returns the fused op's outputs for those of the stock normalization but y, by name."""

    def check_channels(self, match):
        """Returns why what is normalized is not channels as the fused ops know them, or None."""
        return self.check(match)

    def scalable(self, attrs, shapes):
        return True

    def stock(self, attrs, **operands):
        outputs = self.normalize(attrs, **operands)
        return {**outputs, "y": self.activate(outputs["y"], attrs)}

    def takes_moments_of(self, match):
        return match.operands["x"] if self.in_training(match) else None

    def fuse(self, match, training):
        vectors, attrs = self.arguments(match)
        side, moments = self._side(match), match.attrs["moments"]
        save_mask = training and bool(side) and self.activation.name == "relu"
        fused = emit(
            self.fused_ops[0],
            match.operands["x"],
            *vectors,
            side,
            [] if moments is None else [moments],
            save_mask=save_mask,
            name=match.fused_name(),
            **attrs,
            **self._activation_attrs(match),
        )
        masks = [fused["mask"]] if save_mask else []
        saved = (fused["saved_mean"], fused["saved_inv_std"], masks, vectors[:2], attrs)
        return Fused({"y": fused["y"], **self.statistics(fused)}, saved)

    def fuse_gradient(self, match, fused, dy, wanted):
        mean, inv_std, masks, scale_and_offset, attrs = fused.saved
        side = [] if masks or self.activation.name == "none" else self._side(match)
        gradients = emit(
            self.fused_ops[1],
            dy,
            match.operands["x"],
            *scale_and_offset,
            mean,
            inv_std,
            side,
            masks,
            training=attrs["training"],
            data_format=attrs["data_format"],
            side_input_gradient="side_input" in wanted,
            name=match.fused_name("_grad"),
            **self._activation_attrs(match),
        )
        return {name: gradients[f"{name}_grad"] for name in wanted}

    def describe(self, match):
        side = match.operands.get("side_input")
        invalidated = match.node(match.attrs["sum"]).name if side is not None else "<none>"
        return (
            f"{self.activation.label} with FusedBatchNorm",
            f"activation={match.outputs['y'].op.name} "
            f"side_input={'<none>' if side is None else side.op.name} invalidated={invalidated} "
            f"fused_batch_norm={match.node(self.anchor).name}",
        )

    def _side(self, match):
        return [match.operands[name] for name in ("side_input",) if name in match.operands]

    def _activation_attrs(self, match):
        attrs = {"activation": self.activation.name}
        return attrs | ({"alpha": match.attrs["alpha"]} if "alpha" in match.attrs else {})


class AddAct(AddSideInput):
    """act(batch_norm(x) + side_input)."""

    def stock(self, attrs, side_input, **operands):
        outputs = self.normalize(attrs, **operands)
        total = self.add(attrs, outputs["y"], side_input)
        return {**outputs, "y": self.activate(total, attrs)}

    def check(self, match):
        return self.check_side_input(match, match.operands["x"]) or super().check(match)


class BatchNormAct(BatchNorm):
    """act(fused_batch_norm(x))."""

    family = "batch_norm"
    anchor = "FusedBatchNormV3"
    operands: ClassVar = {"x": (4,), "scale": (1,), "offset": (1,), "mean": (1,), "variance": (1,)}
    captured: ClassVar = {
        "FusedBatchNormV3": {
            "epsilon": 1e-3,
            "exponential_avg_factor": 1.0,
            "data_format": b"NHWC",
            "is_training": True,
        }
    }

    def operand_dtype(self, name, dtype, attrs):
        # The statistics of a half precision batch norm are float32.
        return dtype if name in ("x", "side_input") else tf.float32

    def normalize(self, attrs, x, scale, offset, mean, variance):
        y, new_mean, new_variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=x,
            scale=scale,
            offset=offset,
            mean=mean,
            variance=variance,
            **{name: attrs[name] for name in BatchNormAct.captured["FusedBatchNormV3"]},
        )
        return {"y": y, "new_mean": new_mean, "new_variance": new_variance}

    def in_training(self, match):
        return match.attrs["is_training"]

    def check(self, match):
        data_format = match.attrs["data_format"]
        if data_format not in (b"NHWC", b"NCHW"):
            return f"data format {data_format.decode()} is not supported"
        return None

    def arguments(self, match):
        attrs = match.attrs
        vectors = [match.operands[name] for name in ("scale", "offset", "mean", "variance")]
        if attrs["is_training"] and attrs["exponential_avg_factor"] == 1.0:
            # Stock then ignores the moving statistics, which may be empty.
            vectors[2:] = [tf.zeros_like(vectors[0])] * 2
        return vectors, {
            "epsilon": attrs["epsilon"],
            "momentum": 1.0 - attrs["exponential_avg_factor"],
            "training": self.in_training(match),
            "unbiased": True,
            "data_format": attrs["data_format"],
        }

    def statistics(self, fused):
        return {"new_mean": fused["new_mean"], "new_variance": fused["new_variance"]}


class BatchNormAddAct(AddAct, BatchNormAct):
    """act(fused_batch_norm(x) + side_input)."""

    family = "batch_norm_add"
    operands: ClassVar = BatchNormAct.operands | {"side_input": (4,)}
    differentiable = (*BatchNormAct.differentiable, "side_input")
