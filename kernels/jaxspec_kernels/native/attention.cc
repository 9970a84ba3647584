// Attention of a few queries per sequence over paged keys and values.
//
// Each query head of each token is a row by itself: it meets the keys that it sees in
// their order, with sums of its own. Its bits do not depend on how many queries there
// are, how a tree's drafts lie, where pages are, nor on the threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "parallel.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace jaxspec {
namespace {

namespace ffi = xla::ffi;

// Multiplications of one call from which on a second thread is of use.
constexpr int64_t kMinWorkPerThread = 1 << 18;

struct Sizes {
  int64_t seqs, queries, q_heads, kv_heads, head_dim, pages, page_size, table;
};

struct Options {
  float scale, soft_cap;  // a soft cap of 0 is none
  int64_t window;         // 0 is none
};

// Slots of the keys that a query sees, in their order.
void see(std::vector<int64_t>& seen, const Sizes& sizes, int64_t kv_len, int64_t query,
         const bool* mask, int64_t window) {
  seen.clear();
  const int64_t start = kv_len - sizes.queries;  // slot of the first query
  const int64_t capacity = sizes.table * sizes.page_size;
  if (mask == nullptr) {
    const int64_t position = start + query;
    const int64_t first =
        window ? std::max<int64_t>(position - window + 1, 0) : 0;
    for (int64_t key = first; key <= std::min(position, capacity - 1); ++key)
      seen.push_back(key);
    return;
  }
  auto depth_of = [&](int64_t node) {
    int64_t depth = -1;
    for (int64_t other = 0; other < sizes.queries; ++other)
      depth += mask[node * sizes.queries + other];
    return depth;
  };
  const int64_t position = start + depth_of(query);
  // What lies before the tree is seen by whoever sees its root.
  const int64_t last = std::min(kv_len, capacity);
  for (int64_t key = 0; key < last; ++key) {
    const int64_t node = std::clamp<int64_t>(key - start, 0, sizes.queries - 1);
    const bool is_inside = key >= start;
    if (is_inside ? !mask[query * sizes.queries + node] : node != 0) continue;
    const int64_t at = is_inside ? start + depth_of(node) : key;
    if (!window || position - at < window) seen.push_back(key);
  }
}

// The rows of one KV head of one token: `group` query heads.
template <typename Query, typename Value>
void attend_token(const Sizes& sizes, const Options& options,
                  const std::vector<int64_t>& seen, const Query* query,
                  const Value* kv_pages, const int32_t* page_table, int64_t kv_head,
                  Query* mixed, std::vector<float>& scratch) {
  const int64_t group = sizes.q_heads / sizes.kv_heads, size = sizes.head_dim;
  const int64_t count = seen.size();
  if (!count) {
    for (int64_t i = 0; i < group * size; ++i) put(mixed + i, 0.0f);
    return;
  }
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  scratch.assign(group * (padded + 2 * size + 1), 0.0f);
  float* scores = scratch.data();
  float* scaled = scores + group * padded;
  float* sums = scaled + group * size;
  float* totals = sums + group * size;
  for (int64_t i = 0; i < group * size; ++i)
    scaled[i] = widen(query[i]) * options.scale;
  const int64_t stride = 2 * sizes.kv_heads * size;
  auto row_of = [&](int64_t slot) {
    const int64_t page = std::clamp<int64_t>(page_table[slot / sizes.page_size], 0,
                                             sizes.pages - 1);
    return kv_pages + (page * sizes.page_size + slot % sizes.page_size) * stride +
           2 * kv_head * size;
  };
  for (int64_t i = 0; i < count; ++i) {
    const Value* key = row_of(seen[i]);
    for (int64_t head = 0; head < group; ++head) {
      Floats sum = {};
      for (int64_t d = 0; d < size; d += kLanes)
        sum += load(scaled + head * size + d) * load(key + d);
      scores[head * padded + i] = sum_of(sum);
    }
  }
  constexpr float kNothing = -1e30f;
  for (int64_t head = 0; head < group; ++head) {
    float* row = scores + head * padded;
    Floats most = splat(kNothing);
    for (int64_t i = 0; i < padded; i += kLanes) {
      Floats score = load(row + i);
      if (options.soft_cap != 0)
        score = tanh(score / options.soft_cap) * options.soft_cap;
      store(row + i, score);
    }
    for (int64_t i = count; i < padded; ++i) row[i] = kNothing;
    for (int64_t i = 0; i < padded; i += kLanes) {
      const Floats score = load(row + i);
      most = select(score > most, score, most);
    }
    const float maximum = max_of(most);
    Floats total = {};
    for (int64_t i = 0; i < padded; i += kLanes) {
      Floats weight = exp(load(row + i) - splat(maximum));
      weight = select(load(row + i) == splat(kNothing), Floats{}, weight);
      store(row + i, weight);
      total += weight;
    }
    totals[head] = sum_of(total);
  }
  for (int64_t i = 0; i < count; ++i) {
    const Value* value = row_of(seen[i]) + size;
    for (int64_t head = 0; head < group; ++head) {
      const Floats weight = splat(scores[head * padded + i]);
      float* sum = sums + head * size;
      for (int64_t d = 0; d < size; d += kLanes)
        store(sum + d, load(sum + d) + weight * load(value + d));
    }
  }
  for (int64_t head = 0; head < group; ++head)
    for (int64_t d = 0; d < size; ++d)
      put(mixed + head * size + d, sums[head * size + d] / totals[head]);
}

template <typename Query, typename Value>
void attend_all(ffi::ThreadPool& pool, const Sizes& sizes, const Options& options,
                const Query* query, const Value* kv_pages, const int32_t* page_table,
                const int32_t* kv_len, const bool* mask, Query* mixed) {
  const int64_t group = sizes.q_heads / sizes.kv_heads;
  auto run = [&](int64_t part) {
    static thread_local std::vector<int64_t> seen;
    static thread_local std::vector<float> scratch;
    const int64_t seq = part / sizes.kv_heads, kv_head = part % sizes.kv_heads;
    const bool* own = mask ? mask + seq * sizes.queries * sizes.queries : nullptr;
    for (int64_t token = 0; token < sizes.queries; ++token) {
      see(seen, sizes, kv_len[seq], token, own, options.window);
      const int64_t at = ((seq * sizes.queries + token) * sizes.q_heads +
                          kv_head * group) * sizes.head_dim;
      attend_token(sizes, options, seen, query + at, kv_pages,
                   page_table + seq * sizes.table, kv_head, mixed + at, scratch);
    }
  };
  const int64_t parts = sizes.seqs * sizes.kv_heads;
  int64_t tokens = 0;
  for (int64_t seq = 0; seq < sizes.seqs; ++seq)
    tokens += std::clamp<int64_t>(kv_len[seq], 0, sizes.table * sizes.page_size);
  const int64_t work = 2 * tokens * sizes.queries * sizes.q_heads * sizes.head_dim;
  if (work < 2 * kMinWorkPerThread) {
    for (int64_t part = 0; part < parts; ++part) run(part);
  } else {
    for_each_part(pool, parts, run);
  }
}

ffi::Error Attend(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer kv_pages,
                  ffi::Buffer<ffi::S32> page_table, ffi::Buffer<ffi::S32> kv_len,
                  ffi::Buffer<ffi::PRED> mask, ffi::Result<ffi::AnyBuffer> mixed,
                  float scale, float soft_cap, int64_t window) {
  const auto rows = query.dimensions(), pages = kv_pages.dimensions();
  const auto table = page_table.dimensions(), masked = mask.dimensions();
  if (rows.size() != 4 || pages.size() != 4 || table.size() != 2 ||
      kv_len.dimensions().size() != 1 || masked.size() != 3)
    return ffi::Error::InvalidArgument("attend: too few or too many axes");
  const Sizes sizes{rows[0], rows[1], rows[2], pages[2] / 2,
                    rows[3], pages[0], pages[1], table[1]};
  const bool is_masked = masked[0] != 0;
  if (table[0] != sizes.seqs || kv_len.dimensions()[0] != sizes.seqs ||
      pages[3] != sizes.head_dim || sizes.kv_heads == 0 ||
      sizes.q_heads % sizes.kv_heads || sizes.head_dim % kLanes ||
      (is_masked && (masked[0] != sizes.seqs || masked[1] != sizes.queries ||
                     masked[2] != sizes.queries)) ||
      mixed->element_type() != query.element_type())
    return ffi::Error::InvalidArgument("attend: shapes do not fit each other");
  const Options options{scale, soft_cap, window};
  const bool* given = is_masked ? mask.typed_data() : nullptr;
  auto run = [&](auto* to, auto* from, auto* held) {
    attend_all(pool, sizes, options, from, held, page_table.typed_data(),
               kv_len.typed_data(), given, to);
    return ffi::Error::Success();
  };
  auto run_query = [&](auto* to, auto* from) {
    switch (kv_pages.element_type()) {
      case ffi::F32:
        return run(to, from, static_cast<const float*>(kv_pages.untyped_data()));
      case ffi::BF16:
      case ffi::U16:  // the bits of bfloat16
        return run(to, from, static_cast<const Bfloat16*>(kv_pages.untyped_data()));
      default:
        return ffi::Error::InvalidArgument("attend: pages are float32 or bfloat16");
    }
  };
  switch (query.element_type()) {
    case ffi::F32:
      return run_query(static_cast<float*>(mixed->untyped_data()),
                       static_cast<const float*>(query.untyped_data()));
    case ffi::BF16:
      return run_query(static_cast<Bfloat16*>(mixed->untyped_data()),
                       static_cast<const Bfloat16*>(query.untyped_data()));
    default:
      return ffi::Error::InvalidArgument("attend: queries are float32 or bfloat16");
  }
}

}  // namespace
}  // namespace jaxspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_attend, jaxspec::Attend,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::PRED>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window"));
