"""vLLM's `get_tokenizer`, for a model by its name."""

from jaxspec.engine.model_folders import model_folder
from jaxspec.text.tokenizer import Tokenizer

__all__ = ["Tokenizer", "get_tokenizer"]


def get_tokenizer(
    tokenizer_name: str,
    *,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
) -> Tokenizer:
    """Read the tokenizer of a model; the other arguments have no effect."""
    return Tokenizer.from_folder(model_folder(tokenizer_name, "tokenizer_name"))
