"""vLLM's `load_chat_template`."""

import os

from jaxspec.text.chat_template import given_template


def load_chat_template(chat_template: str | os.PathLike[str] | None) -> str | None:
    """Return a chat template: given as such, or as the path of a file with one."""
    if chat_template is None:
        return None
    return given_template(os.fspath(chat_template)).text
