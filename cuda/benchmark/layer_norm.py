"""Speed of layer and RMS norm on the GPU, beside a measured copy, PyTorch eager and torch.compile.

    python cuda/benchmark/layer_norm.py [--dtype bfloat16] [--seconds 0.2] [--eager]

GB/s counts every tensor that is read or written once, dy and x twice backward, as their sums over
rows come first. `copy` is the rate of torch.Tensor.copy_ on tensors of the same size in the same
run. Needs PyTorch with CUDA and a GPU; TensorFlow is not used.
"""

import torch
from common import Bench, launchers

_cuda = launchers()
SHAPES = [  # rows and depth: BERT-base, BERT-large, GPT-2 XL, Llama 7B, Llama 70B
    (16384, 768),
    (16384, 1024),
    (8192, 1600),
    (8192, 4096),
    (4096, 8192),
]
EPSILON = 1e-5


class Case:
    """The tensors of one shape, and its operations: ours, PyTorch's."""

    def __init__(self, shape, dtype, subtract_mean):
        self.x, self.dy, self.y, self.dx = (
            torch.randn(shape, dtype=dtype, device="cuda") for _ in range(4)
        )
        rows, depth = shape
        self.vectors = [torch.rand(depth, device="cuda") + 0.5 for _ in range(4)]
        self.statistics = [torch.empty(rows, device="cuda") for _ in range(2)]
        self.options = {
            "subtract_mean": subtract_mean,
            "stream": torch.cuda.current_stream().cuda_stream,
        }
        self.bytes = self.x.numel() * self.x.element_size()

    def copy(self):
        self.y.copy_(self.x)

    def forward(self):
        _cuda.layer_norm_forward(
            *(self.x, *self.vectors[:2], self.y, *self.statistics),
            epsilon=EPSILON,
            **self.options,
        )

    def backward(self):
        _cuda.layer_norm_gradient(
            *(self.dy, self.x, self.vectors[0], *self.statistics, self.dx, *self.vectors[2:]),
            **self.options,
        )

    def step(self):
        self.forward()
        self.backward()

    def torch_layer(self):
        """PyTorch's function of the same, its inputs and dy."""
        vectors = [v.to(self.x.dtype) for v in self.vectors[:2]]
        size = self.x.shape[-1:]

        def layer_norm(x, scale, offset):
            return torch.nn.functional.layer_norm(x, size, scale, offset, EPSILON)

        def rms_norm(x, scale):
            return torch.nn.functional.rms_norm(x, size, scale, EPSILON)

        if self.options["subtract_mean"]:
            return layer_norm, (self.x, *vectors), self.dy
        return rms_norm, (self.x, vectors[0]), self.dy


def main():
    bench = Bench(__doc__)
    for shape in SHAPES:
        for name, subtract_mean in (("layer norm", True), ("RMS norm", False)):
            case = Case(shape, bench.dtype, subtract_mean)
            copy_rate = bench.copy_rate(case)
            print(f"\n{name} {shape}: copy {copy_rate:.0f} GB/s")
            bench.show_rate("forward", case.forward, 2 * case.bytes, copy_rate)
            bench.show_rate("its gradient", case.backward, 5 * case.bytes, copy_rate)
            bench.show_peers(case.step, *case.torch_layer())


if __name__ == "__main__":
    main()
