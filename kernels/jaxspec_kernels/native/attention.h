// Attention of a few queries per sequence over paged keys and values.
#pragma once

#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace jaxspec {

// Element type of pages.
enum class PageType { kFloat32, kBfloat16, kFloat8, kInt8 };

// Arguments as in `jaxspec_kernels.paged_attention`.
struct Attention {
  int64_t queries, q_heads;  // per sequence, per query
  float scale, soft_cap;     // soft cap 0: none
  int64_t window;            // 0: none
  const void* kv_pages;      // [page, page_size, 2 * kv_head, head_dim]
  PageType page_type;
  const float* scales;  // [page, page_size, 2 * kv_head], of int8 pages
  int64_t pages, page_size, kv_heads, head_dim;
  const int32_t* page_table;  // [seq, table]
  const int32_t* kv_len;      // [seq]
  const bool* mask;           // [seq, query, query]; null: none
  int64_t seqs, table;
};

// Set fields from buffers; an error if shapes do not fit. `scales` is empty unless pages
// are int8.
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
