"""The README is consistent: tables, links, and notes on missing results."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from matplotlib.patches import Rectangle

from benchmarks.figures import draw_all
from tests.support.processes import run_python

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLE_SCRIPT = ROOT / "benchmarks" / "readme_table.py"
BENCHMARK = ROOT / "benchmarks" / "cpu_pair.py"
# The tables of every page, and the note in place of each missing one.
PAGES = {
    "README.md": ["real"],
    "docs/training.md": ["training"],
    "docs/drafts.md": ["costs", "real drafts", "texts", "results"],
    "benchmarks/README.md": ["real", "peers", "forms", "methods"],
}
SPEC = "Not measured yet: run the commands above on a quiet machine."
NOTES = {
    "costs": "Not computed yet: run `python -m benchmarks.draft_costs`.",
    "forms": SPEC,
    "methods": SPEC,
    "peers": "Not measured yet: run `python -m benchmarks.peers` on a quiet machine.",
    "real": "Not measured yet: run `python -m benchmarks.peers --real` on a quiet "
    "machine.",
    "real drafts": "Not measured yet.",
    "results": "Not measured yet: run `make bench` on a quiet machine.",
    "texts": "Not measured yet.",
    "training": "Not measured yet: train as above, and run "
    "`python -m benchmarks.training`.",
}

Done = subprocess.CompletedProcess[str]


def result(**changes: Any) -> dict[str, Any]:
    """Return the newest result of `make bench`, with changes."""
    path = max(RESULTS.glob("cpu_pair-*.json"))
    return json.loads(path.read_text(encoding="utf-8")) | changes


def page_of(name: str, tables: dict[str, str]) -> str:
    """Return a page with these tables; other tables are outdated."""
    lines = ["above"]
    for table in PAGES[name]:
        begin = f"<!-- {table}: written by benchmarks/readme_table.py -->"
        end = f"<!-- end of {table} -->"
        lines += [begin, tables.get(table, "stale"), end]
    return "\n".join([*lines, "below\n"])


def write_table(folder: Path, results: list[dict[str, Any]], *options: str) -> Done:
    """Run the script on pages with outdated tables between the marks."""
    for name in PAGES:
        page = folder / name
        page.parent.mkdir(exist_ok=True)
        if not page.exists():
            page.write_text(page_of(name, {}))
    for number, one in enumerate(results):
        path = folder / f"cpu_pair-{number}.json"
        path.write_text(json.dumps(one))
    return run_python(TABLE_SCRIPT, "--root", folder, "--results", folder, *options)


def test_table_is_the_newest_results():
    done = run_python(TABLE_SCRIPT, "--check")
    assert done.returncode == 0, done.stderr


def test_pages_report_missing_results(tmp_path):
    assert write_table(tmp_path, []).returncode == 0
    for name in PAGES:
        assert (tmp_path / name).read_text() == page_of(name, NOTES)


def test_real_sizes_have_tables_on_two_pages(tmp_path):
    """A failed run leaves its cell empty, and a type without a cell has no row."""
    source = RESULTS / "peers-real-cpu.json"
    measured = json.loads(source.read_text(encoding="utf-8"))
    names = ("section", "model", "cell", "threads")
    failed = [("compared", "270M F16", "batch 1", 1), ("forms", "int4", "batch", 2)]
    measured["cells"] = [
        cell
        if tuple(cell[name] for name in names) not in failed
        else {name: cell[name] for name in names} | {"failed": "it fell over"}
        for cell in measured["cells"]
    ]
    (tmp_path / source.name).write_text(json.dumps(measured))
    assert write_table(tmp_path, []).returncode == 0
    readme, page = (tmp_path / name for name in ("README.md", "benchmarks/README.md"))
    for text in (readme.read_text(), page.read_text()):
        assert "| 270M F16 | - | 45.7 (1.42) | " in text
    assert "2B shapes | threads" not in readme.read_text()
    text = page.read_text()
    # 3.31 tokens/s of 5.23 GB are 17.3 GB/s, of the 19.3 GB/s of a copy.
    assert "| bfloat16 | 1 | 3.3 | 1.00 | 17.3 | 0.89 | 11.2 | 147 |\n" in text
    assert "| int4 | 1 |" in text and "| int4 | 2 |" not in text
    # 20 rounds accepted 60 drafts.
    assert "| 270M with suffix drafts | prose | 54.3 | 98.4 | 1.81 | 4.00 |\n" in text
    assert "](figures/real-bandwidth.svg)" in text
    (axes,) = draw_all(tmp_path)[0]["real-bandwidth"].axes
    heights = [bar.get_height() for bar in axes.patches if isinstance(bar, Rectangle)]
    assert len(heights) == 5
    assert heights[0] == pytest.approx(17.3 / 19.35, abs=0.005)


def test_newest_full_result_becomes_the_table(tmp_path):
    quick = {**result()["arguments"], "quick": True}
    runs = [[90, 80, 100], [70, 70, 70]]
    newest = result(huggingface={"float32": {"tokens_per_s": runs}})
    results = [
        result(date="2026-01-20T10:00:00", commit="older"),
        newest,
        result(date="2028-11-22T10:00:00", commit="short", arguments=quick),
    ]
    assert write_table(tmp_path, results, "--check").returncode == 1
    assert write_table(tmp_path, results).returncode == 0
    assert write_table(tmp_path, results, "--check").returncode == 0
    text = (tmp_path / "docs" / "drafts.md").read_text()
    assert f"at commit {newest['commit']} on " in text
    # The medians of 90 80 100 and of 70 70 70, and then the median of the two.
    assert "greedy: 80 tok/s in float32" in text


def test_links_have_targets():
    benchmarks = ROOT / "benchmarks"
    folders = (ROOT, benchmarks, benchmarks / "monitoring")
    pages = [folder / "README.md" for folder in folders]
    pages.append(benchmarks / "compilers.md")
    pages += [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]
    for page in (*pages, *(ROOT / "docs").glob("*.md")):
        links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
        assert links, page.name
        for link in links:
            path, _, heading = link.partition("#")
            if "://" in link:
                continue
            target = page.parent / path if path else page
            assert target.exists(), f"{page.name}: {link}"
            if heading and target.suffix == ".md":
                assert heading in headings_of(target), f"{page.name}: {link}"


def headings_of(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.replace(" ", "-") for title in kept}


def test_named_tests_exist():
    pages = [ROOT / "tests" / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"([\w/]+\.py)::(test_\w+)", text))
    assert named
    for path, name in named:
        file = ROOT / "tests" / path.removeprefix("tests/")
        assert file.exists(), path
        assert re.search(rf"^def {name}\b", file.read_text("utf-8"), re.M), name


def test_linked_names_are_in_their_files():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (flow,) = re.findall(r"^## How a request is served\n(.*?)^## ", page, re.M | re.S)
    named = re.findall(r"^\d+\. \[`([\w.]+)`\]\(\.\./([\w./]+\.py)\)", flow, re.M)
    assert len(named) == 10, "the flow of a request, in ten lines"
    for name, path in named:
        last = name.rpartition(".")[2]
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^ *(def|class) {last}\b", source, re.MULTILINE), name


def test_names_in_instructions_are_in_the_linked_files():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    examples = {"NAME", "typical_p"}
    num_names = 0
    for item in re.split(r"^(?:\d+\.|-) ", page, flags=re.MULTILINE)[1:]:
        paths = [ROOT / link for link in re.findall(r"\]\(([^)]+\.py)\)", item)]
        if not paths:
            continue
        source = "".join(path.read_text(encoding="utf-8") for path in paths)
        names = set(re.findall(r"`(\w+)`", item.partition("\n\n")[0])) - examples
        missing = [name for name in names if not re.search(rf"\b{name}\b", source)]
        assert not missing, f"{missing} not in {[path.name for path in paths]}"
        num_names += len(names)
    assert num_names > 20


def test_targets_of_make_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"make ([\w-]+)[ `]", README))
    assert {"demo", "test", "bench"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_no_command_installs_the_other_project():
    # On PyPI, jaxspec is the name of an X-ray library.
    assert "another project" in README
    # Not hidden folders: an environment has thousands of files.
    folders = [one for one in ROOT.glob("[!.]*") if one.is_dir()]
    pages = list(ROOT.glob("*.md"))
    pages += [page for folder in folders for page in folder.rglob("*.md")]
    assert len(pages) > 20
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"pip install (-\S+ )*[\"']?jaxspec\b", text), page


@pytest.mark.slow
def test_peak_memory_is_that_of_the_process_alone():
    measure = (
        "import benchmarks.first_token as f\n"
        "small = bytearray(b'x') * 2**26\n"
        "print(f.peak_resident_bytes())"
    )
    done = run_python(
        "-c",
        "import subprocess, sys\n"
        "large = bytearray(b'x') * 2**30\n"
        f"subprocess.run([sys.executable, '-c', {measure!r}], check=True)",
    )
    assert done.returncode == 0, done.stderr
    assert 2**26 < int(done.stdout) < 2**29


@pytest.mark.slow
def test_quick_benchmark_makes_a_table(tmp_path):
    path = tmp_path / "cpu_pair-0.json"
    done = run_python(
        *(BENCHMARK, "--quick", "--skip-huggingface", "--output", path),
        *("--num-speculative-tokens", "1"),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == json.loads(path.read_text())
    measured = json.loads(path.read_text())
    assert measured["arguments"]["quick"]
    assert str(ROOT) not in path.read_text(), "no paths of this machine in a result"
    greedy = measured["modes"]["greedy"]["rows"]
    assert list(greedy) == ["math", "shell", "stories", "fiction", "code", "all"]
    assert greedy["all"]["num_equal"] == greedy["all"]["num_prompts"] == 5
    assert greedy["all"]["acceptance_rate"] <= 1
    startup = measured["startup"]
    for start in startup.values():
        assert 100 * 2**20 < start["peak_resident_bytes"] < 2**30
    assert startup["warm"]["first_token_s"] < startup["cold"]["first_token_s"]
    measured["arguments"]["quick"] = False
    assert write_table(tmp_path, [measured]).returncode == 0
    assert "| all, greedy | " in (tmp_path / "docs" / "drafts.md").read_text()
