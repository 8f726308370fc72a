"""Memory of the first GPU, by calls of NVIDIA's driver.

The driver alone, since no two frameworks with CUDA libraries of their own get along in one process.
"""

import ctypes
import functools


class DriverError(Exception):
    """A call of the driver has failed."""


class Driver:
    """The driver, with the context that CUDA's runtime uses made current."""

    def __init__(self):
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    @classmethod
    @functools.cache
    def of_process(cls):
        return cls()

    def allocate(self, nbytes):
        """Returns the address of new memory, aligned to 256 bytes."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(nbytes, 1)))
        return address.value

    def free(self, address):
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def fill(self, address, byte, nbytes):
        if nbytes:
            self._call(
                "cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(byte), _size(nbytes)
            )

    def write(self, address, array):
        """Copies a contiguous array to the GPU."""
        if array.nbytes:
            self._call(
                "cuMemcpyHtoD_v2", ctypes.c_uint64(address), _data(array), _size(array.nbytes)
            )

    def read(self, array, address):
        """Copies from the GPU into a contiguous array, after all work before it."""
        self._call("cuCtxSynchronize")
        if array.nbytes:
            self._call(
                "cuMemcpyDtoH_v2", _data(array), ctypes.c_uint64(address), _size(array.nbytes)
            )

    def _call(self, name, *arguments):
        code = getattr(self._library, name)(*arguments)
        if code:
            words = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(words))
            raise DriverError(f"{name}: {(words.value or b'unknown').decode()} ({code})")


class Memory:
    """Memory that is freed with this object.

    Attributes:
        address: `offset` bytes past a multiple of 256.
    """

    def __init__(self, driver, nbytes, offset=0):
        self._start = driver.allocate(nbytes)
        self._driver = driver
        self.address = self._start + offset

    def __del__(self):
        if hasattr(self, "_driver"):
            self._driver.free(self._start)


@functools.cache
def why_not():
    """Returns the reason why there is no GPU to use, or None."""
    try:
        Driver.of_process()
    except OSError:
        return "no NVIDIA driver"
    except DriverError as error:
        return f"no GPU: {error}"
    return None


def _size(nbytes):
    return ctypes.c_size_t(nbytes)


def _data(array):
    return ctypes.c_void_p(array.ctypes.data)
