// Products of rows with a matrix stored in panels, and look-ups of its rows.
//
// A panel stores kWidth outputs: their values of one feature side by side; with
// bfloat16 those of two features, as pairs: [panel, features / 2, kWidth, 2]. Zeros
// fill the last panel and the last pair. Each row of the result has its own
// accumulators and adds up its features in order: its bits depend neither on the number
// of rows nor on threads.
//
// Quantized values are widened to float32 in registers. The sum of a group of features
// is multiplied by the group's scale and added to the result, group by group: this
// order is fixed as well.
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "panels.h"
#include "parallel.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace jaxspec {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kWidth = kPanelWidth;
constexpr int kVectors = kWidth / kLanes;  // of one panel
// Rows that are multiplied together: accumulators, the matrix's vectors and their widened
// copies fill the registers. With twelve rows of 32 registers, compilers keep some of
// them in memory: 0.8 of the speed.
constexpr int most_rows(bool is_widened) {
  return kLanes < 16 ? 4 : is_widened ? 6 : 9;
}
// With few rows, several panels at once, so that sums do not wait for each other.
constexpr int panels_at_once(int rows) {
  return kLanes < 16 ? 1 : rows <= 2 ? 4 : rows <= 6 ? 2 : 1;
}
// Bytes of the matrix per thread: handing work to another takes some microseconds. With
// one row or two, reading dominates, and one core does most of it: on few cores a
// second thread takes time from the thread that prepares the next launch.
constexpr int64_t kMinBytesPerThread = 1 << 17, kMinBytesRead = 1 << 20;

// Layout of one kind of matrix, and one step over its features.
//
// kFeatures: features per step. kValues: values per output and step. kIsScaled: whether
// there are scales. kMaxRows: rows at once. Input: values of a row per step.

struct Float32 {
  typedef float Value;
  typedef float Input;
  static constexpr int kFeatures = 1, kValues = 1;
  static constexpr bool kIsScaled = false;
  static constexpr int kMaxRows = most_rows(true);

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

// bfloat16 weights, float32 arithmetic: pairs are widened in registers.
struct Widened {
  typedef Bfloat16 Value;
  typedef struct {
    float values[2];
  } Input;
  static constexpr int kFeatures = 2, kValues = 2;
  static constexpr bool kIsScaled = false;
  static constexpr int kMaxRows = most_rows(true);

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

// bfloat16 weights and rows.
#if defined(__AVX512BF16__)
struct Paired {
  typedef Bfloat16 Value;
  typedef uint32_t Input;
  static constexpr int kFeatures = 2, kValues = 2;
  static constexpr bool kIsScaled = false;
  static constexpr int kMaxRows = most_rows(false);

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
struct Paired : Widened {
  static void pack(const float* row, Input* to) {
    *to = {{widen(narrow(row[0])), widen(narrow(row[1]))}};
  }
};
#endif

// 8-bit integers.
struct Int8 {
  typedef int8_t Value;
  typedef float Input;
  static constexpr int kFeatures = 1, kValues = 1;
  static constexpr bool kIsScaled = true;
  static constexpr int kMaxRows = most_rows(true);

  static Floats widened(const Value* values) { return to_floats(load_bytes(values)); }
  static float widened(Value value, int64_t) { return value; }
  static void pack(const float* row, Input* to) { *to = *row; }
  template <int Rows, int Vectors>
  static inline void add(const Value* values, const Input* inputs,
                         Floats (*sums)[Vectors], int first) {
    for (int vector = 0; vector < kVectors; ++vector) {
      const Floats value = widened(values + vector * kLanes);
      for (int row = 0; row < Rows; ++row)
        sums[row][first + vector] += splat(inputs[row]) * value;
    }
  }
};

// 8-bit floats, e4m3: sign, four bits of an exponent with bias 7, three of a fraction.
// Weights have no NaN.
struct Float8 {
  typedef uint8_t Value;
  typedef float Input;
  static constexpr int kFeatures = 1, kValues = 1;
  static constexpr bool kIsScaled = true;
  static constexpr int kMaxRows = most_rows(true);

  static Floats widened(const Value* values) {
    return of_float8(load_bytes(values));
  }
  static float widened(Value value, int64_t) {
    Value lanes[kLanes] = {value};
    return widened(lanes)[0];
  }
  static void pack(const float* row, Input* to) { *to = *row; }
  template <int Rows, int Vectors>
  static inline void add(const Value* values, const Input* inputs,
                         Floats (*sums)[Vectors], int first) {
    for (int vector = 0; vector < kVectors; ++vector) {
      const Floats value = widened(values + vector * kLanes);
      for (int row = 0; row < Rows; ++row)
        sums[row][first + vector] += splat(inputs[row]) * value;
    }
  }
};

// 4-bit integers of two features: the first has the lower bits.
struct Int4 {
  typedef uint8_t Value;
  typedef struct {
    float values[2];
  } Input;
  static constexpr int kFeatures = 2, kValues = 1;
  static constexpr bool kIsScaled = true;
  static constexpr int kMaxRows = most_rows(true);

  static float widened(Value value, int64_t feature) {
    const int8_t bits = static_cast<int8_t>(feature % 2 ? value : value << 4);
    return bits >> 4;
  }
  static void pack(const float* row, Input* to) { *to = {{row[0], row[1]}}; }
  template <int Rows, int Vectors>
  static inline void add(const Value* values, const Input* inputs,
                         Floats (*sums)[Vectors], int first) {
    for (int vector = 0; vector < kVectors; ++vector) {
      const Ints pairs = load_bytes(values + vector * kLanes);
      const Floats even = to_floats((pairs << 28) >> 28), odd = to_floats(pairs >> 4);
      for (int row = 0; row < Rows; ++row) {
        sums[row][first + vector] += splat(inputs[row].values[0]) * even;
        sums[row][first + vector] += splat(inputs[row].values[1]) * odd;
      }
    }
  }
};

// Outputs of `Rows` rows from `Panels` panels; `inputs` are [step, row].
//
// steps: number of steps. first: the first output. outputs: [row, num_outputs].
// scales: those of the first of these panels, [panel, group, output].
template <typename Kind, int Rows, int Panels>
void multiply_panels(const typename Kind::Value* panels, const float* scales,
                     int64_t groups, int64_t steps, const typename Kind::Input* inputs,
                     float* outputs, int64_t first, int64_t num_outputs) {
  Floats sums[Rows][Panels * kVectors] = {};
  const int64_t size = steps * Kind::kValues * kWidth;
  auto add = [&](Floats(*to)[Panels * kVectors], int64_t begin, int64_t end) {
    for (int64_t step = begin; step < end; ++step)
      for (int panel = 0; panel < Panels; ++panel)
        Kind::template add<Rows, Panels * kVectors>(
            panels + panel * size + step * Kind::kValues * kWidth,
            inputs + step * Rows, to, panel * kVectors);
  };
  if constexpr (Kind::kIsScaled) {
    for (int64_t group = 0; group < groups; ++group) {
      Floats own[Rows][Panels * kVectors] = {};
      add(own, steps * group / groups, steps * (group + 1) / groups);
      for (int panel = 0; panel < Panels; ++panel)
        for (int vector = 0; vector < kVectors; ++vector) {
          const Floats scale =
              load(scales + (panel * groups + group) * kWidth + vector * kLanes);
          for (int row = 0; row < Rows; ++row)
            sums[row][panel * kVectors + vector] +=
                own[row][panel * kVectors + vector] * scale;
        }
    }
  } else {
    add(sums, 0, steps);
  }
  for (int row = 0; row < Rows; ++row)
    for (int vector = 0; vector < Panels * kVectors; ++vector) {
      const int64_t at = first + vector * kLanes;
      float* to = outputs + row * num_outputs + at;
      if (at + kLanes <= num_outputs)
        store(to, sums[row][vector]);
      else if (at < num_outputs)
        std::memcpy(to, &sums[row][vector], (num_outputs - at) * sizeof(float));
    }
}

// The same for panels `first` to `last`.
template <typename Kind, int Rows>
void multiply_rows(const typename Kind::Value* panels, const float* scales,
                   int64_t groups, int64_t first, int64_t last, int64_t steps,
                   const typename Kind::Input* inputs, float* outputs,
                   int64_t num_outputs) {
  constexpr int kPanels = panels_at_once(Rows);
  const int64_t size = steps * Kind::kValues * kWidth;
  int64_t panel = first;
  for (; panel + kPanels <= last; panel += kPanels)
    multiply_panels<Kind, Rows, kPanels>(
        panels + panel * size, scales + panel * groups * kWidth, groups, steps, inputs,
        outputs, panel * kWidth, num_outputs);
  for (; panel < last; ++panel)
    multiply_panels<Kind, Rows, 1>(panels + panel * size,
                                   scales + panel * groups * kWidth, groups, steps,
                                   inputs, outputs, panel * kWidth, num_outputs);
}

template <typename Kind, int... Rows>
auto function_for(int64_t rows, std::integer_sequence<int, Rows...>) {
  static constexpr decltype(&multiply_rows<Kind, 1>) kFunctions[] = {
      multiply_rows<Kind, Rows + 1>...};
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

// Reorders inputs to [step, row]: values that are multiplied together are adjacent.
template <typename Kind>
void pack(const Groups& groups, int64_t features, const float* inputs,
          typename Kind::Input* to) {
  const int64_t whole = features / Kind::kFeatures;
  const int64_t steps = (features + Kind::kFeatures - 1) / Kind::kFeatures;
  for (int64_t group = 0; group < groups.count; ++group) {
    const int64_t start = groups.start(group), size = groups.size(group);
    for (int64_t row = 0; row < size; ++row) {
      const float* from = inputs + (start + row) * features;
      typename Kind::Input* own = to + start * steps + row;
      for (int64_t step = 0; step < whole; ++step)
        Kind::pack(from + step * Kind::kFeatures, own + step * size);
      if (whole < steps) {
        const float last[2] = {from[features - 1], 0.0f};
        Kind::pack(last, own + whole * size);
      }
    }
  }
}

template <typename Kind>
void multiply_kind(ffi::ThreadPool& pool, const Panels& panels, const float* inputs,
                   int64_t num_rows, float* outputs) {
  const auto* values = static_cast<const typename Kind::Value*>(panels.values);
  const Groups groups(num_rows, Kind::kMaxRows);
  const int64_t steps = (panels.features + Kind::kFeatures - 1) / Kind::kFeatures;
  const int64_t num_panels = (panels.outputs + kWidth - 1) / kWidth;
  static thread_local std::vector<typename Kind::Input> buffer;
  buffer.resize(num_rows * steps);
  pack<Kind>(groups, panels.features, inputs, buffer.data());
  const typename Kind::Input* packed = buffer.data();
  auto run = [&, packed](int64_t first, int64_t last) {
    for (int64_t group = 0; group < groups.count; ++group) {
      const int64_t start = groups.start(group);
      function_for<Kind>(groups.size(group),
                         std::make_integer_sequence<int, Kind::kMaxRows>())(
          values, panels.scales, panels.groups, first, last, steps,
          packed + start * steps,
          outputs + start * panels.outputs, panels.outputs);
    }
  };
  const int64_t panel_bytes =
      steps * Kind::kValues * kWidth * sizeof(typename Kind::Value);
  const int64_t bytes = num_panels * panel_bytes * groups.count;
  const int64_t least = num_rows <= 2 ? kMinBytesRead : kMinBytesPerThread;
  const int64_t useful = std::max<int64_t>(bytes / least, 1);
  const int64_t threads = std::min<int64_t>({pool.num_threads(), useful, num_panels});
  // Parts fit in a core's cache while groups of rows pass by. There are more parts than
  // threads, so that a thread that begins late does less. Few rows read each value
  // once.
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

}  // namespace

Panels panels_of(ffi::AnyBuffer buffer, ffi::Buffer<ffi::F32> scales, int64_t outputs,
                 int64_t features, bool is_rounded) {
  const auto shape = buffer.dimensions(), form_of_scales = scales.dimensions();
  const auto type = buffer.element_type();
  Panels found{};
  int64_t held = 0;  // features, including those that fill a pair
  if (buffer.element_type() == ffi::F32 && shape.size() == 3 && shape[2] == kWidth) {
    found.kind = Panels::kFloat32, held = shape[1];
    if (held != features) return found;
  } else if (buffer.element_type() == ffi::BF16 && shape.size() == 4 &&
             shape[2] == kWidth && shape[3] == 2) {
    found.kind = is_rounded ? Panels::kPaired : Panels::kWidened, held = 2 * shape[1];
    if (held != features && held != features + 1) return found;
  } else if ((type == ffi::S8 || type == ffi::F8E4M3FN || type == ffi::U8) &&
             shape.size() == 3 && shape[2] == kWidth) {
    found.kind = type == ffi::S8   ? Panels::kInt8
                 : type == ffi::U8 ? Panels::kInt4
                                   : Panels::kFloat8;
    const int64_t together = type == ffi::U8 ? 2 : 1;
    if (form_of_scales.size() != 3 || form_of_scales[0] != shape[0] ||
        form_of_scales[1] < 1 || form_of_scales[2] != kWidth)
      return found;
    found.scales = scales.typed_data(), found.groups = form_of_scales[1];
    if (together * shape[1] != features || shape[1] % found.groups) return found;
  } else {
    return found;
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
      return multiply_kind<Float32>(pool, panels, inputs, num_rows, outputs);
    case Panels::kWidened:
      return multiply_kind<Widened>(pool, panels, inputs, num_rows, outputs);
    case Panels::kPaired:
      return multiply_kind<Paired>(pool, panels, inputs, num_rows, outputs);
    case Panels::kInt8:
      return multiply_kind<Int8>(pool, panels, inputs, num_rows, outputs);
    case Panels::kInt4:
      return multiply_kind<Int4>(pool, panels, inputs, num_rows, outputs);
    case Panels::kFloat8:
      return multiply_kind<Float8>(pool, panels, inputs, num_rows, outputs);
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
  // `together`: features of a step; `count_of`: values per output and step.
  auto run = [&](auto* values, int64_t together, int64_t count_of, auto widened) {
    const int64_t steps = (features + together - 1) / together;
    for (int64_t number = 0; number < count[0]; ++number) {
      const int64_t output =
          std::clamp<int64_t>(index.typed_data()[number], 0, num_outputs - 1);
      const int64_t panel = output / kWidth, place = output % kWidth;
      auto* from = values + (panel * steps * kWidth + place) * count_of;
      float* to = rows->typed_data() + number * features;
      for (int64_t feature = 0; feature < features; ++feature)
        to[feature] = widened(from[feature / together * count_of * kWidth +
                                   feature % together * (count_of - 1)],
                              feature);
      if (!matrix.scales) continue;
      const int64_t size = features / matrix.groups;
      for (int64_t feature = 0; feature < features; ++feature)
        to[feature] *=
            matrix.scales[(panel * matrix.groups + feature / size) * kWidth + place];
    }
  };
  auto plain = [](auto value, int64_t) { return widen(value); };
  const void* values = matrix.values;
  switch (matrix.kind) {
    case Panels::kFloat32:
      run(static_cast<const float*>(values), 1, 1, plain);
      break;
    case Panels::kWidened:
    case Panels::kPaired:
      run(static_cast<const Bfloat16*>(values), 2, 2, plain);
      break;
    case Panels::kInt8:
      run(static_cast<const int8_t*>(values), 1, 1,
          [](int8_t value, int64_t feature) { return Int8::widened(value, feature); });
      break;
    case Panels::kInt4:
      run(static_cast<const uint8_t*>(values), 2, 1,
          [](uint8_t value, int64_t feature) { return Int4::widened(value, feature); });
      break;
    case Panels::kFloat8:
      run(static_cast<const uint8_t*>(values), 1, 1, [](uint8_t value, int64_t feature) {
        return Float8::widened(value, feature);
      });
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
