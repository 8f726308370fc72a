"""Repository rules for what BUILD.bazel calls @local_config_tf.

tf_configure: the TensorFlow wheel, pybind11 and Python headers of the Python in PYTHON_BIN_PATH, by default the python3
on the PATH. Nothing is downloaded.

tf_source: the TensorFlow that the workspace builds from source as @org_tensorflow, for //:ops alone (docs/serving.md).
"""

_PYTHON_FACTS = """
import importlib.util, json, os, platform, sysconfig
pybind11 = importlib.util.find_spec("pybind11")
print(json.dumps({
    "pybind11": pybind11 and os.path.join(pybind11.submodule_search_locations[0], "include"),
    "include": sysconfig.get_path("include"),
    "suffix": sysconfig.get_config_var("EXT_SUFFIX"),
    "machine": platform.machine(),
}))
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "tf_headers",
    hdrs = glob(["tf_include/**"]),
    defines = {definitions},
    includes = ["tf_include"],
)

cc_import(
    name = "tf_framework",
    shared_library = "libtensorflow_framework.so.2",
)

cc_library(
    name = "pybind11",
    hdrs = glob(["pybind11_include/**", "python_include/**"]),
    includes = ["pybind11_include", "python_include"],
)

exports_files(["build_info.cc", "_build_info.json"])
"""

def _execute(ctx, command):
    result = ctx.execute(command)
    if result.return_code:
        fail(result.stderr)
    return result.stdout.strip()

def _tf_configure_impl(ctx):
    python = ctx.os.environ.get("PYTHON_BIN_PATH") or str(ctx.which("python3"))
    tf = json.decode(_execute(ctx, [python, ctx.path(Label("//:build_tools/find_tensorflow.py"))]))
    facts = json.decode(_execute(ctx, [python, "-c", _PYTHON_FACTS]))
    if not facts["pybind11"]:
        fail("pybind11 is missing: run %s -m pip install pybind11" % python)
    ctx.symlink(tf["include"], "tf_include")
    ctx.symlink(tf["library"], "libtensorflow_framework.so.2")
    ctx.symlink(facts["pybind11"], "pybind11_include")
    ctx.symlink(facts["include"], "python_include")

    version = ctx.read(Label("//:tf_fused_ops/_version.py")).split('__version__ = "')[1].split('"')[0]
    info = ctx.read(Label("//:cmake/build_info.json.in"))
    for key, value in {
        "@TFO_VERSION@": version,
        "@TFO_TF_VERSION@": tf["version"],
        "@TFO_TF_CXX11_ABI@": str(tf["cxx11_abi"]),
        "@CMAKE_CXX_COMPILER_ID@ @CMAKE_CXX_COMPILER_VERSION@": _execute(ctx, ["sh", "-c", "${CC:-gcc} --version | head -n 1"]),
        "@CMAKE_SYSTEM_PROCESSOR@": facts["machine"],
        "@TFO_CUDA_COMPILER@": "none",
        "@TFO_BUILT_CUDA_ARCHS@": "none",
    }.items():
        info = info.replace(key, value)
    ctx.file("_build_info.json", info)
    ctx.file("build_info.cc", ctx.read(Label("//:cmake/build_info.cc.in")).replace("@TFO_BUILD_INFO@", info))
    ctx.file("config.bzl", "\n".join([
        "EXT_SUFFIX = %r" % facts["suffix"],
        "CXX_STANDARD = %r" % tf["cxx_standard"],
        "MACHINE = %r" % facts["machine"],
        "",
    ]))
    ctx.file("BUILD", _BUILD.format(definitions = repr(tf["definitions"].split(";"))))

tf_configure = repository_rule(
    implementation = _tf_configure_impl,
    environ = ["PYTHON_BIN_PATH"],
    local = True,
)

_SOURCE_BUILD = """
cc_library(
    name = "tf_headers",
    visibility = ["//visibility:public"],
    deps = [
        "@org_tensorflow//tensorflow/core:framework",
        "@org_tensorflow//tensorflow/core:lib",
    ],
)
"""

def _tf_source_impl(ctx):
    ctx.file("config.bzl", "\n".join([
        "EXT_SUFFIX = '.so'",
        "CXX_STANDARD = '17'",
        "MACHINE = %r" % _execute(ctx, ["uname", "-m"]),
        "",
    ]))
    ctx.file("BUILD", _SOURCE_BUILD)

tf_source = repository_rule(implementation = _tf_source_impl)
