"""`info`: what was built for what, what is installed and what is in use."""

import importlib.metadata
import json
import os
import platform
from pathlib import Path

import numpy as np
import tensorflow as tf

from tf_fused_ops import _library
from tf_fused_ops._version import __version__

_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly", "tf-nightly-cpu")
_ENVIRONMENT = (
    "TF_FUSED_OPS_ISA",
    "TFO_CUDA",
    "TF_CPP_VMODULE",
    "TF_CPP_MIN_LOG_LEVEL",
    "TF_ENABLE_ONEDNN_OPTS",
    "TF_NUM_INTRAOP_THREADS",
    "KERAS_BACKEND",
    "NO_COLOR",
)


def _distribution_versions(names):
    for name in names:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def describe_gpu_code(code):
    """Returns (architecture, form) pairs in words."""
    if not code:
        return "none"
    machine = [str(arch) for arch, form in code if form == "machine code"]
    ptx = [arch for arch, form in code if form == "PTX"]
    parts = []
    if machine:
        parts.append(f"machine code for compute capability {', '.join(map(_capability, machine))}")
    if ptx:
        newest = _capability(max(ptx))
        parts.append(f"PTX {newest}, which the driver translates for {newest} and later")
    return "; ".join(parts)


def _capability(arch):
    return f"{int(arch) // 10}.{int(arch) % 10}"


def collect():
    """Returns a dict of section -> {name: value}, every value a string."""
    built = _library.build_info()
    gpus = [device.name for device in tf.config.list_physical_devices("GPU")]
    return {
        "package": {
            "tf_fused_ops": __version__,
            "folder": str(Path(__file__).resolve().parent.parent),
            "compiler": built["compiler"],
            "CUDA compiler": built.get("cuda_compiler", "none"),
            "GPU code": describe_gpu_code(_library.cuda_code()),
        },
        "built for": {
            "TensorFlow": built["tensorflow_version"],
            "C++ ABI (_GLIBCXX_USE_CXX11_ABI)": str(built["cxx11_abi"]),
            "processor": built["processor"],
        },
        "installed": {
            "TensorFlow": f"{tf.__version__} ({', '.join(_distribution_versions(_DISTRIBUTIONS))})",
            "C++ ABI (_GLIBCXX_USE_CXX11_ABI)": str(int(tf.sysconfig.CXX11_ABI_FLAG)),
            "Keras": tf.keras.__version__,
            "NumPy": np.__version__,
            "Python": platform.python_version(),
            "processor": platform.machine(),
        },
        "in use": {
            "instruction sets found": " ".join(_library.available_isas()),
            "instruction set used": _library.isa(),
            "graphics cards": " ".join(gpus) or "none",
            "GPU kernels": _library.cuda_status(),
        },
        "environment": {name: os.environ.get(name, "not set") for name in _ENVIRONMENT},
    }


def add_parser(subparsers):
    """Adds the subcommand and returns its parser."""
    parser = subparsers.add_parser(
        "info",
        help="versions, C++ ABI, instruction sets, environment variables",
        epilog="example: python -m tf_fused_ops info --json",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    return parser


def run(args):
    """Prints the information and returns 0."""
    sections = collect()
    if args.json:
        print(json.dumps(sections, indent=2))
        return 0
    width = max(len(name) for values in sections.values() for name in values)
    for section, values in sections.items():
        print(section)
        for name, value in values.items():
            print(f"  {name:<{width}}  {value}")
    return 0
