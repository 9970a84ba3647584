"""Tries an installed jaxspec, offline: `python smoke.py [--native] [--serve]`.

Runs in a clean environment, so it imports nothing of the checkout.
"""

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

PROMPT = "Once upon a time there was a dragon who"
INSTALL = 'pip install "jaxspec-decoding[serve]"'
LICENSES = "LICENSE NOTICE CC-BY-4.0.txt CDLA-Sharing-1.0.txt MIT-GSM8K.txt PSF-2.0.txt"
PACKAGES = ("jaxspec", "jaxspec_kernels", "jaxspec_checkpoints")
# Prints two texts as JSON: with drafts, and without. It connects to no other machine.
GENERATE = """
import json, os, socket, sys

connect = socket.socket.connect
def guarded(self, address):
    assert isinstance(address, str) or address[0].startswith("127."), address
    return connect(self, address)
socket.socket.connect = guarded

from jaxspec import LLM, SamplingParams
from jaxspec_kernels import native

llm = LLM("jaxspec/tiny-gemma2", speculative_model="jaxspec/tiny-gemma2-draft",
          num_speculative_tokens=4, max_num_seqs=2, max_model_len=128)
texts = []
for count in (4, 0):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True,
                            extra_args={"num_speculative_tokens": count})
    texts.append(llm.generate(sys.argv[1], params, use_tqdm=False)[0].outputs[0].text)
shipped = native.shipped_library("on")
found = {"texts": texts, "native": native.is_available(),
         "shipped": shipped and shipped.name}
print(json.dumps(found), flush=True)
os._exit(0)
"""


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command, not in the checkout; return its output."""
    words = [str(word) for word in command]
    given = {"capture_output": True, "text": True, "cwd": tempfile.gettempdir()}
    return subprocess.run(words, **(given | options))  # pyright: ignore


def program() -> str:
    """Return the path of the installed program `jaxspec`."""
    return str(Path(sys.executable).with_name("jaxspec"))


def check_files(version: str) -> None:
    """Check the version, license texts and types of the installed packages."""
    assert run(program(), "--version").stdout == f"jaxspec {version}\n"
    names = [str(file) for file in importlib.metadata.files("jaxspec-decoding") or ()]
    for license_name in LICENSES.split():
        assert any(
            "dist-info/licenses/" in name and name.endswith(license_name)
            for name in names
        ), license_name
    for package in PACKAGES:
        assert f"{package}/py.typed" in names, package


def check_texts(*, needs_native: bool) -> None:
    """Generate with drafts and without; both texts must be equal."""
    environment = dict(os.environ, HF_HUB_OFFLINE="1")
    if needs_native:
        environment |= {"CXX": "", "PATH": "/nowhere"}  # no compiler
        environment.pop("JAXSPEC_NATIVE", None)
    done = run(sys.executable, "-P", "-c", GENERATE, PROMPT, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    drafted, plain = found["texts"]
    assert drafted == plain and len(plain) > 20, found
    if needs_native:
        assert found["native"] and found["shipped"], found
    print(f"  text: {PROMPT}{plain!r}")
    print(f"  C++: {found['native']}, shipped library: {found['shipped']}")


def check_missing_server() -> None:
    """Without the extra, the server's error is one line that names it."""
    for command in (
        [program(), "serve"],
        [sys.executable, "-m", "jaxspec.serve"],
        [program(), "run-batch"],
        [program(), "bench", "serve"],
    ):
        done = run(*command)
        lines = done.stderr.splitlines()
        assert done.returncode == 2 and len(lines) == 1, done
        assert lines[0].endswith(INSTALL), done


def check_server() -> None:
    """Start the server, complete a prompt, and stop it by SIGTERM."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    command = [program(), "serve", "--port", str(port), "--max-num-seqs", "2"]
    server = subprocess.Popen(command, cwd=tempfile.gettempdir())
    url = f"http://127.0.0.1:{port}"
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        for _ in range(600):
            assert server.poll() is None, "the server ended"
            try:
                urllib.request.urlopen(f"{url}/health", timeout=10).close()
                break
            except OSError:
                time.sleep(0.5)
        with urllib.request.urlopen(request, timeout=300) as response:
            answer = json.load(response)
        assert answer["usage"]["completion_tokens"] == 8, answer
        server.terminate()
        assert server.wait(timeout=60) == 0
        print(f"  server: {answer['choices'][0]['text']!r}")
    finally:
        server.kill()


def check_environment_report(version: str) -> None:
    """`jaxspec collect-env` prints the version, and no secret."""
    secret = "hf_" + "x" * 30
    done = run(program(), "collect-env", env=dict(os.environ, HF_TOKEN=secret))
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^ +jaxspec +{re.escape(version)}$", done.stdout, re.MULTILINE)
    assert secret not in done.stdout


def main() -> None:
    """Run the checks; an AssertionError says which one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--native", action="store_true", help="no compiler is needed")
    parser.add_argument("--serve", action="store_true", help="with the extra serve")
    options = parser.parse_args()
    assert shutil.which(program()), "jaxspec is not installed here"
    version = importlib.metadata.version("jaxspec-decoding")
    check_files(version)
    check_environment_report(version)
    if options.serve:
        check_server()
    else:
        check_missing_server()
        check_texts(needs_native=options.native)
    print(f"  jaxspec {version} works on Python {sys.version.split()[0]}", flush=True)


if __name__ == "__main__":
    main()
