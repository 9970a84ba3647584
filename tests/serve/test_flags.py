"""The command line, the flag file, the settings, and the start of the program."""

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config.engine import EngineConfig
from jaxspec.engine.arg_utils import AsyncEngineArgs
from jaxspec.engine.model_folders import BUNDLED_DRAFT, BUNDLED_TARGET
from jaxspec.engine.vllm_arguments import VLLM_ENGINE_FLAGS
from jaxspec.errors import ConfigError
from jaxspec.serve import __main__ as program
from jaxspec.serve.flags import Options, make_parser, read_flags, read_values
from jaxspec.serve.settings import ServerSettings
from tests.support.processes import run_python

SECRET_FILES = ["api-key: [hush", "api-key=hush", "api-key: hush\n  x: 1", "- hush"]


def read(*arguments: str) -> Options:
    return read_flags("prog", arguments)


def test_default_model_is_bundled_pair():
    options = read()
    engine = options.engine
    assert (engine.model, engine.speculative_model) == (BUNDLED_TARGET, BUNDLED_DRAFT)
    assert engine.num_speculative_tokens == 5
    given = options.listening
    assert (given.host, given.port) == ("127.0.0.1", 8000)
    names = (BUNDLED_TARGET,)
    assert options.settings == ServerSettings(served_model_names=names)
    assert read("--spec-method", "ngram").engine.speculative_model is None


def test_defaults_equal_engine_args():
    engine = read("m").engine
    for item in dataclasses.fields(AsyncEngineArgs):
        if item.name != "model" and item.default is not dataclasses.MISSING:
            assert getattr(engine, item.name) == item.default, item.name


def test_length_has_a_unit_or_is_chosen_automatically():
    for text, length in (("8k", 8000), ("8K", 8192), ("auto", -1)):
        assert read("m", "--max-model-len", text).engine.max_model_len == length


def test_spellings_of_speculation_are_equivalent():
    def config(spelling: str) -> EngineConfig:
        line = f"--model {BUNDLED_TARGET} {spelling.replace('DRAFT', BUNDLED_DRAFT)}"
        return read(*shlex.split(line)).engine.create_engine_config()

    expected = config("--speculative-model DRAFT --num-speculative-tokens 5")
    assert expected.max_draft_tokens == 5
    for spelling in (
        '--speculative-config \'{"model": "DRAFT", "num_speculative_tokens": 5}\'',
        "--spec-model DRAFT --spec-tokens 5",
        "--speculative_model=DRAFT --num_speculative_tokens=5",
        "-sc.model DRAFT --spec-tokens 5",
    ):
        assert config(spelling) == expected


def test_parses_every_kind_of_value():
    words = "m --trust-remote-code --no-enable-prefix-caching --swap-space 2 --hf-token"
    words += " --served-model-name a b --api-key k l --max-request-s 1.5"
    words += " --max-num-queued-reqs 7 --shutdown-timeout 3 -tp 2"
    options = read(*words.split(), "--allowed-origins", '["*"]')
    engine, settings = options.engine, options.settings
    assert (engine.trust_remote_code, engine.enable_prefix_caching) == (True, False)
    assert (engine.swap_space, engine.hf_token) == (2.0, True)
    assert engine.tensor_parallel_size == 2
    assert engine.served_model_name == ["a", "b"]
    expected = ServerSettings(
        served_model_names=("a", "b"),
        api_keys=("k", "l"),
        allowed_origins=("*",),
        max_request_s=1.5,
        max_num_queued_reqs=7,
    )
    assert settings == expected
    assert settings.model_name == "a"
    assert options.shutdown_timeout == 3
    words = "m --enable-auto-tool-choice --tool-call-parser gemma"
    words += " --exclude-tools-when-tool-choice-none"
    assert read(*words.split()).settings.enable_auto_tool_choice


def test_reads_flag_file(tmp_path: Path):
    path = tmp_path / "flags.yaml"
    path.write_text(
        "model: m\nport: 9\nserved_model_name: [a, b]\ntrust-remote-code: true\n"
        "enable-prefix-caching: false\nspeculative-config: {model: d}\nseed: null\n"
    )
    options = read("--config", str(path), "--port", "10")
    engine = options.engine
    assert (engine.model, engine.served_model_name) == ("m", ["a", "b"])
    assert (engine.trust_remote_code, engine.enable_prefix_caching) == (True, False)
    assert engine.speculative_config == {"model": "d"}
    assert options.listening.port == 10, "the command line takes precedence"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "nowhere"),
        ("modle: m", "modle"),
        ("- m", "YAML"),
        ("{", "YAML"),
        ("config: x.yaml", "config"),
        *((text, "YAML") for text in SECRET_FILES),
    ],
)
def test_rejects_invalid_file(tmp_path: Path, text: str | None, message: str):
    path = tmp_path / "nowhere.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        read("--config", str(path))
    assert "hush" not in f"{refused.value} {refused.value.value}"


@pytest.mark.parametrize(
    "arguments",
    [
        "--nope",
        "--port x",
        "--speculative-config {",
        "--limit-concurrency 0",
        "--limit-concurrency 1.5",
        "--timeout-keep-alive -1",
        "--timeout-read-headers nan",
    ],
)
def test_rejects_invalid_command_line(arguments: str):
    with pytest.raises(SystemExit) as ended:
        read(*arguments.split())
    assert ended.value.code == 2


def test_rejects_unsupported_or_contradictory_values():
    assert read("m", "--api-server-count", "1", "--model", "m").engine.model == "m"
    with pytest.raises(ConfigError, match="--api-server-count must be 1, got 2"):
        read("m", "--api-server-count", "2")
    with pytest.raises(ConfigError, match="--model"):
        read("m", "--model", "n")


def test_help_lists_every_argument_of_jaxspec():
    text = make_parser("prog").format_help()
    shown = re.findall(r"--[\w-]+", text)
    for item in dataclasses.fields(AsyncEngineArgs):
        is_shown = f"--{item.name.replace('_', '-')}" in shown
        assert is_shown == (item.name not in VLLM_ENGINE_FLAGS), item.name
    assert "Tokens per page of the KV memory" in text


@pytest.mark.parametrize("values", [("hush", ""), ("[hush",), ("hu sh\n",), ("hushé",)])
def test_invalid_key_is_not_quoted(values: tuple[str, ...]):
    with pytest.raises(ConfigError, match="api_key") as refused:
        read("m", "--api-key", *values)
    assert "hu" not in f"{refused.value} {refused.value.value}"


def test_repr_shows_no_secret():
    options = read("m", "--api-key", "hush", "--hf-token", "hush")
    assert options.settings.api_keys == ("hush",)
    assert "hush" not in f"{options.settings} {options.engine}"


def test_api_key_from_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert read("m").settings.api_keys == ("theirs",)
    assert read_values("ray", {"model": "m"}).settings.api_keys == ("theirs",)
    assert read("m", "--api-key", "ours").settings.api_keys == ("ours",)
    monkeypatch.setenv("VLLM_API_KEY", "")
    assert read("m").settings.api_keys == ()


def test_dev_mode_from_environment(monkeypatch: pytest.MonkeyPatch):
    for value, expected in (("1", True), ("0", False)):
        monkeypatch.setenv("VLLM_SERVER_DEV_MODE", value)
        assert read("m").settings.server_dev_mode == expected
    assert read("m", "--server-dev-mode").settings.server_dev_mode


@pytest.mark.parametrize(
    "given",
    [
        {"served_model_names": ()},
        {"served_model_names": ("",)},
        {"api_keys": ("",)},
        {"api_keys": ("good", "")},
        {"allowed_origins": "http://page"},
        {"enable_request_id_headers": 1},
        {"per_request_spec_decode_metrics": "all"},
        {"max_body_bytes": 0},
        {"timeout_read_body": 0},
        {"timeout_read_body": float("inf")},
        {"max_num_queued_reqs": -1},
        {"max_num_queued_tokens": 1.5},
        {"max_request_s": 0},
        {"enable_auto_tool_choice": 1},
    ],
)
def test_rejects_invalid_setting(given: dict[str, Any]):
    (name,) = given
    with pytest.raises(ConfigError, match=name.removesuffix("s")):
        ServerSettings(**given)


@pytest.mark.parametrize(
    "module", ("jaxspec.serve", "jaxspec.entrypoints.openai.api_server")
)
def test_help_does_not_import_jax(module: str):
    code = (
        "import runpy, sys\n"
        "sys.argv = ['x', '--help']\n"
        f"try: runpy.run_module({module!r}, run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'jax' not in sys.modules\n"
    )
    printed = run_python("-c", code, check=True).stdout
    assert f"python -m {module}" in printed
    assert "--speculative-model" in printed


def test_invalid_value_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert program.main(["m", "--quantization", "int3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m jaxspec.serve: error: quantization")


@pytest.mark.parametrize(
    ("level", "is_logged"),
    [("info", False), pytest.param("debug", True, marks=pytest.mark.slow)],
)
def test_missing_devices_are_logged_only_in_debug(level, is_logged):
    code = (
        f"from jaxspec.serve import launcher; launcher.set_up_log({level!r})\n"
        "import logging; log = logging.getLogger('jax._src.xla_bridge')\n"
        "log.info('Failed to open libtpu.so'); log.warning('A real error')\n"
        "logging.getLogger('jaxspec').info('ours')\n"
    )
    logged = run_python("-c", code, check=True).stderr
    assert ("libtpu" in logged) == is_logged
    assert "A real error" in logged
    assert "ours" in logged
