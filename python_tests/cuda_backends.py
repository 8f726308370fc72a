"""Where the GPU half's launchers run in tests: on a GPU, or emulated on the processor.

The emulation (cuda_emulation/) executes the same kernels thread by thread: it proves their indexing
and arithmetic, not that a GPU runs them. Each backend has put, poisoned and get for arrays, and the
launchers as `module`.
"""

import functools
import importlib.util
import sys
from pathlib import Path

import cuda_driver
import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
_TYPESTR = {
    **{"float32": "<f4", "float16": "<f2", "bfloat16": "<V2", "float64": "<f8"},
    **{"uint8": "|u1", "uint64": "<u8", "int32": "<i4", "int64": "<i8"},
}


class DeviceArray:
    """Memory with the CUDA array interface, bfloat16 included."""

    def __init__(self, owner, pointer, shape, dtype):
        self.owner, self.shape, self.dtype = owner, tuple(shape), np.dtype(dtype)
        self.__cuda_array_interface__ = {
            "shape": self.shape,
            "typestr": _TYPESTR[self.dtype.name],
            "data": (pointer, False),
            "version": 3,
        }

    @property
    def nbytes(self):
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Emulated:
    """The processor. `libraries` stand in for NVIDIA's, as ctypes sees them."""

    name, stream = "emulated", 0

    def __init__(self, module, libraries):
        self.module, self.libraries = module, libraries

    def put(self, array, misaligned=False):
        """A copy of `array`; one element past a multiple of 16 bytes where `misaligned`."""
        array = np.asarray(array, order="C")
        result = self.poisoned(array.shape, array.dtype, misaligned)
        result.owner[...] = array.reshape(-1).view(np.uint8)
        return result

    def poisoned(self, shape, dtype, misaligned=False):
        """An array of NaN, aligned as GPUs' allocators do."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory = np.full(nbytes + 272, 255, np.uint8)
        start = -memory.ctypes.data % 256 + (dtype.itemsize if misaligned else 0)
        owner = memory[start : start + nbytes]
        return DeviceArray(owner, owner.ctypes.data, shape, dtype)

    def get(self, array):
        return array.owner.copy().view(array.dtype).reshape(array.shape)


class Gpu(Emulated):
    """A GPU, with memory from its driver: what else uses the GPU in this process is left alone."""

    name = "gpu"

    def __init__(self, module, driver):
        self.module, self.driver = module, driver

    def put(self, array, misaligned=False):
        array = np.asarray(array, order="C")
        result = self.poisoned(array.shape, array.dtype, misaligned)
        self.driver.write(result.owner.address, array)
        return result

    def poisoned(self, shape, dtype, misaligned=False):
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        start = dtype.itemsize if misaligned else 0
        owner = cuda_driver.Memory(self.driver, nbytes + start, start)
        self.driver.fill(owner.address, 255, nbytes)
        return DeviceArray(owner, owner.address, shape, dtype)

    def get(self, array):
        result = np.empty(array.shape, array.dtype)
        self.driver.read(result, array.owner.address)
        return result


@functools.cache
def _emulated():
    if not (ROOT / "cuda").exists():
        pytest.skip("the sources of the GPU half are not beside the tests")
    sys.path.insert(0, str(Path(__file__).parent / "cuda_emulation"))
    import build

    return Emulated(*build.load())


def why_no_gpu():
    """Returns the reason why nothing can be run on a GPU here, or None."""
    if importlib.util.find_spec("tf_fused_ops._cuda") is None:
        return "the GPU half is not built"
    return cuda_driver.why_not()


def _gpu():
    reason = why_no_gpu()
    if reason is not None:
        pytest.skip(reason)
    from tf_fused_ops import _cuda

    return Gpu(_cuda, cuda_driver.Driver.of_process())


def backend(name):
    """Returns the backend "emulated" or "gpu"; skips the test, with the reason, without a GPU."""
    return _emulated() if name == "emulated" else _gpu()


# How the emulated device is set: one kernel for all, or kernels for the phases.
PLANS = {
    "fused": {"multiprocessors": 24},
    "phases": {"cooperative": False},
    "phases on one multiprocessor": {
        "cooperative": False,
        "multiprocessors": 1,
        "blocks_per_multiprocessor": 1,
    },
}


def device_fixture(plans=PLANS):
    """Returns a fixture: a backend, the emulation once for each plan, which is `device.plan`."""

    @pytest.fixture(
        params=[
            *(pytest.param(("emulated", plan), id=f"emulated {plan}") for plan in plans),
            pytest.param(("gpu", None), id="gpu", marks=pytest.mark.gpu),
        ]
    )
    def device(request):
        name, plan = request.param
        result = backend(name)
        result.plan = plan
        if plan is not None:
            result.module.set_device(**PLANS[plan])
        yield result
        if plan is not None:
            result.module.set_device()

    return device
