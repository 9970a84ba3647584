// The two halves of a decoder's layer, each from the residual stream to the residual
// stream: attention with its projections, and the gated feed-forward network.
//
// Every row is computed independently, in one order of operations, so that its bits do
// not depend on the number of rows. Rows that are not used are left out of all products:
// their residual stream is copied.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "attention.h"
#include "panels.h"
#include "parallel.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace jaxspec {
namespace {

namespace ffi = xla::ffi;

// Values per thread below which a further thread does not pay.
constexpr int64_t kMinValuesPerThread = 1 << 14;
// Rows of the feed-forward network at a time: its activations are large.
constexpr int64_t kMaxRows = 256;

template <typename Run>
void for_each_row(ffi::ThreadPool& pool, int64_t rows, int64_t values, const Run& run) {
  const int64_t parts = std::min(rows * values / kMinValuesPerThread, rows);
  if (parts < 2) {
    for (int64_t row = 0; row < rows; ++row) run(row);
    return;
  }
  for_each_part(pool, parts, [&](int64_t part) {
    const int64_t last = rows * (part + 1) / parts;
    for (int64_t row = rows * part / parts; row < last; ++row) run(row);
  });
}

// Divides rows by their root mean square and multiplies with `offset` + `weight`.
struct Norm {
  std::vector<float> scale;  // empty: no norm
  float epsilon;

  // Returns false unless the buffer is empty or holds the weights of rows of `size`.
  bool set(ffi::AnyBuffer weight, int64_t size, float offset, float eps) {
    epsilon = eps;
    const int64_t count = weight.element_count();
    if (count != 0 && count != size) return false;
    scale.resize(count);
    auto take = [&](auto* values) {
      for (int64_t i = 0; i < count; ++i) scale[i] = offset + widen(values[i]);
    };
    if (weight.element_type() == ffi::F32)
      take(static_cast<const float*>(weight.untyped_data()));
    else if (weight.element_type() == ffi::BF16)
      take(static_cast<const Bfloat16*>(weight.untyped_data()));
    else
      return false;
    return true;
  }

  // to = norm(row), or residual + norm(row) with a residual.
  void apply(const float* row, const float* residual, float* to, int64_t size) const {
    float factor = 1.0f;
    if (!scale.empty())
      factor = 1.0f / std::sqrt(dot(row, row, size) / size + epsilon);
    for (int64_t i = 0; i < size; ++i) {
      const float normed = scale.empty() ? row[i] : row[i] * factor * scale[i];
      to[i] = residual ? residual[i] + normed : normed;
    }
  }
};

// Normalises `count` heads of `size` in place, `stride` apart.
void apply_to_heads(const Norm& norm, float* heads, int64_t count, int64_t stride,
                    int64_t size) {
  if (norm.scale.empty()) return;
  for (int64_t head = 0; head < count; ++head) {
    float* own = heads + head * stride;
    norm.apply(own, nullptr, own, size);
  }
}

// Indices of the used rows of a call. Products get these rows without gaps.
struct UsedRows {
  std::vector<int64_t> index;

  // Returns false unless the mask is empty (all are used) or has one value per row.
  bool set(ffi::Buffer<ffi::PRED> is_used, int64_t rows) {
    const int64_t count = is_used.element_count();
    if (count != 0 && count != rows) return false;
    index.clear();
    for (int64_t row = 0; row < rows; ++row)
      if (count == 0 || is_used.typed_data()[row]) index.push_back(row);
    return true;
  }

  int64_t count() const { return index.size(); }
};

// Applies a norm to the used rows: row `used.index[i]` becomes row i.
void apply_to_used(ffi::ThreadPool& pool, const Norm& norm, const float* rows,
                   const UsedRows& used, int64_t first, int64_t count, float* to,
                   int64_t size) {
  for_each_row(pool, count, size, [&](int64_t i) {
    norm.apply(rows + used.index[first + i] * size, nullptr, to + i * size, size);
  });
}

// Adds the norm of row i to row `used.index[i]` of the residual stream.
void add_to_used(ffi::ThreadPool& pool, const Norm& norm, const float* rows,
                 const float* residual, const UsedRows& used, int64_t first,
                 int64_t count, float* to, int64_t size) {
  for_each_row(pool, count, size, [&](int64_t i) {
    const int64_t at = used.index[first + i] * size;
    norm.apply(rows + i * size, residual + at, to + at, size);
  });
}

// Copies the rows that are not used.
void copy_unused(const UsedRows& used, const float* from, float* to, int64_t rows,
                 int64_t size) {
  auto next = used.index.begin();
  for (int64_t row = 0; row < rows; ++row) {
    if (next != used.index.end() && *next == row)
      ++next;
    else
      std::copy_n(from + row * size, size, to + row * size);
  }
}

float rounded(float value, bool is_rounded) {
  return is_rounded ? widen(narrow(value)) : value;
}

// Rotates one head; element i is paired with i + half. `rotated` may be `values`.
template <typename To>
void rotate(const float* values, const float* cosine, const float* sine, int64_t half,
            bool is_rounded, To* rotated) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = values[i], second = values[half + i];
    put(rotated + i, rounded(first * cosine[i] - second * sine[i], is_rounded));
    put(rotated + half + i, rounded(second * cosine[i] + first * sine[i], is_rounded));
  }
}

// Writes rotated keys and the values of one row to its slot: a head's keys, then
// values.
template <typename Value>
void write_row(const float* key_value, const float* cosine, const float* sine,
               int64_t heads, int64_t size, Value* to) {
  for (int64_t head = 0; head < heads; ++head) {
    const int64_t at = 2 * head * size;
    rotate(key_value + at, cosine, sine, size / 2, false, to + at);
    for (int64_t i = 0; i < size; ++i) put(to + at + size + i, key_value[at + size + i]);
  }
}

// Quantizes a head to whole numbers up to 127, and returns their scale.
void quantize(const float* values, int64_t size, int8_t* to, float* scale) {
  float most = 0;
  for (int64_t i = 0; i < size; ++i) {
    const float one = std::abs(values[i]);
    most = one > most || one != one ? one : most;
    if (most != most) break;  // NaN: the scale is NaN as well
  }
  *scale = most * (1.0f / 127);
  const float inverse = *scale > 0 ? 1.0f / *scale : 0.0f;
  for (int64_t i = 0; i < size; ++i) {
    const float one = std::clamp(std::nearbyint(values[i] * inverse), -127.0f, 127.0f);
    to[i] = one == one ? static_cast<int8_t>(one) : 0;  // NaN as an integer is undefined
  }
}

// As `write_row`, for int8; `scales` are those of a head's keys, then of its values.
void write_scaled_row(const float* key_value, const float* cosine, const float* sine,
                      int64_t heads, int64_t size, int8_t* to, float* scales) {
  static thread_local std::vector<float> rotated;
  rotated.resize(2 * heads * size);
  write_row(key_value, cosine, sine, heads, size, rotated.data());
  for (int64_t part = 0; part < 2 * heads; ++part)
    quantize(rotated.data() + part * size, size, to + part * size, scales + part);
}

ffi::Error AttentionBlock(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> stream,
                          ffi::AnyBuffer before, ffi::AnyBuffer after,
                          ffi::AnyBuffer q_norm, ffi::AnyBuffer k_norm,
                          ffi::AnyBuffer q_proj, ffi::Buffer<ffi::F32> q_scales,
                          ffi::AnyBuffer kv_proj, ffi::Buffer<ffi::F32> kv_scales,
                          ffi::AnyBuffer o_proj, ffi::Buffer<ffi::F32> o_scales,
                          ffi::Buffer<ffi::F32> cosine,
                          ffi::Buffer<ffi::F32> sine, ffi::Buffer<ffi::S32> slots,
                          ffi::Buffer<ffi::PRED> is_used, ffi::AnyBuffer kv_pages, ffi::AnyBuffer scales,
                          ffi::RemainingArgs regions,
                          ffi::ResultBuffer<ffi::F32> made,
                          ffi::Result<ffi::AnyBuffer> made_pages,
                          ffi::Result<ffi::AnyBuffer> made_scales,
                          ffi::Span<const int64_t> num_queries, int64_t num_q_heads,
                          float scale, float soft_cap, int64_t window, float epsilon,
                          float offset, bool is_rounded) {
  auto refuse = [](const char* reason) {
    return ffi::Error::InvalidArgument(std::string("attention_block: ") + reason);
  };
  const auto shape = stream.dimensions();
  if (shape.size() != 2 || made->element_count() != stream.element_count())
    return refuse("rows have other axes");
  const int64_t rows = shape[0], model = shape[1];
  Attention attention{};
  attention.q_heads = num_q_heads, attention.scale = scale;
  attention.soft_cap = soft_cap, attention.window = window;
  if (ffi::Error error = set_pages(attention, kv_pages, scales); error.failure())
    return error;
  const int64_t size = attention.head_dim, kv_heads = attention.kv_heads;
  const int64_t queries_size = num_q_heads * size, keys_size = 2 * kv_heads * size;
  const int64_t half = size / 2;
  if (num_q_heads < 1 || num_q_heads % kv_heads || size % 2)
    return refuse("heads do not fit each other");
  if (static_cast<int64_t>(cosine.element_count()) != rows * half ||
      static_cast<int64_t>(sine.element_count()) != rows * half ||
      static_cast<int64_t>(slots.element_count()) != rows)
    return refuse("positions are of other rows");
  static thread_local UsedRows used_rows;
  if (!used_rows.set(is_used, rows)) return refuse("the mask is of other rows");
  const Panels to_queries = panels_of(q_proj, q_scales, queries_size, model, is_rounded);
  const Panels to_keys = panels_of(kv_proj, kv_scales, keys_size, model, is_rounded);
  const Panels from_heads = panels_of(o_proj, o_scales, model, queries_size, is_rounded);
  if (!to_queries.values || !to_keys.values || !from_heads.values)
    return refuse("matrices do not fit");
  static thread_local Norm first, last, q_heads, k_heads;
  if (!first.set(before, model, offset, epsilon) ||
      !last.set(after, model, offset, epsilon) ||
      !q_heads.set(q_norm, size, offset, epsilon) ||
      !k_heads.set(k_norm, size, offset, epsilon))
    return refuse("norms do not fit");
  if (made_pages->element_type() != kv_pages.element_type() ||
      made_pages->size_bytes() != kv_pages.size_bytes() ||
      made_scales->size_bytes() != scales.size_bytes())
    return refuse("pages become others");
  if (regions.size() != 3 * num_queries.size()) return refuse("regions are incomplete");
  void* pages = made_pages->untyped_data();
  if (pages != kv_pages.untyped_data())
    std::memcpy(pages, kv_pages.untyped_data(), kv_pages.size_bytes());
  attention.kv_pages = pages;
  float* slot_scales = static_cast<float*>(made_scales->untyped_data());
  if (scales.size_bytes() > 0 && slot_scales != scales.untyped_data())
    std::memcpy(slot_scales, scales.untyped_data(), scales.size_bytes());
  attention.scales = slot_scales;

  // Used rows are adjacent, except in `by_region`: attention takes all rows.
  static thread_local std::vector<float> normed, query, key_value, by_region;
  // Bind by reference: other threads would read their own thread-local values.
  const UsedRows& used = used_rows;
  const Norm &query_norm = q_heads, &key_norm = k_heads;
  const int64_t count = used.count();
  normed.resize(rows * std::max(model, queries_size));
  query.resize(rows * std::max(model, queries_size));
  key_value.resize(count * keys_size);
  float *normed_rows = normed.data(), *queries = query.data();
  float* keys = key_value.data();
  apply_to_used(pool, first, stream.typed_data(), used, 0, count, normed_rows, model);
  multiply(pool, to_queries, normed_rows, count, queries);
  multiply(pool, to_keys, normed_rows, count, keys);
  const int64_t num_slots = attention.pages * attention.page_size;
  for_each_row(pool, count, queries_size + keys_size, [&](int64_t i) {
    const int64_t row = used.index[i];
    const float* cosines = cosine.typed_data() + row * half;
    const float* sines = sine.typed_data() + row * half;
    apply_to_heads(query_norm, queries + i * queries_size, num_q_heads, size, size);
    for (int64_t head = 0; head < num_q_heads; ++head) {
      float* own = queries + i * queries_size + head * size;
      rotate(own, cosines, sines, half, is_rounded, own);
    }
    const int64_t slot = slots.typed_data()[row];
    if (slot < 0 || slot >= num_slots) return;  // padding
    float* own = keys + i * keys_size;
    apply_to_heads(key_norm, own, kv_heads, 2 * size, size);
    auto write = [&](auto* all) {
      write_row(own, cosines, sines, kv_heads, size, all + slot * keys_size);
    };
    switch (attention.page_type) {
      case PageType::kFloat32:
        return write(static_cast<float*>(pages));
      case PageType::kBfloat16:
        return write(static_cast<Bfloat16*>(pages));
      case PageType::kFloat8:
        return write(static_cast<StoredFloat8*>(pages));
      case PageType::kInt8:
        return write_scaled_row(own, cosines, sines, kv_heads, size,
                                static_cast<int8_t*>(pages) + slot * keys_size,
                                slot_scales + slot * 2 * kv_heads);
    }
  });
  const bool is_gathered = count < rows;
  if (is_gathered) {
    by_region.assign(rows * queries_size, 0.0f);
    for (int64_t i = 0; i < count; ++i)
      std::copy_n(queries + i * queries_size, queries_size,
                  by_region.data() + used.index[i] * queries_size);
  }
  const float* all_queries = is_gathered ? by_region.data() : queries;
  // From here on the heads' results overwrite the normed rows.
  int64_t start = 0;
  for (size_t region = 0; region < num_queries.size(); ++region) {
    attention.queries = num_queries[region];
    if (attention.queries < 0) return refuse("a region has a negative number of queries");
    if (attention.queries == 0) continue;
    auto table = regions.get<ffi::Buffer<ffi::S32>>(3 * region);
    auto kv_len = regions.get<ffi::Buffer<ffi::S32>>(3 * region + 1);
    auto mask = regions.get<ffi::Buffer<ffi::PRED>>(3 * region + 2);
    if (!table.has_value() || !kv_len.has_value() || !mask.has_value())
      return refuse("regions are of other types");
    if (ffi::Error error = set_region(attention, *table, *kv_len, *mask);
        error.failure())
      return error;
    const int64_t of_region = attention.seqs * attention.queries;
    if (start + of_region > rows)
      return refuse("regions have more rows than there are");
    attend(pool, attention, all_queries + start * queries_size,
           normed_rows + start * queries_size);
    start += of_region;
  }
  std::fill(normed_rows + start * queries_size, normed_rows + rows * queries_size,
            0.0f);
  if (is_gathered)
    for (int64_t i = 0; i < count; ++i)
      std::copy_n(normed_rows + used.index[i] * queries_size, queries_size,
                  normed_rows + i * queries_size);
  multiply(pool, from_heads, normed_rows, count, queries);
  add_to_used(pool, last, queries, stream.typed_data(), used, 0, count,
              made->typed_data(), model);
  copy_unused(used, stream.typed_data(), made->typed_data(), rows, model);
  return ffi::Error::Success();
}

// As jax.nn.gelu(approximate=True).
Floats gelu(Floats x) {
  constexpr float kFactor = 0.7978845608028654f;  // sqrt(2 / pi)
  const Floats cubic = x + 0.044715f * x * x * x;
  return 0.5f * x * (1.0f + tanh(kFactor * cubic));
}

// x / (1 + exp(-x))
Floats silu(Floats x) { return x / (splat(1.0f) + exp(-x)); }

ffi::Error FeedForwardBlock(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> stream,
                            ffi::AnyBuffer before, ffi::AnyBuffer after,
                            ffi::AnyBuffer gate_up_proj,
                            ffi::Buffer<ffi::F32> gate_up_scales,
                            ffi::AnyBuffer down_proj,
                            ffi::Buffer<ffi::F32> down_scales,
                            ffi::Buffer<ffi::PRED> is_used,
                            ffi::ResultBuffer<ffi::F32> made, int64_t hidden,
                            int64_t block, bool is_gelu, float epsilon, float offset,
                            bool is_rounded) {
  auto refuse = [](const char* reason) {
    return ffi::Error::InvalidArgument(std::string("feed_forward_block: ") + reason);
  };
  const auto shape = stream.dimensions();
  if (shape.size() != 2 || made->element_count() != stream.element_count())
    return refuse("rows have other axes");
  const int64_t rows = shape[0], model = shape[1];
  if (hidden < 1 || block < 1 || hidden % block) return refuse("blocks do not divide");
  const Panels in = panels_of(gate_up_proj, gate_up_scales, 2 * hidden, model, is_rounded);
  const Panels out = panels_of(down_proj, down_scales, model, hidden, is_rounded);
  if (!in.values || !out.values) return refuse("matrices do not fit");
  static thread_local Norm first, last;
  if (!first.set(before, model, offset, epsilon) ||
      !last.set(after, model, offset, epsilon))
    return refuse("norms do not fit");
  static thread_local UsedRows used_rows;
  if (!used_rows.set(is_used, rows)) return refuse("the mask is of other rows");
  const UsedRows& used = used_rows;
  const Norm &norm_before = first, &norm_after = last;
  // Per call, and reused by the next: products and activations.
  static thread_local std::vector<float> normed, inner, active, outer;
  const int64_t most = std::min(used.count(), kMaxRows);
  normed.resize(most * model), outer.resize(most * model);
  inner.resize(most * 2 * hidden), active.resize(most * hidden);
  float *normed_rows = normed.data(), *products = inner.data();
  float* activated = active.data();
  for (int64_t start = 0; start < used.count(); start += kMaxRows) {
    const int64_t count = std::min(kMaxRows, used.count() - start);
    apply_to_used(pool, norm_before, stream.typed_data(), used, start, count,
                  normed_rows, model);
    multiply(pool, in, normed_rows, count, products);
    // Blocks of gate and up alternate.
    auto activate = [&](int64_t row, float* to) {
      const float* own = products + row * 2 * hidden;
      for (int64_t at = 0; at < hidden; at += block) {
        const float *gate = own + 2 * at, *up = gate + block;
        int64_t i = 0;
        for (; i + kLanes <= block; i += kLanes) {
          const Floats x = load(gate + i);
          store(to + at + i, (is_gelu ? gelu(x) : silu(x)) * load(up + i));
        }
        if (i < block) {
          float rest[kLanes] = {};
          std::copy(gate + i, gate + block, rest);
          const Floats x = load(rest);
          store(rest, is_gelu ? gelu(x) : silu(x));
          for (int64_t j = 0; i + j < block; ++j) to[at + i + j] = rest[j] * up[i + j];
        }
      }
    };
    for_each_row(pool, count, 4 * hidden,
                 [&](int64_t row) { activate(row, activated + row * hidden); });
    multiply(pool, out, activated, count, outer.data());
    add_to_used(pool, norm_after, outer.data(), stream.typed_data(), used, start, count,
                made->typed_data(), model);
  }
  copy_unused(used, stream.typed_data(), made->typed_data(), rows, model);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_attention_block, jaxspec::AttentionBlock,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::PRED>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<xla::ffi::Span<const int64_t>>("num_queries")
                                  .Attr<int64_t>("num_q_heads")
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("offset")
                                  .Attr<bool>("is_rounded"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_feed_forward_block, jaxspec::FeedForwardBlock,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::PRED>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<int64_t>("hidden")
                                  .Attr<int64_t>("block")
                                  .Attr<bool>("is_gelu")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("offset")
                                  .Attr<bool>("is_rounded"));
