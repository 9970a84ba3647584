// Attention of a few queries per sequence over paged keys and values.
//
// Each query head of each token is a row: it multiplies with the keys that it sees in
// their order and has its own sums. Its bits depend neither on the number of queries,
// the shape of a draft tree, the position of pages, nor on threads. Rows share only
// reads: neighbouring queries multiply with the same keys while these are in registers.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "parallel.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace jaxspec {
namespace {

namespace ffi = xla::ffi;

// Multiplications per thread below which a further thread does not pay.
constexpr int64_t kMinWorkPerThread = 1 << 18;

// Rows per pass over keys: their sums fill the registers.
constexpr int kMaxRows = kLanes == 16 ? 6 : 2;
// Vectors of a value that are added up together.
constexpr int kVectors = 4;
// Queries of one part: they share reads of keys.
constexpr int64_t kMaxQueries = 16;
// Size of the scores of one part in bytes: they fit in a core's cache.
constexpr int64_t kMaxScores = 1 << 18;
constexpr float kNothing = -1e30f;

// Positions in [first, last).
struct Range {
  int64_t first, last;
  int64_t count() const { return std::max<int64_t>(last - first, 0); }
};

// Positions that a query of a chain sees.
Range range_of(const Attention& given, int64_t kv_len, int64_t query) {
  const int64_t position = kv_len - given.queries + query;
  const int64_t first =
      given.window ? std::max<int64_t>(position - given.window + 1, 0) : 0;
  return {first, std::min(position + 1, given.table * given.page_size)};
}

// Slots of the keys that a query of a tree sees, in order.
void visible_keys(std::vector<int64_t>& seen, const Attention& given, int64_t kv_len,
         int64_t query, const bool* mask) {
  seen.clear();
  const int64_t window = given.window, queries = given.queries;
  const int64_t start = kv_len - queries;  // slot of the first query
  const int64_t capacity = given.table * given.page_size;
  auto depth_of = [&](int64_t node) {
    int64_t depth = -1;
    for (int64_t other = 0; other < queries; ++other)
      depth += mask[node * queries + other];
    return depth;
  };
  const int64_t position = start + depth_of(query);
  // A query that sees the root of the tree sees all tokens before the tree.
  const int64_t last = std::min(kv_len, capacity);
  for (int64_t key = 0; key < last; ++key) {
    const int64_t node = std::clamp<int64_t>(key - start, 0, queries - 1);
    const bool is_inside = key >= start;
    if (is_inside ? !mask[query * queries + node] : node != 0) continue;
    const int64_t at = is_inside ? start + depth_of(node) : key;
    if (!window || position - at < window) seen.push_back(key);
  }
}

// Transposes kLanes keys: to[feature * kLanes + key].
template <typename Value>
void transpose_keys(const Value* const* keys, int64_t size, float* to) {
  for (int64_t at = 0; at < size; at += kLanes) {
    const int64_t count = std::min<int64_t>(size - at, kLanes);
    Floats rows[kLanes];
    for (int key = 0; key < kLanes; ++key) rows[key] = load_some(keys[key] + at, count);
    transpose(rows);
    for (int64_t row = 0; row < count; ++row) store(to + (at + row) * kLanes, rows[row]);
  }
}

// Scores of rows with the keys of a block, one lane per key. A row adds up the products
// of even features, those of odd ones, and then both sums.
template <int Rows>
void score(const float* rows, const float* block, int64_t size, Floats* found) {
  Floats even[Rows] = {}, odd[Rows] = {};
  for (int64_t at = 0; at + 1 < size; at += 2) {
    const Floats first = load(block + at * kLanes);
    const Floats second = load(block + (at + 1) * kLanes);
    for (int row = 0; row < Rows; ++row) {
      even[row] += splat(rows[row * size + at]) * first;
      odd[row] += splat(rows[row * size + at + 1]) * second;
    }
  }
  if (size % 2) {
    const Floats last = load(block + (size - 1) * kLanes);
    for (int row = 0; row < Rows; ++row)
      even[row] += splat(rows[row * size + size - 1]) * last;
  }
  for (int row = 0; row < Rows; ++row) found[row] = even[row] + odd[row];
}

// Adds `count` values times a row's weights to the sums of rows, in order of positions,
// each feature by itself. `lanes`: valid lanes of the last vector, unless it is whole.
template <int Rows, int Vectors, bool IsWhole, typename Value>
void mix_some(const Value* const* values, int64_t at, const float* const* weights,
              int64_t count, float* sums, int64_t size, int64_t lanes) {
  auto size_of = [lanes](int vector) {
    return IsWhole || vector + 1 < Vectors ? int64_t{kLanes} : lanes;
  };
  Floats own[Rows][Vectors];
  for (int row = 0; row < Rows; ++row)
    for (int vector = 0; vector < Vectors; ++vector)
      own[row][vector] =
          load_some(sums + row * size + at + vector * kLanes, size_of(vector));
  for (int64_t key = 0; key < count; ++key) {
    Floats value[Vectors];
    for (int vector = 0; vector < Vectors; ++vector)
      value[vector] = load_some(values[key] + at + vector * kLanes, size_of(vector));
    for (int row = 0; row < Rows; ++row) {
      const Floats weight = splat(weights[row][key]);
      for (int vector = 0; vector < Vectors; ++vector)
        own[row][vector] += weight * value[vector];
    }
  }
  for (int row = 0; row < Rows; ++row)
    for (int vector = 0; vector < Vectors; ++vector)
      store_some(sums + row * size + at + vector * kLanes, own[row][vector],
                 size_of(vector));
}

template <int Rows, typename Value>
void mix(const Value* const* values, const float* const* weights, int64_t count,
         float* sums, int64_t size) {
  if (count < 1) return;
  int64_t at = 0;
  for (; at + kVectors * kLanes <= size; at += kVectors * kLanes)
    mix_some<Rows, kVectors, true>(values, at, weights, count, sums, size, kLanes);
  for (; at < size; at += kLanes)
    mix_some<Rows, 1, false>(values, at, weights, count, sums, size,
                             std::min<int64_t>(size - at, kLanes));
}

// Calls run(first, integral constant of the group size) for groups of `count` rows.
template <typename Run>
void for_rows(int64_t count, const Run& run) {
  int64_t first = 0;
  for (; first + kMaxRows <= count; first += kMaxRows)
    run(first, std::integral_constant<int, kMaxRows>());
  constexpr int kHalf = kMaxRows / 2;
  for (; first + kHalf <= count; first += kHalf)
    run(first, std::integral_constant<int, kHalf>());
  for (; first < count; ++first) run(first, std::integral_constant<int, 1>());
}

// Replaces scores by unnormalised weights; returns their sum. `count` is above 0; there
// is room for a whole vector.
float to_weights(float* scores, int64_t count, float soft_cap) {
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  Floats most = splat(kNothing);
  std::fill(scores + count, scores + padded, 0.0f);
  if (soft_cap != 0)
    for (int64_t i = 0; i < padded; i += kLanes)
      store(scores + i, tanh(load(scores + i) / soft_cap) * soft_cap);
  std::fill(scores + count, scores + padded, kNothing);
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Floats score = load(scores + i);
    most = select(score > most, score, most);
  }
  const float maximum = max_of(most);
  Floats total = {};
  for (int64_t i = 0; i < padded; i += kLanes) {
    Floats weight = exp(load(scores + i) - splat(maximum));
    weight = select(load(scores + i) == splat(kNothing), Floats{}, weight);
    store(scores + i, weight);
    total += weight;
  }
  return sum_of(total);
}

// Attention of the queries of one sequence at one KV head.
//
// A row is a query head of a token. `keys` are those that any of the tokens sees, and
// `ranges` the part of them that each token sees. Afterwards `keys` point to the
// values. int8 pages: `scales[i]` points to the scale of `keys[i]`, which multiplies a
// score; the next float is the scale of its value, which multiplies a weight.
template <typename Query, typename Value>
void attend_rows_of(const Attention& given, std::vector<const Value*>& keys,
                    const std::vector<const float*>& scales, const Range* ranges,
                    int64_t tokens, const Query* query, Query* mixed,
                    std::vector<float>& scratch) {
  constexpr bool kIsScaled = std::is_same_v<Value, StoredInt8>;
  const int64_t group = given.q_heads / given.kv_heads, size = given.head_dim;
  const int64_t rows = tokens * group, stride = given.q_heads * size;
  const int64_t count = keys.size();
  const int64_t padded = count + 2 * kLanes;
  scratch.resize(rows * (padded + 2 * size) + kLanes * size);
  float* scores = scratch.data();
  float* scaled = scores + rows * padded;
  float* sums = scaled + rows * size;
  float* block = sums + rows * size;
  std::fill(sums, sums + rows * size, 0.0f);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < size; ++i)
      scaled[row * size + i] =
          widen(query[row / group * stride + row % group * size + i]) * given.scale;
  for (int64_t at = 0; at < count; at += kLanes) {
    const Value* own[kLanes];
    for (int64_t key = 0; key < kLanes; ++key)
      own[key] = keys[std::min(at + key, count - 1)];
    transpose_keys(own, size, block);
    Floats factors = {};
    if constexpr (kIsScaled) {
      float lanes[kLanes];
      for (int64_t key = 0; key < kLanes; ++key)
        lanes[key] = scales[std::min(at + key, count - 1)][0];
      factors = load(lanes);
    }
    for_rows(rows, [&](int64_t first, auto number) {
      constexpr int kRows = number.value;
      // Tokens later in a chain begin and end no earlier.
      if (ranges[first / group].first >= at + kLanes ||
          ranges[(first + kRows - 1) / group].last <= at)
        return;
      Floats found[kRows];
      score<kRows>(scaled + first * size, block, size, found);
      if constexpr (kIsScaled)
        for (int row = 0; row < kRows; ++row) found[row] *= factors;
      for (int row = 0; row < kRows; ++row) {
        const Range range = ranges[(first + row) / group];
        float* to = scores + (first + row) * padded - range.first;
        const int64_t begin = std::max(range.first, at);
        const int64_t end = std::min(range.last, at + kLanes);
        if (begin == at && end == at + kLanes) {
          store(to + at, found[row]);
        } else if (begin < end) {
          float lanes[kLanes];
          store(lanes, found[row]);
          std::copy(lanes + begin - at, lanes + end - at, to + begin);
        }
      }
    });
  }
  // From here on `keys` point to values, each of which follows its key.
  for (const Value*& key : keys) key += size;
  for_rows(rows, [&](int64_t first, auto number) {
    constexpr int kRows = number.value;
    float totals[kRows];
    Range all{0, count};
    for (int row = 0; row < kRows; ++row) {
      const Range range = ranges[(first + row) / group];
      all = {std::max(all.first, range.first), std::min(all.last, range.last)};
      totals[row] = range.count() ? to_weights(scores + (first + row) * padded,
                                               range.count(), given.soft_cap)
                                  : 0.0f;
      if constexpr (kIsScaled)
        for (int64_t i = 0; i < range.count(); ++i)
          scores[(first + row) * padded + i] *= scales[range.first + i][1];
    }
    // Read values that all rows see once, and the others per row.
    if (!all.count()) all = {0, 0};
    auto mix_row = [&](int row, int64_t begin, int64_t end) {
      const float* own = scores + (first + row) * padded -
                         ranges[(first + row) / group].first + begin;
      mix<1>(keys.data() + begin, &own, end - begin, sums + (first + row) * size,
             size);
    };
    const float* weights[kRows];
    for (int row = 0; row < kRows; ++row) {
      const Range range = ranges[(first + row) / group];
      weights[row] = scores + (first + row) * padded - range.first + all.first;
      if (all.count()) mix_row(row, range.first, all.first);
    }
    mix<kRows>(keys.data() + all.first, weights, all.count(), sums + first * size,
               size);
    for (int row = 0; row < kRows; ++row) {
      const Range range = ranges[(first + row) / group];
      mix_row(row, all.count() ? all.last : range.first, range.last);
      Query* to =
          mixed + (first + row) / group * stride + (first + row) % group * size;
      const float* sum = sums + (first + row) * size;
      for (int64_t i = 0; i < size; ++i)
        put(to + i, range.count() ? sum[i] / totals[row] : 0.0f);
    }
  });
}

template <typename Query, typename Value>
void attend_all(ffi::ThreadPool& pool, const Attention& given, const Query* query,
                Query* mixed) {
  const int64_t group = given.q_heads / given.kv_heads, queries = given.queries;
  const int64_t blocks = (queries + kMaxQueries - 1) / kMaxQueries;
  const int64_t capacity = given.table * given.page_size;
  auto run = [&](int64_t part) {
    static thread_local std::vector<int64_t> seen;
    static thread_local std::vector<float> scratch;
    static thread_local std::vector<const Value*> keys;
    static thread_local std::vector<const float*> scales;
    const int64_t block = part % blocks, kv_head = part / blocks % given.kv_heads;
    const int64_t seq = part / blocks / given.kv_heads;
    const int32_t* page_table = given.page_table + seq * given.table;
    const bool* own = given.mask ? given.mask + seq * queries * queries : nullptr;
    const int64_t stride = 2 * given.kv_heads * given.head_dim;
    auto key_at = [&](int64_t slot) {
      const int64_t page = std::clamp<int64_t>(page_table[slot / given.page_size], 0,
                                               given.pages - 1);
      return static_cast<const Value*>(given.kv_pages) +
             (page * given.page_size + slot % given.page_size) * stride +
             2 * kv_head * given.head_dim;
    };
    auto add = [&](const Value* key) {
      keys.push_back(key);
      if constexpr (std::is_same_v<Value, StoredInt8>)
        scales.push_back(given.scales + (key - static_cast<const Value*>(
                                                   given.kv_pages)) / given.head_dim);
    };
    auto attend_tokens = [&](const Range* ranges, int64_t token, int64_t tokens) {
      const int64_t at =
          ((seq * queries + token) * given.q_heads + kv_head * group) * given.head_dim;
      attend_rows_of<Query, Value>(given, keys, scales, ranges, tokens, query + at,
                                   mixed + at, scratch);
    };
    const int64_t last = queries * (block + 1) / blocks;
    int64_t token = queries * block / blocks;
    while (token < last) {
      keys.clear(), scales.clear();
      if (own != nullptr) {
        visible_keys(seen, given, given.kv_len[seq], token, own);
        for (const int64_t slot : seen) add(key_at(slot));
        const Range range{0, static_cast<int64_t>(keys.size())};
        attend_tokens(&range, token, 1);
        ++token;
        continue;
      }
      Range ranges[kMaxQueries];
      const Range first = range_of(given, given.kv_len[seq], token);
      Range all = first;
      int64_t tokens = 0;
      for (; token + tokens < last; ++tokens) {
        const Range range = range_of(given, given.kv_len[seq], token + tokens);
        // Queries that see nothing come first; group them among themselves.
        if ((range.count() == 0) != (first.count() == 0)) break;
        const int64_t needs = (range.last - first.first) * (tokens + 1) * group;
        if (tokens && needs * int64_t{sizeof(float)} > kMaxScores) break;
        ranges[tokens] = range;
        all.last = range.last;
      }
      if (!all.count()) all = {0, 0};
      for (int64_t i = 0; i < tokens; ++i)
        ranges[i] = all.count() ? Range{ranges[i].first - all.first,
                                        ranges[i].last - all.first}
                                : Range{0, 0};
      for (int64_t slot = all.first; slot < all.last;) {
        const int64_t end =
            std::min((slot / given.page_size + 1) * given.page_size, all.last);
        for (const Value* key = key_at(slot); slot < end; ++slot, key += stride)
          add(key);
      }
      attend_tokens(ranges, token, tokens);
      token += tokens;
    }
  };
  const int64_t parts = given.seqs * given.kv_heads * blocks;
  int64_t tokens = 0;
  for (int64_t seq = 0; seq < given.seqs; ++seq)
    tokens += std::clamp<int64_t>(given.kv_len[seq], 0, capacity);
  const int64_t work = 2 * tokens * queries * given.q_heads * given.head_dim;
  if (work < 2 * kMinWorkPerThread) {
    for (int64_t part = 0; part < parts; ++part) run(part);
  } else {
    for_each_part(pool, parts, run);
  }
}

// Dispatches on the type of the pages.
template <typename Query>
void attend_rows(ffi::ThreadPool& pool, const Attention& given, const Query* query,
                 Query* mixed) {
  switch (given.page_type) {
    case PageType::kFloat32:
      return attend_all<Query, float>(pool, given, query, mixed);
    case PageType::kBfloat16:
      return attend_all<Query, Bfloat16>(pool, given, query, mixed);
    case PageType::kFloat8:
      return attend_all<Query, StoredFloat8>(pool, given, query, mixed);
    case PageType::kInt8:
      return attend_all<Query, StoredInt8>(pool, given, query, mixed);
  }
}

}  // namespace

ffi::Error set_pages(Attention& attention, ffi::AnyBuffer kv_pages,
                     ffi::AnyBuffer scales) {
  const auto shape = kv_pages.dimensions();
  const auto type = kv_pages.element_type();
  // Page ids are clamped, so there must be a page.
  if (shape.size() != 4 || shape[0] < 1 || shape[1] < 1 || shape[2] < 1 || shape[2] % 2)
    return ffi::Error::InvalidArgument("pages have other axes");
  // bfloat16 and fp8 pages may be passed as their bits.
  if (type == ffi::F32)
    attention.page_type = PageType::kFloat32;
  else if (type == ffi::BF16 || type == ffi::U16)
    attention.page_type = PageType::kBfloat16;
  else if (type == ffi::F8E4M3FN || type == ffi::U8)
    attention.page_type = PageType::kFloat8;
  else if (type == ffi::S8)
    attention.page_type = PageType::kInt8;
  else
    return ffi::Error::InvalidArgument("pages are float32, bfloat16, fp8 or int8");
  const int64_t needed = type == ffi::S8 ? shape[0] * shape[1] * shape[2] : 0;
  if (scales.element_type() != ffi::F32 ||
      static_cast<int64_t>(scales.element_count()) != needed)
    return ffi::Error::InvalidArgument("scales are those of other pages");
  attention.kv_pages = kv_pages.untyped_data();
  attention.scales = static_cast<const float*>(scales.untyped_data());
  attention.pages = shape[0], attention.page_size = shape[1];
  attention.kv_heads = shape[2] / 2, attention.head_dim = shape[3];
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
                  ffi::AnyBuffer scales, ffi::Buffer<ffi::S32> page_table,
                  ffi::Buffer<ffi::S32> kv_len, ffi::Buffer<ffi::PRED> mask,
                  ffi::Result<ffi::AnyBuffer> mixed, float scale, float soft_cap,
                  int64_t window) {
  const auto rows = query.dimensions();
  if (rows.size() != 4)
    return ffi::Error::InvalidArgument("attend: queries have other axes");
  Attention attention{};
  attention.queries = rows[1], attention.q_heads = rows[2];
  attention.scale = scale, attention.soft_cap = soft_cap, attention.window = window;
  if (ffi::Error error = set_pages(attention, kv_pages, scales); error.failure())
    return error;
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
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::PRED>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window"));
