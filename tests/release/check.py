"""Installs a release in clean environments of each Python, and tries it.

For each Python from 3.11 on that is on PATH or was installed by pyenv: the wheel alone,
the wheel with the extra `serve` (added by the command that the error names), and the
source archive. `make release-check` runs it.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.release.smoke import INSTALL

SMOKE = Path(__file__).with_name("smoke.py")
OLDEST, NEWEST = 11, 19  # minor versions of Python 3
VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


def find_pythons() -> dict[str, str]:
    """Return one interpreter for each version of Python, by "3.11", "3.12", ..."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found: dict[str, str] = {}
    for minor in range(OLDEST, NEWEST + 1):
        name = f"python3.{minor}"
        kept = sorted(root.glob(f"versions/*/bin/{name}"))
        for path in filter(None, [shutil.which(name), *kept]):
            # A launcher on PATH may have no version that it can launch.
            command = [str(path), "-c", VERSION]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.stdout.strip() == f"3.{minor}":
                found.setdefault(f"3.{minor}", str(path))
    return found


def artifacts(folder: Path) -> dict[str, Path]:
    """Return the wheel and the source archive of a folder, which has one of each."""
    (wheel,) = folder.glob("jaxspec_decoding-*.whl")
    (archive,) = folder.glob("jaxspec_decoding-*.tar.gz")
    return {"wheel": wheel, "source": archive}


def steps(kind: str, artifact: Path, python: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of one environment, with their names."""
    pip = [str(python), "-m", "pip"]
    install = [*pip, "install", "-q", "--disable-pip-version-check"]
    yield "install", [*install, str(artifact)]
    smoke = [str(python), str(SMOKE)]
    if kind == "source":
        yield "try", smoke
        return
    yield "try, without a compiler", [*smoke, "--native"]
    yield INSTALL, [*install, *shlex.split(INSTALL)[2:]]
    yield "try the server", [*smoke, "--serve"]


def check(kind: str, artifact: Path, interpreter: str, folder: Path) -> bool:
    """Make an environment and run its steps; return whether all succeed."""
    subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    environment = dict(os.environ)
    # The environment must find neither this checkout nor its compiled libraries.
    for name in ("PYTHONPATH", "PYTHONHOME", "JAXSPEC_NATIVE"):
        environment.pop(name, None)
    python = folder / "bin" / "python"
    return all(
        run_step(name, command, environment, folder)
        for name, command in steps(kind, artifact, python)
    )


def run_step(name: str, command: list[str], environment: Any, folder: Path) -> bool:
    """Run a command in a folder; print and return whether it succeeds."""
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, cwd=folder)
    state = "ok" if done.returncode == 0 else f"FAILED ({done.returncode})"
    print(f"  {name}: {state}, {time.perf_counter() - start:.0f} s", flush=True)
    return done.returncode == 0


def main() -> int:
    """Run all checks; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="has one wheel, one source archive")
    parser.add_argument("--only", metavar="3.N", help="one version of Python")
    options = parser.parse_args()
    pythons = find_pythons()
    if options.only:
        pythons = {options.only: pythons[options.only]}
    if not pythons:
        print("There is no Python 3.11 or newer", file=sys.stderr)
        return 1
    failed = []
    for version, interpreter in pythons.items():
        for kind, artifact in artifacts(options.folder).items():
            print(f"Python {version} ({interpreter}), {artifact.name}", flush=True)
            with tempfile.TemporaryDirectory(prefix="jaxspec-release-") as folder:
                place = Path(folder) / "environment"
                if not check(kind, artifact.resolve(), interpreter, place):
                    failed.append(f"{kind} on Python {version}")
    print("Failed: " + ", ".join(failed) if failed else "The release works", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
