"""The function of vLLM's `distributed` that scripts call between two engines."""

import gc


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of deleted engines; there are no worker processes to end."""
    gc.collect()
