"""Speed of softmax, dropout and cross entropy on the GPU, beside a measured copy and PyTorch.

    python cuda/benchmark/transformer.py [--dtype bfloat16] [--seconds 0.2] [--eager]

GB/s counts every tensor that is read or written once. `copy` is the rate of torch.Tensor.copy_ on
tensors of the same size in the same run. Needs PyTorch with CUDA and a GPU; TensorFlow is not used.
"""

import torch
from common import Bench, launchers

_cuda = launchers()

SCORES = [(16, 12, 512, 512), (8, 16, 1024, 1024)]  # batch, heads, queries, keys
HIDDEN = [(8192, 3072), (8192, 768)]  # tokens and width
LOGITS = [(8192, 8192), (8192, 32000), (4096, 50257)]  # tokens and classes
RATE = 0.1


class Case:
    """Tensors of one shape: x, y, dy and dx, and the stream."""

    def __init__(self, shape, dtype):
        self.x, self.y, self.dy, self.dx = (
            torch.randn(shape, dtype=dtype, device="cuda") for _ in range(4)
        )
        self.bytes = self.x.numel() * self.x.element_size()
        self.options = {"stream": torch.cuda.current_stream().cuda_stream}

    def copy(self):
        self.y.copy_(self.x)

    def step(self):
        self.forward()
        self.backward()


class Softmax(Case):
    reads = (2, 3)  # tensors read and written, forward and backward

    def forward(self):
        _cuda.softmax_forward(self.x, self.y, scale=0.125, **self.options)

    def backward(self):
        _cuda.softmax_gradient(self.dy, self.y, self.dx, scale=0.125, **self.options)

    def torch_layer(self):
        return lambda x: torch.softmax(x * 0.125, -1), (self.x,), self.dy


class Dropout(Case):
    reads = (2, 2)

    def __init__(self, shape, dtype):
        super().__init__(shape, dtype)
        words = (
            torch.tensor([*words], dtype=torch.int64, device="cuda") for words in ([7], [1, 2])
        )
        self.random = [tensor.view(torch.uint64) for tensor in words]

    def _run(self, x, y):
        _cuda.dropout(x, *self.random, y, rate=RATE, scale=1 / (1 - RATE), **self.options)

    def forward(self):
        self._run(self.x, self.y)

    def backward(self):
        self._run(self.dy, self.dx)

    def torch_layer(self):
        return lambda x: torch.nn.functional.dropout(x, RATE), (self.x,), self.dy


class CrossEntropy(Case):
    reads = (1, 2)

    def __init__(self, shape, dtype):
        super().__init__(shape, dtype)
        rows, classes = shape
        self.labels = torch.randint(classes, (rows,), device="cuda")
        self.loss, self.dloss = (torch.ones(rows, dtype=dtype, device="cuda") for _ in range(2))
        self.saved = [torch.empty(rows, device="cuda") for _ in range(2)]

    def forward(self):
        _cuda.cross_entropy_forward(self.x, self.labels, self.loss, *self.saved, **self.options)

    def backward(self):
        _cuda.cross_entropy_gradient(
            *(self.dloss, self.x, self.labels, *self.saved, self.dx), **self.options
        )

    def torch_layer(self):
        def function(x):
            return torch.nn.functional.cross_entropy(x, self.labels, reduction="none")

        return function, (self.x,), self.dloss


def main():
    bench = Bench(__doc__)
    for kind, shapes in ((Softmax, SCORES), (Dropout, HIDDEN), (CrossEntropy, LOGITS)):
        for shape in shapes:
            case = kind(shape, bench.dtype)
            copy_rate = bench.copy_rate(case)
            print(f"\n{kind.__name__} {shape}: copy {copy_rate:.0f} GB/s")
            for name, part, tensors in zip(
                ("forward", "its gradient"), (case.forward, case.backward), kind.reads, strict=True
            ):
                bench.show_rate(name, part, tensors * case.bytes, copy_rate)
            bench.show_peers(case.step, *case.torch_layer())


if __name__ == "__main__":
    main()
