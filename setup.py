"""Build the native modules that this machine can build. Everything else is declared in pyproject.toml.

`_C` is always built, and so is `_sim` (the device copy path over a simulated runtime). `_cuda` needs nvcc and `_hip`
needs hipcc: KVOFFLOAD_CUDA and KVOFFLOAD_HIP are auto (the default: built where the tool is), 0 (not built) or 1 (a
missing tool is an error). KVOFFLOAD_CUDA_ARCHS ("80 90 100") and KVOFFLOAD_HIP_ARCHS ("gfx90a gfx942") choose the
architectures.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

GPU_ONLY = {
    "bind_gpu.cpp",
    "gpu_copier.cpp",
    "gpu_events.cpp",
    "gpu_issue.cpp",
    "gpu_pins.cpp",
    "gpu_plan.cpp",
    "gpu_store.cpp",
    "sim_control.cpp",
    "sim_copies.cpp",
    "sim_runtime.cpp",
}
CORE = sorted(str(p) for p in Path("csrc").glob("*.cpp") if p.name not in GPU_ONLY)
GPU = [
    "csrc/gpu.cu",
    *(f"csrc/{n}.cpp" for n in ("gpu_plan", "gpu_copier", "gpu_issue", "gpu_store", "gpu_pins")),
    *(f"csrc/{n}.cpp" for n in ("gpu_events", "bind_gpu", "thread_pool")),
]
SIM = ["csrc/sim_runtime.cpp", "csrc/sim_control.cpp", "csrc/sim_copies.cpp"]
FLAGS = ["-O3", "-std=c++17", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter", "-pthread"]
CUDA_ARCHS = "80 86 89 90 100 120"


def pybind11_include() -> list[str]:
    """Where pybind11's headers are; nothing where the compiler finds them by itself (CPATH)."""
    try:
        import pybind11
        from pybind11.setup_helpers import ParallelCompile
    except ImportError:
        return []
    ParallelCompile(default=0).install()  # 0 = as many compilers at once as there are cores
    return [pybind11.get_include()]


def wanted(switch: str, tool: str | None, name: str) -> bool:
    """Whether to build a module, from its environment switch and the tool found for it."""
    value = os.environ.get(switch, "auto")
    if value not in ("auto", "0", "1"):
        raise SystemExit(f"{switch}={value}: must be auto, 0 or 1")
    if value == "1" and tool is None:
        raise SystemExit(
            f"{switch}=1, but {name} was not found (looked in CUDA_HOME, CUDA_PATH, ROCM_PATH and HIP_PATH, and where "
            f"these are not set in /usr/local/cuda, /opt/rocm and PATH); install it or set {switch}=0"
        )
    if value == "auto" and tool is None:
        print(f"kvoffload: no {name} here, its module is not built")
    return value != "0" and tool is not None


def find_tool(name: str, variables: tuple[str, ...], default: str) -> str | None:
    """The compiler in the folders that the variables name; where none of them is set, in the default folder or PATH."""
    named = [root for v in variables if (root := os.environ.get(v))]
    for root in named or [default]:
        if os.access(Path(root) / "bin" / name, os.X_OK):
            return str(Path(root) / "bin" / name)
    return None if named else shutil.which(name)


def nvcc_command(nvcc: str) -> list[str]:
    archs = os.environ.get("KVOFFLOAD_CUDA_ARCHS", CUDA_ARCHS).split()
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=False).stdout
    known = [a for a in archs if f"compute_{a}" in listed] or archs
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in known]
    # PTX of the oldest, which every later device can compile.
    codes.append(f"-gencode=arch=compute_{known[0]},code=compute_{known[0]}")
    return [nvcc, "-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden", "--threads", "2", *codes]


def hip_command(hipcc: str) -> list[str]:
    archs = os.environ.get("KVOFFLOAD_HIP_ARCHS", "gfx90a gfx942 gfx1100").split()
    os.environ["HIP_PLATFORM"] = "amd"  # Debian's hipcc turns to nvcc where both are installed
    return [
        *(
            hipcc,
            "-x",
            "hip",
            "-O3",
            "-std=c++17",
            "-fPIC",
            "-fvisibility=hidden",
            "-D__HIP_PLATFORM_AMD__=1",
        ),
        *(f"--offload-arch={a}" for a in archs),
    ]


class BuildExtensions(build_ext):
    """As setuptools does it, but .cu files by the device compiler, and objects of each module apart."""

    def build_extension(self, ext: Extension) -> None:
        shared, self.build_temp = self.build_temp, str(Path(self.build_temp) / ext.name)
        compiler, plain = self.compiler, self.compiler._compile
        if ".cu" not in compiler.src_extensions:
            compiler.src_extensions.append(".cu")

        def compile_one(obj, src, suffix, cc_args, extra, pp_opts):  # noqa: ANN001, ANN202
            if suffix != ".cu":
                plain(obj, src, suffix, cc_args, extra, pp_opts)
                return
            command = COMMANDS[ext.name] or [*compiler.compiler_so, *FLAGS, "-x", "c++"]
            line = [*command, *pp_opts, "-c", src, "-o", obj]
            if subprocess.run(line, check=False).returncode:
                raise CompileError(f"kvoffload: {ext.name} cannot be built, this failed: {shlex.join(line)}")

        compiler._compile = compile_one
        try:
            super().build_extension(ext)
        finally:
            compiler._compile = plain
            self.build_temp = shared


def module(name: str, sources: list[str], defines: list[tuple[str, str]], libraries: list[str]) -> Extension:
    return Extension(
        f"kvoffload.{name}",
        sources,
        include_dirs=["csrc", *PYBIND11],
        define_macros=[("KVOFFLOAD_MODULE", name), *defines],
        depends=[str(p) for p in Path("csrc").glob("*.h")],
        language="c++",
        extra_compile_args=FLAGS,
        extra_link_args=["-pthread", *libraries],
    )


def modules() -> list[Extension]:
    built = [module("_C", CORE, [], []), module("_sim", [*GPU, *SIM], [("KVOFFLOAD_SIM", "1")], [])]
    COMMANDS["kvoffload._sim"] = None
    nvcc = find_tool("nvcc", ("CUDA_HOME", "CUDA_PATH"), "/usr/local/cuda")
    if nvcc and wanted("KVOFFLOAD_CUDA", nvcc, "nvcc"):
        COMMANDS["kvoffload._cuda"] = nvcc_command(nvcc)
        built.append(module("_cuda", GPU, [], cuda_libraries(nvcc)))
    elif nvcc is None:
        wanted("KVOFFLOAD_CUDA", nvcc, "nvcc")
    hipcc = find_tool("hipcc", ("ROCM_PATH", "HIP_PATH"), "/opt/rocm")
    if wanted("KVOFFLOAD_HIP", hipcc, "hipcc") and hipcc:
        COMMANDS["kvoffload._hip"] = hip_command(hipcc)
        built.append(module("_hip", GPU, [], [f"-L{Path(hipcc).parents[1] / 'lib'}", "-lamdhip64"]))
    return built


def cuda_libraries(nvcc: str) -> list[str]:
    """Linking the runtime statically: the module then imports without any CUDA library."""
    dry = subprocess.run(
        [nvcc, "--dryrun", "-c", "csrc/gpu.cu"], capture_output=True, text=True, check=False
    ).stderr
    tops = [line.split("=", 1)[1].strip() for line in dry.splitlines() if line.startswith("#$ TOP=")]
    roots = [Path(t) for t in tops] or [Path(nvcc).resolve().parents[1]]
    folders = [
        r / d for r in roots for d in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
    ]
    paths = [f"-L{f.resolve()}" for f in folders if (f / "libcudart_static.a").exists()]
    return [*dict.fromkeys(paths), "-lcudart_static", "-lrt", "-ldl", "-Wl,--exclude-libs,ALL"]


COMMANDS: dict[str, list[str] | None] = {}
PYBIND11 = pybind11_include()
if "-g" not in os.environ.get("CFLAGS", "") + os.environ.get("CXXFLAGS", ""):
    FLAGS.append("-g0")  # Python's own flags ask for debug information, twenty times the size

setup(
    package_dir={"kvoffload": "kvoffload", "kvoffload.connectors": "connectors"},
    packages=[
        *find_packages(include=["kvoffload", "kvoffload.*"]),
        "kvoffload.connectors",
        *(f"kvoffload.connectors.{p}" for p in find_packages("connectors")),
    ],
    ext_modules=modules(),
    cmdclass={"build_ext": BuildExtensions},
)
