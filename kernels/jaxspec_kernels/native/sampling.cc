// Passes over rows of logits, as `jaxspec_kernels.rejection_sampling.passes` describes.
//
// The bits of a row's result depend neither on other rows nor on the number of threads:
// one thread reads a row, in the order of its columns.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "parallel.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace jaxspec {
namespace {

namespace ffi = xla::ffi;

using Matrix = ffi::Buffer<ffi::F32, 2>;
using Values = ffi::Buffer<ffi::F32, 1>;
using Numbers = ffi::Buffer<ffi::S32, 1>;
using Flags = ffi::Buffer<ffi::PRED, 1>;
using Pairs = ffi::Buffer<ffi::U32, 2>;
using Cube = ffi::Buffer<ffi::F32, 3>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();
// exp of less counts as 0: float32 would hold it only as a denormal number.
constexpr float kUnderflow = -87.0f;
// Fewer logits per thread do not pay: handing work to a thread takes microseconds.
constexpr int64_t kMinValuesPerThread = 1 << 13;
// Independent partial sums, so that additions do not wait for each other.
constexpr int kSums = 4;

bool any(Ints condition) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)condition, (__m512i)condition);
#elif defined(__AVX2__)
  return _mm256_movemask_epi8((__m256i)condition);
#else
  for (int lane = 0; lane < kLanes; ++lane)
    if (condition[lane]) return true;
  return false;
#endif
}

// Natural logarithm of positive normal numbers.
Floats log(Floats x) {
  Words bits;
  std::memcpy(&bits, &x, sizeof(bits));
  // The mantissa between sqrt(1/2) and sqrt(2), and its power of two.
  constexpr uint32_t kRootOfHalf = 0x3f3504f3u;
  const Words shifted = bits - kRootOfHalf;
  const Ints power = (Ints)shifted >> 23;
  const Words mantissa = (shifted & 0x007fffffu) + kRootOfHalf;
  Floats m;
  std::memcpy(&m, &mantissa, sizeof(m));
  const Floats n = __builtin_convertvector(power, Floats);
  // log((1 + s) / (1 - s)) = 2 (s + s^3 / 3 + ...), |s| < 0.172: off by less than 1e-9.
  const Floats f = m - splat(1.0f), s = f / (m + splat(1.0f)), square = s * s;
  Floats series = splat(2.0f / 9);
  for (const float term : {2.0f / 7, 2.0f / 5, 2.0f / 3})
    series = series * square + splat(term);
  // ln 2 in two parts: n times the first is exact.
  return n * 0.693145751953125f +
         (n * 1.42860682030941723e-6f + (s * 2.0f + s * square * series));
}

// Logits of one row: NaN and columns without a token read as -inf, +inf as the largest
// float.
struct Row {
  const float* values;
  int64_t size;  // tokens

  Floats operator[](int64_t at) const {
    Floats found;
    if (at + kLanes <= size) {
      found = load(values + at);
    } else {
      float rest[kLanes];
      std::fill(rest, rest + kLanes, -kInfinity);
      std::copy(values + at, values + size, rest);
      found = load(rest);
    }
    const Floats most = splat(kLargest);
    return select(found == found, select(found > most, most, found), splat(-kInfinity));
  }

  float one(int64_t at) const {
    const float found = values[at];
    return found != found ? -kInfinity : std::min(found, kLargest);
  }
};

// Parameters of a row's weights: `passes.Distribution`.
struct Distribution {
  float temperature, maximum, threshold;

  Floats to_weights(Floats logits) const {
    const float safe_max = maximum == -kInfinity ? 0.0f : maximum;
    const Floats power = (logits - splat(safe_max)) / splat(temperature);
    // -inf marks no token; a temperature below 0, or -0, would make its exponent +inf.
    const float least = std::max(threshold, -kLargest);
    const Ints counts = (logits >= splat(least)) & (power >= splat(kUnderflow));
    return select(counts, exp(power), Floats{});
  }
};

struct Distributions {
  const float *temperature, *maximum, *threshold;

  Distribution operator[](int64_t row) const {
    return {temperature[row], maximum[row], threshold[row]};
  }
};

// Sums `term(at)` over a row, in an order that depends on its length only.
template <typename Term>
float sum(int64_t size, const Term& term) {
  Floats sums[kSums] = {};
  int64_t at = 0;
  for (; at + kSums * kLanes <= size; at += kSums * kLanes)
    for (int part = 0; part < kSums; ++part) sums[part] += term(at + part * kLanes);
  for (int part = 0; at < size; at += kLanes, ++part) sums[part] += term(at);
  return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Rows of logits, of which this device holds some columns.
struct Rows {
  const float* values;
  int64_t count, columns, offset, size;

  Rows(const Matrix& logits, const Numbers& offset, int64_t vocab_size)
      : values(logits.typed_data()),
        // -1, which no shape equals, unless there is exactly one offset.
        count(offset.element_count() == 1 ? logits.dimensions()[0] : -1),
        columns(logits.dimensions()[1]),
        offset(count < 0 ? 0 : offset.typed_data()[0]),
        size(std::clamp<int64_t>(vocab_size - this->offset, 0, columns)) {}

  Row operator[](int64_t row) const { return {values + row * columns, size}; }

  // Whether this device holds a token.
  bool holds(int64_t token) const { return token >= offset && token < offset + size; }
};

template <typename Run>
void for_each_row(ffi::ThreadPool& pool, int64_t count, int64_t columns,
                  const Run& run) {
  if (count * columns >= 2 * kMinValuesPerThread)
    return for_each_part(pool, count, run);
  for (int64_t row = 0; row < count; ++row) run(row);
}

bool all_equal(int64_t count, std::initializer_list<int64_t> sizes) {
  return std::all_of(sizes.begin(), sizes.end(),
                     [count](int64_t size) { return size == count; });
}

ffi::Error mismatch(const char* name) {
  return ffi::Error::InvalidArgument(std::string(name) + ": shapes do not fit");
}

ffi::Error Statistics(ffi::ThreadPool pool, Matrix logits, Values temperature,
                      Numbers tokens, Flags is_summed, Numbers offset,
                      ffi::Result<Values> maximum, ffi::Result<Numbers> best,
                      ffi::Result<Values> total, ffi::Result<Values> draft_logit,
                      int64_t vocab_size) {
  const Rows rows(logits, offset, vocab_size);
  const int64_t count = rows.count;
  if (!all_equal(count,
                 {(int64_t)temperature.element_count(), (int64_t)tokens.element_count(),
                  (int64_t)is_summed.element_count(), (int64_t)maximum->element_count(),
                  (int64_t)best->element_count(), (int64_t)total->element_count(),
                  (int64_t)draft_logit->element_count()}))
    return mismatch("statistics");
  for_each_row(pool, count, rows.columns, [&](int64_t number) {
    const Row row = rows[number];
    Floats tops = splat(-kInfinity);
    for (int64_t at = 0; at < row.size; at += kLanes) {
      const Floats here = row[at];
      tops = select(here > tops, here, tops);
    }
    const float top = max_of(tops);
    int64_t found = 0;
    while (found + kLanes <= row.size && !any(row[found] == splat(top)))
      found += kLanes;
    while (found < row.size && row.one(found) != top) ++found;
    const int64_t token = tokens.typed_data()[number];
    maximum->typed_data()[number] = top;
    best->typed_data()[number] =
        static_cast<int32_t>(rows.offset + (found < row.size ? found : 0));
    draft_logit->typed_data()[number] =
        rows.holds(token) ? row.one(token - rows.offset) : -kInfinity;
    const Distribution distribution = {temperature.typed_data()[number], top,
                                       -kInfinity};
    total->typed_data()[number] =
        is_summed.typed_data()[number]
            ? sum(row.size,
                  [&](int64_t at) { return distribution.to_weights(row[at]); })
            : 0.0f;
  });
  return ffi::Error::Success();
}

ffi::Error MassAbove(ffi::ThreadPool pool, Matrix logits, Values temperature,
                     Values maximum, Values threshold, Matrix limits, Numbers offset,
                     ffi::Result<Matrix> mass_above, int64_t vocab_size, bool counts) {
  const Rows rows(logits, offset, vocab_size);
  const int64_t tries = limits.dimensions()[1];
  if (!all_equal(rows.count,
                 {(int64_t)temperature.element_count(),
                  (int64_t)maximum.element_count(), (int64_t)threshold.element_count(),
                  limits.dimensions()[0], mass_above->dimensions()[0]}) ||
      mass_above->dimensions()[1] != tries)
    return mismatch("mass_above");
  const Distributions distributions = {temperature.typed_data(), maximum.typed_data(),
                                       threshold.typed_data()};
  for_each_row(pool, rows.count, rows.columns, [&](int64_t number) {
    const Row row = rows[number];
    const Distribution distribution = distributions[number];
    static thread_local std::vector<float> weights;
    weights.resize((row.size + kLanes - 1) / kLanes * kLanes);
    for (int64_t at = 0; at < row.size; at += kLanes)
      store(weights.data() + at,
            counts ? splat(1.0f) : distribution.to_weights(row[at]));
    for (int64_t one = 0; one < tries; ++one) {
      const Floats limit = splat(limits.typed_data()[number * tries + one]);
      mass_above->typed_data()[number * tries + one] = sum(row.size, [&](int64_t at) {
        return select(row[at] >= limit, load(weights.data() + at), Floats{});
      });
    }
  });
  return ffi::Error::Success();
}

inline Words mix(Words bits) {
  bits = (bits ^ (bits >> 16)) * 0x85ebca6bu;
  bits = (bits ^ (bits >> 13)) * 0xc2b2ae35u;
  return bits ^ (bits >> 16);
}

ffi::Error GumbelArgmax(ffi::ThreadPool pool, Matrix logits, Values temperature,
                        Values maximum, Values threshold, Pairs words, Numbers offset,
                        ffi::Result<Values> score, ffi::Result<Numbers> best,
                        int64_t vocab_size) {
  const Rows rows(logits, offset, vocab_size);
  if (!all_equal(
          rows.count,
          {(int64_t)temperature.element_count(), (int64_t)maximum.element_count(),
           (int64_t)threshold.element_count(), words.dimensions()[0],
           (int64_t)score->element_count(), (int64_t)best->element_count()}) ||
      words.dimensions()[1] != 2)
    return mismatch("gumbel_argmax");
  const Distributions distributions = {temperature.typed_data(), maximum.typed_data(),
                                       threshold.typed_data()};
  for_each_row(pool, rows.count, rows.columns, [&](int64_t number) {
    const Row row = rows[number];
    const Distribution distribution = distributions[number];
    const uint32_t first = words.typed_data()[2 * number];
    const uint32_t second = words.typed_data()[2 * number + 1];
    Words lanes;
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
    float top = 0.0f;
    int64_t winner = 0;
    for (int64_t at = 0; at < row.size; at += kLanes) {
      const Floats weights = distribution.to_weights(row[at]);
      if (!any(weights > Floats{})) continue;
      const Words ids = lanes + static_cast<uint32_t>(rows.offset + at);
      const Words bits = mix(mix(ids + first) ^ second) >> 9;
      const Floats uniform =
          (__builtin_convertvector((Ints)bits, Floats) + splat(0.5f)) * 0x1p-23f;
      const Floats scores = weights / -log(uniform);
      if (!any(scores > splat(top))) continue;
      for (int lane = 0; lane < kLanes; ++lane)
        if (scores[lane] > top) top = scores[lane], winner = at + lane;
    }
    score->typed_data()[number] = top;
    best->typed_data()[number] = static_cast<int32_t>(rows.offset + winner);
  });
  return ffi::Error::Success();
}

ffi::Error ResidualMass(ffi::ThreadPool pool, Matrix logits, Values temperature,
                        Values maximum, Values threshold, Values total, Cube probs,
                        Matrix joint, Numbers offset, ffi::Result<Matrix> residual_mass,
                        int64_t vocab_size) {
  const Rows rows(logits, offset, vocab_size);
  const int64_t seqs = joint.dimensions()[0], inner = joint.dimensions()[1];
  const auto shape = probs.dimensions();
  if (!all_equal(rows.count,
                 {(int64_t)temperature.element_count(),
                  (int64_t)maximum.element_count(), (int64_t)threshold.element_count(),
                  (int64_t)total.element_count(), seqs * (inner + 2)}) ||
      shape[0] != seqs || shape[1] != inner + 1 || shape[2] != rows.columns ||
      residual_mass->dimensions()[0] != seqs || residual_mass->dimensions()[1] != inner)
    return mismatch("residual_mass");
  const Distributions distributions = {temperature.typed_data(), maximum.typed_data(),
                                       threshold.typed_data()};
  for_each_row(pool, seqs * inner, rows.columns, [&](int64_t number) {
    const int64_t seq = number / inner, level = number % inner + 1;
    const int64_t at_row = seq * (inner + 2) + level;
    const Row row = rows[at_row];
    const Distribution distribution = distributions[at_row];
    // Past the vocabulary it reads as -inf: the difference, +inf, is dropped below.
    const Row draft = {probs.typed_data() + (seq * shape[1] + level) * shape[2],
                       row.size};
    const float row_total = total.typed_data()[at_row];
    const Floats divisor = splat(row_total > 0 ? row_total : 1.0f);
    const Floats factor = splat(joint.typed_data()[number]);
    residual_mass->typed_data()[number] = sum(row.size, [&](int64_t at) {
      const Floats above =
          factor * (distribution.to_weights(row[at]) / divisor) - draft[at];
      return select((above > Floats{}) & (above < splat(kInfinity)), above, Floats{});
    });
  });
  return ffi::Error::Success();
}

// Cutoff of a row: the largest logit with enough mass at or above it.
//
// Quickselect: partition the logits by a pivot and continue in the part that holds the
// cutoff, so that each logit is read about twice. Sums depend on the row only.
struct Cutoff {
  float threshold;
  double mass;  // at or above it
};

struct Candidate {
  float logit, weight;
};

Cutoff cutoff_of(std::vector<Candidate>& all, double wanted) {
  Candidate *first = all.data(), *last = first + all.size();
  Cutoff found = {kInfinity, 0};
  while (first < last) {
    const float pivot = first[(last - first) / 2].logit;
    // [first, more) are greater, [more, at) equal, [less, last) smaller.
    Candidate *more = first, *at = first, *less = last;
    double greater = 0, equal = 0;
    while (at < less) {
      if (at->logit > pivot) {
        greater += at->weight;
        std::swap(*more++, *at++);
      } else if (at->logit == pivot) {
        equal += at->weight;
        ++at;
      } else {
        std::swap(*at, *--less);
      }
    }
    if (more > first && found.mass + greater >= wanted) {
      last = more;
      continue;
    }
    found = {pivot, found.mass + greater + equal};
    if (found.mass >= wanted) break;
    first = less;
  }
  return found;
}

ffi::Error Search(ffi::ThreadPool pool, Matrix logits, Values temperature,
                  Values maximum, Values threshold, Values total, Values wanted,
                  Flags is_searched, ffi::Result<Values> cutoff,
                  ffi::Result<Values> mass, int64_t vocab_size, bool counts) {
  const int64_t num_rows = logits.dimensions()[0], columns = logits.dimensions()[1];
  if (!all_equal(
          num_rows,
          {(int64_t)temperature.element_count(), (int64_t)maximum.element_count(),
           (int64_t)threshold.element_count(), (int64_t)total.element_count(),
           (int64_t)wanted.element_count(), (int64_t)is_searched.element_count(),
           (int64_t)cutoff->element_count(), (int64_t)mass->element_count()}))
    return mismatch("search");
  const Distributions distributions = {temperature.typed_data(), maximum.typed_data(),
                                       threshold.typed_data()};
  const int64_t size = std::clamp<int64_t>(vocab_size, 0, columns);
  for_each_row(pool, num_rows, columns, [&](int64_t number) {
    cutoff->typed_data()[number] = -kInfinity;
    mass->typed_data()[number] = total.typed_data()[number];
    if (!is_searched.typed_data()[number]) return;
    const Row row = {logits.typed_data() + number * columns, size};
    const Distribution distribution = distributions[number];
    const float goal = wanted.typed_data()[number];
    // All tokens below this weigh less, together, than the mass that may be dropped.
    // Half of it leaves room for rounding.
    const float spare =
        counts ? 0.0f
               : std::max((total.typed_data()[number] - goal) / (2 * columns), 0.0f);
    static thread_local std::vector<Candidate> candidates;
    candidates.clear();
    for (int64_t at = 0; at < row.size; at += kLanes) {
      const Floats here = row[at], weights = distribution.to_weights(here);
      const Ints is_candidate = (weights > Floats{}) & (weights >= splat(spare));
      if (!any(is_candidate)) continue;
      for (int lane = 0; lane < kLanes; ++lane)
        if (is_candidate[lane])
          candidates.push_back({here[lane], counts ? 1.0f : weights[lane]});
    }
    if (candidates.empty()) return;
    const Cutoff found = cutoff_of(candidates, goal);
    cutoff->typed_data()[number] = found.threshold;
    mass->typed_data()[number] = static_cast<float>(found.mass);
  });
  return ffi::Error::Success();
}

// Draws one token per sequence from one of its rows, as `draw.draw` does when the
// vocabulary is not split.
ffi::Error Draw(ffi::ThreadPool pool, Matrix logits, Values temperature, Values maximum,
                Values threshold, Values total, Numbers tokens, Cube probs, Numbers row,
                Numbers index, Flags is_rejected, Values joint, Values uniform,
                ffi::Result<Numbers> token, int64_t vocab_size) {
  const int64_t num_rows = logits.dimensions()[0], columns = logits.dimensions()[1];
  const int64_t seqs = token->dimensions()[0];
  const auto shape = probs.dimensions();
  const bool has_probs = shape[1] > 0;
  if (num_rows < 1 ||  // a row out of range is clamped
      !all_equal(seqs,
                 {(int64_t)row.element_count(), (int64_t)index.element_count(),
                  (int64_t)is_rejected.element_count(), (int64_t)joint.element_count(),
                  (int64_t)uniform.element_count(), (int64_t)tokens.element_count()}) ||
      !all_equal(
          num_rows,
          {(int64_t)temperature.element_count(), (int64_t)maximum.element_count(),
           (int64_t)threshold.element_count(), (int64_t)total.element_count()}) ||
      (has_probs && (shape[0] != seqs || shape[2] != columns)))
    return mismatch("draw");
  const Distributions distributions = {temperature.typed_data(), maximum.typed_data(),
                                       threshold.typed_data()};
  const int64_t size = std::clamp<int64_t>(vocab_size, 0, columns);
  for_each_row(pool, seqs, columns, [&](int64_t seq) {
    token->typed_data()[seq] = 0;
    const int64_t number = std::clamp<int64_t>(row.typed_data()[seq], 0, num_rows - 1);
    const Row own = {logits.typed_data() + number * columns, size};
    const Distribution distribution = distributions[number];
    const float row_total = total.typed_data()[number];
    const Floats divisor = splat(row_total > 0 ? row_total : 1.0f);
    static thread_local std::vector<float> target_probs, residual;
    const int64_t padded = (size + kLanes - 1) / kLanes * kLanes;
    target_probs.resize(padded);
    for (int64_t at = 0; at < size; at += kLanes)
      store(target_probs.data() + at, distribution.to_weights(own[at]) / divisor);
    const float* drawn = target_probs.data();
    if (is_rejected.typed_data()[seq]) {
      residual.resize(padded);
      const Floats factor = splat(joint.typed_data()[seq]);
      const int64_t level =
          has_probs ? std::clamp<int64_t>(index.typed_data()[seq], 0, shape[1] - 1) : 0;
      const Row draft = {probs.typed_data() + (seq * shape[1] + level) * columns, size};
      const int64_t point_mass = tokens.typed_data()[seq];
      const float residual_mass = sum(size, [&](int64_t at) {
        const Floats scaled = factor * load(target_probs.data() + at);
        Floats above = has_probs ? scaled - draft[at] : scaled;
        if (!has_probs && point_mass >= at && point_mass < at + kLanes)
          above[point_mass - at] -= 1.0f;
        above =
            select((above > Floats{}) & (above < splat(kInfinity)), above, Floats{});
        store(residual.data() + at, above);
        return above;
      });
      if (residual_mass > 0) drawn = residual.data();
    }
    // Find the block that holds the token by sums of blocks, then its column. If
    // rounding leaves none, take the last that is not 0.
    constexpr int64_t kBlock = 32 * kLanes;
    auto block_sum = [&](int64_t start) {
      const int64_t length = std::min(kBlock, size - start);
      return sum(length, [&](int64_t at) { return load(drawn + start + at); });
    };
    double goal = 0;
    for (int64_t start = 0; start < size; start += kBlock) goal += block_sum(start);
    goal *= uniform.typed_data()[seq];
    int64_t block = -1;
    double before = 0, passed = 0;
    for (int64_t start = 0; start < size; start += kBlock) {
      const float here = block_sum(start);
      if (here > 0) {
        block = start, before = passed;
        if (passed + here > goal) break;
      }
      passed += here;
    }
    if (block < 0) return;
    double reached = before;
    for (int64_t at = block; at < std::min(block + kBlock, size); ++at) {
      if (!(drawn[at] > 0)) continue;
      token->typed_data()[seq] = static_cast<int32_t>(at);
      reached += drawn[at];
      if (reached > goal) break;
    }
  });
  return ffi::Error::Success();
}

ffi::Error Probabilities(ffi::ThreadPool pool, Matrix logits, Values temperature,
                         Values maximum, Values threshold, Values total, Numbers offset,
                         ffi::Result<Matrix> probs, int64_t vocab_size) {
  const Rows rows(logits, offset, vocab_size);
  if (!all_equal(rows.count,
                 {(int64_t)temperature.element_count(),
                  (int64_t)maximum.element_count(), (int64_t)threshold.element_count(),
                  (int64_t)total.element_count(), probs->dimensions()[0]}) ||
      probs->dimensions()[1] != rows.columns)
    return mismatch("probabilities");
  const Distributions distributions = {temperature.typed_data(), maximum.typed_data(),
                                       threshold.typed_data()};
  for_each_row(pool, rows.count, rows.columns, [&](int64_t number) {
    const Row row = rows[number];
    const Distribution distribution = distributions[number];
    const float row_total = total.typed_data()[number];
    const Floats divisor = splat(row_total > 0 ? row_total : 1.0f);
    float* to = probs->typed_data() + number * rows.columns;
    int64_t at = 0;
    for (; at + kLanes <= row.size; at += kLanes)
      store(to + at, distribution.to_weights(row[at]) / divisor);
    if (at < row.size) {
      const Floats last = distribution.to_weights(row[at]) / divisor;
      std::memcpy(to + at, &last, (row.size - at) * sizeof(float));
    }
    std::fill(to + row.size, to + rows.columns, 0.0f);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxspec

using jaxspec::Cube;
using jaxspec::Flags;
using jaxspec::Matrix;
using jaxspec::Numbers;
using jaxspec::Pairs;
using jaxspec::Values;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_statistics, jaxspec::Statistics,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<Matrix>()
                                  .Arg<Values>()
                                  .Arg<Numbers>()
                                  .Arg<Flags>()
                                  .Arg<Numbers>()
                                  .Ret<Values>()
                                  .Ret<Numbers>()
                                  .Ret<Values>()
                                  .Ret<Values>()
                                  .Attr<int64_t>("vocab_size"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_mass_above, jaxspec::MassAbove,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<Matrix>()
                                  .Arg<Values>()
                                  .Arg<Values>()
                                  .Arg<Values>()
                                  .Arg<Matrix>()
                                  .Arg<Numbers>()
                                  .Ret<Matrix>()
                                  .Attr<int64_t>("vocab_size")
                                  .Attr<bool>("counts"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_gumbel_argmax, jaxspec::GumbelArgmax,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<Matrix>()
                                  .Arg<Values>()
                                  .Arg<Values>()
                                  .Arg<Values>()
                                  .Arg<Pairs>()
                                  .Arg<Numbers>()
                                  .Ret<Values>()
                                  .Ret<Numbers>()
                                  .Attr<int64_t>("vocab_size"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_residual_mass, jaxspec::ResidualMass,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<Matrix>()
                                  .Arg<Values>()
                                  .Arg<Values>()
                                  .Arg<Values>()
                                  .Arg<Values>()
                                  .Arg<Cube>()
                                  .Arg<Matrix>()
                                  .Arg<Numbers>()
                                  .Ret<Matrix>()
                                  .Attr<int64_t>("vocab_size"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_search, jaxspec::Search,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<Matrix>()
                                  .Arg<Values>()
                                  .Arg<Values>()
                                  .Arg<Values>()
                                  .Arg<Values>()
                                  .Arg<Values>()
                                  .Arg<Flags>()
                                  .Ret<Values>()
                                  .Ret<Values>()
                                  .Attr<int64_t>("vocab_size")
                                  .Attr<bool>("counts"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_draw, jaxspec::Draw,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<Matrix>()
                                  .Arg<Values>()
                                  .Arg<Values>()
                                  .Arg<Values>()
                                  .Arg<Values>()
                                  .Arg<Numbers>()
                                  .Arg<Cube>()
                                  .Arg<Numbers>()
                                  .Arg<Numbers>()
                                  .Arg<Flags>()
                                  .Arg<Values>()
                                  .Arg<Values>()
                                  .Ret<Numbers>()
                                  .Attr<int64_t>("vocab_size"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_probabilities, jaxspec::Probabilities,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<Matrix>()
                                  .Arg<Values>()
                                  .Arg<Values>()
                                  .Arg<Values>()
                                  .Arg<Values>()
                                  .Arg<Numbers>()
                                  .Ret<Matrix>()
                                  .Attr<int64_t>("vocab_size"));
