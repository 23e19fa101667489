"""Builds the two optional extensions; the package works without either (see vllm_ext/native.py)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# What takes over when an extension is missing; native.py says the same at run time.
FALL_BACK = {
    "vllm_ext._C": "pure Python takes over",
    "vllm_ext._ops": "torch's own operators take over",
}
# The oldest torch the ops library must load in: 2.10.
TORCH_TARGET_VERSION = "0x020a000000000000"

built: set[str] = set()


def say(extension: str, reason: str) -> None:
    print(
        f"vllm-ext: {extension} was not built: {reason}; {FALL_BACK[extension]}.",
        file=sys.stderr,
        flush=True,
    )


def package_folder(name: str) -> Path | None:
    """The folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def extensions() -> list[Extension]:
    found = []
    if pybind11 := package_folder("pybind11"):
        found.append(
            Extension(
                "vllm_ext._C",
                sources=["csrc/native.cpp", "csrc/host_copy.cpp"],
                depends=["setup.py", "csrc/host_copy.h"],
                include_dirs=[str(pybind11 / "include")],
                extra_compile_args=["-std=c++17", "-O3", "-g0", "-fvisibility=hidden"],
                language="c++",
                optional=True,
            )
        )
    else:
        say("vllm_ext._C", "pybind11 is not installed where the build runs")
    if torch := package_folder("torch"):
        found.append(
            Extension(
                "vllm_ext._ops",
                sources=["csrc/ops.cpp"],
                depends=["setup.py"],
                include_dirs=[str(torch / "include")],
                library_dirs=[str(torch / "lib")],
                libraries=["torch_cpu"],
                define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION)],
                extra_compile_args=["-std=c++17", "-O3", "-g0"],
                language="c++",
                optional=True,
            )
        )
    else:
        say(
            "vllm_ext._ops",
            "torch is not installed where the build runs (--no-build-isolation uses yours)",
        )
    return found


class BuildOptional(build_ext):  # type: ignore[misc]
    """Builds what the machine can build and says in one sentence what it could not."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:  # whatever a compiler does wrong, the wheel must still be made
            say(ext.name, f"the compiler failed ({error})")
        else:
            built.add(ext.name)

    def get_ext_filename(self, fullname: str) -> str:
        # A torch op library holds no Python module: one name for every Python.
        if fullname.rpartition(".")[2] == "_ops":
            return str(Path(*fullname.split("."))) + ".so"
        return str(super().get_ext_filename(fullname))


class WheelOfWhatWasBuilt(bdist_wheel):  # type: ignore[misc]
    """Tags the wheel py3-none-any when nothing was compiled."""

    def run(self) -> None:
        self.run_command("build")
        if not built:
            self.root_is_pure = True
            self.distribution.ext_modules = None
        super().run()


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildOptional, "bdist_wheel": WheelOfWhatWasBuilt},
)
