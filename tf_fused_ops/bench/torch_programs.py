"""The cases in PyTorch, as its users write them: channels last where TensorFlow's are."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tf_fused_ops.bench import grid
from tf_fused_ops.bench.cases import (
    EPSILON,
    BatchNormCase,
    ConvCase,
    ConvTransposeCase,
    DecoderCase,
    MatMulCase,
    QuantizedCase,
    RecurrentCase,
    WeightOnlyCase,
)
from tf_fused_ops.bench.stacks import POOL

_ACTIVATIONS = {
    "none": lambda y: y,
    "relu": F.relu,
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu_erf": F.gelu,
    "silu": F.silu,
}


class Layout(NamedTuple):
    """How a tensor of TensorFlow's layout becomes PyTorch's, and back."""

    to_torch: Callable
    from_torch: Callable


AS_IS = Layout(lambda v: v, lambda v: v)
# A permuted view of [batch, height, width, channels] is PyTorch's channels last.
CHANNELS_LAST = Layout(lambda v: v.permute(0, 3, 1, 2), lambda v: v.permute(0, 2, 3, 1))
FILTERS = Layout(lambda v: v.permute(3, 2, 0, 1).contiguous(), lambda v: v.permute(2, 3, 1, 0))
FILTERS_CHANNELS_LAST = Layout(
    lambda v: v.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last),
    FILTERS.from_torch,
)
TRANSPOSED = Layout(lambda v: v.t().contiguous(), lambda v: v.t())


def _swapped(v):
    """The columns of a GRU's first two gates in each other's place."""
    update, reset, new = v.chunk(3, -1)
    return torch.cat([reset, update, new], -1)


SWAPPED = Layout(_swapped, _swapped)
SWAPPED_TRANSPOSED = Layout(
    lambda v: TRANSPOSED.to_torch(_swapped(v)), lambda v: _swapped(TRANSPOSED.from_torch(v))
)
_LAYERS = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "simple_rnn": torch.nn.RNN}


class Program(NamedTuple):
    """A function, and the layouts of its inputs and its output.

    `prepare` is called once, in inference: of the inputs it makes what the function takes.
    `compiles` says whether it is compiled in less than minutes.
    """

    forward: Callable
    inputs: list
    output: Layout
    prepare: Callable = lambda *inputs: inputs
    compiles: bool = True


def use_threads(count):
    """Sets the number of threads of an op."""
    torch.set_num_threads(count)


class Programs:
    """One PyTorch peer.

    Args:
        peer: "torch" or "torch_compile".
        device: "cpu" or "gpu".
    """

    def __init__(self, peer, device="cpu"):
        self._compiles = peer == "torch_compile"
        self._device = "cuda" if device == "gpu" else "cpu"
        # As in TensorFlow.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    def wait(self):
        """Returns once all that was called is done."""
        if self._device == "cuda":
            torch.cuda.synchronize()

    def load(self, case, mode):
        """Prepares a case, as `tensorflow_programs.Programs.load` does."""
        program = _program(case)
        if self._compiles and not program.compiles:
            raise NotImplementedError(f"{case.title()} takes minutes to compile")
        layouts = [*program.inputs, program.output]
        *inputs, dy = (
            self._tensor(layout, value, dtype)
            for layout, value, dtype in zip(
                layouts, grid.inputs(case), grid.dtypes(case), strict=True
            )
        )
        forward = self.decorate(program.forward)
        if mode == "forward":
            inputs = program.prepare(*inputs)

            @torch.inference_mode()
            def call():
                return [forward(*inputs)]
        else:
            for value in inputs:
                value.requires_grad_()

            def call():
                y = forward(*inputs)
                return [y, *torch.autograd.grad(y, inputs, dy)]

        return call, [
            _array(layout.from_torch(value.detach()))
            for layout, value in zip([program.output, *program.inputs], call(), strict=False)
        ]

    def load_stack(self, layers):
        """Prepares a stack, as `tensorflow_programs.Programs.load_stack` does."""
        programs = [layer if layer == POOL else _program(layer) for layer in layers]
        x, weights = None, []
        for layer, program in zip(layers, programs, strict=True):
            if layer == POOL:
                continue
            values = [
                layout.to_torch(
                    torch.from_numpy(value).to(self._device, getattr(torch, layer.dtype))
                )
                for layout, value in zip(program.inputs, grid.inputs(layer)[:-1], strict=True)
            ]
            x = values[0] if x is None else x
            weights += [value.requires_grad_() for value in values[1:]]
        grid.inputs.cache_clear()

        def forward(x, weights):
            rest, y = iter(weights), x
            for program in programs:
                if program == POOL:
                    y = F.max_pool2d(y, 2)
                else:
                    y = program.forward(y, next(rest), next(rest))
            return y.square().mean()

        loss = self.decorate(forward)
        return lambda: torch.autograd.grad(loss(x, weights), weights)

    def _tensor(self, layout, value, dtype):
        """An array, in PyTorch's layout, on the device."""
        return layout.to_torch(torch.from_numpy(value).to(self._device, getattr(torch, dtype)))

    def decorate(self, function):
        """The function as it is, or compiled: an error where it cannot be compiled whole."""
        if not self._compiles:
            return function
        torch._dynamo.reset()
        return torch.compile(function, fullgraph=True, dynamic=False)


@functools.singledispatch
def _program(case):
    """The `Program` of a case."""
    raise NotImplementedError(f"there is no {case.title()} in PyTorch itself")


@_program.register
def _(case: ConvCase):
    last = case.layout == "NHWC"
    image, filters = (CHANNELS_LAST, FILTERS_CHANNELS_LAST) if last else (AS_IS, FILTERS)
    pads = case.pads()
    even = all(before == after for before, after in pads)
    padding = [before for before, _ in pads] if even else 0

    def forward(x, w, b):
        if not even:
            x = F.pad(x, [*pads[1], *pads[0]])
        y = F.conv2d(x, w, b, case.strides, padding, case.dilations, case.groups)
        return _ACTIVATIONS[case.act](y)

    return Program(forward, [image, filters, AS_IS], image)


@_program.register
def _(case: ConvTransposeCase):
    height, width = case.image
    # So much is cut off in front and behind, unless there must be more behind.
    padding = [before for before, _ in case.convolution().pads()]

    def forward(x, w, b):
        y = F.conv_transpose2d(x, w, b, case.strides, padding)
        return _ACTIVATIONS[case.act](y[:, :, :height, :width])

    return Program(forward, [CHANNELS_LAST, FILTERS_CHANNELS_LAST, AS_IS], CHANNELS_LAST)


@_program.register
def _(case: MatMulCase):
    def forward(a, b, bias):
        return _ACTIVATIONS[case.act](F.linear(a, b, bias))

    return Program(forward, [AS_IS, TRANSPOSED, AS_IS], AS_IS)


@_program.register
def _(case: BatchNormCase):
    image = CHANNELS_LAST if case.layout == "NHWC" else AS_IS

    def forward(x, scale, offset, *side):
        y = F.batch_norm(x, None, None, scale, offset, training=True, eps=EPSILON)
        return _ACTIVATIONS[case.act](y + side[0] if side else y)

    return Program(forward, [image, AS_IS, AS_IS, *([image] if case.side else [])], image)


@_program.register
def _(case: RecurrentCase):
    is_gru = case.cell == "gru"
    layer = _LAYERS[case.cell](case.features, case.units, batch_first=True, device="meta")

    def forward(x, kernel, recurrent_kernel, bias):
        biases = bias.unbind() if is_gru else (bias, torch.zeros_like(bias))
        # In the place of its own, at once: `torch.func.functional_call` takes 0.1 ms more.
        layer._flat_weights = [kernel, recurrent_kernel, *biases]
        return layer(x)[0]

    kernel, bias = (SWAPPED_TRANSPOSED, SWAPPED) if is_gru else (TRANSPOSED, AS_IS)
    return Program(forward, [AS_IS, kernel, kernel, bias], AS_IS)


@_program.register
def _(case: QuantizedCase):
    def prepare(a, b, b_scale, bias=None):
        # What `torch.ao.quantization.quantize_dynamic` makes of a Linear, with these weights.
        layer = torch.ao.nn.quantized.dynamic.Linear(case.k, case.n, dtype=torch.qint8)
        zeros = torch.zeros(case.n, dtype=torch.int64)
        scale = 1 / b_scale.double()
        weights = torch._make_per_channel_quantized_tensor(b, scale, zeros, axis=0)
        layer.set_weight_bias(weights, bias)
        return a, layer

    def forward(a, layer):
        return _ACTIVATIONS[case.act](layer(a))

    return Program(forward, [AS_IS, TRANSPOSED, AS_IS, *[AS_IS] * case.bias], AS_IS, prepare)


@_program.register
def _(case: WeightOnlyCase):
    if case.form != "matmul":
        raise NotImplementedError(f"{case.title()} is the same in another spelling")

    def prepare(a, b, scale, *others):
        if case.bits == 8:
            return a, b.T.contiguous(), (1 / scale).to(a.dtype), *others
        zero, _, *bias = others
        halves = torch.stack([b & 15, (b >> 4) & 15], -1).flatten(1)[:, : case.n]
        # Integers from 0 to 15, of which 8 is what stands for zero.
        integers = (halves.to(torch.int32) ^ 8).T.contiguous()
        weights = torch._convert_weight_to_int4pack_for_cpu(integers, 1)
        offset = -scale * zero
        return a, weights, torch.stack([scale, offset], -1).to(a.dtype), *bias

    def forward(a, weights, scale, *bias):
        if case.bits == 8:
            y = torch._weight_int8pack_mm(a, weights, scale)
        else:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(a, weights, case.group, scale)
        return _ACTIVATIONS[case.act](y + bias[0] if bias else y)

    inputs = 3 + 2 * (case.bits == 4) + case.bias
    return Program(forward, [AS_IS] * inputs, AS_IS, prepare)


@_program.register
def _(case: DecoderCase):
    def prepare(x, cache, scale, *weights):
        # Keys, and values, of each layer: [batch, heads, length, depth].
        parts = cache.permute(1, 2, 0, 4, 3, 5).contiguous()
        return x, [part.unbind() for part in parts.unbind()], scale, *weights

    def attend(x, part, position, query, key, value, output):
        """What is added to x; the keys and values of a layer are updated in place."""
        shape = (case.batch, -1, 1, case.depth)
        query, *new = (F.linear(x, w).view(shape) for w in (query, key, value))
        for cached, update in zip(part, new, strict=True):
            cached[:, :, position : position + 1] = update
        seen = (cached[:, :, : position + 1] for cached in part)
        y = F.scaled_dot_product_attention(query, *seen, enable_gqa=True)
        return F.linear(y.view(x.shape), output)

    def forward(first, cache, scale, *weights):
        def norm(x, scale):
            return F.rms_norm(x, [case.width], scale, EPSILON)

        y = torch.zeros_like(first)
        for position in range(case.length - case.steps, case.length):
            x = y + first
            for part, layer in zip(cache, case.by_layer(weights), strict=True):
                before, behind, *projections, gate, up, down = layer
                x = x + attend(norm(x, before), part, position, *projections)
                y = norm(x, behind)
                x = x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)
            y = norm(x, scale)
        return y

    layer = [AS_IS, AS_IS, *[TRANSPOSED] * len(case.matrices())]
    # All steps are unrolled: 145 s on two cores, for 4 layers and 32 steps.
    return Program(forward, [*[AS_IS] * 3, *layer * case.layers], AS_IS, prepare, compiles=False)


def _array(tensor):
    """As NumPy knows it: bfloat16 widened."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()
