"""Where a model's operations run: in which kernels, split over which devices.

XLA splits matrix products by itself, following the placement of the weights. It cannot
split a kernel, so attention runs under `shard_map` on each device's heads. The
reference implementation also runs there, so that tests on eight CPU devices cover the
split that every backend uses.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxspec.models.batch import Region
from jaxspec.sharding import num_parts
from jaxspec_kernels import copy_kv_rows, paged_attention, write_kv_pages
from jaxspec_kernels.bits import KvPages
from jaxspec_kernels.dispatch import resolve


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The kernels and the devices of a model; by default one device of jax's default.

    Attributes:
        implementation: As in `jaxspec_kernels.dispatch`.
        mesh: None is one device.
        mesh_axes: Axes of the mesh that split the model's heads.
    """

    implementation: str | None = None
    mesh: Mesh | None = None
    mesh_axes: tuple[str, ...] = ()

    @property
    def device_kind(self) -> str | None:
        """The device whose measured tile sizes the kernels use."""
        return None if self.mesh is None else self.mesh.devices.flat[0].device_kind

    @property
    def branches_wait(self) -> bool:
        """Whether a conditional stops the host until the device has reached it.

        It does on a GPU, where XLA reads the predicate on the host. Work that takes
        less than this wait is done without a conditional there.
        """
        return resolve("paged_attention", self.implementation) == "gpu"

    @property
    def has_blocks(self) -> bool:
        """Whether each half of a layer may run as one operation.

        Otherwise `write` and `attend` are separate operations.
        """
        return resolve("decoder_blocks", self.implementation) == "cpu"

    def split(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """Return a function that runs on each device's part of the arguments."""
        if self.mesh is None or self.mesh.size == 1:
            return function
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,  # kernels do not declare what varies by device
        )

    def write(
        self,
        kv_pages: KvPages,
        key: Float[Array, "token kv_head head_dim"],
        value: Float[Array, "token kv_head head_dim"],
        slot_mapping: Int[Array, " token"],
        num_q_heads: int,
    ) -> KvPages:
        """See `write_kv_pages`."""
        axes = self._head_axes(num_q_heads, key.shape[1])
        pages, heads = PartitionSpec(None, None, axes), PartitionSpec(None, axes)

        def run(kv_pages, key, value, slot_mapping):
            return write_kv_pages(
                kv_pages, key, value, slot_mapping, implementation=self.implementation
            )

        specs = (pages, heads, heads, PartitionSpec())
        return self.split(run, specs, pages)(kv_pages, key, value, slot_mapping)

    def copy(
        self,
        kv_pages: KvPages,
        source: Int[Array, " slot"],
        target: Int[Array, " slot"],
        num_q_heads: int,
    ) -> KvPages:
        """See `copy_kv_rows`."""
        axes = self._head_axes(num_q_heads, kv_pages.shape[2] // 2)
        pages, whole = PartitionSpec(None, None, axes), PartitionSpec()
        run = functools.partial(copy_kv_rows, implementation=self.implementation)
        split = self.split(run, (pages, whole, whole), pages)
        return split(kv_pages, source, target)

    def attend(
        self,
        query: Float[Array, "seq token q_head head_dim"],
        kv_pages: KvPages,
        region: Region,
        *,
        scale: float,
        soft_cap: float | None,
        window: int | None,
    ) -> Float[Array, "seq token q_head head_dim"]:
        """See `paged_attention`."""
        axes = self._head_axes(query.shape[2], kv_pages.shape[2] // 2)
        heads, whole = PartitionSpec(None, None, axes), PartitionSpec()

        def run(query, kv_pages, page_table, kv_len, ancestor_mask):
            return paged_attention(
                query,
                kv_pages,
                page_table,
                kv_len,
                ancestor_mask=ancestor_mask,
                scale=scale,
                soft_cap=soft_cap,
                window=window,
                implementation=self.implementation,
                device_kind=self.device_kind,
            )

        attend = self.split(run, (heads, heads, whole, whole, whole), heads)
        table, mask = region.page_table, region.ancestor_mask
        return attend(query, kv_pages, table, region.kv_len, mask)

    def vocab_axes(self, vocab_size: int) -> tuple[str, ...] | None:
        """Return the axes that split the vocabulary; None if it is not split."""
        if self.mesh is None or self.mesh.size == 1:
            return None
        parts = num_parts(self.mesh, self.mesh_axes)
        return None if vocab_size % parts else self.mesh_axes

    def _head_axes(self, num_q_heads: int, num_kv_heads: int) -> Any:
        """Return the axes that split query heads and their KV heads, or None."""
        if self.mesh is None:
            return None
        parts = num_parts(self.mesh, self.mesh_axes)
        return None if num_q_heads % parts or num_kv_heads % parts else self.mesh_axes
