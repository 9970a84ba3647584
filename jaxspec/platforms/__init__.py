"""The device of this process, as vLLM's `platforms` describes it."""

import jax


class _Platform:
    """Questions that scripts ask before they choose their arguments."""

    @property
    def device_type(self) -> str:
        """Return "cpu", "cuda" or "tpu"."""
        kind = jax.default_backend()
        return "cuda" if kind == "gpu" else kind

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    def is_cuda_alike(self) -> bool:
        return self.is_cuda()

    def is_tpu(self) -> bool:
        return self.device_type == "tpu"

    def is_rocm(self) -> bool:
        return False

    def is_xpu(self) -> bool:
        return False


current_platform = _Platform()
