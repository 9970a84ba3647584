"""Compiles the C++ operations into a wheel, for every kind of processor.

Off by default: `pip install .` makes a wheel for any platform, whose operations are
compiled where they run. HATCH_BUILD_HOOK_ENABLE_CUSTOM=true, as in `make wheel`, makes
one for this platform, which needs no compiler.
"""

import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "kernels/jaxspec_kernels/native"


class NativeLibraries(BuildHookInterface):
    """Adds one library for each variant of `jaxspec_kernels.native.compiling`."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the libraries, and name the platform in the wheel's tag."""
        if self.target_name != "wheel" or version == "editable":
            return
        sources = Path(self.root) / NATIVE
        compiling = load(sources / "compiling.py")
        include = str(package_folder("jaxlib") / "include")
        machine = platform.machine()
        if machine not in compiling.VARIANTS:
            raise RuntimeError(
                f"There are libraries for {', '.join(compiling.VARIANTS)}, not for "
                f"{machine!r}. Build without HATCH_BUILD_HOOK_ENABLE_CUSTOM."
            )
        self.folder = Path(tempfile.mkdtemp(prefix="jaxspec-wheel-"))
        for variant in compiling.VARIANTS[machine]:
            folder = self.folder / variant.name
            folder.mkdir()
            library = compiling.compile_library(
                find_compiler(),
                (*compiling.FLAGS, *variant.flags),
                include,
                compiling.sources_in(sources),
                folder,
            )
            name = compiling.shipped_name(variant, sources, include)
            shipped = f"{NATIVE.removeprefix('kernels/')}/shipped/{name}"
            build_data["force_include"][str(library)] = shipped
        place = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        # No library uses Python's interface, so that one wheel serves all versions.
        build_data["tag"] = f"py3-none-{place}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact: str) -> None:
        """Remove the compiled files."""
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


def load(path: Path) -> ModuleType:
    """Load a module without its package, which imports jax."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def package_folder(name: str) -> Path:
    """Return the folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{name} is not installed, whose headers the C++ needs")
    return Path(spec.submodule_search_locations[0])


def find_compiler() -> str:
    """Return the C++ compiler: $CXX, or the system's."""
    found = shutil.which(os.environ.get("CXX") or "c++")
    if found is None:
        raise RuntimeError("there is no C++ compiler (c++ or $CXX)")
    return found
