// Matrices stored in panels, as `jaxspec_kernels.panel_matmul` describes.
#pragma once

#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace jaxspec {

// Outputs of one panel.
constexpr int64_t kPanelWidth = 32;

struct Panels {
  // Integers and 8-bit floats have scales. 4-bit integers are unsigned with minima.
  enum Kind { kFloat32, kBfloat16, kInt8, kInt4, kUint4, kFloat8 } kind;
  bool is_rounded;     // rows are rounded to bfloat16, unless values are float32
  const void* values;  // null if a buffer is no such matrix
  int64_t outputs, features;
  // [panel, group, kPanelWidth]; or [panel, group, 2, kPanelWidth], scales and minima.
  const float* scales;
  bool has_minima;
  int64_t groups;  // of features; 1 without scales

  // The scales of a group of a panel; its minima, if any, follow them.
  const float* scales_of(int64_t panel, int64_t group) const {
    return scales + (panel * groups + group) * (has_minima ? 2 : 1) * kPanelWidth;
  }
};

// The (outputs, features) matrix that a buffer holds.
//
// scales: empty unless values are quantized.
Panels panels_of(xla::ffi::AnyBuffer buffer, xla::ffi::Buffer<xla::ffi::F32> scales,
                 int64_t outputs, int64_t features, bool is_rounded);

// Products of [row, features] with the transposed matrix: [row, outputs].
void multiply(xla::ffi::ThreadPool& pool, const Panels& panels, const float* inputs,
              int64_t num_rows, float* outputs);

}  // namespace jaxspec
