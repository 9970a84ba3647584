"""Text, special pieces and conversations are encoded, and ids are decoded."""

from pathlib import Path

import pytest
import sentencepiece
import transformers

import jaxspec_checkpoints
from jaxspec.errors import ConfigError, RequestError
from jaxspec.inputs import parse_prompt
from jaxspec.text.tokenizer import NoTokenizer, Tokenizer, check_same_tokenizer

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


def test_special_ids_are_those_of_gemma(tokenizer: Tokenizer):
    assert tokenizer.pad_token_id == 0
    assert tokenizer.eos_token_id == 1
    assert tokenizer.bos_token_id == 2
    assert tokenizer.all_special_ids == [0, 1, 2, 3, 106, 107]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<bos>", "<eos>")
    assert tokenizer.vocab_size > 107


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str):
    token_ids = tokenizer.encode(text)
    assert token_ids[0] == 2
    assert tokenizer.encode(text, add_special_tokens=False) == token_ids[1:]
    assert tokenizer.decode(token_ids) == text
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<bos>" + text


@pytest.mark.parametrize("text", TEXTS)
def test_ordinary_text_encodes_like_sentencepiece(
    tokenizer: Tokenizer, folder: Path, text: str
):
    oracle = sentencepiece.SentencePieceProcessor()
    oracle.LoadFromFile(str(folder / "tokenizer.model"))
    assert tokenizer.encode(text)[1:] == oracle.encode(text)


def test_special_pieces_in_text_become_their_ids(tokenizer: Tokenizer):
    inner = tokenizer.encode("user", add_special_tokens=False)
    assert tokenizer.encode("<start_of_turn>user<end_of_turn><eos>") == [
        2,
        106,
        *inner,
        107,
        1,
    ]


def test_bos_is_added_once(tokenizer: Tokenizer):
    assert tokenizer.encode("<bos>a") == tokenizer.encode("a")
    assert tokenizer.encode("<bos>") == [2]


def test_decode_skips_or_shows_special_ids(tokenizer: Tokenizer):
    middle = tokenizer.encode(" there", add_special_tokens=False)
    token_ids = [2, 106, *middle, 107, 3, 0, 1]
    assert tokenizer.decode(token_ids) == " there"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == (
        "<bos><start_of_turn> there<end_of_turn><unk><pad><eos>"
    )


def test_bytes_form_characters(tokenizer: Tokenizer):
    # U+1F9A6 is not in this small vocabulary, so it becomes four byte pieces.
    token_ids = tokenizer.encode("\U0001f9a6", add_special_tokens=False)
    assert len(token_ids) == 4
    assert all(tokenizer.is_byte(token) for token in token_ids)
    assert tokenizer.decode(token_ids) == "\U0001f9a6"
    assert set(tokenizer.decode(token_ids[:3])) == {"\ufffd"}
    assert not tokenizer.is_byte(106)


def test_pieces_of_ids_are_returned(tokenizer: Tokenizer):
    token_ids = tokenizer.encode(" a")
    pieces = tokenizer.convert_ids_to_tokens(token_ids)
    assert pieces[0] == "<bos>"
    assert "".join(pieces[1:]) == "\u2581a"
    assert tokenizer.is_special(107)
    assert not tokenizer.is_special(108)


def test_special_pieces_can_be_encoded_as_text(tokenizer: Tokenizer):
    text = "a<end_of_turn>\n<start_of_turn>model\n<eos>"
    token_ids = tokenizer.encode(text, parse_special_tokens=False)
    assert token_ids[0] == 2
    assert not any(map(tokenizer.is_special, token_ids[1:]))
    assert tokenizer.decode(token_ids) == text
    # "<bos>" in the text is encoded as text; only the first token is the real bos.
    spelled = tokenizer.encode("<bos>a", parse_special_tokens=False)
    assert spelled[0] == 2 and len(spelled) > 3 and 2 not in spelled[1:]


def test_padding_ids_have_no_text(tokenizer: Tokenizer):
    last = tokenizer.vocab_size
    assert tokenizer.decode([2, last, -1, last + 128]) == ""
    assert tokenizer.convert_ids_to_tokens([last, -1]) == ["", ""]
    assert not tokenizer.is_byte(last)
    assert not tokenizer.is_byte(-1)


USER = {"role": "user", "content": "a"}


def test_conversation_has_one_bos(tokenizer: Tokenizer):
    text = "<bos><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\n"
    assert tokenizer.apply_chat_template([USER], tokenize=False) == text
    token_ids = tokenizer.apply_chat_template(conversation=[USER])
    assert token_ids == tokenizer.encode(text)
    assert isinstance(token_ids, list)
    assert token_ids[:2] == [2, 106]
    assert token_ids.count(2) == 1
    assert tokenizer.write_chat([USER]) == (text, token_ids)


def test_continue_final_message_excludes_generation_prompt(tokenizer: Tokenizer):
    with pytest.raises(RequestError, match="add_generation_prompt=False"):
        tokenizer.apply_chat_template([USER], continue_final_message=True)


def test_chat_needs_turns_or_template(tmp_path: Path):
    write_model(tmp_path, {"<end_of_turn>": "<end_of_tale>"})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert not tokenizer.has_turns
    assert tokenizer.all_special_ids == [0, 1, 2, 3]
    assert tokenizer.turn_end_ids == ()
    with pytest.raises(ConfigError, match="The model has no chat template"):
        tokenizer.apply_chat_template([USER])
    template = "<bos>{{ messages[0].content }}"
    token_ids = tokenizer.apply_chat_template([USER], chat_template=template)
    assert token_ids == tokenizer.encode("a")


def test_model_with_template_has_turn_end_ids(tmp_path: Path):
    write_model(tmp_path, {})
    assert Tokenizer.from_folder(tmp_path).turn_end_ids == ()
    assert Tokenizer.from_folder(tmp_path, "{{ x }}").turn_end_ids == (107,)
    (tmp_path / "chat_template.jinja").write_text("x")
    assert Tokenizer.from_folder(tmp_path).turn_end_ids == (107,)


def write_model(folder: Path, renamed: dict[str, str]) -> None:
    """Write the bundled model with some pieces renamed, to names of equal length."""
    model = (jaxspec_checkpoints.bundled_target() / "tokenizer.model").read_bytes()
    for old, new in renamed.items():
        assert len(old) == len(new)
        model = model.replace(old.encode(), new.encode())
    (folder / "tokenizer.model").write_bytes(model)


def test_equal_tokenizers_in_two_files(tmp_path: Path):
    target = Tokenizer.from_folder(jaxspec_checkpoints.bundled_target())
    draft = Tokenizer.from_folder(jaxspec_checkpoints.bundled_draft())
    check_same_tokenizer(target, draft)
    hf = transformers.AutoTokenizer.from_pretrained(
        jaxspec_checkpoints.bundled_target()
    )
    hf.save_pretrained(tmp_path)
    other = Tokenizer.from_folder(tmp_path)
    assert other.pieces.digest != target.pieces.digest
    check_same_tokenizer(target, other)


def test_error_names_first_different_piece(tmp_path: Path):
    target = Tokenizer.from_folder(jaxspec_checkpoints.bundled_target())
    write_model(tmp_path, {"<unused5>": "<unique5>", "<unused9>": "<unique9>"})
    with pytest.raises(ConfigError) as caught:
        check_same_tokenizer(target, Tokenizer.from_folder(tmp_path), "Take this one.")
    message = str(caught.value)
    assert "12 is '<unused5>' for the target and '<unique5>' for the draft" in message
    assert message.endswith("Take this one.")
    assert caught.value.parameter == "speculative_model"


def test_different_vocab_sizes_are_refused(tmp_path: Path):
    target = Tokenizer.from_folder(jaxspec_checkpoints.bundled_target())
    hf = transformers.AutoTokenizer.from_pretrained(
        jaxspec_checkpoints.bundled_target()
    )
    hf.add_tokens(["<extra>"])
    hf.save_pretrained(tmp_path)
    longer = Tokenizer.from_folder(tmp_path)
    assert longer.vocab_size == target.vocab_size + 1
    with pytest.raises(ConfigError, match="8192 is no piece for the target and '<ex"):
        check_same_tokenizer(target, longer)
    with pytest.raises(ConfigError, match="'<extra>' for the target and no piece"):
        check_same_tokenizer(longer, target)


def test_encodes_prompts(tokenizer: Tokenizer):
    parsed = parse_prompt("Hello", tokenizer, tokenizer.vocab_size, 64)
    assert parsed.token_ids == tokenizer.encode("Hello")


def test_tokenizer_has_huggingfaces_methods(tokenizer: Tokenizer):
    ids = tokenizer.encode("Hello, world!")
    encoding = tokenizer("Hello, world!")
    assert encoding.input_ids == encoding["input_ids"] == ids
    assert encoding.attention_mask == [1] * len(ids)
    several = tokenizer(["Hello, world!", "x"], add_special_tokens=False)
    assert several.input_ids == [ids[1:], tokenizer.encode("x", False)]
    with pytest.raises(AttributeError):
        _ = encoding.token_type_ids
    vocab = tokenizer.get_vocab()
    assert len(tokenizer) == len(vocab) == tokenizer.vocab_size
    pieces = tokenizer.convert_ids_to_tokens(ids)
    assert [vocab[piece] for piece in pieces] == ids
    assert tokenizer.convert_tokens_to_ids(pieces) == ids
    assert tokenizer.convert_tokens_to_ids("<eos>") == tokenizer.eos_token_id
    assert tokenizer.convert_tokens_to_ids("no such piece") == tokenizer.unk_token_id


def test_missing_tokenizer_decodes_to_nothing_and_encodes_no_text():
    nothing = NoTokenizer("none was named")
    assert nothing, "true although it has no pieces"
    assert len(nothing) == 0
    assert parse_prompt([2, 5], nothing, 16, 16).token_ids == [2, 5]
    assert nothing.decode([2, 5]) == nothing.id_to_piece(5) == ""
    assert nothing.convert_ids_to_tokens([2, 5]) == ["", ""]
    assert nothing.token_bytes(5) == b""
    assert nothing.plain_texts[5] == ""
    assert nothing.turn_end_ids == ()
    messages = [{"role": "user", "content": "Hi"}]
    for ask in (
        lambda: parse_prompt("Hi", nothing, 16, 16),
        lambda: nothing.write_chat(messages),
        lambda: nothing.apply_chat_template(messages),
    ):
        with pytest.raises(RequestError, match="needs a tokenizer.*none was named"):
            ask()
