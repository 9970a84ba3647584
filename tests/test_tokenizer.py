from pathlib import Path
from typing import Any

import pytest
import sentencepiece

import jaxspec_checkpoints
from jaxspec.errors import ConfigError, RequestError
from jaxspec.inputs import parse_prompt
from jaxspec.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two spaces,\n\n\tand a tab  ",
    "def f(x):\n    return x + 1234567890\n",
    "生活的真谛是 🦉 naïve",
    "\x00\x7f",
    "<b>not special</b> <unused> <0x41>",
]


def train(folder: Path) -> Path:
    """Train a tiny tokenizer with Gemma's special ids."""
    symbols = ["<mask>", "<2mass>", "[@BOS@]", *(f"<unused{i}>" for i in range(99))]
    symbols += ["<start_of_turn>", "<end_of_turn>", "\n"]
    sentencepiece.SentencePieceTrainer.train(  # pyright: ignore
        sentence_iterator=iter(["the quick brown fox says hello to the world"] * 20),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=420,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        unk_piece="<unk>",
        user_defined_symbols=symbols,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundled = jaxspec_checkpoints.bundled_target()
    if (bundled / "tokenizer.model").is_file():
        return bundled
    return train(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def test_special_ids_are_gemmas(tokenizer: Tokenizer):
    assert tokenizer.pad_token_id == 0
    assert tokenizer.eos_token_id == 1
    assert tokenizer.bos_token_id == 2
    assert tokenizer.all_special_ids == [0, 1, 2, 3, 106, 107]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<bos>", "<eos>")
    assert tokenizer.vocab_size > 107


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_way_there_and_back(tokenizer: Tokenizer, text: str):
    token_ids = tokenizer.encode(text)
    assert token_ids[0] == 2
    assert tokenizer.encode(text, add_special_tokens=False) == token_ids[1:]
    assert tokenizer.decode(token_ids) == text
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<bos>" + text


@pytest.mark.parametrize("text", TEXTS)
def test_ordinary_text_encodes_as_sentencepiece_does(
    tokenizer: Tokenizer, folder: Path, text: str
):
    oracle = sentencepiece.SentencePieceProcessor()
    oracle.LoadFromFile(str(folder / "tokenizer.model"))
    assert tokenizer.encode(text)[1:] == oracle.encode(text)


def test_special_pieces_in_a_text_become_their_ids(tokenizer: Tokenizer):
    inner = tokenizer.encode("user", add_special_tokens=False)
    assert tokenizer.encode("<start_of_turn>user<end_of_turn><eos>") == [
        2,
        106,
        *inner,
        107,
        1,
    ]


def test_the_beginning_is_marked_once(tokenizer: Tokenizer):
    assert tokenizer.encode("<bos>a") == tokenizer.encode("a")
    assert tokenizer.encode("<bos>") == [2]


def test_decode_leaves_special_ids_out_or_spells_them(tokenizer: Tokenizer):
    middle = tokenizer.encode(" there", add_special_tokens=False)
    token_ids = [2, 106, *middle, 107, 3, 0, 1]
    assert tokenizer.decode(token_ids) == " there"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == (
        "<bos><start_of_turn> there<end_of_turn><unk><pad><eos>"
    )


def test_bytes_make_characters_and_half_characters_are_replaced(tokenizer: Tokenizer):
    # U+1F9A6 is in no vocabulary of this size: four byte pieces.
    token_ids = tokenizer.encode("\U0001f9a6", add_special_tokens=False)
    assert len(token_ids) == 4
    assert all(tokenizer.is_byte(token) for token in token_ids)
    assert tokenizer.decode(token_ids) == "\U0001f9a6"
    assert set(tokenizer.decode(token_ids[:3])) == {"\ufffd"}
    assert not tokenizer.is_byte(106)


def test_pieces(tokenizer: Tokenizer):
    token_ids = tokenizer.encode(" a")
    pieces = tokenizer.convert_ids_to_tokens(token_ids)
    assert pieces[0] == "<bos>"
    assert "".join(pieces[1:]) == "\u2581a"
    assert tokenizer.is_special(107)
    assert not tokenizer.is_special(108)


def test_a_conversation_is_written_in_turns(tokenizer: Tokenizer):
    messages = [
        {"role": "user", "content": " Hi \n"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": [{"type": "text", "text": "Bye"}]},
    ]
    expected = (
        "<bos><start_of_turn>user\nHi<end_of_turn>\n"
        "<start_of_turn>model\nHello.<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n"
        "<start_of_turn>model\n"
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) == expected
    token_ids = tokenizer.apply_chat_template(messages)
    assert token_ids == tokenizer.encode(expected)
    assert isinstance(token_ids, list)
    assert token_ids[:2] == [2, 106]
    assert token_ids.count(2) == 1
    closed = tokenizer.apply_chat_template(messages, False, False)
    assert closed == expected.removesuffix("<start_of_turn>model\n")


def test_the_last_turn_can_be_left_open(tokenizer: Tokenizer):
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "model", "content": "Once upon"},
    ]
    text = tokenizer.apply_chat_template(
        messages, False, False, continue_final_message=True
    )
    assert isinstance(text, str)
    assert text.endswith("<start_of_turn>model\nOnce upon")
    with pytest.raises(RequestError, match="add_generation_prompt=False"):
        tokenizer.apply_chat_template(messages, continue_final_message=True)


USER, MODEL = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("messages", "given", "allowed"),
    [
        ([], "got []", "at least one"),
        ([{"role": "system", "content": "x"}, USER], "'system'", "first user message"),
        ([MODEL], "'assistant'", "'user'"),
        ([USER, USER], "messages[1]", "'assistant'"),
        ([USER, MODEL, MODEL], "messages[2]", "'user'"),
        ([{"role": "tool", "content": "x"}], "'tool'", "'user', 'assistant', 'model'"),
        ([{"content": "x"}], "None", "'user', 'assistant', 'model'"),
        ([{"role": "user"}], "None", "a string"),
        ([{"role": "user", "content": 3}], "got 3", "a string"),
        ([{"role": "user", "content": [{"type": "image"}]}], "'image'", "'text'"),
    ],
)
def test_a_bad_conversation(
    tokenizer: Tokenizer, messages: Any, given: str, allowed: str
):
    with pytest.raises(RequestError) as caught:
        tokenizer.apply_chat_template(messages)
    assert given in str(caught.value)
    assert allowed in str(caught.value)


def test_a_folder_without_tokenizer(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"with a tokenizer\.model.*no such file"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(ConfigError, match=r"tokenizer\.json alone"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", [b"", b"no model"])
def test_a_file_that_is_no_model(tmp_path: Path, content: bytes):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.model must be a SentencePiece"):
        Tokenizer.from_folder(tmp_path)


def test_it_encodes_prompts(tokenizer: Tokenizer):
    parsed = parse_prompt("Hello", tokenizer, tokenizer.vocab_size, 64)
    assert parsed.token_ids == tokenizer.encode("Hello")
