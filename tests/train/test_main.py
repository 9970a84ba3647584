"""The command line trains a head that can be loaded; errors take two lines."""

import json
import re

import pytest

from jaxspec.models.families import config_from_folder
from jaxspec.models.heads.config import read_head
from jaxspec.train.__main__ import METHODS, main, make_parser
from jaxspec.train.text import pack
from jaxspec.train.texts import FORMAT, SETTINGS, model_digest
from jaxspec_checkpoints import bundled_draft

WORDS = "the cat sat on the mat and then the dog ran to the house because it was late"
START = f"--start {bundled_draft()}"
FEW_ROWS = "held-out text has 2 rows, but a step takes rows=8: raise tokens or held_"


@pytest.fixture(name="data")
def _data(tmp_path):
    path = tmp_path / "data.jsonl"
    lines = [dict(text=f"{number} {WORDS} " * 3) for number in range(24)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def command(data, tmp_path, method, *more):
    # The target is the bundled pair's smaller model, which compiles quickly.
    return [
        method,
        *("--target", str(bundled_draft()), "--data", str(data)),
        *("--out", str(tmp_path / "out"), "--text", "given", "--length", "16"),
        *("--tokens", "384", "--rows", "8", "--held-out", "0.34", "--steps", "2"),
        *more,
    ]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_the_common_flags(method):
    options = make_parser().parse_args(
        [method, "--target", "t", "--data", "d", "--out", "o"]
    )
    assert (options.method, options.steps, options.loss) == (method, 1000, "lk")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("eagle3 --steps 0", "steps must be an integer of at least 1, got 0"),
        ("eagle3 --layers 1,2,9", r"eagle_aux.*has 2 layers"),
        ("eagle3 --draft-vocab-size 9999", "draft_vocab_size must be"),
        ("dflash --block-size 1", "block_size must be an integer of at least"),
        ("dflash --layers 1,9", r"after layers \[1, 9\].* has 2 layers"),
        ("dflash --mask-token 8192", "mask_token must be an integer from 0 to"),
        ("medusa --heads 0", "num_heads must be an integer of at least 1"),
        ("pard", "needs start, an initial model, keep_layers, or its sizes: hid"),
        (
            f"pard {START} --export gguf",
            "export must be 'safetensors' here, got 'gguf': GGUF has no key for the",
        ),
        ("eagle3 --export gguf", "got 'gguf': heads have no GGUF form"),
        ("medusa --export specforge", "only EAGLE-3 heads are written in"),
        ("eagle3 --export specforge --layers 0,1,2", "must be numbers of at least 1"),
        (f"draft --keep-layers 0,1 {START}", "exclude each other: start sets the"),
        ("draft --keep-layers 1,0", r"keep_layers must be ascending numbers"),
        ("draft --keep-layers 0,2", "keep_layers must be an integer from 0 to"),
        (f"draft {START} --draft-vocab-size 9", "draft_vocab_size needs keep_layers"),
        ("draft --keep-layers 0 --draft-vocab-size 9999", "an integer from 1 to 8192"),
        (f"pard {START} --mask-token 8192", r"mask_token must be .*8191, got 8192"),
        ("draft", "needs start, an initial model, keep_layers, or its sizes: h"),
        ("draft --start jaxspec/none", "start"),
        ("eagle3 --held-out 0.9", r"held_out must be a number in \(0, 0.5\]"),
        ("eagle3 --held-out 0.1", FEW_ROWS),
        ("eagle3 --text written --held-out 0.1", FEW_ROWS),
        ("eagle3 --rows 16 --held-out 0.5", "text has 12 rows.*rows=16"),
        ("eagle3 --tensor-parallel-size 99", "must be a divisor of the"),
        ("eagle3 --data nothing", "data must be a file of JSON lines"),
        ("eagle3 --target nothing", "target must be an existing folder"),
    ],
)
def test_bad_arguments_fail_before_anything_runs(data, tmp_path, capsys, more, named):
    more = more.replace("jaxspec/none", str(tmp_path / "none"))
    assert main(command(data, tmp_path, *more.split())) == 2
    shown = capsys.readouterr().err
    assert re.search(named, shown), shown
    assert not (tmp_path / "out").exists()
    # No work folder remains, with which the corrected command would fail.
    assert not (tmp_path / "out.work").exists()


def test_few_held_out_texts_fail_before_anything_runs(tmp_path, capsys):
    texts, out = tmp_path / "texts", tmp_path / "out"
    texts.mkdir()
    settings = {"format": FORMAT, "target": model_digest(bundled_draft())}
    (texts / SETTINGS).write_text(json.dumps(settings))
    for name, num_rows in (("train", 16), ("held-out", 3)):
        pack([([2, 3, 4], 1)] * num_rows, 16).save(texts / f"{name}.npz")
    arguments = ["--target", str(bundled_draft()), "--texts", str(texts)]
    for more, named in (
        ([], "has 3 rows, but a step takes rows=8: write more texts, or"),
        (["--held-out-rows", "4"], "held_out_rows must be an integer from 1 to 3"),
    ):
        assert main(["eagle3", *arguments, "--out", str(out), *more]) == 2
        shown = capsys.readouterr().err
        assert named in shown, shown
        assert not (tmp_path / "out.work").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("relaxed_promotion")
def test_head_is_trained_and_loaded(data, tmp_path, capsys):
    arguments = command(data, tmp_path, "medusa", "--states", "cached")
    assert main(arguments) == 0
    assert "medusa: 2 steps" in capsys.readouterr().out
    config, _ = read_head(tmp_path / "out")
    config.check_target(config_from_folder(bundled_draft()))
    assert main(arguments) == 2
    assert "out must be a folder that does not exist" in capsys.readouterr().err
    changed = [*arguments, "--out", str(tmp_path / "more")]
    changed += ["--work", str(tmp_path / "out.work"), "--seed", "1"]
    assert main(changed) == 2
    assert "holds a run with seed=0, got 1" in capsys.readouterr().err
