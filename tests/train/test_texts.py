"""A folder of texts: written by one model, with prompts that no draft is trained on."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from jaxspec.errors import ConfigError
from jaxspec.train import texts as module
from jaxspec.train.__main__ import main, make_parser
from jaxspec.train.texts import model_digest, open_texts, write_texts
from jaxspec_checkpoints import bundled_draft

PROMPTS = [f"Once upon a time, {number} dogs" for number in range(6)]


class Writer:
    """Stands for `LLM`: continues every prompt with three tokens."""

    def __init__(self, model, **options):
        self.options = options

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def generate(self, prompts, sampling_params, *, use_tqdm):
        output = SimpleNamespace(
            token_ids=[7, 8, 9], finish_reason="length", stop_reason=None
        )
        return [SimpleNamespace(outputs=[output]) for _ in prompts]


@pytest.fixture(name="arguments")
def _arguments(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LLM", Writer)
    files = {"data": PROMPTS[:4], "held-out-data": PROMPTS[4:]}
    found = ["text", "--target", str(bundled_draft()), "--out", str(tmp_path / "out")]
    for name, prompts in files.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
        found += [f"--{name}", str(path)]
    return [*found, "--length", "32", "--tokens", "12", "--held-out-tokens", "6"]


def test_texts_are_written_and_read(arguments, tmp_path, capsys):
    written = write_texts(make_parser().parse_args(arguments))
    assert (len(written.trained), len(written.held_out)) == (4, 2)
    assert written.trained.num_written == 12
    found = open_texts(tmp_path / "out")
    assert found.digest == written.digest
    assert found.settings["target"] == model_digest(bundled_draft())
    # A different seed is a different text.
    assert main([*arguments, "--seed", "1"]) == 2
    assert "holds texts with seed=0, got 1" in capsys.readouterr().err
    heads = {row[:start].tobytes() for row, start in rows(found.trained)}
    assert not heads & {row[:start].tobytes() for row, start in rows(found.held_out)}


def rows(text):
    return zip(text.tokens, text.starts, strict=True)


def test_shared_prompts_are_refused(arguments, tmp_path, capsys):
    path = tmp_path / "held-out-data.jsonl"
    path.write_text(json.dumps({"prompt": PROMPTS[1]}))
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert "held_out_data has 1 prompts of data" in shown and "1 dogs" in shown
    assert not (tmp_path / "out").exists()


def test_incomplete_folders_are_refused(arguments, tmp_path):
    with pytest.raises(ConfigError, match="texts must be a folder that"):
        open_texts(tmp_path)
    write_texts(make_parser().parse_args(arguments))
    (tmp_path / "out/held-out.npz").unlink()
    with pytest.raises(ConfigError, match=r"has no held-out.npz: .*interrupted"):
        open_texts(tmp_path / "out")
    path = tmp_path / "out/settings.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ConfigError, match="has format=2, but only 1 is supported"):
        open_texts(tmp_path / "out")


def test_texts_of_another_target_are_refused(arguments, tmp_path, capsys):
    write_texts(make_parser().parse_args(arguments))
    path = tmp_path / "out/settings.json"
    path.write_text(path.read_text().replace(model_digest(bundled_draft()), "other"))
    head = ["medusa", "--target", str(bundled_draft()), "--out", str(tmp_path / "head")]
    assert main([*head, "--texts", str(tmp_path / "out")]) == 2
    assert "whose files differ from the target's" in capsys.readouterr().err
    assert not (tmp_path / "head.work").exists()


def test_digest_changes_with_a_models_files(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/weights").write_bytes(bytes(3 * 2**20))
    before = model_digest(tmp_path / "a")
    (tmp_path / "a/weights").write_bytes(bytes(3 * 2**20 - 1) + b"1")
    assert model_digest(tmp_path / "a") != before
    np.testing.assert_equal(model_digest(tmp_path / "a/weights")[:4].isalnum(), True)
