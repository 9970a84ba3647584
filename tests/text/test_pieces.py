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
from jaxspec.errors import ConfigError
from jaxspec.models.families import DEFAULT_TURNS
from jaxspec.text.pieces import _without_turns, read_pieces
from jaxspec.text.tokenizer import Tokenizer
from tests.support.texts import SPECIAL, is_alike, texts

BUNDLED = jaxspec_checkpoints.bundled_target()
MARKERS = DEFAULT_TURNS.markers
MODEL = (BUNDLED / "tokenizer.model").read_bytes()


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
def tokenizer(request: pytest.FixtureRequest, exported: Path) -> Tokenizer:
    folder = BUNDLED if request.param == "model" else exported
    return Tokenizer.from_folder(folder)


def first_difference(given: list[str], ours: list[Any], theirs: list[Any]) -> Any:
    """Return the first of ten thousand results that differs, to print only that."""
    assert len(given) == len(ours) == len(theirs)
    pairs = zip(given, ours, theirs, strict=True)
    return next((row for row in pairs if row[1] != row[2]), None)


def test_ten_thousand_texts_have_huggingface_ids(tokenizer: Tokenizer, hf: Any):
    given = [text for text in texts() if is_alike(text)]
    assert len(given) > 10_000
    theirs = hf(given, add_special_tokens=False)["input_ids"]
    ours = [tokenizer.encode(text, add_special_tokens=False) for text in given]
    assert first_difference(given, ours, theirs) is None
    # Special pieces in a text can be encoded as text.
    given = [text for text in given if any(piece in text for piece in SPECIAL)]
    assert len(given) > 1000
    plain: Any = dict(add_special_tokens=False)
    theirs = [hf.encode(text, **plain, split_special_tokens=True) for text in given]
    plain["parse_special_tokens"] = False
    ours = [tokenizer.encode(text, **plain) for text in given]
    assert first_difference(given, ours, theirs) is None
    special = {tokenizer.pieces.special[piece] for piece in SPECIAL}
    assert not any(special.intersection(token_ids) for token_ids in ours)


def test_decoding_inverts_encoding(tokenizer: Tokenizer):
    given = texts()[::3]
    back = [
        tokenizer.decode(
            tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False
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


def test_any_ids_decode_like_sentencepiece(tokenizer: Tokenizer, reference: Any):
    given = random_ids(tokenizer.vocab_size)
    assert reference.is_byte(127) and reference.is_byte(382)
    ours = [tokenizer.decode(token_ids) for token_ids in given]
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


def test_json_file_with_one_turn_marker_has_no_turns(exported: Path, tmp_path: Path):
    content = (exported / "tokenizer.json").read_text()
    renamed = content.replace("<end_of_turn>", "<end_of_tale>")
    (tmp_path / "tokenizer.json").write_text(renamed)
    tokenizer = Tokenizer.from_folder(tmp_path, "{{ 'x' }}")
    assert not tokenizer.has_turns and tokenizer.turn_end_ids == ()
