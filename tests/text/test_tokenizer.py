"""Token ids equal those of SentencePiece and of HuggingFace's tokenizers."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import sentencepiece.sentencepiece_model_pb2 as protobuf
import tokenizers
import transformers

import jaxspec_checkpoints
from jaxspec.errors import ConfigError, RequestError
from jaxspec.inputs import parse_prompt
from jaxspec.models.families import DEFAULT_TURNS
from jaxspec.text.pieces import _without_turns, read_pieces
from jaxspec.text.tokenizer import NoTokenizer, Tokenizer, check_same_tokenizer
from tests.support.texts import SPECIAL, is_alike, texts

BUNDLED = jaxspec_checkpoints.bundled_target()
MARKERS = DEFAULT_TURNS.markers
MODEL = (BUNDLED / "tokenizer.model").read_bytes()
USER = {"role": "user", "content": "a"}


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
    # "<bos>" in the text is encoded as text; only the first token is the real bos.
    spelled = tokenizer.encode("<bos>a", parse_special_tokens=False)
    assert spelled[0] == 2 and len(spelled) > 3 and 2 not in spelled[1:]
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


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_chat_needs_turns_or_template(exported: Path, tmp_path: Path, name: str):
    folder = BUNDLED if name == "tokenizer.model" else exported
    content = (folder / name).read_bytes()
    content = content.replace(b"<end_of_turn>", b"<end_of_tale>")
    (tmp_path / name).write_bytes(content)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert not tokenizer.has_turns
    assert tokenizer.turn_end_ids == ()
    assert Tokenizer.from_folder(tmp_path, "{{ 'x' }}").turn_end_ids == ()
    with pytest.raises(ConfigError, match="The model has no chat template"):
        tokenizer.apply_chat_template([USER])
    template = "<bos>{{ messages[0].content }}"
    token_ids = tokenizer.apply_chat_template([USER], chat_template=template)
    assert token_ids == tokenizer.encode("a")
    if name == "tokenizer.model":
        assert tokenizer.all_special_ids == [0, 1, 2, 3]


def test_model_with_template_has_turn_end_ids(tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(MODEL)
    assert Tokenizer.from_folder(tmp_path).turn_end_ids == ()
    assert Tokenizer.from_folder(tmp_path, "{{ x }}").turn_end_ids == (107,)
    (tmp_path / "chat_template.jinja").write_text("x")
    assert Tokenizer.from_folder(tmp_path).turn_end_ids == (107,)


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
    other = MODEL.replace(b"<unused5>", b"<unique5>").replace(
        b"<unused9>", b"<unique9>"
    )
    (tmp_path / "tokenizer.model").write_bytes(other)
    with pytest.raises(ConfigError) as caught:
        check_same_tokenizer(
            tokenizer, Tokenizer.from_folder(tmp_path), "Take this one."
        )
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


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return HuggingFace's tokenizer, made from the model file, not the JSON file."""
    folder = tmp_path_factory.mktemp("bundled")
    for name in ("config.json", "tokenizer.model", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def exported(hf: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder whose only tokenizer file is HuggingFace's `tokenizer.json`."""
    folder = tmp_path_factory.mktemp("exported")
    hf.save_pretrained(folder)
    assert not (folder / "tokenizer.model").exists()
    return folder


@pytest.mark.parametrize("name", ["target", "draft"])
def test_bundled_json_file_equals_export_of_model_file(exported: Path, name: str):
    """Clients without sentencepiece read the JSON file."""
    files = [BUNDLED.parent / name, exported]
    bundled, made = ((folder / "tokenizer.json").read_text() for folder in files)
    assert json.loads(bundled) == json.loads(made)


@pytest.fixture(scope="module")
def reference() -> Any:
    """Return SentencePiece's own tokenizer of the bundled model."""
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(MODEL)
    return processor


@pytest.fixture(scope="module", params=["model", "json"])
def either(request: pytest.FixtureRequest, exported: Path) -> Tokenizer:
    folder = BUNDLED if request.param == "model" else exported
    return Tokenizer.from_folder(folder)


def first_difference(given: list[str], ours: list[Any], theirs: list[Any]) -> Any:
    """Return the first of ten thousand results that differs, to print only that."""
    assert len(given) == len(ours) == len(theirs)
    pairs = zip(given, ours, theirs, strict=True)
    return next((row for row in pairs if row[1] != row[2]), None)


def test_ten_thousand_texts_have_huggingface_ids(either: Tokenizer, hf: Any):
    given = [text for text in texts() if is_alike(text)]
    assert len(given) > 10_000
    theirs = hf(given, add_special_tokens=False)["input_ids"]
    ours = [either.encode(text, add_special_tokens=False) for text in given]
    assert first_difference(given, ours, theirs) is None
    # Special pieces in a text can be encoded as text.
    given = [text for text in given if any(piece in text for piece in SPECIAL)]
    assert len(given) > 1000
    plain: Any = dict(add_special_tokens=False)
    theirs = [hf.encode(text, **plain, split_special_tokens=True) for text in given]
    plain["parse_special_tokens"] = False
    ours = [either.encode(text, **plain) for text in given]
    assert first_difference(given, ours, theirs) is None
    special = {either.pieces.special[piece] for piece in SPECIAL}
    assert not any(special.intersection(token_ids) for token_ids in ours)
    spaced = [text.replace("\u2581", " ") for text in given]
    assert first_difference(given, list(map(either.decode, ours)), spaced) is None


def test_decoding_inverts_encoding(either: Tokenizer):
    given = texts()[::3]
    back = [
        either.decode(
            either.encode(text, add_special_tokens=False), skip_special_tokens=False
        )
        for text in given
    ]
    # A space is U+2581 in pieces, so this character decodes to a space.
    spaced = [text.replace("\u2581", " ") for text in given]
    assert first_difference(given, back, spaced) is None


def test_model_file_encodes_like_sentencepiece(reference: Any):
    tokenizer = Tokenizer.from_folder(BUNDLED)
    given = [text for text in texts() if not any(piece in text for piece in SPECIAL)]
    given += [" " * count for count in range(60)] + ["\n" * 9, "<mask><unused3>x"]
    ours = [tokenizer.encode(text, add_special_tokens=False) for text in given]
    assert first_difference(given, ours, reference.encode(given)) is None


def test_huggingface_differs_from_sentencepiece_as_recorded(hf, exported, reference):
    pieces = {
        " " * 17: (["\u2581" * 16, "\u2581"], ["\u2581" * 8, "\u2581" * 9]),
        "\n" * 5: (["\n" * 4, "\n"], ["\n" * 2, "\n" * 3]),
        "<unused7>": (["<unused7>"], ["<", "un", "used", "7", ">"]),
    }
    ours, from_json = Tokenizer.from_folder(BUNDLED), Tokenizer.from_folder(exported)
    for text, (right, huggingfaces) in pieces.items():
        # The models were trained on SentencePiece's ids, so SentencePiece is right
        # here.
        assert reference.encode(text, out_type=str) == right
        assert hf.tokenize(text) == huggingfaces
        for tokenizer, expected in ((ours, right), (from_json, huggingfaces)):
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.convert_ids_to_tokens(token_ids) == expected


def test_listed_symbols_of_json_file_are_recognized(exported: Path, tmp_path: Path):
    # The tokenizer files of Gemma 2 list all of these pieces.
    library = tokenizers.Tokenizer.from_file(str(exported / "tokenizer.json"))
    library.add_tokens([tokenizers.AddedToken("<unused7>", normalized=False)])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("a<unused7>")[-1] == 14
    assert tokenizer.encode("a<unused7>", parse_special_tokens=False)[-1] == 14
    assert not tokenizer.is_special(14)


def test_image_piece_after_vocabulary_is_text(exported: Path, tmp_path: Path):
    """Gemma 3's file lists this piece, but the text model has no embedding for it."""
    library = tokenizers.Tokenizer.from_file(str(exported / "tokenizer.json"))
    size = library.get_vocab_size()
    piece = tokenizers.AddedToken("<image_soft_token>", special=True, normalized=False)
    library.add_special_tokens([piece])
    library.save(str(tmp_path / "tokenizer.json"))
    assert library.token_to_id("<image_soft_token>") == size
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == size
    text = "a <image_soft_token> b"
    assert tokenizer.encode(text) == Tokenizer.from_folder(exported).encode(text)


def random_ids(size: int) -> list[list[int]]:
    """Make lists of random token ids.

    Many are byte tokens, most of which form no complete UTF-8 character.
    """
    draw = random.Random(1)
    kinds = [range(108, size), range(127, 383), range(127 + 0x80, 383)]
    return [
        [draw.choice(draw.choice(kinds)) for _ in range(draw.randint(0, 12))]
        for _ in range(3000)
    ]


def test_any_ids_decode_like_sentencepiece(either: Tokenizer, reference: Any):
    given = random_ids(either.vocab_size)
    assert reference.is_byte(127) and reference.is_byte(382)
    ours = [either.decode(token_ids) for token_ids in given]
    theirs = [reference.decode(token_ids) for token_ids in given]
    assert first_difference([str(ids) for ids in given], ours, theirs) is None
    assert sum("\ufffd" in text for text in theirs) > 1000


def test_both_files_have_equal_pieces(exported: Path, reference: Any):
    ours, from_json = (read_pieces(one, MARKERS) for one in (BUNDLED, exported))
    ids = range(reference.vocab_size())
    assert ours.size == from_json.size == len(ids)
    assert ours.named == from_json.named == {"bos": 2, "eos": 1, "pad": 0, "unk": 3}
    for pieces in (ours, from_json):
        assert [pieces.id_to_piece(token) for token in ids] == [
            reference.id_to_piece(token) for token in ids
        ]
        assert [pieces.is_byte(token) for token in ids] == [
            reference.is_byte(token) for token in ids
        ]
    # transformers writes files that declare <mask> special.
    assert from_json.special == ours.special | {"<mask>": 4}
    assert sorted(ours.special.values()) == [0, 1, 2, 3, 106, 107]


def test_json_file_settings_of_padding_are_ignored(exported: Path, tmp_path: Path):
    library = tokenizers.Tokenizer.from_file(str(exported / "tokenizer.json"))
    library.enable_truncation(2)
    library.enable_padding(length=9)
    library.save(str(tmp_path / "tokenizer.json"))
    text = "The quick brown fox"
    expected = Tokenizer.from_folder(BUNDLED).encode(text)
    assert Tokenizer.from_folder(tmp_path).encode(text) == expected
    # The model file takes precedence.
    assert Tokenizer.from_folder(tmp_path).encode("<unused7>") != [2, 14]
    (tmp_path / "tokenizer.model").write_bytes(MODEL)
    assert Tokenizer.from_folder(tmp_path).encode("<unused7>") == [2, 14]


def broken_json(change: str) -> bytes:
    pieces = {"<bos>": 0, "<eos>": 1, "<unk>": 2}
    model: dict[str, Any] = {
        "type": "BPE",
        "vocab": pieces,
        "merges": [],
        "unk_token": "<unk>",
        "byte_fallback": change != "no bytes",
    }
    if change == "another kind":
        model = {"type": "WordLevel", "vocab": pieces, "unk_token": "<unk>"}
    if change == "no end":
        del pieces["<eos>"]
        pieces["<unk>"] = 1
    return json.dumps({"version": "1.0", "model": model}).encode()


def test_changes_only_kind_of_turn_markers(tmp_path: Path):
    """The expected file is made with SentencePiece's own schema."""
    model: Any = protobuf
    expected = model.ModelProto.FromString(MODEL)
    turns = [piece for piece in expected.pieces if piece.piece in MARKERS]
    assert len(turns) == 2
    for piece in turns:
        assert piece.type == piece.USER_DEFINED
        piece.type = piece.CONTROL
    control = expected.SerializeToString()
    assert _without_turns(MODEL, MARKERS) == control
    # A file may have control pieces already.
    (tmp_path / "tokenizer.model").write_bytes(control)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("<start_of_turn>") == [2, 106]
    assert 106 not in tokenizer.encode("<start_of_turn>", parse_special_tokens=False)


def with_text_marker() -> bytes:
    """Return the bundled model file with <start_of_turn> as an ordinary piece."""
    place = MODEL.index(b"<start_of_turn>") + 15 + 5
    assert MODEL[place : place + 2] == b"\x18\x04"
    return MODEL[: place + 1] + b"\x01" + MODEL[place + 2 :]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("", None, r"tokenizer\.model or a tokenizer\.json.*no such file"),
        ("tokenizer.model", b"", "must be a SentencePiece model"),
        ("tokenizer.model", b"no model", "must be a SentencePiece model"),
        ("tokenizer.model", MODEL[:-1000], "must be a SentencePiece model"),
        ("tokenizer.model", with_text_marker(), "neither control nor symbol"),
        ("tokenizer.json", b"", "must be a tokenizer like Gemma's"),
        ("tokenizer.json", b"{}", "must be a tokenizer like Gemma's"),
        ("tokenizer.json", broken_json("another kind"), "not a BPE model"),
        ("tokenizer.json", broken_json("no bytes"), "not a BPE model"),
        ("tokenizer.json", broken_json("no end"), "no bos piece or no eos piece"),
    ],
)
def test_rejects_invalid_file(tmp_path: Path, name: str, content: Any, reason: str):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path / name) in str(caught.value)
    assert caught.value.parameter == "tokenizer"


@pytest.mark.parametrize(
    "name", ["tokenizer.model", "tokenizer_config.json", "chat_template.jinja"]
)
def test_refuses_link_to_another_folder(tmp_path: Path, name: str):
    """Links within the cache of the hub are accepted."""
    cache = tmp_path / "models--a--b"
    folder, blobs = cache / "snapshots" / "main", cache / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "model").write_bytes(MODEL)
    (folder / "tokenizer.model").symlink_to(blobs / "model")
    assert Tokenizer.from_folder(folder).encode("<eos>") == [2, 1]
    (folder / name).unlink(missing_ok=True)
    (tmp_path / "other").write_bytes(MODEL)
    (folder / name).symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match=f"{name} is a symlink that points outside"):
        Tokenizer.from_folder(folder)
