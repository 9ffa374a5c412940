"""Build the native core. Everything else is declared in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import find_packages, setup

CORE = sorted(str(p) for p in Path("csrc").glob("*.cpp") if p.name != "bind_gpu.cpp")
FLAGS = ["-O3", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter", "-pthread"]

ParallelCompile(default=0).install()  # 0 = as many compilers at once as there are cores

setup(
    package_dir={"kvoffload": "kvoffload", "kvoffload.connectors": "connectors"},
    packages=[
        *find_packages(include=["kvoffload", "kvoffload.*"]),
        "kvoffload.connectors",
        *(f"kvoffload.connectors.{p}" for p in find_packages("connectors")),
    ],
    ext_modules=[
        Pybind11Extension(
            "kvoffload._C",
            CORE,
            include_dirs=["csrc"],
            depends=[str(p) for p in Path("csrc").glob("*.h")],
            cxx_std=17,
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
        )
    ],
)
