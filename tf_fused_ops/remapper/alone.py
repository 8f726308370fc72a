"""Fuses convolutions that no rule has taken and that stock TensorFlow has no kernel for.

On a CPU that is gradients of grouped and of dilated convolutions, for some dtypes or without
oneDNN, and dilated convolutions of volumes. Dilated ones of images are fused with them, since a
tape outside would ask for such gradients.
"""

from tf_fused_ops.remapper.conv3d import Conv3DAct
from tf_fused_ops.remapper.convolution import Conv2DAct
from tf_fused_ops.remapper.emission import emit

# Where gradient ops take the sizes of what they are the gradient of.
SIZES = {
    "Conv2DBackpropInput": 0,
    "Conv2DBackpropFilter": 1,
    "Conv3DBackpropInputV2": 0,
    "Conv3DBackpropFilterV2": 1,
}
_OPERANDS = ("input", "filters")


def fuse_alone(op, kind):
    """Emits the fused op for a convolution or for one of its gradients.

    Args:
        op: The stock op. Sizes that it takes are those of a tensor at hand.
        kind: What kind of convolution it is, in words.

    Returns:
        (The tensor that replaces its output, what is fused in words).
    """
    rule = Conv3DAct() if op.type.startswith("Conv3D") else Conv2DAct()
    attrs = {name: op.get_attr(name) for name in rule.captured[rule.anchor]}
    if rule.anchor == "Conv3D":
        del attrs["data_format"]  # there is one only
    attrs |= {"activation": "none", "name": f"{op.name}_fused"}
    forward, gradient = rule.fused_ops
    if op.type == rule.anchor:
        y = emit(forward, *op.inputs, [], [], *rule.further_inputs(None), **attrs)["y"]
        return y, f"Fuse {kind} {rule.anchor}:  contraction={op.name}"
    place, operands = SIZES[op.type], list(op.inputs)
    sizes = operands[place]
    operands[place] = sizes.op.inputs[sizes.value_index]
    input, filters, dy = operands
    name = _OPERANDS[place]
    switches = {f"{other}_gradient": other == name for other in (*_OPERANDS, "bias", "side_input")}
    found = emit(gradient, dy, input, filters, [], **switches, **attrs)[f"{name}_grad"]
    return found, f"Fuse gradient of {kind} {rule.anchor}: {name}={op.name}"
