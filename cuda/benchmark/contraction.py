"""Speed of the GPU's contractions, beside plain library calls, PyTorch eager and torch.compile.

    python cuda/benchmark/contraction.py [--dtype bfloat16] [--seconds 0.2] [--eager]

A dense layer with gelu is judged by the rate of its bare product (torch.matmul, which is cuBLAS) in
the same run, a convolution with bias and relu by cuDNN's own fused one; the training steps, forward
and all gradients, by PyTorch's. Needs PyTorch with CUDA and a GPU; TensorFlow is not used.
"""

import torch
from common import Bench, launchers

_cuda = launchers()
PRODUCTS = [  # rows, inputs and outputs of dense layers: BERT-base, BERT-large, GPT-2 XL, Llama 7B
    (16384, 768, 3072),
    (16384, 3072, 768),
    (16384, 1024, 4096),
    (8192, 1600, 6400),
    (8192, 4096, 11008),
]
CONVOLUTIONS = [  # batch, height and width, inputs, outputs, kernel, stride: of ResNet-50
    (256, 224, 3, 64, 7, 2),
    (256, 56, 64, 64, 3, 1),
    (256, 56, 64, 256, 1, 1),
    (256, 28, 128, 128, 3, 1),
    (256, 28, 256, 256, 3, 2),
    (256, 14, 256, 256, 3, 1),
    (256, 7, 512, 512, 3, 1),
]


class Contraction:
    """Tensors and operations that a dense layer and a convolution have in common."""

    def __init__(self, shape, x, filters, y_shape, activation, saves):
        self.shape, self.x, self.filters, self.activation = shape, x, filters, activation
        self.bias = torch.randn(filters.shape[-1], dtype=x.dtype, device="cuda")
        self.y, self.dy = (torch.randn(y_shape, dtype=x.dtype, device="cuda") for _ in range(2))
        self.pre_activation = torch.empty_like(self.y) if saves else None
        self.gradients = [torch.empty_like(t) for t in (x, filters, self.bias)]
        self.flops = 2 * self.y.numel() * filters.numel() // filters.shape[-1]

    def _options(self):
        stream = torch.cuda.current_stream().cuda_stream
        return {"activation": self.activation, "stream": stream}

    def forward(self):
        _cuda.conv_forward(
            *(self.shape, self.x, self.filters, self.y),
            bias=self.bias,
            pre_activation=self.pre_activation,
            **self._options(),
        )

    def step(self):
        """Forward and all gradients."""
        self.forward()
        names = ("input_gradient", "filters_gradient", "bias_gradient")
        _cuda.conv_gradient(
            *(self.shape, self.dy, self.x, self.filters),
            saved=self.y if self.pre_activation is None else self.pre_activation,
            **dict(zip(names, self.gradients, strict=True)),
            **self._options(),
        )

    def rate(self, time):
        """TFLOP/s."""
        return self.flops / time / 1e9


def products(dtype):
    """Yields a title, ours, the bare product, and PyTorch's function with its inputs and dy."""

    def layer(a, b, bias):
        return torch.nn.functional.gelu(torch.addmm(bias, a, b), approximate="tanh")

    for m, k, n in PRODUCTS:
        a, b = (torch.randn(s, dtype=dtype, device="cuda") for s in ((m, k), (k, n)))
        ours = Contraction(
            _cuda.ConvShape.matmul(1, m, k, n),
            *(a.view(1, 1, m, k), b.view(1, 1, k, n), (1, 1, m, n)),
            *("gelu_tanh", True),
        )
        plain = lambda a=a, b=b: a @ b  # noqa: E731
        title = f"[{m}, {k}] x [{k}, {n}] + bias, gelu (tanh)"
        yield title, ours, ("cuBLAS product", plain), layer, (a, b, ours.bias), ours.dy[0, 0]


def convolutions(dtype):
    """The same of convolutions, channels last, beside cuDNN's fused one."""
    for batch, size, cin, cout, kernel, stride in CONVOLUTIONS:
        pad = kernel // 2
        out = (size + 2 * pad - kernel) // stride + 1
        x = torch.randn(batch, size, size, cin, dtype=dtype, device="cuda")
        filters = torch.randn(kernel, kernel, cin, cout, dtype=dtype, device="cuda")
        ours = Contraction(
            _cuda.ConvShape(
                batch=batch,
                in_size=(size, size),
                in_c=cin,
                out_size=(out, out),
                out_c=cout,
                kernel=(kernel, kernel),
                strides=(stride, stride),
                pads=(pad, pad),
            ),
            *(x, filters, (batch, out, out, cout)),
            *("relu", False),
        )
        theirs_x = x.permute(0, 3, 1, 2)
        weight = filters.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)

        def layer(x, weight, bias, stride=stride, pad=pad):
            return torch.relu(torch.nn.functional.conv2d(x, weight, bias, stride, pad))

        def fused(x=theirs_x, w=weight, bias=ours.bias, stride=stride, pad=pad):
            return torch.cudnn_convolution_relu(
                x, w, bias, (stride,) * 2, (pad,) * 2, (1, 1), groups=1
            )

        title = f"{kernel}x{kernel} s{stride}, {batch}x{size}x{size}, {cin} to {cout} + bias, relu"
        inputs, dy = (theirs_x, weight, ours.bias), ours.dy.permute(0, 3, 1, 2)
        yield title, ours, ("cuDNN fused", fused), layer, inputs, dy


def main():
    bench = Bench(__doc__)
    # As the launchers do by default.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for cases in (products(bench.dtype), convolutions(bench.dtype)):
        for title, ours, (name, library), layer, inputs, dy in cases:
            forward, plain = bench.time(ours.forward), bench.time(library)
            print(f"\n{title}")
            print(
                f"  forward                    {forward:8.3f} ms {ours.rate(forward):6.0f} TFLOP/s"
            )
            print(f"  {name:<26} {plain:8.3f} ms: ours has {plain / forward:6.1%} of its rate")
            bench.show_peers(ours.step, layer, inputs, dy)


if __name__ == "__main__":
    main()
