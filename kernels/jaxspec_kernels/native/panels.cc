// Products of rows with a matrix stored in panels, and look-ups of its rows.
//
// A panel stores kWidth outputs, as `layouts.h` describes. Zeros fill the last panel, and
// the last step of each group of features. Each row of the result has its own
// accumulators and adds up its features in order: its bits depend neither on the number
// of rows nor on threads.
//
// Values are widened in registers: to float32, or to bfloat16 if rows are rounded to it.
// The sum of a group of features is multiplied by the group's scale and added to the
// result, group by group: this order is fixed as well. A group's minimum is multiplied by
// the sum of the row's features, which is computed once for all outputs, and added after
// the scaled sum.
//
// Tiles (AMX) add up 32 features in another order, that of Intel's manual. On processors
// that have them, rows rounded to bfloat16 are multiplied in this order always: many rows
// in tiles, and few rows in float32.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "layouts.h"
#include "panels.h"
#include "parallel.h"
#include "tiles.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace jaxspec {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kWidth = kPanelWidth;
constexpr int kVectors = kWidth / kLanes;  // of one panel
// Rows that are multiplied together, with values that are widened once for all of them:
// accumulators, the matrix's vectors and their widened copies fill the registers. With
// twelve rows of 32 registers, compilers keep some of them in memory: 0.8 of the speed.
constexpr int kMaxRows = kLanes < 16 ? 4 : 8;
// Panels multiplied at once. Few rows take several: independent additions overlap.
constexpr int panels_at_once(int rows, int sums, bool is_scaled) {
  if (kLanes < 16) return 1;
  if (is_scaled) return rows == 1 ? 4 / sums : rows == 2 ? 2 / sums : 1;
  return rows * sums <= 2 ? 4 / sums : rows <= 6 ? 2 / sums : 1;
}
// With this number of rows or fewer, reading the matrix takes longer than multiplying.
constexpr int kFewRows = 2;
// Bytes of the matrix per thread: handing work to another takes some microseconds. With
// one row or two, reading dominates, and one core does most of it: on few cores a
// second thread takes time from the thread that prepares the next launch.
constexpr int64_t kMinBytesPerThread = 1 << 17, kMinBytesRead = 1 << 20;

constexpr int64_t kAheadBytes = 2048;

// Memory that a thread reuses, aligned to cache lines.
struct alignas(64) Line {
  char bytes[64];
};

struct Memory {
  std::vector<Line> rows, panel, sums, row_sums;
};

Memory& memory() {
  static thread_local Memory own;
  return own;
}

template <typename Value>
Value* reserve(std::vector<Line>& lines, int64_t count) {
  const size_t needed = (count * sizeof(Value) + sizeof(Line) - 1) / sizeof(Line);
  if (lines.size() < needed) lines.resize(needed);
  return reinterpret_cast<Value*>(lines.data());
}

// Steps of the features of a matrix in one layout.
template <typename Layout>
struct Steps {
  int64_t groups, size;  // groups of features, and features of each
  int64_t per_group;     // steps

  explicit Steps(const Panels& panels)
      : groups(panels.groups),
        size(panels.features / panels.groups),
        per_group((size + Layout::kFeatures - 1) / Layout::kFeatures) {}

  int64_t count() const { return groups * per_group; }
  // Values of a panel.
  int64_t values() const { return count() * Layout::kValues * kWidth; }
};

// Prefetches what a thread reads some kB after a step: few rows leave too few loads in
// flight to reach the memory's speed. Each vector prefetches a cache line, if there is one.
template <typename Layout>
inline void prefetch(const typename Layout::Value* step, int vector) {
  constexpr int kLine = sizeof(Line);
  constexpr int kBytes = Layout::kValues * kWidth * sizeof(typename Layout::Value);
  if (vector * kLine < kBytes)
    __builtin_prefetch(reinterpret_cast<const char*>(step) + vector * kLine + kAheadBytes);
}

// Leaves a thread's treatment of denormal numbers as it is.
struct AsSet {
  AsSet() {}
};

// Products in float32.
//
// Input: the numbers of a row for one step. Mode: set while a thread multiplies. kSums:
// accumulators per row and output.
template <typename Layout, bool IsRounded>
struct InFloats {
  typedef struct {
    float values[Layout::kFeatures];
  } Input;
  typedef AsSet Mode;
  static constexpr int kSums = 1;

  static void pack(const float* row, Input* to) {
    for (int i = 0; i < Layout::kFeatures; ++i)
      to->values[i] = IsRounded ? widen(narrow(row[i])) : row[i];
  }
  // Adds products of steps of panels, `size` values apart.
  template <int Rows, int Vectors>
  static inline void add(const typename Layout::Value* panels, int64_t size,
                         const Input* inputs, int64_t steps, Floats (*sums)[Vectors]) {
    for (int64_t step = 0; step < steps; ++step) {
      auto from = [&](int vector) {
        return panels + vector / kVectors * size + step * Layout::kValues * kWidth;
      };
      auto input = [&](int row, int feature) {
        return splat(inputs[step * Rows + row].values[feature]);
      };
      if constexpr (Rows <= kFewRows || kLanes < 16) {
        for (int vector = 0; vector < Vectors; ++vector) {
          if (Layout::kIsScaled || Rows <= kFewRows)
            prefetch<Layout>(from(vector), vector % kVectors);
#pragma GCC unroll 8
          for (int feature = 0; feature < Layout::kFeatures; ++feature) {
            const Floats value = Layout::floats(from(vector), vector % kVectors, feature);
            for (int row = 0; row < Rows; ++row)
              sums[row][vector] += input(row, feature) * value;
          }
        }
      } else {
        // Registers hold the input of one row at a time.
        for (int feature = 0; feature < Layout::kFeatures; ++feature) {
          Floats values[Vectors];
          for (int vector = 0; vector < Vectors; ++vector) {
            if (Layout::kIsScaled && !feature)
              prefetch<Layout>(from(vector), vector % kVectors);
            values[vector] = Layout::floats(from(vector), vector % kVectors, feature);
          }
          for (int row = 0; row < Rows; ++row) {
            const Floats own = input(row, feature);
            for (int vector = 0; vector < Vectors; ++vector)
              sums[row][vector] += own * values[vector];
          }
        }
      }
    }
  }
};

#if defined(__AVX512BF16__) && !defined(JAXSPEC_HAS_TILES)
// Products of pairs of bfloat16. Processors with tiles multiply float32 as fast, should
// the system not allow tiles.
template <typename Layout>
struct InPairs {
  typedef struct {
    uint32_t pairs[Layout::kFeatures / 2];
  } Input;
  typedef AsSet Mode;
  static constexpr int kSums = 1;

  static void pack(const float* row, Input* to) {
    for (int i = 0; i < Layout::kFeatures / 2; ++i)
      to->pairs[i] = narrow(row[2 * i]).bits |
                     static_cast<uint32_t>(narrow(row[2 * i + 1]).bits) << 16;
  }
  template <int Rows, int Vectors>
  static inline void add(const typename Layout::Value* panels, int64_t size,
                         const Input* inputs, int64_t steps, Floats (*sums)[Vectors]) {
    auto add_to = [](Floats& sum, __m512i pairs, __m512i input) {
      sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)input);
    };
    for (int64_t step = 0; step < steps; ++step) {
      auto from = [&](int vector) {
        return panels + vector / kVectors * size + step * Layout::kValues * kWidth;
      };
      auto input = [&](int row, int pair) {
        return _mm512_set1_epi32(inputs[step * Rows + row].pairs[pair]);
      };
      if constexpr (Rows <= kFewRows) {
        for (int vector = 0; vector < Vectors; ++vector) {
          prefetch<Layout>(from(vector), vector % kVectors);
#pragma GCC unroll 4
          for (int pair = 0; pair < Layout::kFeatures / 2; ++pair) {
            const __m512i pairs = Layout::pairs(from(vector), vector % kVectors, pair);
            for (int row = 0; row < Rows; ++row)
              add_to(sums[row][vector], pairs, input(row, pair));
          }
        }
      } else {
        // Registers hold the input of one row at a time.
        for (int pair = 0; pair < Layout::kFeatures / 2; ++pair) {
          __m512i pairs[Vectors];
          for (int vector = 0; vector < Vectors; ++vector) {
            if (Layout::kIsScaled && !pair)
              prefetch<Layout>(from(vector), vector % kVectors);
            pairs[vector] = Layout::pairs(from(vector), vector % kVectors, pair);
          }
          for (int row = 0; row < Rows; ++row) {
            const __m512i own = input(row, pair);
            for (int vector = 0; vector < Vectors; ++vector)
              add_to(sums[row][vector], pairs[vector], own);
          }
        }
      }
    }
  }
};

template <typename Layout, bool IsRounded>
using ArithmeticOf =
    std::conditional_t<IsRounded, InPairs<Layout>, InFloats<Layout, false>>;
#else
template <typename Layout, bool IsRounded>
using ArithmeticOf = InFloats<Layout, IsRounded>;
#endif

#if defined(JAXSPEC_HAS_TILES)
// Products of rows rounded to bfloat16, added in the order of a tile: of kTileFeatures
// features at a time, even and odd features are summed separately, starting from zero.
// The sum of both is added to the result.
template <typename Layout>
struct InTileOrder : InFloats<Layout, true> {
  typedef FlushDenormals Mode;
  static constexpr int kSums = 2;
  static constexpr int kSteps = kTileFeatures / Layout::kFeatures;

  static void pack(const float* row, typename InFloats<Layout, true>::Input* to) {
    for (int i = 0; i < Layout::kFeatures; ++i)
      to->values[i] = std::abs(row[i]) < 0x1p-126f ? 0.0f : widen(narrow(row[i]));
  }
  template <int Rows, int Vectors>
  static inline void add(const typename Layout::Value* panels, int64_t size,
                         const typename InFloats<Layout, true>::Input* inputs,
                         int64_t steps, Floats (*sums)[Vectors]) {
    for (int64_t start = 0; start < steps; start += kSteps) {
      Floats parts[2][Rows][Vectors] = {};
      const int64_t stop = std::min<int64_t>(start + kSteps, steps);
      for (int64_t step = start; step < stop; ++step)
        for (int vector = 0; vector < Vectors; ++vector) {
          const auto* from =
              panels + vector / kVectors * size + step * Layout::kValues * kWidth;
          prefetch<Layout>(from, vector % kVectors);
#pragma GCC unroll 8
          for (int feature = 0; feature < Layout::kFeatures; ++feature) {
            const Floats value = Layout::floats(from, vector % kVectors, feature);
            for (int row = 0; row < Rows; ++row)
              parts[feature % 2][row][vector] = add_product(
                  parts[feature % 2][row][vector],
                  splat(inputs[step * Rows + row].values[feature]), value);
          }
        }
      for (int row = 0; row < Rows; ++row)
        for (int vector = 0; vector < Vectors; ++vector)
          sums[row][vector] += parts[0][row][vector] + parts[1][row][vector];
    }
  }
};
#endif

// Outputs of `Rows` rows from `Panels` panels; `inputs` are [step, row].
//
// groups, per_group: number of groups, and of steps per group. first: the first output.
// outputs: [row, num_outputs]. scales: null, or as in `Panels`, beginning with the first
// of these panels. row_sums: null without minima, or [row, group].
template <typename Layout, typename Arithmetic, bool IsScaled, int Rows, int Panels>
void multiply_panels(const typename Layout::Value* panels, const float* scales,
                     const float* row_sums, int64_t groups, int64_t per_group,
                     const typename Arithmetic::Input* inputs, float* outputs,
                     int64_t first, int64_t num_outputs) {
  Floats sums[Rows][Panels * kVectors] = {};
  const int64_t size = groups * per_group * Layout::kValues * kWidth;
  auto add = [&](Floats(*to)[Panels * kVectors], int64_t begin, int64_t end) {
    Arithmetic::template add<Rows, Panels * kVectors>(
        panels + begin * Layout::kValues * kWidth, size, inputs + begin * Rows,
        end - begin, to);
  };
  if constexpr (IsScaled) {
    for (int64_t group = 0; group < groups; ++group) {
      Floats own[Rows][Panels * kVectors] = {};
      add(own, group * per_group, (group + 1) * per_group);
      for (int panel = 0; panel < Panels; ++panel)
        for (int vector = 0; vector < kVectors; ++vector) {
          const int at = panel * kVectors + vector;
          const float* from = scales +
                              (panel * groups + group) * (row_sums ? 2 : 1) * kWidth +
                              vector * kLanes;
          const Floats scale = load(from);
          if (!row_sums) {
            for (int row = 0; row < Rows; ++row)
              sums[row][at] = add_product(sums[row][at], own[row][at], scale);
            continue;
          }
          const Floats minimum = load(from + kWidth);
          for (int row = 0; row < Rows; ++row)
            sums[row][at] =
                add_product(add_product(sums[row][at], own[row][at], scale),
                            splat(row_sums[row * groups + group]), minimum);
        }
    }
  } else {
    add(sums, 0, groups * per_group);
  }
  for (int row = 0; row < Rows; ++row)
    for (int vector = 0; vector < Panels * kVectors; ++vector) {
      const int64_t at = first + vector * kLanes;
      if (at < num_outputs)
        store_some(outputs + row * num_outputs + at, sums[row][vector], num_outputs - at);
    }
}

// The same for panels `first` to `last` of all outputs; `panels` begins with the first.
template <typename Layout, typename Arithmetic, bool IsScaled, int Rows>
void multiply_rows(const typename Layout::Value* panels, const float* scales,
                   const float* row_sums, int64_t groups, int64_t per_group,
                   int64_t first, int64_t last,
                   const typename Arithmetic::Input* inputs, float* outputs,
                   int64_t num_outputs) {
  constexpr int kPanels = panels_at_once(Rows, Arithmetic::kSums, IsScaled);
  const int64_t size = groups * per_group * Layout::kValues * kWidth;
  int64_t panel = first;
  auto run = [&](auto function, int count) {
    const int64_t of_panel = groups * (row_sums ? 2 : 1) * kWidth;
    function(panels + (panel - first) * size,
             IsScaled ? scales + panel * of_panel : nullptr, row_sums, groups, per_group,
             inputs, outputs, panel * kWidth, num_outputs);
    panel += count;
  };
  while (panel + kPanels <= last)
    run(multiply_panels<Layout, Arithmetic, IsScaled, Rows, kPanels>, kPanels);
  while (panel < last) run(multiply_panels<Layout, Arithmetic, IsScaled, Rows, 1>, 1);
}

template <typename Layout, typename Arithmetic, bool IsScaled, int... Rows>
auto function_for(int64_t rows, std::integer_sequence<int, Rows...>) {
  static constexpr decltype(&multiply_rows<Layout, Arithmetic, IsScaled, 1>)
      kFunctions[] = {multiply_rows<Layout, Arithmetic, IsScaled, Rows + 1>...};
  return kFunctions[rows - 1];
}

// Rows in groups of nearly equal size: 13 are 7 and 6, not 12 and 1.
struct Groups {
  int64_t num_rows, count;

  Groups(int64_t num_rows, int most)
      : num_rows(num_rows), count((num_rows + most - 1) / most) {}

  int64_t start(int64_t group) const { return num_rows * group / count; }
  int64_t size(int64_t group) const { return start(group + 1) - start(group); }
};

// Reorders inputs to [step, row], for rows that are multiplied together. The features of
// a group fill `per_group` steps, with zeros at the end.
template <typename Arithmetic, int Features>
void pack(ffi::ThreadPool& pool, const Groups& rows, int64_t groups, int64_t size,
          int64_t per_group, const float* inputs, typename Arithmetic::Input* to) {
  for_each_part(pool, rows.count, [&](int64_t part) {
    const int64_t start = rows.start(part), count = rows.size(part);
    for (int64_t row = 0; row < count; ++row)
      for (int64_t group = 0; group < groups; ++group) {
        const float* from = inputs + ((start + row) * groups + group) * size;
        auto* own = to + (start * groups + group * count) * per_group + row;
        const int64_t whole = std::min(size / Features, per_group);
        for (int64_t step = 0; step < whole; ++step)
          Arithmetic::pack(from + step * Features, own + step * count);
        for (int64_t step = whole; step < per_group; ++step) {
          float last[Features] = {};
          std::copy(from + std::min(step * Features, size), from + size, last);
          Arithmetic::pack(last, own + step * count);
        }
      }
  });
}

// Rounds to bfloat16, as `narrow`.
inline Floats rounded(Floats values) {
  const Words bits = (Words)values;
  const Words nearest = bits + 0x7fffu + (bits >> 16 & 1u);
  return select(values == values, (Floats)(nearest & 0xffff0000u), values);
}

// Sums of each row's features by group, [row, group], for minima; null without minima.
// `fill` rows of zeros follow.
template <bool IsRounded>
const float* sum_groups(ffi::ThreadPool& pool, const Panels& panels, const float* inputs,
                        int64_t num_rows, int64_t fill) {
  if (!panels.has_minima) return nullptr;
  const int64_t groups = panels.groups, size = panels.features / groups;
  float* sums = reserve<float>(memory().row_sums, (num_rows + fill) * groups);
  std::fill_n(sums + num_rows * groups, fill * groups, 0.0f);
  constexpr int64_t kRowsPerPart = 8;
  const int64_t parts = (num_rows + kRowsPerPart - 1) / kRowsPerPart;
  for_each_part(pool, parts, [&](int64_t part) {
    const int64_t last = std::min((part + 1) * kRowsPerPart, num_rows);
    for (int64_t row = part * kRowsPerPart; row < last; ++row)
      for (int64_t group = 0; group < groups; ++group) {
        const float* from = inputs + (row * groups + group) * size;
        Floats sum = {};
        for (int64_t at = 0; at < size; at += kLanes) {
          const Floats values = load_some(from + at, size - at);
          sum += IsRounded ? rounded(values) : values;
        }
        sums[row * groups + group] = sum_of(sum);
      }
  });
  return sums;
}

// Calls run(first, last) for parts of the panels, on all threads that are useful.
//
// most: panels of a part; 0: any number.
template <typename Run>
void for_each_panels(ffi::ThreadPool& pool, int64_t num_panels, int64_t panel_bytes,
                     int64_t num_rows, int64_t most, const Run& run) {
  const int64_t bytes = num_panels * panel_bytes * ((num_rows + 7) / 8);
  const int64_t least = num_rows <= 2 ? kMinBytesRead : kMinBytesPerThread;
  const int64_t useful = std::max<int64_t>(bytes / least, 1);
  const int64_t threads = std::min<int64_t>({pool.num_threads(), useful, num_panels});
  // There are more parts than threads, so that a thread that begins late does less.
  int64_t parts = threads < 2 ? 1 : 4 * threads;
  if (most) parts = std::max(parts, (num_panels + most - 1) / most);
  parts = std::min(parts, num_panels);
  auto run_part = [&](int64_t part) {
    run(num_panels * part / parts, num_panels * (part + 1) / parts);
  };
  if (threads < 2) {
    for (int64_t part = 0; part < parts; ++part) run_part(part);
  } else {
    for_each_part(pool, parts, run_part);
  }
}

#if defined(JAXSPEC_HAS_TILES)
typedef float Tile[kTileRows * kTileOutputs];
// For several blocks of rows: blocks of features at a time, 512 kB with 512 rows, and
// panels of a part, whose sums take 64 kB each. Both fit in a core's cache.
constexpr int64_t kChunk = 16, kMaxPanels = 16;
// If there are several groups of features, the chunk of one block of rows and that of a
// panel fit in the first-level cache together.
constexpr int64_t kGroupChunk = 8;
// Bytes between pairs of features of a panel, and between its halves.
constexpr int64_t kStride = kWidth * sizeof(uint32_t), kHalf = kStride / 2;

// Prefetches a block of a panel some kB before it is used, or one of the panel `count`
// after it: unpacking leaves too few loads in flight to reach the memory's speed.
inline void prefetch_ahead(const void* values, int64_t panel_bytes, int64_t num_blocks,
                           int64_t panel, int64_t block, int64_t count) {
  const int64_t size = panel_bytes / num_blocks;
  block += std::max(kAheadBytes / size, int64_t{1});
  if (block >= num_blocks) block -= num_blocks, panel += count;
  const char* from =
      static_cast<const char*>(values) + panel * panel_bytes + block * size;
  for (int64_t line = 0; line < size; line += sizeof(Line))
    __builtin_prefetch(from + line);
}

// Rows as tiles of bfloat16: [block of rows, block of features, row, feature]. Zeros fill
// the last block of rows, and the last block of features of each group.
struct TileRows {
  int64_t num_rows, count, num_blocks;  // blocks of rows; blocks of features
  int size;                             // rows of a block
  Line* lines;
  const float* sums;  // null without minima, or [row, group] of all blocks' rows

  const Line* block(int64_t rows, int64_t features) const {
    return lines + (rows * num_blocks + features) * size;
  }
};

TileRows pack_tiles(ffi::ThreadPool& pool, const Panels& panels, int64_t per_group,
                    const float* inputs, int64_t num_rows) {
  TileRows found;
  found.num_rows = num_rows, found.count = (num_rows + kTileRows - 1) / kTileRows;
  found.size = static_cast<int>((num_rows + found.count - 1) / found.count);
  found.num_blocks = panels.groups * per_group;
  found.lines = reserve<Line>(memory().rows, found.count * found.num_blocks * found.size);
  found.sums = sum_groups<true>(pool, panels, inputs, num_rows, kTileRows);
  const int64_t size = panels.features / panels.groups;
  for_each_part(pool, found.count, [&](int64_t part) {
    for (int64_t row = 0; row < found.size; ++row) {
      Line* to = found.lines + part * found.num_blocks * found.size + row;
      const int64_t source = part * found.size + row;
      for (int64_t block = 0; block < found.num_blocks; ++block, to += found.size) {
        const int64_t group = block / per_group, at = block % per_group * kTileFeatures;
        const int64_t left = source < num_rows ? size - at : 0;
        const float* from = inputs + source * panels.features + group * size + at;
        auto half = [&](int64_t first) {
          const int64_t count = std::clamp<int64_t>(left - first, 0, kLanes);
          return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1),
                                       from + first);
        };
        _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(half(kLanes), half(0)));
      }
    }
  });
  return found;
}

// Multiplies `Blocks` blocks of rows, from `rows` on, with `Count` panels, from `first`
// on: one block with one or two panels, or two blocks with one panel.
//
// begin, end: the range of feature blocks; whole groups if there are several groups.
// per_group: feature blocks per group. sums: sums of the feature blocks before `begin`,
// updated in place.
// prepare(block): called before a block of the matrix is read. matrix(panel, block):
// that block, [pair of features, output, 2].
template <int Blocks, int Count, bool IsScaled, typename Prepare, typename Matrix>
void multiply_tile_rows(const Panels& panels, const TileRows& tiles, int64_t per_group,
                        int64_t begin, int64_t end, int64_t rows, int64_t first,
                        Tile* sums, float* outputs, const Prepare& prepare,
                        const Matrix& matrix) {
  static_assert(Blocks * Count <= 2);
  constexpr int kTiles = 2 * Blocks * Count;
  alignas(64) Tile own[kTiles];
  auto finish = [&](int64_t group, int tile) {
    const int64_t panel = first + (Blocks == 1 ? tile / 2 : 0);
    const int64_t start = (rows + (Blocks == 1 ? 0 : tile / 2)) * tiles.size;
    const int64_t output = panel * kWidth + tile % 2 * kTileOutputs;
    const int64_t count = std::min<int64_t>(tiles.size, tiles.num_rows - start);
    const bool is_last = group + 1 == panels.groups;
    Floats scale = {}, minimum = {};
    if constexpr (IsScaled) {
      const float* from = panels.scales_of(panel, group) + tile % 2 * kTileOutputs;
      scale = load(from);
      if (tiles.sums) minimum = load(from + kWidth);
    }
    for (int64_t row = 0; row < count; ++row) {
      Floats value = load(own[tile] + row * kTileOutputs);
      if constexpr (IsScaled) {
        float* sum = sums[tile] + row * kTileOutputs;
        value = add_product(group ? load(sum) : Floats{}, value, scale);
        if (tiles.sums)
          value = add_product(
              value, splat(tiles.sums[(start + row) * panels.groups + group]), minimum);
        if (!is_last) store(sum, value);
      }
      if (is_last && output < panels.outputs)
        store_some(outputs + (start + row) * panels.outputs + output, value,
                   panels.outputs - output);
    }
  };
  auto store_tiles = [&](Tile* to) {
    store_tile<0>(to[0], sizeof(Line)), store_tile<1>(to[1], sizeof(Line));
    if constexpr (kTiles > 2)
      store_tile<2>(to[2], sizeof(Line)), store_tile<3>(to[3], sizeof(Line));
  };
  prepare(begin);
  for (int64_t start = begin; start < end; start += per_group) {
    if (start % per_group) {  // of the one group
      load_tile<0>(sums[0], sizeof(Line)), load_tile<1>(sums[1], sizeof(Line));
      if constexpr (kTiles > 2)
        load_tile<2>(sums[2], sizeof(Line)), load_tile<3>(sums[3], sizeof(Line));
    } else {
      clear_tile<0>(), clear_tile<1>();
      if constexpr (kTiles > 2) clear_tile<2>(), clear_tile<3>();
    }
    const int64_t stop = std::min(start + per_group, end);
    for (int64_t at = start; at < stop; ++at) {
      if (at + 1 < end) prepare(at + 1);
      load_tile<4>(tiles.block(rows, at), sizeof(Line));
      if constexpr (Blocks == 2) load_tile<5>(tiles.block(rows + 1, at), sizeof(Line));
      const char* values = matrix(first, at);
      load_tile<6>(values, kStride);
      multiply_tiles<0, 4, 6>();
      if constexpr (Blocks == 2) multiply_tiles<2, 5, 6>();
      load_tile<7>(values + kHalf, kStride);
      multiply_tiles<1, 4, 7>();
      if constexpr (Blocks == 2) multiply_tiles<3, 5, 7>();
      if constexpr (Count == 2) {
        values = matrix(first + 1, at);
        load_tile<5>(values, kStride);
        multiply_tiles<2, 4, 5>();
        load_tile<6>(values + kHalf, kStride);
        multiply_tiles<3, 4, 6>();
      }
    }
    if (stop % per_group) {
      store_tiles(sums);
      return;
    }
    store_tiles(own);
    for (int tile = 0; tile < kTiles; ++tile) finish(stop / per_group - 1, tile);
  }
}

// Multiplies a block of rows with a half of a panel, for several groups of features.
//
// Keeps the sums in registers: a tile of 32 features takes as long to multiply as to
// store, so sums in memory would double the time. The products of a group are added
// while the next group is multiplied. Bits are those of `multiply_tile_rows`.
//
// begin, end: the range of groups. sums: sums of the groups before `begin`, updated in
// place. products: memory for two groups. matrix(panel, block): as above.
template <typename Matrix>
void multiply_tile_groups(const Panels& panels, const TileRows& tiles, int64_t per_group,
                          int64_t begin, int64_t end, int64_t rows, int64_t panel,
                          int half, float* sums, Tile* products, float* outputs,
                          const Matrix& matrix) {
  Floats total[kTileRows];
  // Registers hold `total` only if this is inlined.
  auto add = [&](int64_t group) __attribute__((always_inline)) {
    const float* from = products[group % 2];
    const float* scales = panels.scales_of(panel, group) + half * kTileOutputs;
    const Floats scale = load(scales);
#pragma GCC unroll 16
    for (int row = 0; row < kTileRows; ++row)
      total[row] = add_product(total[row], load(from + row * kTileOutputs), scale);
    if (!tiles.sums) return;
    const Floats minimum = load(scales + kWidth);
    const float* row_sums = tiles.sums + rows * tiles.size * panels.groups + group;
#pragma GCC unroll 16
    for (int row = 0; row < kTileRows; ++row)
      total[row] = add_product(total[row], splat(row_sums[row * panels.groups]), minimum);
  };
#pragma GCC unroll 16
  for (int row = 0; row < kTileRows; ++row)
    total[row] = begin ? load(sums + row * kTileOutputs) : Floats{};
  for (int64_t group = begin; group < end; ++group) {
    clear_tile<0>();
    for (int64_t at = group * per_group; at < (group + 1) * per_group; ++at) {
      load_tile<4>(tiles.block(rows, at), sizeof(Line));
      load_tile<6>(matrix(panel, at) + half * kHalf, kStride);
      multiply_tiles<0, 4, 6>();
    }
    if (group > begin) add(group - 1);
    store_tile<0>(products[group % 2], sizeof(Line));
  }
  add(end - 1);
#pragma GCC unroll 16
  for (int row = 0; row < kTileRows; ++row)
    store(sums + row * kTileOutputs, total[row]);
  const int64_t start = rows * tiles.size, output = panel * kWidth + half * kTileOutputs;
  if (end < panels.groups || output >= panels.outputs) return;
  const int64_t count = std::min<int64_t>(tiles.size, tiles.num_rows - start);
  for (int64_t row = 0; row < count; ++row)
    store_some(outputs + (start + row) * panels.outputs + output,
               load(sums + row * kTileOutputs), panels.outputs - output);
}

// As `multiply_kind`, with tiles.
template <typename Layout>
void multiply_in_tiles(ffi::ThreadPool& pool, const Panels& panels, const float* inputs,
                       int64_t num_rows, float* outputs) {
  const auto* values = static_cast<const typename Layout::Value*>(panels.values);
  const Steps<Layout> steps(panels);
  constexpr int64_t kSteps = kTileFeatures / Layout::kFeatures;
  const int64_t per_group = (steps.per_group + kSteps - 1) / kSteps;
  const int64_t num_panels = (panels.outputs + kWidth - 1) / kWidth;
  const TileRows tiles = pack_tiles(pool, panels, per_group, inputs, num_rows);
  constexpr int64_t kBlock = kTileFeatures * kWidth;  // values
  const int64_t panel_bytes = steps.values() * sizeof(typename Layout::Value);
  // Whether a block can be read as it is stored.
  auto is_stored = [&](int64_t block) {
    return std::is_same_v<Layout, Bfloat16Layout> &&
           (block + 1) * kSteps <= steps.per_group;
  };
  auto stored = [&](int64_t panel, int64_t block) {
    return static_cast<const char*>(panels.values) + panel * panel_bytes +
           block * kBlock * static_cast<int64_t>(sizeof(Bfloat16));
  };
  auto unpack_block = [&](int64_t panel, int64_t block, Bfloat16* to) {
    const int64_t group = block / per_group, step = block % per_group * kSteps;
    const int64_t count = std::min(kSteps, steps.per_group - step);
    const auto* from = values + panel * steps.values() +
                       (group * steps.per_group + step) * Layout::kValues * kWidth;
    Bfloat16* const end = to + kBlock;
    for (int64_t one = 0; one < count; ++one, from += Layout::kValues * kWidth)
#pragma GCC unroll 4
      for (int pair = 0; pair < Layout::kFeatures / 2; ++pair, to += 2 * kWidth)
        for (int vector = 0; vector < kVectors; ++vector)
          _mm512_store_si512(to + 2 * vector * kLanes,
                             Layout::pairs(from, vector, pair));
    std::fill(to, end, Bfloat16{});
  };
  // Products of one block of rows. Blocks are unpacked one ahead.
  auto run_few = [&](int64_t first, int64_t last) {
    const FlushDenormals mode;
    const Tiles own(tiles.size, 1);
    alignas(64) Tile sums[4];
    Bfloat16* unpacked = reserve<Bfloat16>(memory().panel, 4 * kBlock);
    auto multiply = [&](auto count, int64_t panel) {
      auto slot = [&](int64_t other, int64_t block) {
        return unpacked + (2 * (block % 2) + other - panel) * kBlock;
      };
      auto prepare = [&](int64_t block) {
        for (int64_t other = panel; other < panel + count; ++other) {
          prefetch_ahead(panels.values, panel_bytes, tiles.num_blocks, other, block,
                         count);
          if (!is_stored(block)) unpack_block(other, block, slot(other, block));
        }
      };
      multiply_tile_rows<1, count, Layout::kIsScaled>(
          panels, tiles, per_group, 0, tiles.num_blocks, 0, panel, sums, outputs,
          prepare, [&](int64_t other, int64_t block) {
            return is_stored(block) ? stored(other, block)
                                    : reinterpret_cast<const char*>(slot(other, block));
          });
    };
    int64_t panel = first;
    for (; panel + 2 <= last; panel += 2)
      multiply(std::integral_constant<int, 2>(), panel);
    if (panel < last) multiply(std::integral_constant<int, 1>(), panel);
  };
  // Products of several blocks of rows. A chunk of all rows fits in a core's cache, and a
  // panel's chunk is unpacked once.
  auto run_many = [&](int64_t first, int64_t last) {
    const FlushDenormals mode;
    const Tiles own(tiles.size, 2);
    const bool is_grouped = panels.groups > 1;
    const int64_t chunk =
        is_grouped ? std::max(kGroupChunk / per_group, int64_t{1}) * per_group : kChunk;
    alignas(64) Tile products[2] = {};
    Bfloat16* unpacked = reserve<Bfloat16>(memory().panel, chunk * kBlock);
    Tile* sums = reserve<Tile>(memory().sums, (last - first) * tiles.count * 2);
    for (int64_t begin = 0; begin < tiles.num_blocks; begin += chunk) {
      const int64_t end = std::min(begin + chunk, tiles.num_blocks);
      for (int64_t panel = first; panel < last; ++panel) {
        for (int64_t block = begin; block < end; ++block)
          if (!is_stored(block))
            unpack_block(panel, block, unpacked + (block - begin) * kBlock);
        auto matrix = [&](int64_t, int64_t block) {
          return is_stored(block) ? stored(panel, block)
                                  : reinterpret_cast<const char*>(
                                        unpacked + (block - begin) * kBlock);
        };
        Tile* own_sums = sums + (panel - first) * tiles.count * 2;
        if (is_grouped) {
          for (int64_t tile = 0; tile < 2 * tiles.count; ++tile)
            multiply_tile_groups(panels, tiles, per_group, begin / per_group,
                                 end / per_group, tile / 2, panel, tile % 2,
                                 own_sums[tile], products, outputs, matrix);
          continue;
        }
        auto multiply = [&](auto count, int64_t rows) {
          multiply_tile_rows<count, 1, Layout::kIsScaled>(
              panels, tiles, per_group, begin, end, rows, panel, own_sums + 2 * rows,
              outputs, [](int64_t) {}, matrix);
        };
        int64_t rows = 0;
        for (; rows + 2 <= tiles.count; rows += 2)
          multiply(std::integral_constant<int, 2>(), rows);
        if (rows < tiles.count) multiply(std::integral_constant<int, 1>(), rows);
      }
    }
  };
  if (tiles.count == 1)
    for_each_panels(pool, num_panels, panel_bytes, num_rows, 0, run_few);
  else
    for_each_panels(pool, num_panels, panel_bytes, num_rows, kMaxPanels, run_many);
}
#endif

// Converts a panel of 8-bit floats, which bfloat16 represents exactly.
void convert(const uint8_t* panel, int64_t steps, Bfloat16* to) {
  for (int64_t step = 0; step < steps; ++step, panel += Float8Layout::kValues * kWidth)
    for (int vector = 0; vector < kVectors; ++vector, to += 2 * kLanes) {
      const Words even = (Words)Float8Layout::floats(panel, vector, 0);
      const Words odd = (Words)Float8Layout::floats(panel, vector, 1);
      const Words pairs = even >> 16 | (odd & 0xffff0000u);
      std::memcpy(to, &pairs, sizeof(pairs));
    }
}

// Multiplies with values that are widened in registers.
//
// Stored: the layout of the panels. Layout: the one in which they are multiplied; if it is
// another, a panel is converted once for all rows.
template <typename Stored, typename Layout, typename Arithmetic, bool IsRounded>
void multiply_in_registers(ffi::ThreadPool& pool, const Panels& panels,
                           const float* inputs, int64_t num_rows, float* outputs) {
  const auto* values = static_cast<const typename Stored::Value*>(panels.values);
  const Steps<Stored> steps(panels);
  static_assert(Stored::kFeatures == Layout::kFeatures);
  // More than few rows are never multiplied in the order of tiles here.
  constexpr int kMost = Arithmetic::kSums > 1 ? kFewRows : kMaxRows;
  const Groups rows(num_rows, kMost);
  const int64_t num_panels = (panels.outputs + kWidth - 1) / kWidth;
  auto* packed =
      reserve<typename Arithmetic::Input>(memory().rows, num_rows * steps.count());
  pack<Arithmetic, Layout::kFeatures>(pool, rows, steps.groups, steps.size,
                                      steps.per_group, inputs, packed);
  const float* row_sums = sum_groups<IsRounded>(pool, panels, inputs, num_rows, 0);
  auto multiply = [&](const typename Layout::Value* from, int64_t first, int64_t last) {
    for (int64_t group = 0; group < rows.count; ++group) {
      const int64_t start = rows.start(group);
      function_for<Layout, Arithmetic, Stored::kIsScaled>(
          rows.size(group), std::make_integer_sequence<int, kMost>())(
          from, panels.scales, row_sums ? row_sums + start * steps.groups : nullptr,
          steps.groups, steps.per_group, first, last, packed + start * steps.count(),
          outputs + start * panels.outputs, panels.outputs);
    }
  };
  auto run = [&](int64_t first, int64_t last) {
    const typename Arithmetic::Mode mode;
    if constexpr (std::is_same_v<Stored, Layout>) {
      multiply(values + first * steps.values(), first, last);
    } else {
      auto* converted = reserve<typename Layout::Value>(memory().panel, steps.values());
      for (int64_t panel = first; panel < last; ++panel) {
        convert(values + panel * steps.values(), steps.count(), converted);
        multiply(converted, panel, panel + 1);
      }
    }
  };
  // With several groups of rows, a part stays in a core's cache for all of them. With a
  // single group, each value is read once, and parts may have any size.
  constexpr int64_t kPartBytes = 1 << 18;
  const int64_t panel_bytes = steps.values() * sizeof(typename Stored::Value);
  const int64_t most = std::max(kPartBytes / panel_bytes, int64_t{1});
  for_each_panels(pool, num_panels, panel_bytes, num_rows, rows.count > 1 ? most : 0,
                  run);
}

template <typename Layout, bool IsRounded>
void multiply_kind(ffi::ThreadPool& pool, const Panels& panels, const float* inputs,
                   int64_t num_rows, float* outputs) {
#if defined(JAXSPEC_HAS_TILES)
  if constexpr (IsRounded)
    if (has_tiles()) {
      if (num_rows > kFewRows)
        return multiply_in_tiles<Layout>(pool, panels, inputs, num_rows, outputs);
      return multiply_in_registers<Layout, Layout, InTileOrder<Layout>, true>(
          pool, panels, inputs, num_rows, outputs);
    }
#endif
  // Eight-bit floats take long to convert.
  constexpr int64_t kRowsToConvert = 2 * kMaxRows;
  if constexpr (std::is_same_v<Layout, Float8Layout>)
    if (num_rows > kRowsToConvert)
      return multiply_in_registers<Layout, Bfloat16Layout,
                                   ArithmeticOf<Bfloat16Layout, IsRounded>, IsRounded>(
          pool, panels, inputs, num_rows, outputs);
  multiply_in_registers<Layout, Layout, ArithmeticOf<Layout, IsRounded>, IsRounded>(
      pool, panels, inputs, num_rows, outputs);
}

template <typename Layout>
void multiply_layout(ffi::ThreadPool& pool, const Panels& panels, const float* inputs,
                     int64_t num_rows, float* outputs) {
  if (panels.is_rounded)
    multiply_kind<Layout, true>(pool, panels, inputs, num_rows, outputs);
  else
    multiply_kind<Layout, false>(pool, panels, inputs, num_rows, outputs);
}

}  // namespace

Panels panels_of(ffi::AnyBuffer buffer, ffi::Buffer<ffi::F32> scales, int64_t outputs,
                 int64_t features, bool is_rounded) {
  const auto shape = buffer.dimensions(), form_of_scales = scales.dimensions();
  const auto type = buffer.element_type();
  Panels found{};
  found.is_rounded = is_rounded, found.groups = 1;
  // Steps that the features of a group fill.
  auto is_filled = [&](int64_t count) {
    return features % found.groups == 0 &&
           shape[1] == (features / found.groups + count - 1) / count * found.groups;
  };
  if (type == ffi::F32 && shape.size() == 3 && shape[2] == kWidth) {
    found.kind = Panels::kFloat32;
    if (!is_filled(1)) return found;
  } else if (type == ffi::BF16 && shape.size() == 4 && shape[2] == kWidth &&
             shape[3] == 2) {
    found.kind = Panels::kBfloat16;
    if (!is_filled(2)) return found;
  } else {
    found.has_minima = form_of_scales.size() == 4 && form_of_scales[2] == 2;
    if ((form_of_scales.size() != 3 && !found.has_minima) ||
        form_of_scales[0] != shape[0] || form_of_scales[1] < 1 ||
        form_of_scales.back() != kWidth)
      return found;
    found.scales = scales.typed_data(), found.groups = form_of_scales[1];
    if (type == ffi::U32 && shape.size() == 3 && shape[2] == kWidth) {
      found.kind = found.has_minima ? Panels::kUint4 : Panels::kInt4;
      if (!is_filled(8)) return found;
    } else if ((type == ffi::S8 || type == ffi::F8E4M3FN) && shape.size() == 4 &&
               shape[2] == 2 && shape[3] == kWidth) {
      found.kind = type == ffi::S8 ? Panels::kInt8 : Panels::kFloat8;
      if (!is_filled(2)) return found;
    } else {
      return found;
    }
  }
  if (outputs < 1 || features < 1 || shape[0] != (outputs + kWidth - 1) / kWidth)
    return found;
  found.values = buffer.untyped_data();
  found.outputs = outputs, found.features = features;
  return found;
}

void multiply(ffi::ThreadPool& pool, const Panels& panels, const float* inputs,
              int64_t num_rows, float* outputs) {
  if (!num_rows) return;
  switch (panels.kind) {
    case Panels::kFloat32:
      return multiply_kind<Float32Layout, false>(pool, panels, inputs, num_rows, outputs);
    case Panels::kBfloat16:
      return multiply_layout<Bfloat16Layout>(pool, panels, inputs, num_rows, outputs);
    case Panels::kInt8:
      return multiply_layout<Int8Layout>(pool, panels, inputs, num_rows, outputs);
    case Panels::kInt4:
      return multiply_layout<Int4Layout>(pool, panels, inputs, num_rows, outputs);
    case Panels::kUint4:
      return multiply_layout<Uint4Layout>(pool, panels, inputs, num_rows, outputs);
    case Panels::kFloat8:
      return multiply_layout<Float8Layout>(pool, panels, inputs, num_rows, outputs);
  }
}

namespace {

// As `multiply`; rows of zeros, whose products are zeros, are left out.
void multiply_nonzero(ffi::ThreadPool& pool, const Panels& panels, const float* inputs,
                      int64_t num_rows, float* outputs) {
  const int64_t features = panels.features, size = panels.outputs;
  static thread_local std::vector<int64_t> index;
  index.clear();
  for (int64_t row = 0; row < num_rows; ++row) {
    const float* values = inputs + row * features;
    if (std::any_of(values, values + features, [](float one) { return one != 0.0f; }))
      index.push_back(row);
  }
  const int64_t count = index.size();
  if (count == num_rows) return multiply(pool, panels, inputs, num_rows, outputs);
  static thread_local std::vector<float> rows;
  rows.resize(count * features);
  for (int64_t i = 0; i < count; ++i)
    std::copy_n(inputs + index[i] * features, features, rows.data() + i * features);
  multiply(pool, panels, rows.data(), count, outputs);
  // From the last row on, so that none is overwritten before it has moved.
  for (int64_t row = num_rows - 1, i = count - 1; row >= 0; --row) {
    float* to = outputs + row * size;
    if (i >= 0 && index[i] == row) {
      if (i != row) std::copy_n(outputs + i * size, size, to);
      --i;
    } else {
      std::fill_n(to, size, 0.0f);
    }
  }
}

ffi::Error Multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> inputs,
                    ffi::AnyBuffer panels, ffi::Buffer<ffi::F32> scales,
                    ffi::ResultBuffer<ffi::F32> outputs, bool is_rounded) {
  const auto rows = inputs.dimensions(), made = outputs->dimensions();
  if (rows.size() != 2 || made.size() != 2 || made[0] != rows[0])
    return ffi::Error::InvalidArgument("multiply: rows do not fit each other");
  const Panels matrix = panels_of(panels, scales, made[1], rows[1], is_rounded);
  if (!matrix.values)
    return ffi::Error::InvalidArgument("multiply: shapes do not fit each other");
  multiply_nonzero(pool, matrix, inputs.typed_data(), rows[0], outputs->typed_data());
  return ffi::Error::Success();
}

ffi::Error LookUp(ffi::Buffer<ffi::S32> index, ffi::AnyBuffer panels,
                  ffi::Buffer<ffi::F32> scales, ffi::ResultBuffer<ffi::F32> rows,
                  int64_t num_outputs) {
  const auto count = index.dimensions(), made = rows->dimensions();
  if (count.size() != 1 || made.size() != 2 || made[0] != count[0])
    return ffi::Error::InvalidArgument("look_up: rows do not fit each other");
  const int64_t features = made[1];
  const Panels matrix = panels_of(panels, scales, num_outputs, features, false);
  if (!matrix.values)
    return ffi::Error::InvalidArgument("look_up: shapes do not fit each other");
  auto run = [&](auto layout) {
    typedef decltype(layout) Layout;
    const Steps<Layout> steps(matrix);
    const auto* values = static_cast<const typename Layout::Value*>(matrix.values);
    for (int64_t number = 0; number < count[0]; ++number) {
      const int64_t output =
          std::clamp<int64_t>(index.typed_data()[number], 0, num_outputs - 1);
      const int64_t panel = output / kWidth, place = output % kWidth;
      const auto* from = values + panel * steps.values();
      float* to = rows->typed_data() + number * features;
      for (int64_t group = 0; group < steps.groups; ++group) {
        float scale = 1.0f, minimum = 0.0f;
        if constexpr (Layout::kIsScaled) {
          const float* scales = matrix.scales_of(panel, group) + place;
          scale = *scales;
          if (matrix.has_minima) minimum = scales[kWidth];
        }
        for (int64_t feature = 0; feature < steps.size; ++feature) {
          const int64_t step = group * steps.per_group + feature / Layout::kFeatures;
          const float value = Layout::value(from + step * Layout::kValues * kWidth, place,
                                            feature % Layout::kFeatures);
          *to = Layout::kIsScaled ? value * scale : value;
          if (matrix.has_minima) *to += minimum;
          ++to;
        }
      }
    }
  };
  switch (matrix.kind) {
    case Panels::kFloat32:
      run(Float32Layout());
      break;
    case Panels::kBfloat16:
      run(Bfloat16Layout());
      break;
    case Panels::kInt8:
      run(Int8Layout());
      break;
    case Panels::kInt4:
      run(Int4Layout());
      break;
    case Panels::kUint4:
      run(Uint4Layout());
      break;
    case Panels::kFloat8:
      run(Float8Layout());
      break;
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_multiply, jaxspec::Multiply,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<bool>("is_rounded"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_look_up, jaxspec::LookUp,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<int64_t>("num_outputs"));

// The instructions that products use here, for the log.
extern "C" const char* jaxspec_instructions() {
#if defined(JAXSPEC_HAS_TILES)
  if (jaxspec::has_tiles()) return "AMX";
#endif
#if defined(__AVX512BF16__)
  return "AVX-512 BF16";
#elif defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#elif defined(__ARM_NEON)
  return "NEON";
#else
  return "the processor's base instructions";
#endif
}
