"""Ten thousand texts to test tokenizers with: prose, code, and unusual texts."""

import functools
import random
import re
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPECIAL = ["<bos>", "<eos>", "<pad>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
# Parts of a generated text; some are separated by a space.
ATOMS = [
    *(" ", "  ", "   ", " " * 7, " " * 16, "\t", "\t\t", "\n", "\n\n", "\r\n"),
    *("the", "Hello", "fox,", "can't", "naïve", "ſtraße", "İstanbul", "ΣΊΣΥΦΟΣ"),
    *("0", "7", "42", "2024", "3.14159", "1,000,000", "٣٤", "Ⅷ", "½", "0x1F"),
    *("if x:", "return", "!=", "->", "'''", '"', "\\n", "${x}", "#", "//", "@", "```"),
    *("生活的真谛是", "日本語", "한국어", "ひらがな", "ไทย", "हिन्दी", "தமிழ்"),
    *("שלום", "مرحبا", "\u202eabc\u202c", "\u200f", "e\u0301", "a\u0300\u0323", "ﬁ"),
    *("\U0001f9a6", "\U0001f469\u200d\U0001f4bb", "\U0001f1e9\U0001f1ea", "☃\ufe0f"),
    *("\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f44d\U0001f3fd", "𝔾𝕖𝕞", "𓀀"),
    *("\x00", "\x01", "\x1b[0m", "\x7f", "\x85", "\xa0", "\u2028", "\u3000", "\u200b"),
    *("\ufeff", "\ufffd", "\u2581", "\ufffe", "\uffff", "\ue000", "\U0010ffff", "Ð"),
    *("<b>", "</td>", "<0x41>", "<0x0A>", "<s>", "<|im_end|>", "<start_of", "_turn>"),
    *SPECIAL,
]
# Runs of one character that are longer than any piece of such a run, and symbols that a
# tokenizer.json may lack: HuggingFace's tokenizer may split them in another way than
# SentencePiece.
LONG_RUN = re.compile("[ \u2581]{17}|\n{5}")
UNLISTED = re.compile(r"<2mass>|\[@BOS@\]|<unused\d+>")


@functools.cache
def texts(count: int = 11_400) -> list[str]:
    """Return distinct texts, the same ones in every run with the same Python."""
    draw = random.Random(0)
    found = dict.fromkeys(["", *ATOMS, *_stored(draw)])
    while len(found) < count * 3 // 4:
        atoms = draw.choices(ATOMS, k=draw.randint(2, 12))
        found["".join(atom + " " * draw.randint(0, 1) for atom in atoms)] = None
    while len(found) < count:
        planes = [range(0x300), range(0xD800), range(0xE000, 0x110000)]
        points = [draw.choice(draw.choice(planes)) for _ in range(draw.randint(1, 12))]
        found["".join(map(chr, points))] = None
    return list(found)


def _stored(draw: random.Random) -> list[str]:
    """Return random paragraphs of Python's library, this repository and licenses."""
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    here = [ROOT / "README.md", *sorted((ROOT / "checkpoints").rglob("*.tsv"))]
    parts = [
        part
        for path in [*here, *library]
        for part in path.read_text(encoding="utf-8").split("\n\n")
    ]
    return draw.sample([part for part in parts if 0 < len(part) < 200], 5000)


def is_alike(text: str) -> bool:
    """Return whether HuggingFace's tokenizer splits a text as SentencePiece does."""
    return not LONG_RUN.search(text) and not UNLISTED.search(text)
