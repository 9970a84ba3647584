"""vLLM's settings of profilers, which have no effect: profiles are XLA's."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class ProfilerConfig:
    """vLLM's argument `profiler_config` as an object.

    `start_profile(folder)` records a profile of the devices, with all of its details.
    """

    profiler: str | None = None
    torch_profiler_dir: str = ""
    torch_profiler_activities: list[str] | None = None
    torch_profiler_with_stack: bool = True
    torch_profiler_with_flops: bool = False
    torch_profiler_use_gzip: bool = True
    torch_profiler_dump_cuda_time_total: bool = True
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    ignore_frontend: bool = False
    delay_iterations: int = 0
    max_iterations: int = 0
    warmup_iterations: int = 0
    active_iterations: int = 5
    wait_iterations: int = 0
