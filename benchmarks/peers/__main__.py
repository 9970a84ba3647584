"""Measures this engine and its peers on a CPU, in one run.

    python -m benchmarks.peers --vllm-python PYTHON --openvino-python PYTHON \
        --llama-server PATH --llama-convert PATH

    python -m benchmarks.peers --real

The first command uses the bundled pair; the second, models of real sizes and llama.cpp
(see `real`, which has its own cells).

Decoding is greedy, with the same token ids, number of new tokens and cores for all.
Every peer has a process of its own that remains alive. Runs alternate between all
peers, so that a slow phase of the machine affects all of them. The time is measured
from passing the prompts to the last token. Rows are written when they are measured, so
the run may be stopped; it ends after `--minutes`.

Reading order: `answer` (the child's side, which runs in the environment of its peer);
the children `ours`, `hf`, `ov`, `llama` and `vllm_cpu`; `found` (the peers, their
models and processes); `cells` (cells, rows and table); `turns`; then `real`, with the
child `xllama` and `gguf_models`.
"""

import argparse
import contextlib
import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.cpu_pair import warn_unless_quiet
from benchmarks.measure import DOMAINS, PromptSet, load_prompts
from benchmarks.peers import real
from benchmarks.peers.cells import OURS, peers_table
from benchmarks.peers.found import MODELS, Peer, find_peers
from benchmarks.peers.turns import LOOKUP_MAX, ROOM, Turns
from benchmarks.readme_table import real_tables
from jaxspec.bench.report import commit, machine, now, num_cores, versions
from jaxspec.text.tokenizer import Tokenizer

RESULTS = Path(__file__).parents[1] / "results"
# Options that the result records; the other options are local paths.
SHOWN = (
    *("num_prompts", "single_prompts", "num_tokens", "num_speculative_tokens"),
    *("batch_sizes", "threads", "repeats", "minutes", "dtype", "bfloat16", "peers"),
)
# Number of bundled prompts; if more are needed, they repeat.
MOST_PER_DOMAIN = 3
TIMED = (
    "from passing the prompts, as token ids, to the last token; tokens/s are new "
    "tokens by that time"
)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--real",
        action="store_true",
        help="compare models of real sizes with llama.cpp; of the other options, only "
        "--num-tokens, --threads, --repeats, --models and --output apply",
    )
    add("--corpus", type=Path, help="folder with valid.jsonl.xz, to take prompts from")
    add(
        "--num-prompts",
        type=int,
        default=8,
        help="number of prompts in runs with several at a time",
    )
    add(
        "--single-prompts",
        type=int,
        default=5,
        help="number of prompts in runs with one at a time",
    )
    add(
        "--num-tokens",
        type=int,
        help="new tokens of every request (default: 128; with --real 32)",
    )
    add(
        "--num-speculative-tokens",
        type=int,
        default=5,
        help="draft tokens per round, in every engine",
    )
    add("--batch-sizes", type=int, nargs="+", default=[1, 8])
    add(
        "--threads",
        type=int,
        nargs="+",
        help="default: 1, and 2 if the process may use 2 cores",
    )
    add("--repeats", type=int, default=3)
    add(
        "--minutes",
        type=float,
        default=12,
        help="time limit of the run, without converting models and compiling",
    )
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--bfloat16", action="store_true", help="also measure jaxspec in bfloat16")
    add(
        "--peers",
        nargs="+",
        metavar="NAME",
        help="measure only these engines and jaxspec",
    )
    add("--vllm-python", help="interpreter of an environment with vllm-cpu")
    add(
        "--openvino-python",
        help="interpreter of an environment with openvino-genai and optimum-intel",
    )
    add("--llama-server", help="path of llama-server, the server program of llama.cpp")
    add("--llama-convert", help="its convert_hf_to_gguf.py")
    add(
        "--llama-python",
        default=sys.executable,
        help="interpreter that runs llama.cpp's converter",
    )
    add(
        "--models",
        type=Path,
        help="keep the models that were made for the run in this folder",
    )
    add(
        "--output",
        type=Path,
        help="default: benchmarks/results/peers-cpu.json, or peers-real-cpu.json",
    )
    return parser


def check(options: argparse.Namespace) -> None:
    """Reject impossible options before anything is started."""
    cores = num_cores()
    if options.num_tokens is None:
        options.num_tokens = 32 if options.real else 128
    if options.output is None:
        name = "peers-real-cpu.json" if options.real else "peers-cpu.json"
        options.output = RESULTS / name
    if options.threads is None:
        options.threads = [1, 2] if cores > 1 else [1]
    for name in SHOWN[:6] + ("repeats",):
        value = getattr(options, name)
        if min(value if isinstance(value, list) else [value]) < 1:
            raise SystemExit(
                f"--{name.replace('_', '-')} must be at least 1, got {value}"
            )
    if options.real and options.num_tokens < 2:
        raise SystemExit("--num-tokens must be at least 2 with --real, got 1")
    most = max(options.batch_sizes)
    if options.num_prompts < most:
        raise SystemExit(
            f"--num-prompts {options.num_prompts} must be at least {most}, the "
            "largest batch size"
        )
    if max(options.threads) > cores:
        raise SystemExit(
            f"--threads {max(options.threads)} must be at most {cores}, the cores "
            "that this process may use"
        )
    if not options.output.parent.is_dir():
        raise SystemExit(
            "--output must be a file in an existing folder; there is no "
            f"{options.output.parent}"
        )


def chosen_peers(options: argparse.Namespace) -> dict[str, Peer]:
    peers = {peer.name: peer for peer in find_peers(options)}
    wanted = {OURS, *(options.peers or peers)}
    if unknown := sorted(wanted - set(peers)):
        raise SystemExit(
            f"--peers must be some of {', '.join(peers)}; got {', '.join(unknown)}"
        )
    return {name: peer for name, peer in peers.items() if name in wanted}


def in_turn(chosen: PromptSet) -> list[str]:
    """Interleave the prompts of all domains."""
    groups = zip(*chosen.by_domain.values(), strict=True)
    return [text for group in groups for text in group]


def token_ids(texts: list[str]) -> list[list[int]]:
    tokenizer = Tokenizer.from_folder(str(MODELS["target"]))
    found = [tokenizer.encode(text) for text in texts]
    longest = max(map(len, found))
    if longest > ROOM:
        raise SystemExit(
            f"a prompt has {longest} tokens, but at most {ROOM} are allowed"
        )
    return found


@contextlib.contextmanager
def models_folder(wanted: Path | None) -> Iterator[Path]:
    """Yield the folder of converted models: the given one, or a temporary one."""
    if wanted is not None:
        wanted.mkdir(parents=True, exist_ok=True)
        yield wanted.resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def header(options: argparse.Namespace, chosen: PromptSet) -> dict[str, Any]:
    """Return the header of a result: machine, versions, options; no local paths."""
    return {
        "benchmark": "peers",
        "date": now(),
        **commit(),
        "arguments": {name: getattr(options, name) for name in SHOWN},
        "timed": TIMED,
        "lookup_max": LOOKUP_MAX,
        "prompts": {"source": chosen.source, "digest": chosen.digest},
        "machine": machine(),
        "versions": versions(),
    }


def main(arguments: list[str] | None = None) -> None:
    options = make_parser().parse_args(arguments)
    check(options)
    if options.real:
        real.check_packages()
        warn_unless_quiet()
        with models_folder(options.models) as folder:
            print(real_tables(real.run(options, folder)))
        return
    peers = chosen_peers(options)
    most = max(options.num_prompts, options.single_prompts)
    per_domain = min(-(-most // len(DOMAINS)), MOST_PER_DOMAIN)
    chosen = load_prompts(options.corpus, per_domain)
    texts = list(itertools.islice(itertools.cycle(in_turn(chosen)), most))
    prompts = token_ids(texts)
    result = header(options, chosen)
    warn_unless_quiet()
    with models_folder(options.models) as options.models:
        turns = Turns(options, peers, prompts, result)
        turns.prepare()
        for place, threads in enumerate(options.threads):
            # Each number of threads gets an equal share of the remaining time.
            turns.measure(threads, 1 / (len(options.threads) - place))
    print(peers_table(turns.result))


if __name__ == "__main__":
    main()
