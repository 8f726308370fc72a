"""Speed of layer and RMS norm on the GPU, beside a measured copy, PyTorch eager and torch.compile.

    python cuda/benchmark/layer_norm.py [--dtype bfloat16] [--seconds 0.2]

GB/s counts every tensor that is read or written once, dy and x twice backward, as their sums over
rows come first. `copy` is the rate of torch.Tensor.copy_ on tensors of the same size in the same
run. Needs PyTorch with CUDA and a GPU; TensorFlow is not used.
"""

import argparse
import sys

import torch
from batch_norm import milliseconds

from tf_fused_ops import _cuda

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

    def torch_training(self, compiled):
        """PyTorch's forward and backward of the same."""
        x = self.x.detach().requires_grad_()
        vectors = [v.to(x.dtype).requires_grad_() for v in self.vectors[:2]]
        size = (x.shape[-1],)
        if self.options["subtract_mean"]:

            def function(x, scale, offset):
                return torch.nn.functional.layer_norm(x, size, scale, offset, EPSILON)
        else:
            vectors = vectors[:1]

            def function(x, scale):
                return torch.nn.functional.rms_norm(x, size, scale, EPSILON)

        forward = torch.compile(function) if compiled else function
        return lambda: torch.autograd.grad(forward(x, *vectors), (x, *vectors), self.dy)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=0.2, help="time spent on each number")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU: nothing can be measured")
    print(f"{torch.cuda.get_device_name()}, {arguments.dtype}, PyTorch {torch.__version__}")
    for shape in SHAPES:
        for name, subtract_mean in (("layer norm", True), ("RMS norm", False)):
            case = Case(shape, getattr(torch, arguments.dtype), subtract_mean)
            copy_rate = 2 * case.bytes / milliseconds(case.copy, arguments.seconds) / 1e6
            print(f"\n{name} {shape}: copy {copy_rate:.0f} GB/s")
            for part, tensors in ((case.forward, 2), (case.backward, 5)):
                time = milliseconds(part, arguments.seconds)
                rate = tensors * case.bytes / time / 1e6
                print(
                    f"  {part.__name__:<9} {time:8.3f} ms {rate:7.0f} GB/s "
                    f"{rate / copy_rate:6.1%} of copy"
                )
            ours = milliseconds(lambda: (case.forward(), case.backward()), arguments.seconds)  # noqa: B023
            for peer, compiled in (("PyTorch eager", False), ("torch.compile", True)):
                theirs = milliseconds(case.torch_training(compiled), arguments.seconds)
                print(f"  both beside {peer:<14} {theirs / ours:6.2f}x as fast")


if __name__ == "__main__":
    main()
