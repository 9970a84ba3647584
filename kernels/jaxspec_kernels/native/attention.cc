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

#include "attention.h"
#include "parallel.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace jaxspec {
namespace {

namespace ffi = xla::ffi;

// Multiplications of one call from which on a second thread is of use.
constexpr int64_t kMinWorkPerThread = 1 << 18;

// Slots of the keys that a query sees, in their order.
void see(std::vector<int64_t>& seen, const Attention& given, int64_t kv_len,
         int64_t query, const bool* mask) {
  seen.clear();
  const int64_t window = given.window, queries = given.queries;
  const int64_t start = kv_len - queries;  // slot of the first query
  const int64_t capacity = given.table * given.page_size;
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
    for (int64_t other = 0; other < queries; ++other)
      depth += mask[node * queries + other];
    return depth;
  };
  const int64_t position = start + depth_of(query);
  // What lies before the tree is seen by whoever sees its root.
  const int64_t last = std::min(kv_len, capacity);
  for (int64_t key = 0; key < last; ++key) {
    const int64_t node = std::clamp<int64_t>(key - start, 0, queries - 1);
    const bool is_inside = key >= start;
    if (is_inside ? !mask[query * queries + node] : node != 0) continue;
    const int64_t at = is_inside ? start + depth_of(node) : key;
    if (!window || position - at < window) seen.push_back(key);
  }
}

// The rows of one KV head of one token: `group` query heads.
template <typename Query, typename Value>
void attend_token(const Attention& given, const std::vector<int64_t>& seen,
                  const Query* query, const int32_t* page_table, int64_t kv_head,
                  Query* mixed, std::vector<float>& scratch) {
  const int64_t group = given.q_heads / given.kv_heads, size = given.head_dim;
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
    scaled[i] = widen(query[i]) * given.scale;
  const Value* kv_pages = static_cast<const Value*>(given.kv_pages);
  const int64_t stride = 2 * given.kv_heads * size;
  auto row_of = [&](int64_t slot) {
    const int64_t page = std::clamp<int64_t>(page_table[slot / given.page_size], 0,
                                             given.pages - 1);
    return kv_pages + (page * given.page_size + slot % given.page_size) * stride +
           2 * kv_head * size;
  };
  for (int64_t i = 0; i < count; ++i) {
    const Value* key = row_of(seen[i]);
    for (int64_t head = 0; head < group; ++head)
      scores[head * padded + i] = dot(scaled + head * size, key, size);
  }
  constexpr float kNothing = -1e30f;
  for (int64_t head = 0; head < group; ++head) {
    float* row = scores + head * padded;
    Floats most = splat(kNothing);
    for (int64_t i = 0; i < padded; i += kLanes) {
      Floats score = load(row + i);
      if (given.soft_cap != 0)
        score = tanh(score / given.soft_cap) * given.soft_cap;
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
      const float weight = scores[head * padded + i];
      float* sum = sums + head * size;
      int64_t d = 0;
      for (; d + kLanes <= size; d += kLanes)
        store(sum + d, load(sum + d) + splat(weight) * load(value + d));
      for (; d < size; ++d) sum[d] += weight * widen(value[d]);
    }
  }
  for (int64_t head = 0; head < group; ++head)
    for (int64_t d = 0; d < size; ++d)
      put(mixed + head * size + d, sums[head * size + d] / totals[head]);
}

template <typename Query, typename Value>
void attend_all(ffi::ThreadPool& pool, const Attention& given, const Query* query,
                Query* mixed) {
  const int64_t group = given.q_heads / given.kv_heads, queries = given.queries;
  // Queries of one part: a prompt's are many.
  constexpr int64_t kMostQueries = 16;
  const int64_t blocks = (queries + kMostQueries - 1) / kMostQueries;
  auto run = [&](int64_t part) {
    static thread_local std::vector<int64_t> seen;
    static thread_local std::vector<float> scratch;
    const int64_t block = part % blocks, kv_head = part / blocks % given.kv_heads;
    const int64_t seq = part / blocks / given.kv_heads;
    const bool* own = given.mask ? given.mask + seq * queries * queries : nullptr;
    const int64_t last = std::min((block + 1) * kMostQueries, queries);
    for (int64_t token = block * kMostQueries; token < last; ++token) {
      see(seen, given, given.kv_len[seq], token, own);
      const int64_t at =
          ((seq * queries + token) * given.q_heads + kv_head * group) * given.head_dim;
      attend_token<Query, Value>(given, seen, query + at,
                                 given.page_table + seq * given.table, kv_head,
                                 mixed + at, scratch);
    }
  };
  const int64_t parts = given.seqs * given.kv_heads * blocks;
  int64_t tokens = 0;
  for (int64_t seq = 0; seq < given.seqs; ++seq)
    tokens += std::clamp<int64_t>(given.kv_len[seq], 0, given.table * given.page_size);
  const int64_t work = 2 * tokens * queries * given.q_heads * given.head_dim;
  if (work < 2 * kMinWorkPerThread) {
    for (int64_t part = 0; part < parts; ++part) run(part);
  } else {
    for_each_part(pool, parts, run);
  }
}

// By the type of the pages.
template <typename Query>
void attend_rows(ffi::ThreadPool& pool, const Attention& given, const Query* query,
                 Query* mixed) {
  if (given.are_float32)
    attend_all<Query, float>(pool, given, query, mixed);
  else
    attend_all<Query, Bfloat16>(pool, given, query, mixed);
}

}  // namespace

ffi::Error set_pages(Attention& attention, ffi::AnyBuffer kv_pages) {
  const auto form = kv_pages.dimensions();
  const auto type = kv_pages.element_type();
  if (form.size() != 4 || form[2] == 0 || form[2] % 2)
    return ffi::Error::InvalidArgument("pages have other axes");
  // Those of bfloat16 may be given as their bits.
  if (type != ffi::F32 && type != ffi::BF16 && type != ffi::U16)
    return ffi::Error::InvalidArgument("pages are float32 or bfloat16");
  attention.kv_pages = kv_pages.untyped_data();
  attention.are_float32 = type == ffi::F32;
  attention.pages = form[0], attention.page_size = form[1];
  attention.kv_heads = form[2] / 2, attention.head_dim = form[3];
  return ffi::Error::Success();
}

ffi::Error set_region(Attention& attention, ffi::Buffer<ffi::S32> page_table,
                      ffi::Buffer<ffi::S32> kv_len, ffi::Buffer<ffi::PRED> mask) {
  const auto table = page_table.dimensions(), masked = mask.dimensions();
  if (table.size() != 2 || kv_len.dimensions().size() != 1 || masked.size() != 3 ||
      kv_len.dimensions()[0] != table[0])
    return ffi::Error::InvalidArgument("a region has other axes");
  attention.seqs = table[0], attention.table = table[1];
  attention.page_table = page_table.typed_data();
  attention.kv_len = kv_len.typed_data();
  attention.mask = masked[0] ? mask.typed_data() : nullptr;
  const int64_t queries = attention.queries;
  if (masked[0] &&
      (masked[0] != table[0] || masked[1] != queries || masked[2] != queries))
    return ffi::Error::InvalidArgument("a mask is for other queries");
  return ffi::Error::Success();
}

void attend(ffi::ThreadPool& pool, const Attention& attention, const float* query,
            float* mixed) {
  attend_rows(pool, attention, query, mixed);
}

namespace {

ffi::Error Attend(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer kv_pages,
                  ffi::Buffer<ffi::S32> page_table, ffi::Buffer<ffi::S32> kv_len,
                  ffi::Buffer<ffi::PRED> mask, ffi::Result<ffi::AnyBuffer> mixed,
                  float scale, float soft_cap, int64_t window) {
  const auto rows = query.dimensions();
  if (rows.size() != 4)
    return ffi::Error::InvalidArgument("attend: queries have other axes");
  Attention attention{};
  attention.queries = rows[1], attention.q_heads = rows[2];
  attention.scale = scale, attention.soft_cap = soft_cap, attention.window = window;
  if (ffi::Error error = set_pages(attention, kv_pages); error.failure()) return error;
  if (ffi::Error error = set_region(attention, page_table, kv_len, mask);
      error.failure())
    return error;
  if (rows[0] != attention.seqs || rows[3] != attention.head_dim ||
      rows[2] % attention.kv_heads || mixed->element_type() != query.element_type() ||
      mixed->element_count() != query.element_count())
    return ffi::Error::InvalidArgument("attend: shapes do not fit each other");
  switch (query.element_type()) {
    case ffi::F32:
      attend_rows(pool, attention, static_cast<const float*>(query.untyped_data()),
                  static_cast<float*>(mixed->untyped_data()));
      return ffi::Error::Success();
    case ffi::BF16:
      attend_rows(pool, attention, static_cast<const Bfloat16*>(query.untyped_data()),
                  static_cast<Bfloat16*>(mixed->untyped_data()));
      return ffi::Error::Success();
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
