"""Offline throughput: many prompts at one batch size, ours and what else runs on a CPU.

A run of `python -m benchmarks.peers` with 256 prompts at batch 32 on all cores in
bfloat16. Engines with a queue (ours, vLLM) are given all prompts at once, others a
batch at a time, sorted by length. Other flags are those of `benchmarks.peers`.
"""

import sys
from pathlib import Path

from benchmarks.peers.__main__ import main
from jaxspec.bench.report import num_cores

DEFAULTS = {
    "--num-prompts": 256,
    "--batch-sizes": 32,
    "--dtype": "bfloat16",
    "--threads": num_cores(),
    "--minutes": 120,
    "--output": Path(__file__).with_name("results") / "throughput-cpu.json",
}

if __name__ == "__main__":
    given = [str(word) for pair in DEFAULTS.items() for word in pair]
    main([*given, *sys.argv[1:]])
