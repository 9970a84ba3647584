"""Owns `quality.json`: what quantization took from a checkpoint's texts, as measured.

It stands beside the weights. `python -m jaxspec quality` measures and writes it,
`inspect` shows it; nothing else reads it, and `convert` leaves it behind, as it is
about these weights.
"""

import json
import math
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.files import check_inside, read_json

QUALITY = "quality.json"


@dataclass(frozen=True, kw_only=True)
class Quality:
    """A quantized model beside the weights that it was made of, on the same texts.

    Attributes:
        reference: Name of the model with those weights.
        texts: Names of the files that were read.
        dtype: What both models computed in.
        num_tokens: Predicted in all.
        length: Tokens of a piece of text, each of which is read by itself.
        weight_bytes: Of the quantized model, as a device holds it.
        perplexity: Of the texts.
        reference_perplexity: The reference's.
        kl_nats_per_token: Mean KL divergence of the model's distributions from the
            reference's.
        share_of_same_first: Tokens at which both find the same one most likely.
    """

    reference: str
    texts: str
    dtype: str
    num_tokens: int
    length: int
    weight_bytes: int
    perplexity: float
    reference_perplexity: float
    kl_nats_per_token: float
    share_of_same_first: float

    def line(self) -> str:
        """All of it in one line."""
        return (
            f"perplexity {self.perplexity:.2f} ({self.reference}: "
            f"{self.reference_perplexity:.2f}), KL {self.kl_nats_per_token:.5f} nats a "
            f"token, {self.share_of_same_first:.1%} the same first token, on "
            f"{self.num_tokens:,} tokens of {self.texts}"
        )

    def table(self, form: str) -> str:
        """The same in Markdown, for a model card.

        Args:
            form: What the quantized model is called.
        """
        rows = (
            ("weights", "bytes", "perplexity", "KL, nats/token", "same first token"),
            ("---", "--:", "--:", "--:", "--:"),
            (self.reference, "", f"{self.reference_perplexity:.2f}", "0", "100 %"),
            (
                form,
                f"{self.weight_bytes:,}",
                f"{self.perplexity:.2f}",
                f"{self.kl_nats_per_token:.5f}",
                f"{100 * self.share_of_same_first:.1f} %",
            ),
        )
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write_quality(folder: Path, quality: Quality) -> Path:
    """Write it into a checkpoint's folder, whole or not at all; return where.

    Args:
        folder: Or a GGUF file, which it is written next to.

    Raises:
        CheckpointError: The folder cannot be written to.
    """
    path = _place(folder)
    text = json.dumps(asdict(quality), indent=2) + "\n"
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".quality.") as part:
            made = Path(part) / QUALITY
            made.write_text(text, encoding="utf-8")
            made.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path} was not written: {error}") from error
    return path


def _place(folder: Path) -> Path:
    if folder.is_file():
        return folder.with_name(f"{folder.name}.{QUALITY}")
    return folder / QUALITY


def read_quality(folder: Path) -> Quality | None:
    """What has been measured of the checkpoint in a folder; None if nobody has.

    Raises:
        CheckpointError: The file is damaged.
    """
    path = _place(folder)
    if not path.exists():
        return None
    content = read_json(check_inside(path.parent, path))
    kinds: dict[str, Any] = {item.name: item.type for item in fields(Quality)}
    wrong = [name for name, kind in kinds.items() if not _is(content.get(name), kind)]
    if wrong or content.keys() != kinds.keys():
        raise CheckpointError(
            f"{path} must have {', '.join(kinds)}, wrong here: "
            f"{', '.join(wrong or content.keys() - kinds.keys())}. Delete it, and "
            "measure again"
        )
    return Quality(**content)


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and math.isfinite(value)
    return type(value) is kind
