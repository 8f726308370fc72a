"""The GPU's contraction launchers on the cases of `cases.py`, with arrays of any device."""

import dataclasses

import cases
import numpy as np

GRADIENTS = ("input_gradient", "filters_gradient", "bias_gradient", "side_input_gradient")


@dataclasses.dataclass
class Problem:
    """A case in the launchers' terms: the module's ConvShape and the shapes of four-dimensional
    arrays."""

    shape: object
    input: list
    filters: list
    y: list
    channels: int


def conv_problem(module, case):
    shape = module.ConvShape(
        batch=case.batch,
        in_size=case.image,
        in_c=case.cin,
        out_size=case.output_image(),
        out_c=case.cout,
        kernel=case.kernel,
        strides=case.strides,
        dilations=case.dilations,
        pads=tuple(before for before, _ in case.pads()),
        input_channels_first=case.layout == "NCHW",
        output_channels_first=case.layout == "NCHW",
        groups=case.groups,
    )
    return Problem(
        shape,
        case.ordered(case.batch, case.image, case.cin),
        [*case.kernel, case.cin // case.groups, case.cout],
        case.ordered(case.batch, case.output_image(), case.cout),
        case.cout,
    )


def matmul_problem(module, case):
    """The rows of a are pixels."""
    batch, m, k, n = int(np.prod(case.lead)), case.m, case.k, case.n
    return Problem(
        module.ConvShape.matmul(batch, m, k, n, case.ta, case.tb),
        [batch, k, 1, m] if case.ta else [batch, 1, m, k],
        [1, 1, *((n, k) if case.tb else (k, n))],
        [batch, 1, m, n],
        n,
    )


class Launchers:
    """Runs conv_forward and conv_gradient of a backend of `cuda_backends`.

    Attributes:
        refusals: What the libraries refused to fuse so far, in sentences.
    """

    def __init__(self, backend):
        self._backend, self._module = backend, backend.module
        self.refusals = []

    def _problem(self, case):
        make = conv_problem if isinstance(case, cases.ConvCase) else matmul_problem
        return make(self._module, case)

    def _run(self, function, problem, case, inputs, outputs, misaligned=(), **attributes):
        """Returns the outputs, which are given as shapes by name; those named lie askew."""
        dtype = np.asarray(inputs["input"][0]).dtype
        arrays = {
            name: self._backend.put(np.asarray(value).reshape(shape), name in misaligned)
            for name, (value, shape) in inputs.items()
            if value is not None
        }
        results = {
            name: self._backend.poisoned(shape, dtype, name in misaligned)
            for name, shape in outputs.items()
        }
        options = {"activation": case.act, "alpha": cases.ALPHA, **attributes}
        self.refusals += function(
            problem.shape, **arrays, **results, **options, stream=self._backend.stream
        )
        return {name: self._backend.get(value) for name, value in results.items()}

    def forward(self, case, x, filters, bias, side, save=False, **attributes):
        """Returns y; with save y and the pre-activation."""
        problem = self._problem(case)
        inputs = {
            "input": (x, problem.input),
            "filters": (filters, problem.filters),
            "bias": (bias, [problem.channels]),
            "side_input": (side, problem.y),
        }
        if isinstance(case, cases.ConvCase) and case.scale:
            inputs["scale"] = (case.factors().astype(np.asarray(x).dtype), [problem.channels])
        outputs = dict.fromkeys(("y", "pre_activation") if save else ("y",), problem.y)
        function = self._module.conv_forward
        results = self._run(function, problem, case, inputs, outputs, **attributes)
        if isinstance(case, cases.MatMulCase):
            results = {k: v.reshape(*case.lead, case.m, case.n) for k, v in results.items()}
        return tuple(results.values()) if save else results["y"]

    def gradients(self, case, dy, x, filters, saved, wanted=GRADIENTS, **attributes):
        """Returns the gradients named, in the order of GRADIENTS, and None for the others."""
        problem = self._problem(case)
        inputs = {
            "dy": (dy, problem.y),
            "input": (x, problem.input),
            "filters": (filters, problem.filters),
            "saved": (saved, problem.y),
        }
        shapes = (problem.input, problem.filters, [problem.channels], problem.y)
        outputs = {k: v for k, v in zip(GRADIENTS, shapes, strict=True) if k in wanted}
        function = self._module.conv_gradient
        results = self._run(function, problem, case, inputs, outputs, **attributes)
        own = (np.shape(x), np.shape(filters), (problem.channels,), np.shape(dy))
        return [
            results[name].reshape(shape) if name in results else None
            for name, shape in zip(GRADIENTS, own, strict=True)
        ]
