"""Speed of the memory-bound GPU kernels, beside a measured copy, PyTorch eager and torch.compile.

    python cuda/benchmark/batch_norm.py [--dtype bfloat16] [--seconds 0.2] [--eager]

Every row is one operation on one shape. GB/s counts the bytes that the operation cannot do without:
every tensor it reads or writes, once (x twice forward, dy and x twice backward, as the statistics
come first, unless the tensor fits into the chip and is read once). `copy` is the rate of
torch.Tensor.copy_ on tensors of the same size in the same run, and the share of it is what a kernel
is judged by. Needs PyTorch with CUDA and a GPU; TensorFlow is not used.
"""

import torch
from common import Bench, launchers

_cuda = launchers()
SHAPES = [  # of ResNet-50 at batch 256, NHWC
    (256, 112, 112, 64),
    (256, 56, 56, 256),
    (256, 28, 28, 512),
    (256, 14, 14, 1024),
    (256, 7, 7, 2048),
]
EPSILON = 1e-3


class Case:
    """The tensors of one shape, and its operations by name: ours, PyTorch's, bytes moved."""

    def __init__(self, shape, dtype):
        like = {"dtype": dtype, "device": "cuda"}
        self.x, self.side, self.dy = (torch.randn(shape, **like) for _ in range(3))
        self.y, self.dx, self.dside = (torch.empty(shape, **like) for _ in range(3))
        channels = shape[-1]
        self.scale, self.offset, self.mean, self.variance = (
            torch.rand(channels, device="cuda") + 0.5 for _ in range(4)
        )
        self.vectors = [torch.empty(channels, device="cuda") for _ in range(6)]
        self.bias, self.bias_grad = (torch.zeros(channels, **like) for _ in range(2))
        self.mask = torch.empty((self.x.numel() + 7) // 8, dtype=torch.uint8, device="cuda")
        self.stream = torch.cuda.current_stream().cuda_stream
        self.bytes = self.x.numel() * self.x.element_size()

    def copy(self):
        self.y.copy_(self.x)

    def forward(self):
        _cuda.batch_norm_forward(
            *(self.x, self.scale, self.offset, self.mean, self.variance, self.y, *self.vectors[:4]),
            side_input=self.side,
            mask=self.mask,
            epsilon=EPSILON,
            activation="relu",
            stream=self.stream,
        )

    def backward(self):
        _cuda.batch_norm_gradient(
            *(self.dy, self.x, self.scale, self.offset, *self.vectors[2:4], self.dx),
            *self.vectors[4:],
            mask=self.mask,
            side_input_grad=self.dside,
            activation="relu",
            stream=self.stream,
        )

    def bias_gelu(self):
        _cuda.bias_act_forward(
            *(self.x, self.y),
            bias=self.bias,
            activation="gelu_tanh",
            stream=self.stream,
        )

    def bias_gelu_gradient(self):
        _cuda.bias_act_gradient(
            self.dy,
            saved=self.x,
            dz=self.dx,
            bias_grad=self.bias_grad,
            activation="gelu_tanh",
            stream=self.stream,
        )

    def step(self):
        self.forward()
        self.backward()

    def torch_layer(self):
        """PyTorch's function of the same, channels last, its inputs and dy."""
        x, side, dy = (t.permute(0, 3, 1, 2) for t in (self.x, self.side, self.dy))

        def function(x, side, scale, offset):
            normal = torch.nn.functional.batch_norm(
                x, self.mean, self.variance, scale, offset, True, 0.01, EPSILON
            )
            return torch.relu(normal + side)

        return function, (x, side, self.scale, self.offset), dy

    def operations(self):
        """Yields name, function and bytes moved."""
        size, bits = self.bytes, self.mask.numel()
        yield "batch norm + add + relu", self.forward, 4 * size + bits
        yield "  its gradient", self.backward, 6 * size + 2 * bits
        yield "bias + gelu", self.bias_gelu, 2 * size
        yield "  its gradient", self.bias_gelu_gradient, 3 * size


def main():
    bench = Bench(__doc__)
    for shape in SHAPES:
        case = Case(shape, bench.dtype)
        copy_rate = bench.copy_rate(case)
        print(f"\n{shape}: copy {copy_rate:.0f} GB/s")
        for name, function, moved in case.operations():
            bench.show_rate(name, function, moved, copy_rate)
        bench.show_peers(case.step, *case.torch_layer())


if __name__ == "__main__":
    main()
