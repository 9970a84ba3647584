// Attention of a few queries per sequence over paged keys and values.
#pragma once

#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace jaxspec {

// What pages hold.
enum class Kept { kFloat32, kBfloat16, kFloat8, kInt8 };

// As `jaxspec_kernels.paged_attention` describes it.
struct Attention {
  int64_t queries, q_heads;  // of a sequence, and of a query
  float scale, soft_cap;     // a soft cap of 0 is none
  int64_t window;            // 0 is none
  const void* kv_pages;      // [page, page_size, 2 * kv_head, head_dim]
  Kept kept;
  const float* scales;  // [page, page_size, 2 * kv_head], of int8
  int64_t pages, page_size, kv_heads, head_dim;
  const int32_t* page_table;  // [seq, table]
  const int32_t* kv_len;      // [seq]
  const bool* mask;           // [seq, query, query]; null is none
  int64_t seqs, table;
};

// Take what buffers say; errors where their shapes fit no attention.
// `scales` has none where pages are not int8.
xla::ffi::Error set_pages(Attention& attention, xla::ffi::AnyBuffer kv_pages,
                          xla::ffi::AnyBuffer scales);
xla::ffi::Error set_region(Attention& attention,
                           xla::ffi::Buffer<xla::ffi::S32> page_table,
                           xla::ffi::Buffer<xla::ffi::S32> kv_len,
                           xla::ffi::Buffer<xla::ffi::PRED> mask);

// `query` and `mixed` are [seq, query, q_head, head_dim].
void attend(xla::ffi::ThreadPool& pool, const Attention& attention, const float* query,
            float* mixed);

}  // namespace jaxspec
