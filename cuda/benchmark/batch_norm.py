"""Speed of the memory-bound GPU kernels, beside a measured copy, PyTorch eager and torch.compile.

    python cuda/benchmark/batch_norm.py [--dtype bfloat16] [--seconds 0.2]

Every row is one operation on one shape. GB/s counts the bytes that the operation cannot do without:
every tensor it reads or writes, once (x twice forward, dy and x twice backward, as the statistics
come first, unless the tensor fits into the chip and is read once). `copy` is the rate of
torch.Tensor.copy_ on tensors of the same size in the same run, and the share of it is what a kernel
is judged by. Needs PyTorch with CUDA and a GPU; TensorFlow is not used.
"""

import argparse
import statistics
import sys

import torch

from tf_fused_ops import _cuda

SHAPES = [  # of ResNet-50 at batch 256, NHWC
    (256, 112, 112, 64),
    (256, 56, 56, 256),
    (256, 28, 28, 512),
    (256, 14, 14, 1024),
    (256, 7, 7, 2048),
]
EPSILON = 1e-3


def milliseconds(function, seconds):
    """The median time of `function` over at least `seconds`, caches flushed before each run."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    times = []
    while sum(times) < 1e3 * seconds or len(times) < 5:
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


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

    def torch_training(self, compiled):
        """PyTorch's forward and backward of the same: channels_last batch norm, add, relu."""
        x, side = (t.permute(0, 3, 1, 2).detach().requires_grad_() for t in (self.x, self.side))
        scale, offset = (t.detach().clone().requires_grad_() for t in (self.scale, self.offset))

        def function(x, side):
            normal = torch.nn.functional.batch_norm(
                x, self.mean, self.variance, scale, offset, True, 0.01, EPSILON
            )
            return torch.relu(normal + side)

        forward = torch.compile(function) if compiled else function
        dy = self.dy.permute(0, 3, 1, 2)
        inputs = (x, side, scale, offset)

        def step():
            return torch.autograd.grad(forward(x, side), inputs, dy)

        return step

    def operations(self):
        """Yields name, function and bytes moved."""
        size, bits = self.bytes, self.mask.numel()
        yield "batch norm + add + relu", self.forward, 4 * size + bits
        yield "  its gradient", self.backward, 6 * size + 2 * bits
        yield "bias + gelu", self.bias_gelu, 2 * size
        yield "  its gradient", self.bias_gelu_gradient, 3 * size


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=0.2, help="time spent on each number")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU: nothing can be measured")
    print(f"{torch.cuda.get_device_name()}, {arguments.dtype}, PyTorch {torch.__version__}")
    for shape in SHAPES:
        case = Case(shape, getattr(torch, arguments.dtype))
        copy = milliseconds(case.copy, arguments.seconds)
        copy_rate = 2 * case.bytes / copy / 1e6
        print(f"\n{shape}: copy {copy_rate:.0f} GB/s")
        for name, function, moved in case.operations():
            time = milliseconds(function, arguments.seconds)
            rate = moved / time / 1e6
            print(f"  {name:<26} {time:8.3f} ms {rate:7.0f} GB/s {rate / copy_rate:6.1%} of copy")
        ours = milliseconds(lambda: (case.forward(), case.backward()), arguments.seconds)  # noqa: B023
        for name, compiled in (("PyTorch eager", False), ("torch.compile", True)):
            theirs = milliseconds(case.torch_training(compiled), arguments.seconds)
            print(f"  forward and gradient beside {name:<14} {theirs / ours:6.2f}x as fast")


if __name__ == "__main__":
    main()
