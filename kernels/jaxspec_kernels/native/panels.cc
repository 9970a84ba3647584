// Products of rows with a matrix whose outputs lie in panels, and its rows.
//
// Of kWidth outputs a panel has the values of one feature side by side; of bfloat16
// those of two features, as pairs: [panel, features / 2, kWidth, 2]. Each row of the
// result has accumulators of its own, and its features are added up in their order: its
// bits do not depend on how many rows there are, nor on the threads.
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "parallel.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace jaxspec {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kWidth = 32;
constexpr int kVectors = kWidth / kLanes;  // of one panel
// Rows that are multiplied together: as many accumulators as there are registers for,
// beside the matrix's own vectors.
constexpr int kMostRows = kLanes == 16 ? 12 : 4;
// With few rows several panels at once, so that sums do not wait for each other.
constexpr int panels_at_once(int rows) {
  return kLanes < 16 ? 1 : rows <= 2 ? 4 : rows <= 6 ? 2 : 1;
}
// Of the matrix, for one thread: handing work to another takes some microseconds.
constexpr int64_t kMinBytesPerThread = 1 << 17;

// How one kind of matrix lies, and what a step over its features is.
//
// kFeatures: Those of one step. Input: What a row has for it.

struct Float32 {
  typedef float Value;
  typedef float Input;
  static constexpr int kFeatures = 1;

  static void pack(const float* row, Input* to) { *to = *row; }
  template <int Rows, int Vectors>
  static inline void add(const Value* values, const Input* inputs,
                         Floats (*sums)[Vectors], int first) {
    for (int vector = 0; vector < kVectors; ++vector) {
      const Floats value = load(values + vector * kLanes);
      for (int row = 0; row < Rows; ++row)
        sums[row][first + vector] += splat(inputs[row]) * value;
    }
  }
};

// float32 arithmetic with bfloat16 weights: their pairs are widened in registers.
struct Widened {
  typedef Bfloat16 Value;
  typedef struct {
    float values[2];
  } Input;
  static constexpr int kFeatures = 2;

  static void pack(const float* row, Input* to) { *to = {{row[0], row[1]}}; }
  template <int Rows, int Vectors>
  static inline void add(const Value* values, const Input* inputs,
                         Floats (*sums)[Vectors], int first) {
    for (int vector = 0; vector < kVectors; ++vector) {
      Words pairs;
      std::memcpy(&pairs, values + 2 * vector * kLanes, sizeof(pairs));
      const Floats even = (Floats)(pairs << 16), odd = (Floats)(pairs & 0xffff0000u);
      for (int row = 0; row < Rows; ++row) {
        sums[row][first + vector] += splat(inputs[row].values[0]) * even;
        sums[row][first + vector] += splat(inputs[row].values[1]) * odd;
      }
    }
  }
};

// Rows that are bfloat16 as well.
#if defined(__AVX512BF16__)
struct Paired {
  typedef Bfloat16 Value;
  typedef uint32_t Input;
  static constexpr int kFeatures = 2;

  static void pack(const float* row, Input* to) {
    *to = narrow(row[0]).bits | static_cast<uint32_t>(narrow(row[1]).bits) << 16;
  }
  template <int Rows, int Vectors>
  static inline void add(const Value* values, const Input* inputs,
                         Floats (*sums)[Vectors], int first) {
    for (int vector = 0; vector < kVectors; ++vector) {
      __m512i pairs;
      std::memcpy(&pairs, values + 2 * vector * kLanes, sizeof(pairs));
      for (int row = 0; row < Rows; ++row) {
        Floats& sum = sums[row][first + vector];
        sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs,
                                       (__m512bh)_mm512_set1_epi32(inputs[row]));
      }
    }
  }
};
#else
typedef Widened Paired;
#endif

// Outputs of `Rows` rows from `Panels` panels; `inputs` are [step, row].
template <typename Kind, int Rows, int Panels>
void multiply_panels(const typename Kind::Value* panels, int64_t features,
                     const typename Kind::Input* inputs, float* outputs,
                     int64_t num_outputs) {
  Floats sums[Rows][Panels * kVectors] = {};
  const int64_t size = features * kWidth;
  for (int64_t step = 0; step < features / Kind::kFeatures; ++step)
    for (int panel = 0; panel < Panels; ++panel)
      Kind::template add<Rows, Panels * kVectors>(
          panels + panel * size + step * Kind::kFeatures * kWidth,
          inputs + step * Rows, sums, panel * kVectors);
  for (int row = 0; row < Rows; ++row)
    for (int vector = 0; vector < Panels * kVectors; ++vector)
      store(outputs + row * num_outputs + vector * kLanes, sums[row][vector]);
}

// The same for any number of panels.
template <typename Kind, int Rows>
void multiply_rows(const typename Kind::Value* panels, int64_t num_panels,
                   int64_t features, const typename Kind::Input* inputs,
                   float* outputs, int64_t num_outputs) {
  constexpr int kPanels = panels_at_once(Rows);
  int64_t panel = 0;
  for (; panel + kPanels <= num_panels; panel += kPanels)
    multiply_panels<Kind, Rows, kPanels>(panels + panel * features * kWidth, features,
                                         inputs, outputs + panel * kWidth, num_outputs);
  for (; panel < num_panels; ++panel)
    multiply_panels<Kind, Rows, 1>(panels + panel * features * kWidth, features, inputs,
                                   outputs + panel * kWidth, num_outputs);
}

template <typename Kind, int... Rows>
auto function_for(int64_t rows, std::integer_sequence<int, Rows...>) {
  static constexpr decltype(&multiply_rows<Kind, 1>) kFunctions[] = {
      multiply_rows<Kind, Rows + 1>...};
  return kFunctions[rows - 1];
}

// Rows in groups of about as many each: 13 are 7 and 6, not 12 and 1.
struct Groups {
  int64_t num_rows, count;

  explicit Groups(int64_t num_rows)
      : num_rows(num_rows), count((num_rows + kMostRows - 1) / kMostRows) {}

  int64_t start(int64_t group) const { return num_rows * group / count; }
  int64_t size(int64_t group) const { return start(group + 1) - start(group); }
};

// Group by group [step, row]: what is multiplied together lies together.
template <typename Kind>
void pack(const Groups& groups, int64_t features, const float* inputs,
          typename Kind::Input* to) {
  const int64_t steps = features / Kind::kFeatures;
  for (int64_t group = 0; group < groups.count; ++group) {
    const int64_t start = groups.start(group), size = groups.size(group);
    for (int64_t row = 0; row < size; ++row)
      for (int64_t step = 0; step < steps; ++step)
        Kind::pack(inputs + (start + row) * features + step * Kind::kFeatures,
                   to + start * steps + step * size + row);
  }
}

template <typename Kind>
void multiply_all(ffi::ThreadPool& pool, const void* panels, int64_t num_panels,
                  int64_t features, const float* inputs, int64_t num_rows,
                  float* outputs) {
  const auto* values = static_cast<const typename Kind::Value*>(panels);
  const Groups groups(num_rows);
  const int64_t steps = features / Kind::kFeatures, width = num_panels * kWidth;
  static thread_local std::vector<typename Kind::Input> buffer;
  buffer.resize(num_rows * steps);
  pack<Kind>(groups, features, inputs, buffer.data());
  const typename Kind::Input* packed = buffer.data();
  auto run = [&, packed](int64_t first, int64_t last) {
    for (int64_t group = 0; group < groups.count; ++group) {
      const int64_t start = groups.start(group);
      function_for<Kind>(groups.size(group),
                         std::make_integer_sequence<int, kMostRows>())(
          values + first * features * kWidth, last - first, features,
          packed + start * steps, outputs + start * width + first * kWidth, width);
    }
  };
  const int64_t panel_bytes = features * kWidth * sizeof(typename Kind::Value);
  const int64_t bytes = num_panels * panel_bytes * groups.count;
  const int64_t useful = std::max<int64_t>(bytes / kMinBytesPerThread, 1);
  const int64_t threads = std::min<int64_t>({pool.num_threads(), useful, num_panels});
  // Parts that stay in a core's cache while groups of rows pass by, and more of them
  // than threads: one that begins late does less. Of few rows every value is read once.
  constexpr int64_t kPartBytes = 1 << 18;
  int64_t parts = threads < 2 ? 1 : 4 * threads;
  if (groups.count > 1)
    parts = std::max(parts, num_panels * panel_bytes / kPartBytes);
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

// Features of a panel, however they lie; 0 for what is none.
int64_t features_of(ffi::AnyBuffer panels) {
  const auto form = panels.dimensions();
  switch (panels.element_type()) {
    case ffi::F32:
      return form.size() == 3 && form[2] == kWidth ? form[1] : 0;
    case ffi::BF16:
      return form.size() == 4 && form[2] == kWidth && form[3] == 2 ? 2 * form[1] : 0;
    default:
      return 0;
  }
}

ffi::Error Multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> inputs,
                    ffi::AnyBuffer panels, ffi::ResultBuffer<ffi::F32> outputs,
                    bool is_rounded) {
  const auto rows = inputs.dimensions(), made = outputs->dimensions();
  const int64_t features = features_of(panels);
  if (!features || rows.size() != 2 || made.size() != 2 || features != rows[1] ||
      made[0] != rows[0] || made[1] != panels.dimensions()[0] * kWidth)
    return ffi::Error::InvalidArgument("multiply: shapes do not fit each other");
  auto run = [&](auto* multiply) {
    multiply(pool, panels.untyped_data(), panels.dimensions()[0], features,
             inputs.typed_data(), rows[0], outputs->typed_data());
  };
  if (panels.element_type() == ffi::F32)
    run(&multiply_all<Float32>);
  else if (is_rounded)
    run(&multiply_all<Paired>);
  else
    run(&multiply_all<Widened>);
  return ffi::Error::Success();
}

ffi::Error LookUp(ffi::Buffer<ffi::S32> index, ffi::AnyBuffer panels,
                  ffi::ResultBuffer<ffi::F32> rows) {
  const auto count = index.dimensions(), made = rows->dimensions();
  const int64_t features = features_of(panels);
  if (!features || count.size() != 1 || made.size() != 2 || made[0] != count[0] ||
      made[1] != features)
    return ffi::Error::InvalidArgument("look_up: shapes do not fit each other");
  const int64_t num_outputs = panels.dimensions()[0] * kWidth;
  auto run = [&](auto* values, int64_t together) {
    for (int64_t number = 0; number < count[0]; ++number) {
      const int64_t output =
          std::clamp<int64_t>(index.typed_data()[number], 0, num_outputs - 1);
      auto* from = values + output / kWidth * features * kWidth +
                   output % kWidth * together;
      float* to = rows->typed_data() + number * features;
      for (int64_t feature = 0; feature < features; ++feature)
        to[feature] =
            widen(from[feature / together * together * kWidth + feature % together]);
    }
  };
  if (panels.element_type() == ffi::F32)
    run(panels.typed_data<float>(), 1);
  else
    run(static_cast<const Bfloat16*>(panels.untyped_data()), 2);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_multiply, jaxspec::Multiply,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<bool>("is_rounded"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxspec_look_up, jaxspec::LookUp,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
