"""The functions of vLLM's `utils.network_utils` that scripts for vLLM import."""

import socket


def get_ip() -> str:
    """Return an address at which other hosts reach this one; none is contacted."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        try:
            made.connect(("192.0.2.1", 9))
        except OSError:  # no route: only this host exists
            return "127.0.0.1"
        return made.getsockname()[0]


def get_open_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as made:
        made.bind(("", 0))
        return made.getsockname()[1]
