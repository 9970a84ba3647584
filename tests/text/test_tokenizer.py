"""Text, special pieces and conversations are encoded, and ids are decoded."""

from pathlib import Path

import pytest
import transformers

import jaxspec_checkpoints
from jaxspec.errors import ConfigError, RequestError
from jaxspec.inputs import parse_prompt
from jaxspec.text.tokenizer import NoTokenizer, Tokenizer, check_same_tokenizer

BUNDLED = jaxspec_checkpoints.bundled_target()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(BUNDLED)


def test_special_ids_are_those_of_gemma(tokenizer: Tokenizer):
    assert tokenizer.pad_token_id == 0
    assert tokenizer.eos_token_id == 1
    assert tokenizer.bos_token_id == 2
    assert tokenizer.all_special_ids == [0, 1, 2, 3, 106, 107]
    assert tokenizer.is_special(107) and not tokenizer.is_special(108)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<bos>", "<eos>")
    assert tokenizer.vocab_size > 107


def test_bos_is_added_once(tokenizer: Tokenizer):
    inner = tokenizer.encode("user", add_special_tokens=False)
    turn = tokenizer.encode("<start_of_turn>user<end_of_turn><eos>")
    assert turn == [2, 106, *inner, 107, 1]
    assert tokenizer.encode("<bos>user") == tokenizer.encode("user") == [2, *inner]
    assert tokenizer.encode("<bos>") == [2]
    parsed = parse_prompt("user", tokenizer, tokenizer.vocab_size, 64)
    assert parsed.token_ids == [2, *inner]


def test_decode_skips_or_shows_special_ids(tokenizer: Tokenizer):
    middle = tokenizer.encode(" there", add_special_tokens=False)
    token_ids = [2, 106, *middle, 107, 3, 0, 1]
    assert tokenizer.decode(token_ids) == " there"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == (
        "<bos><start_of_turn> there<end_of_turn><unk><pad><eos>"
    )
    # Padding rows of the embedding have no text.
    last = tokenizer.vocab_size
    assert tokenizer.decode([2, last, -1, last + 128]) == ""
    assert tokenizer.convert_ids_to_tokens([last, -1]) == ["", ""]
    assert not tokenizer.is_byte(last) and not tokenizer.is_byte(-1)


def test_special_pieces_can_be_encoded_as_text(tokenizer: Tokenizer):
    text = "a<end_of_turn>\n<start_of_turn>model\n<eos>"
    token_ids = tokenizer.encode(text, parse_special_tokens=False)
    assert token_ids[0] == 2
    assert not any(map(tokenizer.is_special, token_ids[1:]))
    assert tokenizer.decode(token_ids) == text
    # "<bos>" in the text is encoded as text; only the first token is the real bos.
    spelled = tokenizer.encode("<bos>a", parse_special_tokens=False)
    assert spelled[0] == 2 and len(spelled) > 3 and 2 not in spelled[1:]


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
    model = (BUNDLED / "tokenizer.model").read_bytes()
    for old, new in renamed.items():
        assert len(old) == len(new)
        model = model.replace(old.encode(), new.encode())
    (folder / "tokenizer.model").write_bytes(model)


def test_equal_tokenizers_in_two_files(tokenizer: Tokenizer, tmp_path: Path):
    draft = Tokenizer.from_folder(jaxspec_checkpoints.bundled_draft())
    check_same_tokenizer(tokenizer, draft)
    hf = transformers.AutoTokenizer.from_pretrained(BUNDLED)
    hf.save_pretrained(tmp_path)
    other = Tokenizer.from_folder(tmp_path)
    assert other.pieces.digest != tokenizer.pieces.digest
    check_same_tokenizer(tokenizer, other)
    hf.add_tokens(["<extra>"])
    hf.save_pretrained(tmp_path)
    longer = Tokenizer.from_folder(tmp_path)
    assert longer.vocab_size == tokenizer.vocab_size + 1
    with pytest.raises(ConfigError, match="8192 is no piece for the target and '<ex"):
        check_same_tokenizer(tokenizer, longer)
    with pytest.raises(ConfigError, match="'<extra>' for the target and no piece"):
        check_same_tokenizer(longer, tokenizer)


def test_error_names_first_different_piece(tokenizer: Tokenizer, tmp_path: Path):
    write_model(tmp_path, {"<unused5>": "<unique5>", "<unused9>": "<unique9>"})
    other = Tokenizer.from_folder(tmp_path)
    with pytest.raises(ConfigError) as caught:
        check_same_tokenizer(tokenizer, other, "Take this one.")
    message = str(caught.value)
    assert "12 is '<unused5>' for the target and '<unique5>' for the draft" in message
    assert message.endswith("Take this one.")
    assert caught.value.parameter == "speculative_model"


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
