"""Reads and writes `quality.json`: the measured loss of quality by quantization.

The file is stored next to the weights. `python -m jaxspec quality` measures and writes
it, and `inspect` shows it; nothing else reads it. `convert` does not copy it, because
it is valid only for these weights.
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
    """Quality of a quantized model and of its unquantized weights on the same texts.

    Attributes:
        reference: Name of the model with the unquantized weights.
        texts: Names of the files with the texts.
        dtype: Type in which both models computed.
        num_tokens: Number of predicted tokens.
        length: Tokens per piece of text; pieces are evaluated independently.
        weight_bytes: Bytes of the quantized model's weights on a device.
        perplexity: Perplexity of the texts.
        reference_perplexity: Perplexity of the reference.
        kl_nats_per_token: Mean KL divergence of the model's distributions from the
            reference's.
        share_of_same_first: Fraction of tokens at which both models find the same token
            most likely.
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
        """Describe the measurement in one line."""
        return (
            f"perplexity {self.perplexity:.2f} ({self.reference}: "
            f"{self.reference_perplexity:.2f}), KL {self.kl_nats_per_token:.5f} nats "
            f"a token, the same most likely token at {self.share_of_same_first:.1%} "
            f"of the positions, on {self.num_tokens:,} tokens of {self.texts}"
        )

    def table(self, form: str) -> str:
        """Return a Markdown table for a model card.

        Args:
            form: Name of the quantized model.
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
    """Write `quality.json` into a checkpoint's folder, atomically; return its path.

    Args:
        folder: The folder, or a GGUF file, next to which it is written.

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
    """Return the measurements of the checkpoint in a folder; None without any.

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
            f"{path} must have {', '.join(kinds)}; wrong or missing: "
            f"{', '.join(wrong or content.keys() - kinds.keys())}. Delete it, and "
            "measure again"
        )
    return Quality(**content)


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and math.isfinite(value)
    return type(value) is kind
